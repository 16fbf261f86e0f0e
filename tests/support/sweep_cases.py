"""A training step during which the device's memory shrinks, and what it leaves: what an undisturbed one does.

At the k-th allocation of the step the capacity drops to what is then allocated less x, and stays there until the step
ends, or is aborted and retried.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import tide
from lowtide._torch_private.operators import scoped_library
from lowtide._torch_private.subclasses import inner_tensor
from lowtide.adaptive.rescue import Rescue
from lowtide.errors import RescueError
from lowtide.planner.pipeline import Pipeline, even_pipeline
from lowtide.policy import LayerPolicy, Pattern, Policy, Recompute, Rule, Swap
from lowtide.runtime.apply import apply
from lowtide.runtime.limits import Limits
from numerics.layouts import sequence_parallel_model
from numerics.model import build as small_llama
from numerics.model import loss_of, tokens_of
from support.parity_models import VOCABULARY, build
from tide import faults

__all__ = [
    "LAYOUTS",
    "MODELS",
    "PHASES",
    "POLICIES",
    "SHARES",
    "Outcome",
    "Subject",
    "alone",
    "on_ranks",
    "phase_of",
    "rescued",
    "settled",
    "single",
    "spoilt_in_the_optimizer",
    "spoilt_on",
    "uneven_optimizers",
]

MODELS = ("reference", "reference_moe")
"""Like Llama, and with experts; both with dropout."""
SHARES = (1 / 4, 1 / 64, 1 / 8, 1 / 16)
"""Of the activations' peak: by so much the capacity drops below what is allocated, in turns."""
MICRO_BATCHES = 4
"""Of a pipeline."""
PHASES = ("forward", "backward", "optimizer")
MIXED = (
    LayerPolicy(
        rules=(
            Rule(Pattern("feed_forward_norm"), Recompute()),
            Rule(Pattern("attention.wq"), Swap(1)),
            Rule(Pattern("attention.wo"), Recompute()),
        ),
        boundary=Swap(3),
    ),
    LayerPolicy(Swap(7), rules=(Rule(Pattern("attention_norm"), Recompute()),)),
)
POLICIES: dict[str, tuple[LayerPolicy, ...] | None] = {
    "none": None,
    "full recompute": (LayerPolicy(Recompute()), LayerPolicy(Recompute(), boundary=Swap(2))),
    "mixed": MIXED,
}


class Values(NamedTuple):
    """All that a step leaves: loss, parameters, optimizer states, generators; on the host."""

    tensors: dict[str, Tensor]

    def differ(self, other: Values) -> list[str]:
        """The names of what is not equal bit by bit."""
        assert self.tensors.keys() == other.tensors.keys()
        return [name for name, tensor in self.tensors.items() if not _same_bits(tensor, other.tensors[name])]


@dataclass
class Outcome:
    """What a disturbed step showed."""

    what: str
    phase: str
    line: int = 0
    """The last line of defence that was needed; 0: none."""
    paged: bool = False
    """Whether optimizer states, parameters or gradients left."""
    died: str = ""
    different: list[str] = field(default_factory=list)
    races: list[str] = field(default_factory=list)
    leaked: int = 0

    @property
    def exact(self) -> bool:
        return not (self.died or self.different or self.races or self.leaked)

    def __str__(self) -> str:
        found = [f"died: {self.died}"] if self.died else []
        found += [f"differs: {', '.join(self.different[:6])} ({len(self.different)})"] if self.different else []
        found += [f"race: {race}" for race in self.races[:1]] + ([f"leak: {self.leaked}"] if self.leaked else [])
        return "; ".join([self.what, *found])


