"""Programs that train the small Llama on two ranks, each with or without a Policy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.schedules import PipelineScheduleSingle
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from numerics.model import Llama, Value, build, gradients, loss_of, tokens_of, values
from numerics.policies import apply_column, idle

STEPS = 3

Layout = Callable[[Llama, str | None, str], tuple[nn.Module, Any]]
"""Arranges a model on a device, with a column's Policy; gives what is called, and the handle."""


def train(layout: Layout, column: str | None, device: str = "cpu", *, same_tokens: bool = False) -> list[Value]:
    """The losses and gradients of a few steps on this rank."""
    torch.manual_seed(7)
    model = build(dropout=0.0 if same_tokens else 0.1).to(device)
    called, handle = layout(model, column, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    record: list[Value] = []
    for step in range(STEPS):
        torch.manual_seed(100 + step)
        tokens = tokens_of(step if same_tokens else 10 * step + dist.get_rank()).to(device)
        loss = loss_of(called(tokens), tokens)
        loss.backward()
        record += values(step, [("loss", loss), *gradients(model)])
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    if handle is not None:
        assert not (missing := idle(str(column), handle)), missing
        handle.remove()
    return record


def compile_layers(model: Llama, compiled: bool = True) -> None:
    """Compile each layer in place."""
    torch._dynamo.reset()
    for layer in model.layers if compiled else ():
        layer.compile(backend="aot_eager")


def ddp(column: str | None, device: str = "cpu", *, compiled: bool = False) -> list[Value]:
    def layout(model: Llama, column: str | None, device: str) -> tuple[nn.Module, Any]:
        compile_layers(model, compiled)
        handle = apply_column(column, model)
        return nn.parallel.DistributedDataParallel(model), handle

    return train(layout, column, device)


def ddp_compiled_layers(column: str | None, device: str = "cpu") -> list[Value]:
    return ddp(column, device, compiled=True)


def ddp_compiled_model(column: str | None, device: str = "cpu") -> list[Value]:
    """Compiled around DDP, which splits the graph."""

    def layout(model: Llama, column: str | None, device: str) -> tuple[nn.Module, Any]:
        torch._dynamo.reset()
        handle = apply_column(column, model)
        return torch.compile(nn.parallel.DistributedDataParallel(model), backend="aot_eager"), handle

    return train(layout, column, device)


def fsdp2(
    column: str | None, device: str = "cpu", *, reshard: bool = True, bf16: bool = False, compiled: bool = False
) -> list[Value]:
    def layout(model: Llama, column: str | None, device: str) -> tuple[nn.Module, Any]:
        compile_layers(model, compiled)
        handle = apply_column(column, model)
        mesh = init_device_mesh(device, (dist.get_world_size(),))
        precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        settings: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": reshard}
        if bf16:
            settings["mp_policy"] = precision
        for layer in model.layers:
            fully_shard(layer, **settings)
        fully_shard(model, **settings)
        return model, handle

    return train(layout, column, device)


def fsdp2_kept_gathered(column: str | None, device: str = "cpu") -> list[Value]:
    return fsdp2(column, device, reshard=False)


def fsdp2_compiled_layers(column: str | None, device: str = "cpu") -> list[Value]:
    return fsdp2(column, device, compiled=True)


def fsdp2_bf16(column: str | None, device: str = "cpu") -> list[Value]:
    return fsdp2(column, device, bf16=True)


def fsdp2_bf16_kept_gathered(column: str | None, device: str = "cpu") -> list[Value]:
    return fsdp2(column, device, bf16=True, reshard=False)


def fsdp2_before_apply(column: str | None, device: str = "cpu") -> list[Value]:
    """The wrong order, and one layer that is not sharded by itself."""

    def layout(model: Llama, column: str | None, device: str) -> tuple[nn.Module, Any]:
        mesh = init_device_mesh(device, (dist.get_world_size(),))
        for layer in list(model.layers)[:-1]:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model, apply_column(column, model)

    return train(layout, column, device)


PLAIN: dict[str, Any] = {
    "attention.wq": ColwiseParallel(),
    "attention.wk": ColwiseParallel(),
    "attention.wv": ColwiseParallel(),
    "attention.wo": RowwiseParallel(),
    "feed_forward.w1": ColwiseParallel(),
    "feed_forward.w3": ColwiseParallel(),
    "feed_forward.w2": RowwiseParallel(),
}
SEQUENCE: dict[str, Any] = {
    **PLAIN,
    "attention_norm": SequenceParallel(),
    "attention": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
    "attention.wo": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    "feed_forward_norm": SequenceParallel(),
    "feed_forward": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
    "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
}


def tensor_parallel(column: str | None, device: str = "cpu", *, compiled: bool = False) -> list[Value]:
    def layout(model: Llama, column: str | None, device: str) -> tuple[nn.Module, Any]:
        mesh = init_device_mesh(device, (dist.get_world_size(),))
        for layer in model.layers:
            parallelize_module(layer, mesh, PLAIN)
        compile_layers(model, compiled)
        return model, apply_column(column, model)

    return train(layout, column, device, same_tokens=True)


def tensor_parallel_compiled_layers(column: str | None, device: str = "cpu") -> list[Value]:
    return tensor_parallel(column, device, compiled=True)


def sequence_parallel_model(model: Llama, mesh: Any) -> None:
    """Tensor parallelism with the sequence split between the matrix products."""
    plan = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=False),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, plan)
    for layer in model.layers:
        parallelize_module(layer, mesh, SEQUENCE)


