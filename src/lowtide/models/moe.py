"""A mixture of experts: tokens are routed, dispatched to their experts, and combined.

[Note: where a slot is]
A token that chooses k experts has k slots. Slots are sorted by expert; with capacity, those beyond it are dropped. The
sorted slots of all experts of a rank are one tensor. Dispatch and combine are both gathers: backward of the
one is the other, never a scatter that adds, so that every step gives the same bits on every device.

Under expert parallelism each rank holds some of the experts, in order. Sorted slots are then also sorted by rank: one
all-to-all sends them. They arrive sorted by the rank they come from and in it by expert; sorting by expert alone is
one more gather. The way back is the same in the other order.

Under tensor parallelism each rank holds a part of every expert's inner width, as of a dense block's: each slot is
computed once, a part of it on each rank. Slots are the same on all these ranks, and so is the router. What the experts
answer is then this rank's part of a sum, also after combine, which is linear; the caller of the block adds the parts
up. In backward the same holds for the gradients of the experts' input and of the routing weights: they are parts, and
are added up where the experts' part of the block begins, so that the router sees whole gradients.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn import functional

from lowtide._torch_private.collectives import exchange_rows
from lowtide.errors import ModelError
from lowtide.models.experts_shape import ExpertsShape
from lowtide.models.feed_forward import FeedForward, FusedSwiGLU
from lowtide.models.grouped import GroupedLinear
from lowtide.models.router import Router, Routing, count_slots

__all__ = ["Experts", "MixtureOfExperts", "distribute_experts"]


class MixtureOfExperts(nn.Module):
    """Routed experts, and shared ones that every token passes."""

    def __init__(self, shape: ExpertsShape, width: int, *, fused: bool = False) -> None:
        super().__init__()
        self.shape = shape
        self.router = Router(shape, width)
        self.plan = Plan(shape)
        self.dispatch = Gather()
        self.exchange: Exchange | None = None
        self.arrange: Gather | None = None
        self.tensor_mesh: DeviceMesh | None = None
        """The ranks that share each expert's inner width: then the output is this rank's part of a sum."""
        self.experts = Experts(shape, width, fused=fused)
        self.combine = Combine()
        inner = shape.shared * shape.intermediate_size
        self.shared_experts = FeedForward(width, inner, fused=fused) if shape.shared else None

    def forward(self, hidden: Tensor) -> Tensor:
        routing = self.router(hidden)
        plan = self.plan(routing)
        tokens, weights = self._parts_in_backward(hidden.flatten(0, 1)), self._parts_in_backward(routing.weights)
        slots = self.dispatch(tokens, plan.sources, plan.places)
        if self.exchange is not None and self.arrange is not None:
            slots = self.exchange(slots, plan.received, plan.sent)
            slots = self.arrange(slots, plan.by_expert, plan.by_rank)
        slots = self.experts(slots, plan.counts)
        if self.exchange is not None and self.arrange is not None:
            slots = self.arrange(slots, plan.by_rank, plan.by_expert)
            slots = self.exchange(slots, plan.sent, plan.received)
        routed: Tensor = self.combine(slots, weights, plan.order, plan.places)
        routed = routed.view(hidden.shape)
        return routed if self.shared_experts is None else routed + self.shared_experts(hidden)

    def _parts_in_backward(self, tensor: Tensor) -> Tensor:
        """The tensor as it is; where ranks share the experts' inner width, their gradients of it are added up."""
        if self.tensor_mesh is None:
            return tensor
        whole = DTensor.from_local(tensor, self.tensor_mesh, [Replicate()], run_check=False)
        return whole.to_local(grad_placements=[Partial()])

    def distribute(self, mesh: DeviceMesh) -> None:
        """Shard the experts over a mesh: their inner width over a dimension called ``tensor``, and over any other the
        experts, to which tokens are sent from now on."""
        names = mesh.mesh_dim_names or ("expert",)
        sizes = dict(zip(names, mesh.shape, strict=True))
        tensor = sizes.pop("tensor", 1)
        if self.shape.count % math.prod(sizes.values()):
            raise ModelError(
                f"{self.shape.count} experts cannot be sharded over {math.prod(sizes.values())} ranks:"
                " choose an expert_parallel that divides their number"
            )
        if self.shape.intermediate_size % tensor:
            raise ModelError(
                f"an expert's inner width of {self.shape.intermediate_size} (moe_intermediate_size) cannot be sharded"
                f" over {tensor} tensor-parallel ranks: choose a number of them that divides it"
            )
        for projection, inner in ((self.experts.w1, 1), (self.experts.w3, 1), (self.experts.w2, 2)):
            whole = projection.weight
            placements = [Shard(inner) if name == "tensor" else Shard(0) for name in names]
            # Every rank has the whole weight, or it is on meta and filled later: nothing is sent.
            sharded = distribute_tensor(whole.detach(), mesh, placements, src_data_rank=None)
            projection.weight = nn.Parameter(sharded, requires_grad=whole.requires_grad)
        if "tensor" in names:
            self.tensor_mesh = mesh["tensor"] if mesh.ndim > 1 else mesh
        if sizes:
            group = mesh.get_group(next(iter(sizes))) if mesh.ndim > 1 else mesh.get_group()
            self.plan.group = group
            self.exchange, self.arrange = Exchange(group), Gather()


