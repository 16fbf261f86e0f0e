"""A program for two ranks that counts the collectives of a backward and the bytes held before it."""

from __future__ import annotations

import warnings
from collections import Counter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

from lowtide.policy import Policy
from lowtide.runtime.apply import apply
from lowtide.runtime.limits import Limits
from numerics.layouts import PLAIN, sequence_parallel_model
from numerics.model import Llama, Value, build, gradients, loss_of, tokens_of, values
from support.garbage import collect_garbage

LAYERS = 3


class Seen(NamedTuple):
    """What one rank saw."""

    values: list[Value]
    collectives: dict[str, int]
    """The collectives of the last backward, by name."""
    held: int
    """The bytes on the device between the last forward and its backward, less those before."""
    warnings: list[str]
    kept: list[str]
    """What was to be recomputed and could not be."""


def run(layout: str, policy: Policy | None, device: str) -> Seen:
    """Train a model that is laid out as ``layout`` says."""
    model = build(LAYERS).to(device)
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _lay_out(layout, model, mesh, device)
        handle = apply(model, policy, layers="layers", limits=Limits(minimum_bytes=1)) if policy is not None else None
        if layout in ("sharded", "sharded, kept gathered"):
            for layer in model.layers:
                fully_shard(layer, mesh=mesh, reshard_after_forward=layout == "sharded")
            fully_shard(model, mesh=mesh)
        record: list[Value] = []
        counter, held = Counting(), 0
        for step in range(3):
            tokens = tokens_of(step).to(device)
            collect_garbage()  # what earlier programs left must not go while this is measured
            before = torch.accelerator.memory_allocated() if device != "cpu" else 0
            loss = loss_of(model(tokens), tokens)
            held = torch.accelerator.memory_allocated() - before if device != "cpu" else 0
            counter = Counting()
            with counter:
                loss.backward()
            record += values(step, [("loss", loss), *gradients(model)])
            model.zero_grad(set_to_none=True)
    said = [str(one.message) for one in caught if "lowtide" in str(one.message)]
    kept = [name for _, name in handle.kept] if handle is not None else []
    if handle is not None:
        handle.remove()
    return Seen(record, dict(counter.seen), held, said, kept)


def _lay_out(layout: str, model: Llama, mesh: Any, device: str) -> None:
    if layout == "tensor parallel":
        for layer in model.layers:
            parallelize_module(layer, mesh, PLAIN)
    elif layout == "sequence parallel":
        sequence_parallel_model(model, mesh)


class Counting(TorchDispatchMode):
    """Counts collectives; waiting for one and wrapping what it gave send nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        space, name = func._schema.name.split("::")
        if space in ("_c10d_functional", "c10d") and name not in ("wait_tensor", "_wrap_tensor_autograd"):
            self.seen[name] += 1
        return func(*args, **(kwargs or {}))
