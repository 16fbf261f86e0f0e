"""The process group and its meshes: which ranks share what."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cache

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lowtide._torch_private.training.meshes import flattened
from lowtide.train.run import Degrees, Run

__all__ = ["Meshes", "make_meshes", "process_group", "rank_seed"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Meshes:
    """The ranks this one shares something with, and its place among them."""

    device: torch.device
    """This rank's device."""
    data: DeviceMesh
    """The ranks that see other samples, or other tokens of them."""
    sharded: DeviceMesh
    """The ranks that FSDP works over: those that share parameters, or for HSDP copies x those."""
    context: DeviceMesh | None
    """The ranks that have other tokens of the same samples; None where a rank has all."""
    tensor: DeviceMesh
    """The ranks that share each layer's matrices."""
    pipeline: DeviceMesh
    """The ranks that have the other stages."""
    expert: DeviceMesh | None
    """The ranks that share the experts of each layer; None where they are not shared."""
    experts: DeviceMesh | None
    """The ranks that share the matrices of routed experts: expert-parallel ones, tensor-parallel ones, or both."""
    expert_sharded: DeviceMesh | None
    """The ranks that have the same experts as this one, within those that share parameters."""

    @property
    def samples_from(self) -> int:
        """This rank's place among those that see other samples."""
        return self.data.get_local_rank() // (self.context.size() if self.context is not None else 1)

    @property
    def tokens_from(self) -> int:
        """This rank's place among those that have other tokens of the same samples."""
        return self.context.get_local_rank() if self.context is not None else 0

    @property
    def leads(self) -> bool:
        """Whether this rank speaks for its pipeline stage."""
        return self.data.get_local_rank() == 0 and self.tensor.get_local_rank() == 0


def rank_seed(run: Run, meshes: Meshes) -> int:
    """What this rank draws from. Ranks that see other samples, or have other layers, draw other numbers; ranks that
    share a layer's matrices draw the same."""
    place = meshes.data.get_local_rank() * run.degrees.pipeline + meshes.pipeline.get_local_rank()
    return run.seed + 1_000_003 * place


@contextmanager
def process_group(patience: timedelta) -> Iterator[torch.device]:
    """This rank's device, in a process group of all ranks; one process alone is a group too.

    An error is noted where the launcher finds it before the group ends: the other ranks fail for that only then.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    # gloo connects each rank to each other when a group is made: thousands of sockets a rank, in each group. So it
    # connects the ranks that talk to each other, when they first do.
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    backend = "gloo"
    if accelerator is None:
        device = torch.device("cpu")
    else:
        device = torch.device(accelerator.type, int(os.environ.get("LOCAL_RANK", "0")))
        torch.accelerator.set_device_index(device.index)
        backend = f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device.type)}"
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=patience)
    else:
        store = dist.HashStore()  # type: ignore[attr-defined]  # documented, not re-exported
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=patience)
    try:
        yield device
    except Exception as error:
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        get_error_handler().record_exception(error)
        raise
    finally:
        make_meshes.cache_clear()
        dist.destroy_process_group()


@cache  # groups have threads and connections: a process that makes several runs makes the same ones once
def make_meshes(degrees: Degrees, device: torch.device) -> Meshes:
    """Neighbouring ranks share a layer's matrices, then experts, then parameters; stages lie farthest apart."""
    outer = degrees.shard // degrees.expert
    sizes = {
        "pipeline": degrees.pipeline,
        "replicate": degrees.replicate,
        **({"shard": degrees.shard} if degrees.expert == 1 else {"expert_sharded": outer, "expert": degrees.expert}),
        **({"context": degrees.context} if degrees.context > 1 else {}),
        "tensor": degrees.tensor,
    }
    world = init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    if degrees.context > 1:
        shard = flattened(world, ("shard", "context"), "sharded")
    elif degrees.expert > 1:
        shard = flattened(world, ("expert_sharded", "expert"), "shard")
    else:
        shard = world["shard"]
    data, sharded = shard, shard
    if degrees.replicate > 1:
        inner = ("shard",) if degrees.expert == 1 else ("expert_sharded", "expert")
        data = flattened(world, ("replicate", *inner), "data")
        sharded = world["replicate", "shard"] if degrees.shard > 1 else data
    expert_sharded: DeviceMesh | None = None
    if degrees.expert > 1:
        names = ("replicate", "expert_sharded") if degrees.replicate > 1 else ("expert_sharded",)
        expert_sharded = world[names]
    shared = tuple(name for name, size in (("expert", degrees.expert), ("tensor", degrees.tensor)) if size > 1)
    return Meshes(
        device=device,
        data=data,
        sharded=sharded,
        context=world["context"] if degrees.context > 1 else None,
        tensor=world["tensor"],
        pipeline=world["pipeline"],
        expert=world["expert"] if degrees.expert > 1 else None,
        experts=world[shared] if shared else None,
        expert_sharded=expert_sharded,
    )