def sequence_parallel(column: str | None, device: str = "cpu", *, apply_first: bool = False) -> list[Value]:
    def layout(model: Llama, column: str | None, device: str) -> tuple[nn.Module, Any]:
        handle = apply_column(column, model) if apply_first else None
        sequence_parallel_model(model, init_device_mesh(device, (dist.get_world_size(),)))
        return model, handle or apply_column(column, model)

    return train(layout, column, device, same_tokens=True)


def sequence_parallel_after_apply(column: str | None, device: str = "cpu") -> list[Value]:
    return sequence_parallel(column, device, apply_first=True)


def tensor_parallel_and_fsdp2(column: str | None, device: str = "cpu") -> list[Value]:
    """Both on two ranks: one of the two dimensions has size one."""

    def layout(model: Llama, column: str | None, device: str) -> tuple[nn.Module, Any]:
        mesh = init_device_mesh(device, (1, dist.get_world_size()), mesh_dim_names=("dp", "tp"))
        for layer in model.layers:
            parallelize_module(layer, mesh["tp"], PLAIN)
        handle = apply_column(column, model)
        for layer in model.layers:
            fully_shard(layer, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
        return model, handle

    return train(layout, column, device, same_tokens=True)


# Pipelines. Each rank has some of the model's parts; the Policy is applied to the layers of each.


class Looped(NamedTuple):
    """A schedule, and which parts of the model a rank has in it."""

    schedule: Any
    parts: int
    """The parts of the model, over all ranks."""
    v_shape: bool = False
    """Whether the last rank has the middle parts, and the first rank the first and the last one."""


PIPELINES = {
    "1F1B": Looped(Schedule1F1B, 2),
    "GPipe": Looped(ScheduleGPipe, 2),
    "interleaved 1F1B": Looped(ScheduleInterleaved1F1B, 4),
    "interleaved zero bubble": Looped(ScheduleInterleavedZeroBubble, 4),
    "zero bubble V": Looped(ScheduleZBVZeroBubble, 4, v_shape=True),
}


def pipeline(name: str, column: str | None, device: str = "cpu") -> list[Value]:
    """The losses of the last part and the gradients of this rank's parts."""
    rank, size = dist.get_rank(), dist.get_world_size()
    how = PIPELINES[name]
    mine = [part for part in range(how.parts) if _rank_of(part, how, size) == rank]
    modules = [_part(part, how.parts).to(device) for part in mine]
    handles = [apply_column(column, module) for module in modules]
    stages = [
        PipelineStage(module, part, how.parts, torch.device(device)) for part, module in zip(mine, modules, strict=True)
    ]
    single = issubclass(how.schedule, PipelineScheduleSingle)
    schedule = how.schedule(stages[0] if single else stages, n_microbatches=4, loss_fn=loss_of)
    optimizer = torch.optim.AdamW([p for module in modules for p in module.parameters()], lr=1e-3, foreach=False)
    record: list[Value] = []
    for step in range(STEPS):
        tokens = tokens_of(step, batch=4).to(device)
        losses: list[torch.Tensor] = []
        given = (tokens,) if 0 in mine else ()
        if how.parts - 1 in mine:
            schedule.step(*given, target=tokens, losses=losses)
        else:
            schedule.step(*given)
        record += values(step, [(f"loss {number}", loss) for number, loss in enumerate(losses)])
        for module in modules:
            record += values(step, gradients(module))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    for handle in handles:
        if handle is not None:
            assert not (missing := idle(str(column), handle)), missing
            handle.remove()
    return record


def _rank_of(part: int, how: Looped, size: int) -> int:
    return min(part, how.parts - 1 - part) if how.v_shape else part % size


def _part(part: int, parts: int) -> Llama:
    """Two layers of the model for each part, with the embedding or the head at its ends."""
    model = build(2 * parts)
    model.layers = model.layers[2 * part : 2 * part + 2]
    if part > 0:
        model.embedding = None
    if part < parts - 1:
        model.norm = model.head = None
    return model


def one_f_one_b(column: str | None, device: str = "cpu") -> list[Value]:
    return pipeline("1F1B", column, device)


def gpipe(column: str | None, device: str = "cpu") -> list[Value]:
    return pipeline("GPipe", column, device)


def interleaved(column: str | None, device: str = "cpu") -> list[Value]:
    return pipeline("interleaved 1F1B", column, device)


def interleaved_zero_bubble(column: str | None, device: str = "cpu") -> list[Value]:
    return pipeline("interleaved zero bubble", column, device)


def zero_bubble_v(column: str | None, device: str = "cpu") -> list[Value]:
    return pipeline("zero bubble V", column, device)
