"""Programs that arrange a model over the four ranks."""

from __future__ import annotations

from typing import Any

import torch
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

from lowtide.models.build import build_model
from lowtide.models.decoder import Decoder
from lowtide.models.initialise import initialise
from models.shapes import llama, loss_of, tokens

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
