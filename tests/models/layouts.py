"""Programs that arrange a model over the four ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from lowtide import LayerPolicy, Limits, Pattern, Policy, Recompute, Rule, Swap, apply
from lowtide.models.auxiliary import set_auxiliary_scale
from lowtide.models.build import build_model
from lowtide.models.decoder import Decoder
from lowtide.models.initialise import initialise
from lowtide.models.moe import MixtureOfExperts, distribute_experts
from models.shapes import deepseek, llama, loss_of, tokens

PLAN: dict[str, Any] = {
    "attention_norm": SequenceParallel(),
    "attention": PrepareModuleInput(
        input_layouts=(Shard(1), Replicate()),
        desired_input_layouts=(Replicate(), Replicate()),
        use_local_output=True,
    ),
    "attention.wq": ColwiseParallel(),
    "attention.wk": ColwiseParallel(),
    "attention.wv": ColwiseParallel(),
    "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
    "ffn_norm": SequenceParallel(),
    "feed_forward": PrepareModuleInput(
        input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),), use_local_output=True
    ),
    "feed_forward.w1": ColwiseParallel(),
    "feed_forward.w3": ColwiseParallel(),
    "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
}
"""Tensor and sequence parallel layers, as torch's own plans say it."""


def tensor_parallel(model: Decoder, mesh: DeviceMesh) -> None:
    for layer in model.layers.values():
        parallelize_module(layer, mesh, PLAN)
    parallelize_module(
        model,
        mesh,
        {
            "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        },
    )


def sharded(model: Decoder, mesh: DeviceMesh) -> None:
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def arranged(layout: str, **changes: Any) -> Decoder:
    """A small Llama made on meta, arranged, and filled."""
    with torch.device("meta"):
        model = build_model(llama(**changes))
    if layout == "fsdp":
        sharded(model, init_device_mesh("cpu", (4,)))
    elif layout == "tp":
        tensor_parallel(model, init_device_mesh("cpu", (2, 2), mesh_dim_names=("rest", "tp"))["tp"])
    else:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        tensor_parallel(model, mesh["tp"])
        sharded(model, mesh["dp"])
    model.to_empty(device="cpu")
    initialise(model, seed=5)
    return model


def whole(tensor: Any) -> Tensor:
    return tensor.full_tensor().detach() if isinstance(tensor, DTensor) else tensor.detach()


def parameters(layout: str) -> dict[str, Tensor]:
    """The whole parameters of an arranged model; odd sizes, so that shards are uneven."""
    model = arranged(layout, vocab_size=50, intermediate_size=72)
    return {name: whole(one).clone() for name, one in [*model.named_parameters(), ("rotary", model.rotary)]}


def gradients(layout: str) -> dict[str, Tensor]:
    """The whole gradients of one step on the same tokens, and the loss."""
    model = arranged(layout)
    batch = tokens()
    loss = loss_of(model(batch), batch)
    loss.backward()
    return {"loss": loss.detach()} | {name: whole(one.grad).clone() for name, one in model.named_parameters()}


def experts_in_parts() -> dict[str, Tensor]:
    """Weights of 6 experts over 4 ranks, divided by experts and by columns."""
    module = nn.Module()
    module.weight = nn.Parameter(torch.empty(6, 5, 7))
    module.columns = nn.Parameter(torch.empty(3000, 7))
    mesh = init_device_mesh("cpu", (2, 2))
    for name, placements in (("weight", (Shard(0), Shard(0))), ("columns", (Shard(0), Shard(1)))):
        setattr(module, name, nn.Parameter(distribute_tensor(getattr(module, name).detach(), mesh, placements)))
    initialise(module, seed=5)
    return {name: whole(one) for name, one in module.named_parameters()}


def expert_parallel(decision: str) -> dict[str, Tensor]:
    """Two ranks with half of the experts and half of the batch each, twice over; the whole mean gradients."""
    everything = Pattern(".*", "path")
    policies = {
        "recompute operators": LayerPolicy(rules=(Rule(everything, Recompute()),)),
        "recompute layers": LayerPolicy(Recompute()),
        "swap": LayerPolicy(Swap(3)),
    }
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copy", "ep"))["ep"]
    with torch.device("meta"):
        model = build_model(deepseek())
    distribute_experts(model, mesh)
    model.to_empty(device="cpu")
    initialise(model, seed=5)
    handle = None
    if decision != "keep":
        handle = apply(model, Policy((policies[decision],) * 3, origin="solver"), limits=Limits(minimum_bytes=1))
    batch = tokens(2, seed=1)[mesh.get_local_rank()].unsqueeze(0)
    set_auxiliary_scale(model, 1 / mesh.size())
    for _ in range(2):  # the first step profiles
        model.zero_grad()
        loss = loss_of(model(batch), batch)
        (loss / mesh.size()).backward()
    if handle is not None:
        assert sum(line.recomputes + line.swaps for line in handle.ledger.lines.values())
    for parameter in model.parameters():
        if not isinstance(parameter, DTensor):  # experts have the gradients of all ranks' tokens already
            dist.all_reduce(parameter.grad, group=mesh.get_group())
    return {"loss": loss.detach()} | {name: whole(one.grad).clone() for name, one in model.named_parameters()}


LATENT: dict[str, Any] = {
    "attention.linear_q_up_proj": ColwiseParallel(),
    "attention.linear_kv_up_proj": ColwiseParallel(),
    "attention.linear_proj": RowwiseParallel(),
}
"""Latent attention: every rank has the narrow middles and some of the heads."""
GATED: dict[str, Any] = {"w1": ColwiseParallel(), "w3": ColwiseParallel(), "w2": RowwiseParallel()}


def latent_tensor_parallel() -> dict[str, Tensor]:
    """Heads and dense feed-forward blocks over two ranks, routed experts on both; the whole gradients."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copy", "tp"))["tp"]
    with torch.device("meta"):
        model = build_model(deepseek())
    for layer in model.layers.values():
        parallelize_module(layer, mesh, LATENT)
        layer.attention.tensor_mesh = mesh
        shared = getattr(layer.feed_forward, "shared_experts", layer.feed_forward)
        parallelize_module(shared, mesh, GATED)
    model.to_empty(device="cpu")
    initialise(model, seed=5)
    batch = tokens(2, seed=1)
    loss = loss_of(model(batch), batch)
    loss.backward()
    return {"loss": loss.detach()} | {name: whole(one.grad).clone() for name, one in model.named_parameters()}


def experts_in_fsdp() -> dict[str, Tensor]:
    """Experts over two ranks and their weights sharded over the other two, the rest over all four."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("efsdp", "ep"))
    everyone = init_device_mesh("cpu", (4,))
    with torch.device("meta"):
        model = build_model(deepseek())
    distribute_experts(model, mesh["ep"])
    for layer in model.layers.values():
        if isinstance(layer.feed_forward, MixtureOfExperts):
            fully_shard(layer.feed_forward.experts, mesh=mesh["efsdp"])
            # Its gradients are sums over the ranks of the expert-parallel group: the mean is over all four.
            layer.feed_forward.experts.set_gradient_divide_factor(4.0)
            layer.feed_forward.experts.set_force_sum_reduction_for_comms(True)  # gloo cannot divide on its way
        fully_shard(layer, mesh=everyone)
    fully_shard(model, mesh=everyone)
    model.to_empty(device="cpu")
    initialise(model, seed=5)
    batch = tokens(4, seed=1)[dist.get_rank()].unsqueeze(0)
    loss = loss_of(model(batch), batch)
    loss.backward()
    return {"loss": loss.detach()} | {name: whole(one.grad).clone() for name, one in model.named_parameters()}
