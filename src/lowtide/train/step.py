"""One optimizer step: forward and backward of its micro-batches, then the update.

[Note: a step that is retried]
On OOM the adaptive mode may abort a step, at any operator, and retry it from its start; it restores the parameters, the
optimizers' states and the random generators. Everything else that a step changes is here, and is the same the second
time. Data and learning rates are chosen outside. What belongs to the step alone
(the objective's weights, the routers' counts) is set when it begins. What outlives it (the loss scale, the routers'
biases) is worked out before the update and written after it, in place, when nothing is left that could fail. What a
aborted attempt leaves in torch (gradients, the state of FSDP, DDP and the pipeline) is dropped when the next begins.

[Note: a step is read when the next is issued]
On a device, a step that was issued is far from done. Reading its loss at once would keep the device idle until the
host has the next batch and the first kernels of its forward. So a step gives a function that waits for its numbers,
which are copied to the host behind it, and the loop calls it when it has issued the next step: the host is at most one
step ahead. A loss scale or a threshold on the norm still has the host wait in each step, since it decides about the
update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from lowtide._torch_private.training.resets import reset_reducer, reset_sharding
from lowtide.models.prediction import Predictions
from lowtide.train.clip import clip, global_norm, scale_gradients
from lowtide.train.data.batches import Batch
from lowtide.train.data.packing import Packing
from lowtide.train.expert_load import ExpertLoad
from lowtide.train.loss_scale import Scale
from lowtide.train.mesh import Meshes
from lowtide.train.objective import Objective
from lowtide.train.pipeline import Pipeline
from lowtide.train.run import Run
from lowtide.train.tied import TiedWeights

__all__ = ["Outcome", "Step", "given_to_model"]

Place = Callable[..., None]
"""Takes the phase of the step and, where there are several, the micro-batch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What a step came to, the same on every rank."""

    loss: float
    losses: dict[str, float]
    """Its parts by name, where it has more than one."""
    drop_rates: dict[int, float]
    global_norm: float | None
    overflow: bool
    skipped: bool
    loss_scale: float
    stop: bool
    """Whether any rank was asked to stop."""


class Step:
    """The step of one rank. All of it that talks to other ranks is one call of torch or one small all-reduce."""

    def __init__(
        self,
        run: Run,
        meshes: Meshes,
        parts: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        scale: Scale,
        objective: Objective,
        experts: ExpertLoad,
        pipeline: Pipeline | None,
        place: Place = lambda where, micro=0: None,
        packing: Packing | None = None,
        asked_to_stop: Callable[[], bool] = lambda: False,
        tied: TiedWeights | None = None,
    ) -> None:
        self.packing, self.asked_to_stop, self.tied = packing, asked_to_stop, tied
        self.run, self.meshes, self.parts, self.optimizers = run, meshes, parts, optimizers
        self.scale, self.objective, self.experts = scale, objective, experts
        self.pipeline, self.place = pipeline, place
        self.predicts = any(isinstance(module, Predictions) for part in parts for module in part.modules())
        self.parameters = [parameter for part in parts for parameter in part.parameters() if parameter.requires_grad]
        self.counted = self.parameters if tied is None else [one for one in self.parameters if tied.counts(one)]
        """Those whose gradients are counted in the norm on this rank."""
        self.guarded = run.update.scaled or run.update.skip_norm is not None
        self.needs_norm = self.guarded or run.update.max_norm is not None
        self.under_way = False
        """Whether a step has begun and not ended."""

    def __call__(self, batches: Sequence[Batch]) -> Callable[[], Outcome]:
        """Train on the micro-batches of one step; see [Note: a step that is retried].

        What is returned waits for what it came to: see [Note: a step is read when the next is issued].
        """
        if self.under_way:
            self._drop_attempt()
        self.under_way = True
        scale = self.scale.value
        self.objective.begin([batch.labels for batch in batches], scale)
        self.experts.begin(self.objective.weight)
        losses = self._pipelined(batches) if self.pipeline else self._accumulated(batches)
        if self.tied is not None:
            self.place("tied weights")
            self.tied.reduce()
        self.place("gradient norm")
        norm = self._norm(scale)
        overflow = norm is not None and self.guarded and not bool(torch.isfinite(norm))
        threshold = self.run.update.skip_norm
        skipped = overflow or (threshold is not None and norm is not None and float(norm) >= threshold)
        self.place("loss")
        read_summed, changes = self._summed(losses), self.experts.changes()
        self.place("update")
        if not skipped:
            if norm is not None and self.run.update.max_norm is not None:
                clip(self.parameters, norm, self.run.update.max_norm)
            for optimizer in self.optimizers:
                optimizer.step()
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        for bias, change in changes:
            bias.add_(change)
        self.scale = self.scale.after(overflow=overflow)
        self.under_way = False
        read_norm = _on_its_way(norm) if norm is not None else None

        def outcome() -> Outcome:
            main, reported, stop = self._reported(read_summed())
            others = self.experts.losses(reported, self.run.micro_steps)
            return Outcome(
                loss=main + sum(others.values()),
                losses={"lm": main, **others} if others else {},
                drop_rates=self.experts.drop_rates(reported),
                global_norm=float(read_norm()) if read_norm is not None else None,
                overflow=overflow,
                skipped=skipped,
                loss_scale=scale,
                stop=stop,
            )

        return outcome

    def _drop_attempt(self) -> None:
        """Drop what an aborted step has left behind."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        for part in self.parts:
            if isinstance(part, FSDPModule):
                reset_sharding(part)
            elif isinstance(part, DistributedDataParallel):
                reset_reducer(part)
        if self.pipeline is not None:
            self.pipeline.drop_attempt()

    def _pipelined(self, batches: Sequence[Batch]) -> Tensor:
        assert self.pipeline is not None
        self.place("pipeline")
        tokens = _moved(torch.cat([batch.tokens for batch in batches]), self.meshes.device)
        labels = _moved(torch.cat([batch.labels for batch in batches]), self.meshes.device)
        with self.autocast():
            own, more = given_to_model(self.objective, self.packing, tokens, labels)
            if self.predicts:
                more["tokens"] = tokens
            losses = self.pipeline.run(own, labels, more)
        return losses if losses is not None else torch.zeros((), device=self.meshes.device)

    def _accumulated(self, batches: Sequence[Batch]) -> Tensor:
        (part,) = self.parts
        losses = torch.zeros((), device=self.meshes.device)
        for number, batch in enumerate(batches):
            self.place("forward and backward", number)  # a step of many micro-batches may be long
            tokens, labels = (_moved(one, self.meshes.device) for one in (batch.tokens, batch.labels))
            own, more = given_to_model(self.objective, self.packing, tokens, labels)
            reduce = number == len(batches) - 1 or self.run.update.reduce_each
            with _reducing(part, reduce):
                with self.autocast():
                    loss = self.objective(part(own, **more), labels)
                loss.backward()
            losses += loss.detach()
        return losses

    def autocast(self) -> AbstractContextManager[None]:
        """Mixed precision; FSDP has its own, which also gathers in the smaller type."""
        precision = self.run.precision
        if precision.compute == precision.parameters or any(isinstance(part, FSDPModule) for part in self.parts):
            return nullcontext()
        return torch.autocast(self.meshes.device.type, getattr(torch, precision.compute))

    def _norm(self, scale: float) -> Tensor | None:
        """Take the loss scale out of the gradients, and their norm over all ranks."""
        if scale != 1:
            scale_gradients(self.parameters, torch.tensor(1 / scale, device=self.meshes.device))
        if not self.needs_norm:
            return None
        return global_norm(self.counted, stages=self.run.degrees.pipeline, device=self.meshes.device)

    def _summed(self, losses: Tensor) -> Callable[[], Tensor]:
        """The loss over all ranks, what their routers report, how many were asked to stop: one small all-reduce.

        Ranks without the last pipeline stage, or without routers, have zeros to add. What is returned waits for it.
        """
        loss = self.objective.value(losses).to(torch.float32).reshape(1)
        value = torch.cat((loss, self.experts.reported().to(torch.float32), loss.new_full((1,), self.asked_to_stop())))
        if value.device.type != "cpu":
            dist.all_reduce(value)
            return _on_its_way(value)
        work = dist.all_reduce(value, async_op=True)  # gloo works while the update does

        def arrived() -> Tensor:
            work.wait()
            return value

        return arrived

    def _reported(self, summed: Tensor) -> tuple[float, Tensor, bool]:
        """The loss, what routers report, and whether any rank was asked to stop."""
        value = summed / self.run.degrees.stage
        return float(value[0]), value[1:-1], float(value[-1]) > 0


