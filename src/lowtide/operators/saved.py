"""What saved-tensor hooks give autograd in place of a tensor: one protocol for everything that lowtide holds.

[Note: a backward in two halves]
Zero-bubble pipeline schedules run two backwards over one graph. The first computes the gradient of a chunk's input. The
second computes those of its parameters, one graph task for each group of them. Nodes such as a matrix product run in
both. What is recomputed or reloaded for the first would be made again for every task of the second. So it is held in
between, on the node, until the second half unpacks it or the graph is dropped: only what a node needs that leads to
something which the first half leaves out. All else is freed as in one backward. A backward that makes a graph of the
gradients themselves (``create_graph=True``) is no half, and holds nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

from torch import Tensor, is_grad_enabled

from lowtide._torch_private.backward import current_node, keeps_graph, leaves_out
from lowtide._torch_private.nodes import is_own_output, without_graph
from lowtide._torch_private.saved_tensor_hooks import (
    hooks_on_top,
    pop_saved_tensors_hooks,
    push_saved_tensors_hooks,
    remove_saved_tensors_hooks,
    top_saved_tensors_hooks,
)
from lowtide._torch_private.versions import own_version, version_of

__all__ = ["Kept", "PackHook", "Saved", "call_with_hooks", "foreign_pack_hook", "kept", "kept_apart", "unpack"]


class Saved(Protocol):
    """What autograd holds in place of a tensor that it saves."""

    def tensor(self) -> Tensor:
        """The tensor, with the bits that it was saved with. May be called several times, or never, on any thread."""


PackHook: TypeAlias = Callable[[Tensor], Saved]
"""The first of a pair of saved-tensor hooks; the second is always :func:`unpack`."""


def unpack(saved: Saved) -> Tensor:
    """Give autograd back what it saved."""
    if type(saved) is not Kept and (_seen_halves or keeps_graph()):  # nearly all of it is kept
        return _unpack_in_halves(saved)
    return saved.tensor()


_HELD = "lowtide_held"
_seen_halves = False


def _unpack_in_halves(saved: Saved) -> Tensor:
    """The tensor; if a later half of this backward needs it too, that half gets the same one.

    See [Note: a backward in two halves].
    """
    global _seen_halves
    node = current_node()
    if node is None:  # nothing runs: the user looks at what a node has saved
        return saved.tensor()
    held: dict[int, Tensor] = node.metadata.get(_HELD, {})
    tensor = held.pop(id(saved), None)
    if tensor is None:
        tensor = saved.tensor()
    if keeps_graph() and not is_grad_enabled() and leaves_out(node):
        _seen_halves = True
        node.metadata.setdefault(_HELD, {})[id(saved)] = tensor
    return tensor


def call_with_hooks(
    pack: Callable[[Tensor], Any],
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    unpack: Callable[[Any], Tensor] = unpack,
) -> Any:
    """Call a function with saved-tensor hooks on, which are off afterwards, also if it is interrupted."""
    # Not by torch's context manager: an interrupt between its push and the first line in it would leave hooks on.
    try:
        push_saved_tensors_hooks(pack, unpack)
        return function(*args, **kwargs)
    finally:
        try:
            _take_off(pack)
        except BaseException:  # interrupted, perhaps before its first line
            _take_off(pack)
            raise


def _take_off(pack: Callable[[Tensor], Any]) -> None:
    """Take our hooks off, which are on top of torch's stack unless something was interrupted."""
    if hooks_on_top(pack):
        pop_saved_tensors_hooks()
    else:
        remove_saved_tensors_hooks(pack)


class Kept:
    """A tensor that stays on the device. Raises if it was modified in place: torch leaves that check to hooks."""

    __slots__ = ("kept", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.kept = tensor
        self.version = own_version(tensor) if type(tensor) is Tensor else version_of(tensor)

    def tensor(self) -> Tensor:
        """The tensor, if it was not written to since it was saved."""
        kept = self.kept
        found = own_version(kept) if type(kept) is Tensor else version_of(kept)
        if found != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation:"
                f" a tensor of shape {tuple(kept.shape)} is at version {found}; expected version {self.version}"
            )
        return kept


def kept_apart(tensor: Tensor) -> Kept:
    """As :class:`Kept`, detached from the tensor's graph.

    The node that saves the tensor may be in that graph, which would be a reference cycle: it made the tensor, or the
    tensor is written to later and then has the graph of that write.
    """
    return Kept(without_graph(tensor))


def kept(tensor: Tensor) -> Kept:
    """As :class:`Kept`, detached only if the node that saves the tensor made it.

    A layer's profile says which tensors are their nodes' own outputs, but the layer may diverge from its profile.
    """
    return kept_apart(tensor) if is_own_output(tensor) else Kept(tensor)


def foreign_pack_hook() -> Any:
    """The pack hook that is on top of torch's stack if it is not lowtide's; None if it is, or if there is none.

    [Note: other code's hooks]
    Torch calls only the hooks that were pushed last. Ours on top of other code's would leave those without what they
    are there for: torch's checkpoint would drop nothing, and hooks that quantize would quantize nothing. So where other
    code's hooks are on top when a layer begins, the layer is left to them: nothing in it is profiled, recomputed or
    swapped.
    """
    top = top_saved_tensors_hooks(False)
    if top is None or getattr(top[1], "__module__", "").startswith("lowtide."):
        return None
    return top[0]