class Subject:
    """A model whose one step is run many times from the same state."""

    def __init__(
        self,
        model: nn.Module,
        step: Callable[[Subject], Tensor],
        optimizer: torch.optim.Optimizer,
        rescue: Rescue,
        pipeline: Pipeline | None = None,
    ) -> None:
        self.model, self.optimizer, self.rescue, self.pipeline = model, optimizer, rescue, pipeline
        self._step = step
        self.marks: dict[str, int] = {}
        self.peak = 0
        torch.manual_seed(3)
        for _ in range(2):  # layers are profiled, and the optimizer makes its states
            step(self)
        optimizer.zero_grad()
        self.start = self.values()
        self.static = torch.accelerator.memory_allocated()
        torch.accelerator.reset_peak_memory_stats()
        loss = step(self)
        self.activations = self.peak - self.static
        """Their peak in forward and backward, in bytes."""
        optimizer.zero_grad()
        self.end = self.values(loss)
        gc.collect()

    def step(self) -> Tensor:
        """The whole step; its loss."""
        return self._step(self)

    def mark(self, phase: str) -> None:
        """A phase of the step has ended."""
        self.marks[phase] = faults.allocations_seen()
        if phase == "backward":
            self.peak = int(torch.accelerator.max_memory_allocated())

    def allocations(self, armed: bool) -> dict[str, int]:
        """After each phase of an undisturbed step, how many allocations there were."""
        self._begin(armed)
        faults.disarm()
        self.rescue.run(self.step)
        self.optimizer.zero_grad()
        return dict(self.marks)

    def disturbed(self, armed: bool, number: int, nbytes: int, phase: str, here: bool = True) -> Outcome:
        """Run the step with its memory shrunk; ``here`` is false on a rank that is left alone."""
        outcome = Outcome(f"armed {armed}, allocation {number} ({phase}), {nbytes} bytes", phase)
        tide.clear_races()
        self._begin(armed)
        before, attempts = torch.accelerator.memory_allocated(), 0

        def step() -> Tensor:
            nonlocal attempts
            attempts += 1
            if attempts > 1:
                faults.disarm()
            return self.step()

        faults.shrink_capacity(number, nbytes) if here else faults.disarm()
        try:
            loss = self.rescue.run(step)
        except Exception as error:
            outcome.died = f"{type(error).__name__}: {error} {self.rescue.counts.reasons[-3:]}"
            return outcome
        finally:
            faults.disarm()
            self.rescue.settle()
        self.optimizer.zero_grad()
        counts = self.rescue.counts.taken()
        outcome.line = 3 if counts.retried_steps else 2 if counts.retried_operators else 0
        outcome.paged = counts.paged_bytes > 0
        outcome.different = self.end.differ(self.values(loss))
        outcome.races = [str(race) for race in tide.races()]
        del loss
        outcome.leaked = settled(before) - before
        return outcome

    def _begin(self, armed: bool) -> None:
        (self.rescue.arm if armed else self.rescue.disarm)()
        self.rescue.counts.taken()
        self.begin()

    def begin(self) -> None:
        """Set everything back to where the step begins."""
        self.optimizer.zero_grad()
        now = self._tensors()
        for name, value in self.start.tensors.items():
            if name in now:
                now[name].copy_(value)
        torch.set_rng_state(self.start.tensors["generator cpu"])
        torch.get_device_module("tide").set_rng_state(self.start.tensors["generator tide"])

    def _tensors(self) -> dict[str, Tensor]:
        found = {name: inner_tensor(one.detach()) for name, one in self.model.named_parameters()}
        for number, state in enumerate(self.optimizer.state.values()):
            found |= {f"{number} {name}": inner_tensor(value) for name, value in state.items()}
        return found

    def values(self, loss: Tensor | None = None) -> Values:
        """What there is now."""
        values = {name: tensor.cpu().clone() for name, tensor in self._tensors().items()}
        if loss is not None:
            values["loss"] = loss.cpu()
        values["generator cpu"] = torch.get_rng_state()
        values["generator tide"] = torch.get_device_module("tide").get_rng_state()
        return Values(values)


def _step_of(optimizer: torch.optim.Optimizer, forward: Callable[[], Tensor]) -> Callable[[Subject], Tensor]:
    """A step whose phases come one after the other."""

    def step(subject: Subject) -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = forward()
        subject.mark("forward")
        loss.backward()
        subject.mark("backward")
        optimizer.step()
        subject.mark("optimizer")
        return loss.detach()

    return step


