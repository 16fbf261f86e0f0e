"""What hooks give autograd in place of a saved tensor; the usual one holds the tensor as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

from torch import Tensor

from lowtide._torch_private.nodes import is_own_output, without_graph
from lowtide._torch_private.saved_tensor_hooks import top_saved_tensors_hooks
from lowtide._torch_private.versions import version_of

__all__ = ["Held", "Hold", "Kept", "held_tensor", "hooks_of_others", "kept", "kept_apart"]


class Held(Protocol):
    """What autograd is given in place of a tensor that it saves."""

    def tensor(self) -> Tensor:
        """The tensor."""


Hold: TypeAlias = Callable[[Tensor], Held]
"""Decides how a tensor is held for backward."""


class Kept:
    """A tensor that stays, and must not be changed in place. Where hooks are, torch leaves that check to them."""

    __slots__ = ("kept", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.kept = tensor
        self.version = tensor._version if type(tensor) is Tensor else version_of(tensor)

    def tensor(self) -> Tensor:
        """The tensor, if nobody has written to it."""
        kept = self.kept
        found = kept._version if type(kept) is Tensor else version_of(kept)
        if found != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation:"
                f" a tensor of shape {tuple(kept.shape)} is at version {found}; expected version {self.version}"
            )
        return kept


def kept_apart(tensor: Tensor) -> Kept:
    """As :class:`Kept`, apart from the tensor's graph.

    The node that saves it may be in there: it made the tensor, or the tensor is written to later, and then its graph
    is that of the write, which comes after.
    """
    return Kept(without_graph(tensor))


def kept(tensor: Tensor) -> Kept:
    """As :class:`Kept`, apart from the tensor's graph if the node that saves it made it.

    Which tensors are their nodes' own is known of a layer's profile, but the layer may diverge from it.
    """
    return kept_apart(tensor) if is_own_output(tensor) else Kept(tensor)


def held_tensor(held: Held) -> Tensor:
    """The tensor that is held, whichever way."""
    return held.tensor()


def hooks_of_others() -> Any:
    """What packs the tensors that are saved now, if somebody else's hooks do; None if ours do, or nobody's.

    [Note: hooks of others]
    Torch asks only the hooks that were put on last. Ours on top of somebody else's would leave those without what they
    are there for: torch's checkpoint would drop nothing, and hooks that round would round nothing. So where others' are
    on top when a layer begins, the layer is left to them: nothing in it is learnt, recomputed or swapped.
    """
    top = top_saved_tensors_hooks(False)
    if top is None or getattr(top[1], "__module__", "").startswith("lowtide."):
        return None
    return top[0]
