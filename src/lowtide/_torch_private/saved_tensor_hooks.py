"""The stack of saved-tensor hooks: read, pushed, and changed at its bottom.

See [Note: the bottom of the stacks] in ``modes.py``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from torch import Tensor

from lowtide._torch_private.needed import needed_for

with needed_for("saved-tensor hooks"):
    from torch._C._autograd import SavedTensor, _make_saved_tensor, _top_saved_tensors_default_hooks
    from torch._C._autograd import _pop_saved_tensors_default_hooks as pop_saved_tensors_hooks
    from torch._C._autograd import _push_saved_tensors_default_hooks as push_saved_tensors_hooks

__all__ = [
    "hooks_on_top",
    "insert_saved_tensors_hooks",
    "make_saved_tensor",
    "pop_saved_tensors_hooks",
    "push_saved_tensors_hooks",
    "remove_saved_tensors_hooks",
    "saved_by_selective_checkpoint",
    "top_saved_tensors_hooks",
]


top_saved_tensors_hooks: Callable[[bool], tuple[Any, Any] | None] = _top_saved_tensors_default_hooks
"""The hooks that are asked now, if there are any."""


def make_saved_tensor(tensor: Tensor) -> SavedTensor:
    """Save a tensor as a node of autograd's saves its input: through the hooks that are on top."""
    return _make_saved_tensor(tensor, is_output=False)


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


def saved_by_selective_checkpoint() -> bool:
    """Whether the pack hook that asks is called by torch's selective checkpoint, for a tensor in its own cache.

    It does so where ``checkpoint(..., respect_saved_tensors_hooks=True)`` asks for it (2.15), which is to become the
    default. Such a tensor is not autograd's: no node saves it, and a replayed operator does not save it again.
    """
    frame: FrameType | None = sys._getframe(1)
    for _ in range(8):  # the hook's own frames and two of torch's
        if frame is None:
            return False
        if frame.f_globals.get("__name__") == "torch.utils.checkpoint":
            return frame.f_code.co_qualname.startswith("_CachingTorchDispatchMode.__torch_dispatch__")
        frame = frame.f_back
    return False
