"""Steps that are aborted at an operator, as by OOM, and retried."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from lowtide._torch_private.modes import TorchDispatchMode
from lowtide.train.loop import Loop
from lowtide.train.main import prepare
from lowtide.train.options import TrainOptions
from lowtide.train.step import Step
from support.layout_cases import MODELS
from train.runs import close


class After(NamedTuple):
    """What a run has come to."""

    losses: list[Any]
    """Of each step its loss, the parts of it, norm, scale and drop rates."""
    scale: tuple[float, int]
    values: list[torch.Tensor]
    """Parameters, buffers and the optimizers' states."""


class _Failing(TorchDispatchMode):
    """Counts a step's operators that ask a device for memory, and fails at one of them."""

    def __init__(self, step: Step, at: int | None = None) -> None:
        super().__init__()
        self.step, self.at, self.count = step, at, 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        in_place = function in (torch.ops.aten.add_.Tensor, torch.ops.aten.fill_.Scalar)
        self.count += self.step.under_way and not in_place  # what follows a step is on the host
        if self.count == self.at:
            raise torch.OutOfMemoryError(f"made to fail at operator {self.at}")
        return function(*args, **(kwargs or {}))


def run_steps(model: str, settings: dict[str, Any], shares: list[float], steps: int = 2) -> tuple[After, int]:
    """Train, each step broken off once at each of these shares of its operators; also how often that was."""
    loop = _loop(model, settings)
    losses, broken = [], 0
    for step in range(1, steps + 1):
        before = loop.step
        count = _count(loop, step) if shares else 0
        for share in shares:
            state, failing = _state(loop), _Failing(loop.step, max(1, round(share * count)))
            try:
                with failing:
                    loop.step(loop.data.for_step(int(loop.state.progress["samples"])))
            except torch.OutOfMemoryError:
                broken += 1
            _put_back(loop, state)
        assert loop.step is before
        record = loop.one(step)
        losses.append((record.loss, record.losses, record.global_norm, record.loss_scale, record.drop_rates))
    values = [value.detach().clone() for value in _values(loop)]
    scale = (loop.step.scale.value, loop.step.scale.clean)
    close(loop)
    return After(losses, scale, values), broken


def same(model: str, settings: dict[str, Any], shares: list[float]) -> tuple[bool, bool, int]:
    """Whether the undisturbed run ends in the same losses and scale, and in the same bits; how often it was broken."""
    undisturbed, _ = run_steps(model, settings, [])
    disturbed, broken = run_steps(model, settings, shares)
    reported = undisturbed[:2] == disturbed[:2]
    bits = all(torch.equal(one, other) for one, other in zip(undisturbed.values, disturbed.values, strict=True))
    return reported, bits, broken


def _loop(model: str, settings: dict[str, Any]) -> Loop:
    box = [tempfile.mkdtemp()] if dist.get_rank() == 0 else [""]
    dist.broadcast_object_list(box)
    file = Path(box[0]) / "run.yaml"
    if dist.get_rank() == 0:
        file.write_text(MODELS[model])
    dist.barrier()
    overrides = {tuple(key.split(".")): value for key, value in settings.items()}
    options = TrainOptions(run_directory=file.parent / "output", log_dir=file.parent / "logs", watchdog=0)
    return prepare(file, overrides, options, torch.device("cpu"))


def _count(loop: Loop, step: int) -> int:
    """The operators of a step, which is then undone: all that outlives it, the loss scale and the biases included."""
    state, counting = _state(loop), _Failing(loop.step)
    scale, buffers = loop.step.scale, [buffer.clone() for part in loop.job.models for buffer in part.buffers()]
    with counting:
        loop.step(loop.data.for_step(int(loop.state.progress["samples"])))
    loop.step.scale = scale
    with torch.no_grad():
        for buffer, old in zip((one for part in loop.job.models for one in part.buffers()), buffers, strict=True):
            buffer.copy_(old)
    _put_back(loop, state)
    return counting.count


def _state(loop: Loop) -> Any:
    """What the adaptive mode restores before a retry: parameters, the optimizers' states, and random numbers."""
    parameters = [one.detach().clone() for part in loop.job.models for one in part.parameters()]
    return parameters, [copy.deepcopy(list(one.state.values())) for one in loop.optimizers], torch.get_rng_state()


def _put_back(loop: Loop, state: Any) -> None:
    parameters, optimizers, generator = state
    for part in loop.job.called:
        if isinstance(part, FSDPModule):
            part.reset_iter_state()  # its parameters may be whole just now
    with torch.no_grad():
        for one, old in zip((one for part in loop.job.models for one in part.parameters()), parameters, strict=True):
            one.copy_(old)
    for optimizer, old in zip(loop.optimizers, optimizers, strict=True):
        owners = list(optimizer.state)  # it is filled by the first step
        optimizer.state.clear()
        optimizer.state.update(zip(owners, copy.deepcopy(old), strict=False))
    torch.set_rng_state(generator)


def _values(loop: Loop) -> list[torch.Tensor]:
    found = [value for part in loop.job.models for value in (*part.parameters(), *part.buffers())]
    for optimizer in loop.optimizers:
        for state in optimizer.state.values():
            found += [value for value in state.values() if isinstance(value, torch.Tensor)]
    return [value.to_local() if hasattr(value, "to_local") else value for value in found]