def rescued(model: str, policy: str, stride: int) -> list[Outcome]:
    """Every ``stride``-th allocation of a step in a process of its own, armed and disarmed."""
    subject = alone(model, policy)
    outcomes = []
    for armed in (True, False):
        marks = subject.allocations(armed)
        for turn, number in enumerate(range(1, marks["optimizer"] + 1, stride)):
            nbytes = int(SHARES[turn % len(SHARES)] * subject.activations)
            outcomes.append(subject.disturbed(armed, number, nbytes, phase_of(number, marks)))
            if outcomes[-1].died:  # what it left is no start for another
                subject.rescue.remove()
                subject = single(model, policy)
    return outcomes


def alone(model: str, policy: str) -> Subject:
    """A model that has a process to itself."""
    torch.set_num_threads(1)
    gc.disable()  # what the cycle collector finds is no concern here, and it takes longer than the steps
    subject = single(model, policy)
    gc.collect()
    gc.freeze()  # what is there for good need not be looked at each time that a failed step is swept up
    return subject


def single(model_name: str, policy: str) -> Subject:
    """A model in one process."""
    model: Any = build(model_name, dropout=True)
    model.layers = model.layers[:2]  # every allocation costs a step
    model.to("tide")
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    tokens = torch.randint(3, VOCABULARY, (8, 8), generator=torch.Generator().manual_seed(1)).to("tide")
    rescue = Rescue(model, [optimizer], layers="layers")
    layers = POLICIES[policy]
    if layers is not None:
        decided = Policy(layers, origin="solver")
        rescue.follow(apply(model, decided, layers="layers", limits=Limits(minimum_bytes=1)))

    step = _step_of(optimizer, lambda: model(tokens))
    return Subject(model, step, optimizer, rescue)