def distribute_experts(model: nn.Module, mesh: DeviceMesh) -> None:
    """Shard the experts of every layer over a mesh, before ``fully_shard``, also on meta.

    A dimension of it that is called ``tensor`` shards each expert's inner width, any other the experts.
    """
    for module in list(model.modules()):
        if isinstance(module, MixtureOfExperts):
            module.distribute(mesh)


class Experts(nn.Module):
    """The routed experts of a rank: SwiGLU between projections, each expert with its own weights."""

    def __init__(self, shape: ExpertsShape, width: int, *, fused: bool = False) -> None:
        super().__init__()
        inner, grouped = shape.intermediate_size, shape.grouped
        self.w1 = GroupedLinear(shape.count, width, inner, grouped=grouped)
        self.w3 = GroupedLinear(shape.count, width, inner, grouped=grouped)
        self.w2 = GroupedLinear(shape.count, inner, width, grouped=grouped)
        self.swiglu = FusedSwiGLU() if fused else None

    def forward(self, slots: Tensor, counts: Tensor) -> Tensor:
        gate, up = self.w1(slots, counts), self.w3(slots, counts)
        inner = functional.silu(gate) * up if self.swiglu is None else self.swiglu(gate, up)
        output: Tensor = self.w2(inner, counts)
        return output


class Planned(NamedTuple):
    """Where every slot goes, in whole numbers only."""

    sources: Tensor
    """The token of each slot that is sent, sorted by expert."""
    order: Tensor
    """The slot itself, token by token and choice by choice."""
    places: Tensor
    """``[tokens, chosen]``: where among the sent ones each slot is; one past the end if it is dropped."""
    counts: Tensor
    """Slots of each expert of this rank."""
    sent: list[int]
    """Slots for each rank of the expert-parallel group; empty without one."""
    received: list[int]
    """Slots from each rank."""
    by_expert: Tensor
    """What arrived, sorted by expert."""
    by_rank: Tensor
    """The other way round."""


