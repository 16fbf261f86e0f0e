"""Profile one run of a layer inside a context. See :mod:`lowtide.operators.profiler`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import nn

from lowtide.operators.calls import CallTracker
from lowtide.operators.observation import Observation
from lowtide.operators.profiler import OnSave, OnWrite, Profiler
from lowtide.operators.saved import PackHook, kept_apart
from lowtide.operators.wrappers import take_back

__all__ = ["observe"]


@contextmanager
def observe(
    layer: nn.Module,
    *,
    saved: OnSave | None = None,
    hold: PackHook = kept_apart,
    written: OnWrite | None = None,
    before_function: Callable[[], None] = lambda: None,
) -> Iterator[Callable[[], Observation]]:
    """Profile ``layer`` while it runs inside this context; the yielded function returns what was seen.

    ``hold`` is the pack hook for what is saved meanwhile; ``before_function`` is called before every torch function,
    and may raise.

    >>> layer = nn.Sequential(nn.Linear(4, 4), nn.SiLU())
    >>> with observe(layer) as seen:
    ...     out = layer(torch.ones(2, 4, requires_grad=True))
    >>> [(pack.operator, pack.source, pack.owner) for pack in seen().packs]
    [('0', 'boundary', ''), ('0', 'static', ''), ('1', 'operator', '0')]
    """
    profiler = Profiler(layer, saved, hold, written)
    tracker = CallTracker(layer, profiler, before_function)
    try:
        tracker.attach()
        yield profiler.result
    finally:
        take_back([tracker.detach])
