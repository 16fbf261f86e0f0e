"""The stack of saved-tensor hooks: read, pushed, and changed at its bottom.

See [Note: the bottom of the stacks] in ``modes.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lowtide._torch_private.needed import needed_for

with needed_for("saved-tensor hooks"):
    from torch._C._autograd import _pop_saved_tensors_default_hooks as pop_saved_tensors_hooks
    from torch._C._autograd import _push_saved_tensors_default_hooks as push_saved_tensors_hooks
    from torch._C._autograd import _top_saved_tensors_default_hooks

__all__ = [
    "hooks_on_top",
    "insert_saved_tensors_hooks",
    "pop_saved_tensors_hooks",
    "push_saved_tensors_hooks",
    "remove_saved_tensors_hooks",
    "top_saved_tensors_hooks",
]


top_saved_tensors_hooks: Callable[[bool], tuple[Any, Any] | None] = _top_saved_tensors_default_hooks
"""The hooks that are asked now, if there are any."""


def hooks_on_top(pack: Any) -> bool:
    """Whether the saved-tensor hooks that are asked now are those with this ``pack``; others may have come on top."""
    top = top_saved_tensors_hooks(False)
    return top is not None and top[0] is pack


def insert_saved_tensors_hooks(pack: Any, unpack: Any) -> None:
    """Put hooks below all that are there. See [Note: the bottom of the stacks].

    RuntimeError where hooks are not allowed, as in ``torch.func``'s transforms.
    """
    above: list[tuple[Any, Any]] = []
    try:
        while (top := top_saved_tensors_hooks(True)) is not None:
            pop_saved_tensors_hooks()
            above.append(top)
        push_saved_tensors_hooks(pack, unpack)
    finally:
        for one in reversed(above):
            push_saved_tensors_hooks(*one)


def remove_saved_tensors_hooks(pack: Any) -> None:
    """Take off the hooks with this ``pack``, wherever in the stack they are; nothing if they are not."""
    above: list[tuple[Any, Any]] = []
    try:
        while (top := top_saved_tensors_hooks(True)) is not None:
            pop_saved_tensors_hooks()
            if top[0] is pack:
                break
            above.append(top)
    finally:
        for one in reversed(above):
            push_saved_tensors_hooks(*one)