class Plan(nn.Module):
    """Sorts slots by expert and drops those beyond capacity. Nothing here has a gradient."""

    def __init__(self, shape: ExpertsShape) -> None:
        super().__init__()
        self.shape = shape
        self.group: dist.ProcessGroup | None = None

    def forward(self, routing: Routing) -> Planned:
        with torch.no_grad():
            return self._planned(routing.experts, routing.weights.detach())

    def _planned(self, experts: Tensor, weights: Tensor) -> Planned:
        tokens, chosen = experts.shape
        flat = experts.flatten()
        counts = count_slots(flat, self.shape.count)
        order = flat.argsort(stable=True)
        if self.shape.capacity is not None:
            order, counts = self._within_capacity(flat, weights.flatten(), order, counts, self.shape.capacity)
        places = torch.full_like(flat, len(order))
        places[order] = torch.arange(len(order), device=flat.device)
        places = places.view(tokens, chosen)
        if self.group is None:
            empty = order[:0]
            return Planned(order // chosen, order, places, counts, [], [], empty, empty)
        ranks = dist.get_world_size(self.group)
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=self.group)
        ours, theirs = counts.view(ranks, -1), arriving.view(ranks, -1)
        sent, received = self.lengths(ours, theirs, len(order))
        by_expert = torch.arange(theirs.shape[1], device=flat.device).repeat(ranks)
        by_expert = by_expert.repeat_interleave(theirs.flatten(), output_size=sum(received)).argsort(stable=True)
        return Planned(
            order // chosen,
            order,
            places,
            theirs.sum(0),
            sent,
            received,
            by_expert,
            by_expert.argsort(),
        )

    def lengths(self, ours: Tensor, theirs: Tensor, slots: int) -> tuple[list[int], list[int]]:
        """How many of ``slots`` go to each rank, and how many come from each. A trace, which has no values to look at,
        puts something else here."""
        return ours.sum(1).tolist(), theirs.sum(1).tolist()

    def _within_capacity(
        self, experts: Tensor, weights: Tensor, order: Tensor, counts: Tensor, factor: float
    ) -> tuple[Tensor, Tensor]:
        """The slots that their experts take: the first ones, or those of the highest weight."""
        capacity = math.ceil(len(experts) / self.shape.count * factor)
        if self.shape.drop_policy == "probs":
            by_weight = weights.argsort(descending=True, stable=True)
            order = by_weight[experts[by_weight].argsort(stable=True)]
        starts = counts.cumsum(0) - counts
        turn = torch.arange(len(order), device=order.device) - starts[experts[order]]
        order = order[turn < capacity]
        if self.shape.drop_policy == "probs":  # sent in the order of tokens all the same
            order = order.sort().values
            order = order[experts[order].argsort(stable=True)]
        return order, counts.clamp(max=capacity)


class Gather(nn.Module):
    """Rows in another order: ``sources`` says which row is where, ``places`` where each row went."""

    def forward(self, rows: Tensor, sources: Tensor, places: Tensor) -> Tensor:
        gathered: Tensor = _Gathered.apply(rows, sources, places)
        return gathered


class _Gathered(torch.autograd.Function):
    """Backward gathers too: a row's gradient is the sum over the places it went to, in their order."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sources: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        return rows.index_select(0, sources)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (places,) = ctx.saved_tensors
        rows = _rows_at(gradients[0], places.flatten()).view(*places.shape, -1)
        return rows.sum(1) if places.dim() == 2 else rows, None, None


class Combine(nn.Module):
    """Each token's answers, weighed and added."""

    def forward(self, slots: Tensor, weights: Tensor, order: Tensor, places: Tensor) -> Tensor:
        answers = _Returned.apply(slots, order, places).view(*places.shape, -1)
        return torch.einsum("tk,tkd->td", weights.to(answers.dtype), answers)


class _Returned(torch.autograd.Function):
    """Each slot's answer, zero where it was dropped; backward takes the gradients of those that were sent."""

    @staticmethod
    def forward(ctx: Any, slots: Tensor, order: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        return _rows_at(slots, places.flatten())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (order,) = ctx.saved_tensors
        return gradients[0].index_select(0, order), None, None


def _rows_at(rows: Tensor, places: Tensor) -> Tensor:
    """The rows at ``places``; one past the end is a row of zeros."""
    if len(rows) < len(places):  # some were dropped
        rows = torch.cat((rows, rows.new_zeros(1, rows.shape[1])))
    return rows.index_select(0, places)


class Exchange(nn.Module):
    """Sends each rank its rows and receives ours."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group = group

    def forward(self, rows: Tensor, received: list[int], sent: list[int]) -> Tensor:
        exchanged: Tensor = _Exchanged.apply(rows, received, sent, self.group)
        return exchanged


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, received: list[int], sent: list[int], group: Any) -> Tensor:
        ctx.received, ctx.sent, ctx.group = received, sent, group
        return exchange_rows(rows, received, sent, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return exchange_rows(gradients[0].contiguous(), ctx.sent, ctx.received, ctx.group), None, None, None
