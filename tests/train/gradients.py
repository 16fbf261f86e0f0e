"""Gradients sharded over four processes in every way that the runner shards them."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from lowtide.train.clip import clip, global_norm
from support.forked import forking

RANKS = 4
PATIENCE = 300  # seconds; the machine is shared
SHAPES = [(7, 5), (8,), (1, 3), (6, 4, 2), (2, 2)]
"""Some cannot be sharded evenly over four, and one rank or more has nothing of the third."""


def gradients() -> list[Tensor]:
    """The gradients as one process would have them."""
    random = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=random) * (place + 1) for place, shape in enumerate(SHAPES)]


def parameter(gradient: Tensor) -> nn.Parameter:
    one = nn.Parameter(torch.zeros_like(gradient))
    one.grad = gradient
    return one


def sharded(gradient: Tensor, mesh: DeviceMesh, *placements: Any) -> nn.Parameter:
    return parameter(distribute_tensor(gradient, mesh, placements, src_data_rank=None))


@cache
def square(*names: str) -> DeviceMesh:
    """Two by two ranks."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=names)


@cache
def row() -> DeviceMesh:
    """All ranks."""
    return init_device_mesh("cpu", (4,))


def on_world(*placements: Any) -> Callable[[], dict[str, Any]]:
    """All gradients on a mesh of 2 x 2 ranks."""

    def layout() -> dict[str, Any]:
        mesh = square("dp", "tp")
        return {"parameters": [sharded(one, mesh, *placements) for one in gradients()]}

    return layout


def data_parallel() -> dict[str, Any]:
    return {"parameters": [parameter(one) for one in gradients()]}


def fsdp() -> dict[str, Any]:
    mesh = row()
    return {"parameters": [sharded(one, mesh, Shard(0)) for one in gradients()]}


def tensor_parallel_in_data_parallel() -> dict[str, Any]:
    """Weights on a mesh of the tensor-parallel ranks alone, and plain ones."""
    mesh = square("dp", "tp")["tp"]
    first, *rest = gradients()
    return {"parameters": [sharded(first, mesh, Shard(1)), *(parameter(one) for one in rest)]}


def two_meshes() -> dict[str, Any]:
    """Parts of the model on different meshes, as dense weights and experts are."""
    first, second, *rest = gradients()
    parameters = [sharded(first, row(), Shard(0)), sharded(second, square("dp", "tp"), Replicate(), Shard(0))]
    return {"parameters": [*parameters, *(parameter(one) for one in rest)]}


def pipeline_of_fsdp() -> dict[str, Any]:
    """Each pair of ranks has gradients of its own."""
    mesh = square("pp", "dp")
    stage = mesh.get_local_rank("pp")
    mine = gradients()[:2] if stage == 0 else gradients()[2:]
    return {"parameters": [sharded(one, mesh["dp"], Shard(0)) for one in mine], "stages": 2}


def pipeline_of_data_parallel() -> dict[str, Any]:
    mine = gradients()[:3] if dist.get_rank() < 2 else gradients()[3:]
    return {"parameters": [parameter(one) for one in mine], "stages": 2}


def plain_experts() -> dict[str, Any]:
    """Two expert-parallel ranks have other experts, as plain tensors; the rest is replicated."""
    *rest, experts = gradients()
    mine = parameter(experts.chunk(2)[dist.get_rank() % 2].clone())
    return {
        "parameters": [mine, *(parameter(one) for one in rest)],
        "expert_parameters": [mine],
        "expert_ranks": 2,
    }


def experts_in_fsdp() -> dict[str, Any]:
    """Experts sharded over two ranks, and each part by FSDP over the two ranks that have it."""
    mesh = square("edp", "ep")
    *rest, experts = gradients()
    mine = sharded(experts.chunk(2)[mesh.get_local_rank("ep")], mesh["edp"], Shard(0))
    return {
        "parameters": [mine, *(sharded(one, row(), Shard(0)) for one in rest)],
        "expert_parameters": [mine],
        "expert_ranks": 2,
    }


def open_sums() -> dict[str, Any]:
    """Gradients whose sum over the tensor-parallel ranks is not made yet."""
    mesh = square("dp", "tp")["tp"]
    parts = [DTensor.from_local(one / 2, mesh, [Partial()], run_check=False) for one in gradients()]
    parameters = [nn.Parameter(distribute_tensor(torch.zeros_like(one), mesh, [Replicate()])) for one in gradients()]
    for one, part in zip(parameters, parts, strict=True):
        one.grad = part
    return {"parameters": parameters}


class Block(nn.Module):
    """A norm and two products."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 12, bias=False), nn.Linear(12, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def trained(sharded: bool) -> nn.Module:
    """A model after one backward; divided by tensor and sequence parallel inside FSDP2, or whole."""
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block())
    samples = torch.randn(4, 6, 8)
    if not sharded:
        model(samples).square().mean().backward()
        return model
    mesh = square("dp", "tp")
    plan: dict[str, Any] = {
        "norm": SequenceParallel(use_local_output=True),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
    }
    for block in model:
        parallelize_module(block, mesh["tp"], plan)
        fully_shard(block, mesh=mesh["dp"])
    parallelize_module(
        model, mesh["tp"], PrepareModuleOutput(output_layouts=Shard(1), desired_output_layouts=Replicate())
    )
    fully_shard(model, mesh=mesh["dp"])
    mine = samples.chunk(2)[mesh.get_local_rank("dp")].chunk(2, dim=1)[mesh.get_local_rank("tp")]
    model(mine.contiguous()).square().mean().backward()
    return model


LAYOUTS: dict[str, Callable[[], dict[str, Any]]] = {
    "data parallel": data_parallel,
    "FSDP2": fsdp,
    "HSDP": on_world(Replicate(), Shard(0)),
    "tensor parallel in FSDP2": on_world(Shard(0), Shard(0)),
    "tensor parallel in data parallel": tensor_parallel_in_data_parallel,
    "two meshes and plain tensors": two_meshes,
    "pipeline of FSDP2": pipeline_of_fsdp,
    "pipeline of data parallel": pipeline_of_data_parallel,
    "experts as plain tensors": plain_experts,
    "experts in FSDP2": experts_in_fsdp,
    "sums not made yet": open_sums,
}


def measured(directory: Path) -> dict[str, list[tuple[float, float]]]:
    """For each layout the norm on each rank, and the norm after clipping to 1."""
    context = forking()
    processes = [context.Process(target=_rank, args=(rank, directory), daemon=True) for rank in range(RANKS)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(PATIENCE)
        if process.is_alive():
            process.kill()
    found = [pickle.loads((directory / f"{rank}").read_bytes()) for rank in range(RANKS)]
    return {name: [one[name] for one in found] for name in found[0]}


def _rank(rank: int, directory: Path) -> None:
    os.environ.update(OMP_NUM_THREADS="1")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{directory}/store",
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=PATIENCE),
    )
    result = {name: _norms(layout()) for name, layout in LAYOUTS.items()}
    model = trained(sharded=True)
    result["a model"] = _norms({"parameters": list(model.parameters())})
    (directory / f"{rank}").write_bytes(pickle.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def _norms(given: dict[str, Any]) -> tuple[float, float]:
    norm = global_norm(**given)
    clip(given["parameters"], norm, 1.0)
    return norm.item(), global_norm(**given).item()
