"""Dispatch modes and function modes: which are on, and how one is put at the bottom or taken off.

[Note: the bottom of the stacks]
Saved-tensor hooks and dispatch modes are stacks, and the end of a context takes off what is on top, whatever code put
it there. What lasts while other people's code runs, as a step of their own loop does, therefore goes to the bottom
of its stack: contexts that were entered before it may end before it, those that are entered later may end after it, and
each takes off its own. Ours is taken off by name, from wherever it is.

Hooks at the bottom are not asked while there are others: what those hold is theirs. A mode at the bottom sees what all
others make of an operator, right before the kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from lowtide._torch_private.needed import needed_for

with needed_for("dispatch modes"):
    from torch._C import (
        DisableTorchFunction,
        DispatchKey,
        DispatchKeySet,
        _ExcludeDispatchKeyGuard,
        _pop_torch_dispatch_stack,
        _pop_torch_function_stack,
        _push_on_torch_dispatch_stack,
        _push_on_torch_function_stack,
    )
    from torch._C import _len_torch_dispatch_stack as dispatch_modes
    from torch._C import _len_torch_function_stack as function_modes
    from torch._C._dynamo.guards import set_is_in_mode_without_ignore_compile_internals
    from torch.overrides import _get_current_function_mode_stack as function_modes_on
    from torch.utils import _python_dispatch as python_dispatch
    from torch.utils._device import DeviceContext
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._python_dispatch import _get_current_dispatch_mode as current_dispatch_mode
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as dispatch_modes_on

__all__ = [
    "DeviceContext",
    "DisableTorchFunction",
    "TorchDispatchMode",
    "current_dispatch_mode",
    "dispatch_modes",
    "dispatch_modes_on",
    "function_modes",
    "function_modes_on",
    "hide_dispatch_mode",
    "insert_dispatch_mode",
    "remove_dispatch_mode",
    "remove_function_mode",
    "unseen_by_modes",
]


def insert_dispatch_mode(mode: TorchDispatchMode) -> None:
    """Put a mode below all that are there but torch's own. See [Note: the bottom of the stacks]."""
    _with_modes_lifted(len(dispatch_modes_on()), lambda: _push_on_torch_dispatch_stack(mode))


def remove_dispatch_mode(mode: TorchDispatchMode) -> None:
    """Take a mode off, wherever in the stack it is; nothing if it is not."""
    modes = dispatch_modes_on()
    if any(one is mode for one in modes):
        above = len(modes) - 1 - max(place for place, one in enumerate(modes) if one is mode)
        _with_modes_lifted(above, lambda: _pop_torch_dispatch_stack(None))


def remove_function_mode(mode: Any) -> None:
    """Take a function mode off, wherever in the stack it is; nothing if it is not."""
    if any(one is mode for one in function_modes_on()):
        lifted = [_pop_torch_function_stack()]
        while lifted[-1] is not mode:
            lifted.append(_pop_torch_function_stack())
        for one in reversed(lifted[:-1]):
            _push_on_torch_function_stack(one)


def hide_dispatch_mode(mode: TorchDispatchMode) -> None:
    """Take a mode off for the rest of the node that backward runs on this thread; torch restores it for the next.

    Other threads' modes are not touched, nor what torch notes of modes for all threads.
    """
    modes = dispatch_modes_on()
    if any(one is mode for one in modes):
        lifted = [_pop_torch_dispatch_stack(None)]
        while lifted[-1] is not mode:
            lifted.append(_pop_torch_dispatch_stack(None))
        for one in reversed(lifted[:-1]):
            _push_on_torch_dispatch_stack(one)


def _with_modes_lifted(most: int, change: Callable[[], Any]) -> None:
    """Change the stack under up to so many of its uppermost modes; torch's own have places apart, below all others."""
    lifted: list[TorchDispatchMode] = []
    try:
        while len(lifted) < most and not hasattr(current_dispatch_mode(), "_mode_key"):
            lifted.append(_pop_torch_dispatch_stack(None))
        change()
    finally:
        for one in reversed(lifted):
            _push_on_torch_dispatch_stack(one)
        _count_modes()


def _count_modes() -> None:
    """Correct what torch notes of the modes: whether there are any, and in each what was so when it was entered."""
    any_mode = any_user = any_compiling = False
    for mode in dispatch_modes_on():
        for name, value in (
            ("old_dispatch_mode_flags", any_mode),
            ("old_non_infra_dispatch_mode_flags", any_user),
            ("old_without_ignore_compile_internals_dispatch_mode_flags", any_compiling),
        ):
            flags: Any = getattr(mode, name, ())
            if len(flags) == 1:  # entered once, as modes are
                flags[0] = value
        any_mode = True
        any_user |= not mode.is_infra_mode()
        any_compiling |= not mode.ignore_compile_internals()
    python_dispatch._is_in_torch_dispatch_mode = any_mode
    python_dispatch._is_in_non_infra_torch_dispatch_mode = any_user
    python_dispatch._is_in_any_mode_without_ignore_compile_internals = any_compiling
    set_is_in_mode_without_ignore_compile_internals(any_compiling)


def unseen_by_modes() -> AbstractContextManager[None]:
    """What is done inside to plain tensors is not shown to dispatch modes, each of which takes microseconds."""
    guard: AbstractContextManager[None] = _ExcludeDispatchKeyGuard(_MODES)
    return guard


_MODES = DispatchKeySet(DispatchKey.Python).add(DispatchKey.PythonTLSSnapshot)
