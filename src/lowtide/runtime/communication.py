"""Carry out what a Policy says about communication.

- ``reissue_collectives``: whether a recomputed layer re-issues its tensor-parallel collectives or keeps their results.
- ``reshard_after_forward``: whether sharded parameters are gathered again in backward.
- ``slice_inputs``: of a recomputed layer's input keep this tensor-parallel rank's slice only.
- ``LayerPolicy.collectives``: in a layer that is not recomputed as a whole, drop what single collectives gave.

Layers are sharded and parallelized after a Policy is applied, so all of this looks at a layer when it first runs. What
turns out to have no effect is said in a warning, and in every receipt: see ``Ledger.idle``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lowtide._torch_private.storages import storage_bytes, storage_key
from lowtide._torch_private.subclasses import landed_tensor, subclass_wrapper
from lowtide.operators.calls import tensors_of
from lowtide.operators.kinds import LayerKind
from lowtide.operators.saved import Saved, kept_apart, unpack
from lowtide.operators.wrappers import Function
from lowtide.policy import Decision, Policy, Recompute, ResolvedLayer
from lowtide.policy.collectives import joined, with_collectives
from lowtide.runtime.collectives import keep_results
from lowtide.runtime.ledger import Ledger
from lowtide.runtime.refuse import refuse_compilation

__all__ = [
    "ReshardAfterForward",
    "decide_collectives",
    "keep_slice",
    "keeping_collectives",
    "tensor_parallel_group",
]


def keeping_collectives(
    plain: Function, run: Callable[..., Any], layer: nn.Module, index: int, ledger: Ledger
) -> Function:
    """A layer that is recomputed as a whole but for its collectives, whose results are kept.

    ``run`` calls it with what the call and its replay run in, and ``plain`` without.
    """
    group = _Once(lambda: tensor_parallel_group(layer), "reissue_collectives (mp_comm_recompute)", index, ledger)

    def whole(*args: Any, **kwargs: Any) -> Any:
        if group() is None:
            return plain(*args, **kwargs)
        return run(args, kwargs, keep_results(f"layer {index}"))

    return whole


def tensor_parallel_group(layer: nn.Module) -> dist.ProcessGroup | None:
    """The ranks over which the layer's parameters are split, if any are.

    To be asked while the layer runs: parameters that are sharded for storage alone are gathered then.
    """
    from torch.distributed.tensor import DTensor, Shard

    for parameter in layer.parameters():
        if isinstance(parameter, DTensor):
            for dimension, placement in enumerate(parameter.placements):
                if isinstance(placement, Shard) and parameter.device_mesh.size(dimension) > 1:
                    return parameter.device_mesh.get_group(dimension)
    return None


class _Once:
    """A layer's tensor-parallel group, looked up when the layer first runs; a warning if there is none."""

    def __init__(self, find: Callable[[], dist.ProcessGroup | None], setting: str, index: int, ledger: Ledger) -> None:
        self.find, self.setting, self.index, self.ledger = find, setting, index, ledger
        self.asked = False
        self.group: dist.ProcessGroup | None = None

    def __call__(self) -> dist.ProcessGroup | None:
        if not self.asked:
            self.asked, self.group = True, self.find()
            if self.group is None:
                self.ledger.idle(
                    f"{self.setting} has no effect in layer {self.index}: its parameters are not tensor-parallel"
                )
        return self.group


class ReshardAfterForward:
    """A hook before a layer: a sharded one is resharded after forward, and gathered again in backward."""

    def __init__(self, index: int, ledger: Ledger) -> None:
        self.index, self.ledger, self.done = index, ledger, False

    def __call__(self, layer: nn.Module, args: tuple[Any, ...]) -> None:
        if self.done:
            return
        self.done = True
        from torch.distributed.fsdp import FSDPModule

        if isinstance(layer, FSDPModule):
            layer.set_reshard_after_forward(True, recurse=False)
        else:
            self.ledger.idle(
                f"reshard_after_forward (parallel_optimizer_comm_recompute) has no effect in layer {self.index}: it"
                " is not sharded by fully_shard"
            )


