"""Re-issue collectives in backward, on every rank or on none.

[Note: re-issued collectives]
Recomputing an operator is a rank's own affair. Re-issuing a collective is not: all ranks of its group must do it, in
the same order, or one of them waits for ever. Three things that a rank decides alone must therefore have no say in it:

- *What is asked for.* A rank's control flow may diverge from the layer's profile (an expert without tokens), and then
  it keeps its tensors in this step and is profiled again in the next. It needs no collective's result, but its peers
  do. So a collective is captured where it is issued, in every run of the layer, profiled and diverged ones included,
  and is known by its index among those of its group in this layer: ranks issue the collectives of a group in one order,
  or they would hang without lowtide.
- *Whether it is re-issued.* When such an index is first reached, its ranks ask each other, over the collective's own
  group, whether all of them have its result to recompute. The answer holds as long as the Policy does.
- *When it is re-issued.* Not when a saved tensor is first unpacked, but when the gradient of the layer's output
  arrives: that node is in the graph of every rank. All of the run's collectives are re-issued there, in the order of
  forward, and each exactly once, also where this rank wants nothing of them. Their results live as long as the graph
  refers to them, so that another backward through it (zero-bubble schedules, ``retain_graph``) finds them.

What a collective gave is found among what autograd saves by its storage and the storage's version, never by the
tensor object: gloo writes the result on a thread of its own, and that thread's reference keeps the object alive for a
moment, on one rank longer than on another. A lookup that went by the object kept the tensor on one rank and recomputed
it on the other, and the group hung within a few steps.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.overrides import TorchFunctionMode

from lowtide._torch_private.collectives import finish_collective, group_name_of, group_named, is_collective
from lowtide._torch_private.modes import DisableTorchFunction, unseen_by_modes
from lowtide._torch_private.operators import tree_map
from lowtide._torch_private.versions import own_version
from lowtide.errors import RebuildError
from lowtide.operators.calls import tensors_of
from lowtide.operators.wrappers import Function, Wrappers
from lowtide.runtime.ambient import ambient
from lowtide.runtime.captured_call import CapturedCall
from lowtide.runtime.ledger import Ledger
from lowtide.runtime.registry import Registry

__all__ = ["Collectives", "keep_results"]


class Collectives:
    """The collectives of one layer that are re-issued in backward. See [Note: re-issued collectives]."""

    def __init__(self, layer: int, ledger: Ledger) -> None:
        self.layer, self.ledger = layer, ledger
        self.wanted: tuple[str | None, ...] = ()
        """For each collective of the layer's profile, in order: the operator it belongs to if it is to be re-issued."""
        self.agreed: dict[tuple[str, int], bool] = {}
        """By group and index among the layer's collectives of that group: whether all its ranks re-issue it."""
        self.registry: Registry | None = None
        """Of the run in progress, where its calls are captured."""
        self.wrappers = Wrappers()

    def attach(self, layer: nn.Module) -> None:
        """Capture the layer's collectives from now on, in every run with gradients."""
        self.wrappers.wrap(layer, self._around)

    def remove(self) -> None:
        """Restore the layer."""
        self.wrappers.remove()

    def _around(self, forward: Function) -> Function:
        """The layer's forward, after which backward re-issues its collectives."""

        def collecting(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            issued = _Issued(self, self.registry or Registry())
            with issued:
                output = forward(*args, **kwargs)
            calls = issued.calls
            if calls:
                _reissue_with_gradient_of(output, calls)
            return output

        return collecting

    def agree(self, key: tuple[str, int], mine: bool, device: torch.device) -> bool:
        """Whether every rank of the group re-issues the collective ``key``, asked once."""
        answer = self.agreed.get(key)
        if answer is None:
            with unseen_by_modes(), torch.no_grad():
                flag = torch.tensor([int(mine)], dtype=torch.int32, device=device)
                dist.all_reduce(flag, dist.ReduceOp.MIN, group=group_named(key[0]))
                answer = self.agreed[key] = bool(flag.item())
        return answer


class _Issued(TorchFunctionMode):
    """One run of a layer: captures the collectives that are re-issued; everything else passes through."""

    def __init__(self, collectives: Collectives, registry: Registry) -> None:
        super().__init__()
        self.collectives, self.registry = collectives, registry
        self.count = 0
        self.indices: dict[str, int] = {}
        self.calls: list[CapturedCall] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _known_collective(func):
            return self._issue(func, args, kwargs or {})
        return func(*args, **kwargs) if kwargs else func(*args)

    def _issue(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        owner, number, group = self.collectives, self.count, group_name_of(args, kwargs)
        self.count += 1
        given = tensors_of((args, kwargs))
        if group is None or not given:
            return func(*args, **kwargs)
        index = self.indices[group] = self.indices.get(group, -1) + 1
        wanted = owner.wanted[number] if number < len(owner.wanted) else None
        with DisableTorchFunction():
            agreed = owner.agree((group, index), wanted is not None, given[0].device)
        if not agreed:
            return func(*args, **kwargs)
        with DisableTorchFunction():
            line = owner.ledger.line(owner.layer, wanted or _OTHER)
            call = CapturedCall(func, given[0].device, line, owner.ledger, ambient(()))  # it computes nothing
            call.collective = True
            call.capture(args, kwargs, self.registry.hold)
        output = func(*args, **kwargs)
        with DisableTorchFunction():
            output = finish_collective(output)  # only then is its version what it stays
            self.registry.add(call, output, given)
        self.calls.append(call)
        return output


@cache
def _known_collective(func: Any) -> bool:
    """As :func:`is_collective`, quickly: a layer calls the same few functions all the time."""
    return is_collective(func)


_OTHER = "collectives for other ranks"
"""What the receipt calls a collective that is re-issued since other ranks need it, while this one diverged."""


def _reissue_with_gradient_of(output: Any, calls: list[CapturedCall]) -> None:
    """Re-issue ``calls`` when the first gradient of a layer's output arrives."""

    def reissue(_: Any) -> None:
        waiting, calls[:] = list(calls), []
        for call in waiting:
            call.recompute()

    # Before the nodes that made the output, which is after hooks of the tensors: FSDP gathers parameters in such a one.
    for node in {tensor.grad_fn for tensor in tensors_of(output) if tensor.grad_fn is not None}:
        node.register_prehook(reissue)


def keep_results(whose: str) -> tuple[TorchFunctionMode, TorchFunctionMode]:
    """The contexts of a checkpointed function and of its recomputation, in which collectives return what they returned.

    Torch's selective checkpoint could do this too. But it counts every kernel, so that nothing else may run in there
    that does not run identically twice, such as the gathers of sharded modules.
    """
    results: list[tuple[Any, tuple[int, ...]]] = []
    return _Keeping(results), _Kept(results, whose)


class _Keeping(TorchFunctionMode):
    """Keeps what collectives give."""

    def __init__(self, results: list[tuple[Any, tuple[int, ...]]]) -> None:
        super().__init__()
        self.results = results

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if _known_collective(func):
            with DisableTorchFunction():
                output = finish_collective(output)  # only then is its version what it stays
                kept = tree_map(lambda one: one.detach().requires_grad_(one.requires_grad), output)
            self.results.append((kept, tuple(own_version(one) for one in tensors_of(kept))))
        return output


class _Kept(TorchFunctionMode):
    """Gives what collectives gave, in their order; the other ranks do not issue them again."""

    def __init__(self, results: list[tuple[Any, tuple[int, ...]]], whose: str) -> None:
        super().__init__()
        self.results, self.whose = results, whose
        self.count = 0

    def __enter__(self) -> _Kept:
        self.count = 0  # a graph that is retained is recomputed for each backward
        super().__enter__()
        return self

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not _known_collective(func):
            return func(*args, **(kwargs or {}))
        if self.count == len(self.results):
            raise RebuildError(f"{self.whose} issued {self.count} collectives when it ran, and more when recomputed")
        output, versions = self.results[self.count]
        self.count += 1
        with DisableTorchFunction():
            if versions != tuple(own_version(one) for one in tensors_of(output)):
                raise RebuildError(
                    f"{self.whose} cannot be recomputed: what one of its collectives gave was changed in place after"
                    " that; set reissue_collectives (mp_comm_recompute) to true"
                )
            return tree_map(lambda one: one.detach().requires_grad_(one.requires_grad), output)
