"""What a call runs in besides its arguments: every setting of torch that may choose another kernel or another device.

A replay has to find all of them as the call did. They are listed here and nowhere else. Random states and autocast,
which every replay sets, are in :mod:`lowtide.runtime.randomness` and ``_torch_private``.

[Note: the cost of looking]
A captured call reads what is cheap to read (:func:`ambient`), in about a microsecond. The precisions of matrix products
take several, are set for a whole run as a rule, and are read once for each run of a layer (:func:`precision`) and once
for each backward. Equal settings are one object, so that comparing them is comparing addresses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, TypeAlias

import torch

from lowtide._torch_private.backward import current_backward
from lowtide._torch_private.modes import (
    DeviceContext,
    dispatch_modes,
    dispatch_modes_on,
    function_modes,
    function_modes_on,
)
from lowtide._torch_private.settings import PRECISIONS, SETTINGS, Setting

__all__ = ["Ambient", "Precision", "ambient", "precision", "restored"]


_WRITE = tuple(setting.set for setting in SETTINGS.values())


def _reader(settings: Mapping[str, Setting]) -> Callable[[], tuple[Any, ...]]:
    """Reads all settings, without a loop: see [Note: the cost of looking]."""
    getters = {f"get{number}": setting.get for number, setting in enumerate(settings.values())}
    source = f"lambda: ({', '.join(f'{name}()' for name in getters)},)"
    made: Callable[[], tuple[Any, ...]] = eval(source, dict(getters))
    return made


_read_settings = _reader(SETTINGS)


_read_precisions = _reader(PRECISIONS)
_WRITE_PRECISIONS = tuple(setting.set for setting in PRECISIONS.values())

Precision: TypeAlias = tuple[Any, ...]
"""The settings that take long to read."""


class Ambient(NamedTuple):
    """What a call ran in."""

    settings: tuple[Any, ...]
    device: torch.device | None
    """Where factories make tensors, by ``torch.set_default_device`` or ``with torch.device(...)``."""
    modes: tuple[Any, ...]
    """The user's own modes, the innermost last. Torch's and ours either only look on or are on in backward as well."""
    precision: Precision
    """Empty for a call that has no use for them."""


_NOTHING: Any = (None, ())


class _Last:
    """The settings that were found last: they are the same ones nearly always."""

    ambient = Ambient((), None, (), ())
    precision: Precision = ()
    backward = -1


def ambient(precision: Precision) -> Ambient:
    """What a call runs in now; ``precision`` was read when its layer began, or is empty."""
    settings = _read_settings()
    device, modes = _modes() if function_modes() or dispatch_modes() else _NOTHING
    last = _Last.ambient
    if last.settings == settings and last.precision is precision and last.device == device and last.modes == modes:
        return last
    _Last.ambient = found = Ambient(settings, device, modes, precision)
    return found


def precision() -> Precision:
    """The precisions now."""
    found = _read_precisions()
    if found != _Last.precision:
        _Last.precision = found
    return _Last.precision


@contextmanager
def _set(was: Ambient, now: Ambient) -> Iterator[None]:
    with ExitStack() as stack:
        # What was set last is taken back first: a setting may set others.
        changed = [
            *zip(was.settings, now.settings, _WRITE, strict=True),
            *zip(was.precision, now.precision, _WRITE_PRECISIONS, strict=False),  # none, or all of them
        ]
        for before, current, write in changed:
            if before != current:
                stack.callback(write, current)
                write(before)
        if was.device != now.device:
            stack.enter_context(torch.device("cpu") if was.device is None else was.device)
        for mode in was.modes:
            if not any(mode is one for one in now.modes):
                stack.enter_context(mode)
        yield


def restored(was: Ambient) -> list[Any]:
    """Contexts that restore the settings; none if they did not change."""
    precise: Precision = ()
    if was.precision:
        backward = current_backward()
        if backward == -1 or backward != _Last.backward:
            precision()
            _Last.backward = backward
        precise = _Last.precision
    now = ambient(precise)
    return [] if now is was or now == was else [_set(was, now)]


def _modes() -> tuple[torch.device | None, tuple[Any, ...]]:
    device: torch.device | None = None
    modes: list[Any] = []
    for mode in (*function_modes_on(), *dispatch_modes_on()):
        if isinstance(mode, DeviceContext):
            device = mode.device
        elif not type(mode).__module__.startswith(("torch.", "lowtide.")):
            modes.append(mode)
    return device, tuple(modes)