def _moved(value: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on the device, without waiting for what the device has still to do."""
    return value.to(device) if device.type == "cpu" else value.pin_memory().to(device, non_blocking=True)


def _on_its_way(value: Tensor) -> Callable[[], Tensor]:
    """Begin to copy a tensor to the host; what is returned waits for it."""
    if value.device.type == "cpu":
        return lambda: value
    copy = value.to("cpu", non_blocking=True)  # torch pins it, so that the copy overlaps with what comes next
    end = torch.accelerator.current_stream().record_event()

    def arrived() -> Tensor:
        end.synchronize()
        return copy

    return arrived


def given_to_model(
    objective: Objective, packing: Packing | None, tokens: Tensor, labels: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """This rank's tokens of a micro-batch, and what else the model needs of it."""
    more = objective.arguments(labels)
    if packing is not None:
        packed = packing.arguments(tokens)
        if "positions" in packed:
            packed["positions"] = objective.own(packed["positions"])
        more |= packed  # a mask is one of all tokens
    return objective.own(tokens), more


@contextmanager
def _reducing(part: nn.Module, reduce: bool) -> Iterator[None]:
    """Whether this micro-step's backward reduces gradients over data parallel; only the last one need."""
    if isinstance(part, FSDPModule):
        part.set_requires_gradient_sync(reduce)
        yield
    elif isinstance(part, DistributedDataParallel) and not reduce:
        with part.no_sync():
            yield
    else:
        yield
