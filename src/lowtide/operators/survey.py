"""Run a model once and profile all of it: its kinds of layers, and what they and the root hold for backward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

from torch import nn

from lowtide.operators.checkpointing import checkpointing_off
from lowtide.operators.kinds import LayerKind, layer_kind
from lowtide.operators.layers import Layers, find_layers
from lowtide.operators.observation import Observation
from lowtide.operators.observe import observe
from lowtide.operators.profiler import OnWrite
from lowtide.operators.root import HeldBytes, Root
from lowtide.operators.saved import PackHook, kept_apart
from lowtide.policy import Catalogue

__all__ = ["Survey", "survey", "surveying"]


class Survey(NamedTuple):
    """The layers of a model, their kinds, and what runs outside them."""

    layers: Layers
    kinds: tuple[LayerKind, ...]
    """The distinct kinds, in the order they appear."""
    kind_of: tuple[int, ...]
    """For each layer, the index of its kind in ``kinds``."""
    root: LayerKind
    """What runs in the model outside its layers; its operators have their dotted path in the whole model."""
    held: HeldBytes
    """All that one run holds for backward, each storage once."""

    @property
    def catalogue(self) -> Catalogue:
        """The operators of every layer and of the root, as a Policy is resolved against them."""
        catalogues = [kind.catalogue for kind in self.kinds]
        return Catalogue(tuple(catalogues[kind] for kind in self.kind_of))


def survey(model: nn.Module, run: Callable[[], Any], *, layers: str | None = None) -> Survey:
    """Profile every layer of ``model``, and what runs in it outside the layers, during one ``run()`` of it.

    A loss that the model computes itself belongs to the root; what ``run`` does outside the model is not profiled.
    ``layers`` names the module that holds the layers, if the longest run of equal children is not it.

    >>> import torch
    >>> model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.SiLU()) for _ in range(3)))
    >>> found = survey(model, lambda: model(torch.ones(2, 4, requires_grad=True)))
    >>> len(found.kinds), [operator.name for operator in found.kinds[0].operators]
    (1, ['0', '1'])
    """
    with checkpointing_off(model, find_layers(model, layers)), surveying(model, layers=layers) as seen:
        run()
    return seen()


@contextmanager
def surveying(
    model: nn.Module,
    *,
    layers: str | None = None,
    hold: PackHook = kept_apart,
    written: OnWrite | None = None,
    refuse: Callable[[int], None] = lambda layer: None,
) -> Iterator[Callable[[], Survey]]:
    """As :func:`survey`, of what runs inside this context; the yielded function returns the Survey.

    Of a model that runs more than once the last run is kept. ``hold`` is the pack hook for what the model saves,
    ``written`` is called with what kernels write into, and ``refuse`` with a layer's index before every torch function
    in it.
    """
    found = find_layers(model, layers)
    root = Root(model, found.modules, hold, written)
    with ExitStack() as stack:
        results = [
            stack.enter_context(
                observe(
                    module, saved=root.saved_inside, hold=hold, written=written, before_function=partial(refuse, index)
                )
            )
            for index, module in enumerate(found.modules)
        ]
        stack.enter_context(root.observed())  # after the layers: it pauses before they begin and resumes after they end
        yield lambda: _sum_up(model, found, [result() for result in results], root)


def _sum_up(model: nn.Module, found: Layers, seen: Sequence[Observation], root: Root) -> Survey:
    alike: dict[str, list[LayerKind]] = {}
    kind_of: list[int] = []
    for module, observation in zip(found.modules, seen, strict=True):
        kind = layer_kind(module, observation)
        alike.setdefault(kind.digest, []).append(kind)
        kind_of.append(list(alike).index(kind.digest))
    kinds = [_usual(of_one_kind) for of_one_kind in alike.values()]
    inside = [saved.storage for saved in root.inside]
    outside = layer_kind(model, root.profiler.result(), held_elsewhere=inside)
    return Survey(found, tuple(kinds), tuple(kind_of), outside, root.held())


def _usual(alike: Sequence[LayerKind]) -> LayerKind:
    """The one that saves as many tensors as most do: the first saves less if its input needs no gradient."""
    counts = Counter(len(kind.packs) for kind in alike)
    number = max(counts, key=lambda number: (counts[number], number))
    return next(kind for kind in alike if len(kind.packs) == number)