def keep_slice(forward: Function, layer: nn.Module, index: int, ledger: Ledger) -> Function:
    """A layer that is recomputed as a whole and of whose input each tensor-parallel rank holds its slice only."""
    group = _Once(lambda: tensor_parallel_group(layer), "slice_inputs (recompute_slice_activation)", index, ledger)
    replicated: list[bool] = []

    def sliced(*args: Any, **kwargs: Any) -> Any:
        refuse_compilation(index)
        given = tensors_of((args, kwargs))
        if not torch.is_grad_enabled() or not given or (ranks := group()) is None:
            return forward(*args, **kwargs)
        if not replicated:
            replicated.append(_is_replicated(given[0], ranks))
            if not replicated[0]:
                ledger.idle(
                    f"slice_inputs (recompute_slice_activation) has no effect in layer {index}: its input is not the"
                    " same on all tensor-parallel ranks, or cannot be cut into equal slices"
                )
        if not replicated[0]:
            return forward(*args, **kwargs)
        key, known = storage_key(given[0]), {}

        def pack(tensor: Tensor) -> Saved:
            if storage_key(tensor) != key or not _can_be_sliced(tensor, ranks):
                return kept_apart(tensor)
            layout = tuple(tensor.shape)
            if layout not in known:  # one slice, however often it is saved
                known[layout] = _Slice(tensor, ranks)
            return known[layout]

        with saved_tensors_hooks(pack, unpack):
            output = forward(*args, **kwargs)
        known.clear()
        return output

    return sliced


class _Slice:
    """This rank's piece of a tensor that all ranks of a group have; they put it together again when it is needed."""

    def __init__(self, tensor: Tensor, group: dist.ProcessGroup) -> None:
        with torch.no_grad():
            whole = landed_tensor(tensor)
            self.group, self.shape, self.wrap = group, whole.shape, subclass_wrapper(tensor)
            self.piece = whole.reshape(-1).chunk(group.size())[group.rank()].clone()

    def tensor(self) -> Tensor:
        with torch.no_grad():
            whole = self.piece.new_empty(self.shape)
            dist.all_gather_single(whole.view(-1), self.piece, group=self.group)
            return whole if self.wrap is None else self.wrap(whole)


def _can_be_sliced(tensor: Tensor, group: dist.ProcessGroup) -> bool:
    whole = landed_tensor(tensor)
    full = whole.numel() * whole.element_size() == storage_bytes(tensor)
    return full and whole.is_contiguous() and whole.numel() % group.size() == 0


def _is_replicated(tensor: Tensor, group: dist.ProcessGroup) -> bool:
    """Whether all ranks of a group have the same bytes. All of them ask this at the same time."""
    from torch.distributed.tensor import DTensor

    sharded = isinstance(tensor, DTensor) and not all(placement.is_replicate() for placement in tensor.placements)
    with torch.no_grad():
        whole = landed_tensor(tensor)
        able = not sharded and _can_be_sliced(tensor, group)
        mine = whole.reshape(-1).view(torch.uint8).long() if able else whole.new_zeros(1, dtype=torch.long)
        positions = torch.arange(1, mine.numel() + 1, device=mine.device)
        digest = torch.stack([mine.sum(), (mine * positions).sum(), torch.full_like(mine.sum(), int(able))])
        everyone = digest.new_empty(group.size() * digest.numel())
        dist.all_gather_single(everyone, digest, group=group)
        rows = everyone.view(group.size(), -1)
        return bool(able and (rows == rows[0]).all())


def decide_collectives(
    index: int, kind: LayerKind, resolved: ResolvedLayer, policy: Policy, ledger: Ledger
) -> Mapping[str, Decision]:
    """A layer's decisions by operator, with those for its collectives; says which rules re-issue nothing.

    In a layer that is recomputed but for some operators, ``reissue_collectives=False`` keeps what collectives gave.
    """
    changed, idle = with_collectives(
        resolved,
        joined((call.name, call.reads) for call in kind.calls if call.communicates),
        joined((call.name, call.reads) for call in kind.calls if call.site.function is torch.cat),
        keep_all=not policy.communication.reissue_collectives and policy.layers[index].default == Recompute(),
    )
    for operator in idle:
        ledger.idle(
            f"the collective at {operator} of layer {index} is not re-issued: no operator that is kept reads its output"
        )
    return changed