def sharded() -> Subject:
    """A model whose parameters are sharded over the ranks, each of which has other tokens."""
    model = small_llama(8, dropout=0.1).to("tide")
    mesh = init_device_mesh("tide", (dist.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    tokens = tokens_of(dist.get_rank(), batch=1).to("tide")

    step = _step_of(optimizer, lambda: loss_of(model(tokens), tokens))
    return Subject(model, step, optimizer, Rescue(model, [optimizer], layers="layers"))


def pipelined() -> Subject:
    """A part of a model in a pipeline of as many ranks, with torch's 1F1B."""
    rank, size = dist.get_rank(), dist.get_world_size()
    model = small_llama(3 * size, dropout=0.1)
    model.layers = model.layers[3 * rank : 3 * rank + 3]
    if rank > 0:
        model.embedding = None
    if rank < size - 1:
        model.norm = model.head = None
    model.to("tide")
    stage = PipelineStage(model, rank, size, torch.device("tide"))
    schedule = Schedule1F1B(stage, n_microbatches=MICRO_BATCHES, loss_fn=loss_of)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    tokens = tokens_of(0, batch=MICRO_BATCHES).to("tide")

    def step(subject: Subject) -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        losses: list[Tensor] = []
        given = (tokens,) if rank == 0 else ()
        if rank == size - 1:
            schedule.step(*given, target=tokens, losses=losses)
        else:
            schedule.step(*given)
        subject.mark("backward")
        optimizer.step()
        subject.mark("optimizer")
        return torch.stack(losses).detach() if losses else torch.zeros(1)

    pipeline = even_pipeline(3 * size, stages=size, micro_batches=MICRO_BATCHES)
    return Subject(model, step, optimizer, Rescue(model, [optimizer], layers="layers"), pipeline)


def tensor_parallel() -> Subject:
    """A model whose matrices are split over the ranks, all of which have the same tokens."""
    model = small_llama(4).to("tide")
    mesh = init_device_mesh("tide", (dist.get_world_size(),))
    sequence_parallel_model(model, mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, foreach=False)
    tokens = tokens_of(0).to("tide")

    step = _step_of(optimizer, lambda: loss_of(model(tokens), tokens))
    return Subject(model, step, optimizer, Rescue(model, [optimizer], layers="layers"))


LAYOUTS: dict[str, Callable[[], Subject]] = {"fsdp2": sharded, "pp2": pipelined, "tp2": tensor_parallel}


def on_ranks(layout: str, failing: int, offset: int, stride: int, share: float, most: int = 1 << 30) -> list[Outcome]:
    """Every ``stride``-th allocation of a step on one of the ranks, all of which are armed."""
    subject = LAYOUTS[layout]()
    marks = [subject.allocations(armed=True)]
    dist.broadcast_object_list(marks, failing)
    nbytes = [int(share * subject.activations)]
    dist.broadcast_object_list(nbytes, failing)
    here, outcomes = dist.get_rank() == failing, []
    for number in list(range(1 + offset, marks[0]["optimizer"] + 1, stride))[:most]:
        phase = phase_of(number, marks[0])
        outcomes.append(subject.disturbed(True, number, nbytes[0], phase, here))
        outcomes[-1].what = f"{layout}, rank {failing} fails, seen on {dist.get_rank()}, {outcomes[-1].what}"
        if outcomes[-1].died:
            raise RuntimeError(str(outcomes[-1]))
    subject.rescue.remove()
    return outcomes


def spoilt_on(failing: int) -> tuple[int, list[str]]:
    """A step in which an operator of one rank writes, and fails then: how often it was retried, and what differs."""
    subject = sharded()
    subject.rescue.arm()
    with _careless() as write:
        spare = torch.ones(4, device="tide")

        def step() -> Tensor:
            if not subject.rescue.counts.retried_steps:
                if dist.get_rank() == failing:
                    faults.fail_allocation(1)
                write(spare)
            return subject.step()

        subject._begin(armed=True)
        loss = subject.rescue.run(step)
    subject.optimizer.zero_grad()
    return subject.rescue.counts.retried_steps, subject.end.differ(subject.values(loss))


def spoilt_in_the_optimizer(failing: int) -> str:
    """A step in which the optimizer of one rank fails in a write: what the rank says."""
    subject = sharded()
    subject.rescue.arm()
    with _careless() as write:
        spare = torch.ones(4, device="tide")

        def before(*_: Any) -> None:  # comes after the rescue's own
            if dist.get_rank() == failing:
                faults.fail_allocation(1)
            write(spare)

        subject.optimizer.register_step_pre_hook(before)
        try:
            subject.rescue.run(subject.step)
        except RescueError as error:
            return str(error)
        finally:
            faults.disarm()
            subject.rescue.remove()
    return ""


def uneven_optimizers(steps: int) -> int:
    """Steps on ranks that have one optimizer more the higher they are, as the stages of a pipeline may."""
    model = small_llama(2).to("tide")
    parameters, count = list(model.parameters()), dist.get_rank() + 1
    optimizers = [torch.optim.SGD(parameters[place::count], lr=0.1) for place in range(count)]
    rescue = Rescue(model, optimizers, layers="layers")
    rescue.arm()
    tokens = tokens_of(0, batch=1).to("tide")

    def step() -> Tensor:
        loss = loss_of(model(tokens), tokens)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    for _ in range(steps):
        rescue.run(step)
    rescue.remove()
    return steps


@contextmanager
def _careless() -> Iterator[Callable[[Tensor], None]]:
    """An operator that writes before it allocates."""

    def write(x: Tensor) -> None:
        x.mul_(2)
        torch.empty(4, device=x.device)

    with scoped_library("sweep", "FRAGMENT") as library:
        library.define("careless(Tensor(a!) x) -> ()")
        library.impl("careless", write, "PrivateUse1")
        yield torch.ops.sweep.careless


def phase_of(number: int, marks: dict[str, int]) -> str:
    """The phase in which an allocation comes."""
    return next(phase for phase in PHASES if number <= marks.get(phase, -1))


def settled(expected: int) -> int:
    """The bytes allocated; autograd's thread frees a failed graph a moment after the caller sees the error."""
    end = time.monotonic() + 2
    while (found := int(torch.accelerator.memory_allocated())) != expected and time.monotonic() < end:
        gc.collect()
        time.sleep(0.002)
    return found


def _same_bits(first: Tensor, second: Tensor) -> bool:
    alike = first.dtype == second.dtype and first.shape == second.shape
    return alike and torch.equal(_bits(first), _bits(second))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
