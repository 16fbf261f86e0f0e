"""A program that is run without lowtide and with it, and what the harness gives to it.

A program is a function of a :class:`Side`. It builds its model and its optimizers, hands them to :meth:`Side.start`,
trains as its author would, each step inside ``run.step``, and records what it computes. Run without lowtide the side
does nothing of its own; with it, the model gets a Policy or the loop becomes an adaptive run, by the treatment.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar

import numpy
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import lowtide
from attacks.treatments import APPLIED, Treatment
from lowtide.adaptive.session import Adaptive
from lowtide.operators.layers import find_layers
from lowtide.runtime.apply import Handle
from lowtide.runtime.limits import Limits

__all__ = [
    "BOTH",
    "CPU",
    "PROFILING_STEPS",
    "TIDE",
    "Attack",
    "Found",
    "Run",
    "Side",
    "Value",
    "attack",
    "seed",
    "train",
]

CPU, TIDE, BOTH = ("cpu",), ("tide",), ("cpu", "tide")
PROFILING_STEPS = 5
"""Of adaptive runs; the plan is in use from the second step after them."""
LIMIT_SECONDS = 60.0
Result = TypeVar("Result")
Program = Callable[["Side"], None]
Value = tuple[str, bytes] | float | None
"""What was recorded: a tensor's type and its bits, or a number."""


@dataclass(frozen=True)
class Attack:
    """A program that once broke lowtide, or that tries to."""

    name: str
    tries: str
    """What it once broke or what it tries, in one line."""
    program: Program
    treatments: tuple[str, ...]
    devices: tuple[str, ...]
    documented: tuple[str, ...] = ()
    """Regular expressions of messages that are documented refusals, though their class is torch's."""
    seconds: float = LIMIT_SECONDS
    """After so long it counts as hung."""


def attack(
    tries: str,
    *,
    treatments: Sequence[str] = APPLIED,
    devices: tuple[str, ...] = CPU,
    name: str = "",
    documented: tuple[str, ...] = (),
    seconds: float = LIMIT_SECONDS,
) -> Callable[[Program], Attack]:
    """Make a program an attack that is named after it."""

    def made(program: Program) -> Attack:
        title = name or program.__name__
        return Attack(title, tries, program, tuple(treatments), devices, documented, seconds)

    return made


class Found(Exception):  # noqa: N818  a finding, raised to end the program
    """What a program found out by itself, such as a hook that was left: the outcome's kind and a text."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


def seed(number: int = 0) -> None:
    """Seed every random number generator that a program may draw from."""
    torch.manual_seed(number)
    random.seed(number)
    numpy.random.seed(number)


class Run:
    """Runs the steps of a program, through ``run.step`` of an adaptive run if there is one."""

    def __init__(self, adaptive: Adaptive | None, *, by_step: bool, can_fail: bool) -> None:
        self.adaptive = adaptive
        self._by_step, self._can_fail = by_step, can_fail
        self._attempts = 0

    def step(self, function: Callable[[], Result]) -> Result:
        """Run one step of the program; an adaptive run may call ``function`` again."""
        self._attempts = 0

        def attempt() -> Result:
            self._attempts += 1
            try:
                return function()
            finally:
                self.heal()

        if self.adaptive is not None and self._by_step:
            return self.adaptive.step(attempt)  # type: ignore[return-value]
        return attempt()

    def fail_allocation(self, number: int) -> None:
        """Let that allocation from now on fail, in an adaptive run on tide, in the first attempt of a step."""
        if self._can_fail and self._attempts == 1:
            from tide import faults

            faults.fail_allocation(number)

    def heal(self) -> None:
        """From now on no allocation fails."""
        if self._can_fail:
            from tide import faults

            faults.disarm()


class Side:
    """One of the two runs that are compared: the program alone, or with lowtide in one of its forms."""

    def __init__(self, device: str, treatment: Treatment | None) -> None:
        self.device, self.treatment = torch.device(device), treatment
        self.values: dict[str, Value] = {}
        self.models: list[nn.Module] = []
        self.optimizers: list[Optimizer] = []
        self.handles: list[Handle] = []
        self.adaptives: list[Adaptive] = []
        self._loops = ExitStack()

    @property
    def treated(self) -> bool:
        return self.treatment is not None

    def start(
        self,
        model: nn.Module,
        *optimizers: Optimizer,
        layers: str | tuple[str, ...] | None = None,
        watched: Sequence[Optimizer] | None = None,
        **settings: Any,
    ) -> Run:
        """Put lowtide to work on a model, as the treatment says; ``settings`` are those of :func:`lowtide.adapt`.

        ``watched`` are the optimizers that an adaptive run is told of; all that are given, unless said otherwise.
        """
        self.models.append(model)
        self.optimizers += optimizers
        treatment = self.treatment
        if treatment is None:
            return Run(None, by_step=False, can_fail=False)
        paths: tuple[str | None, ...] = layers if isinstance(layers, tuple) else (layers,)
        if not treatment.adapt:
            limits = Limits(minimum_bytes=1, host_bytes=1 << 30)
            for path in paths:
                policy = treatment.policy(len(find_layers(model, path).modules))
                self.handles.append(lowtide.apply(model, policy, layers=path, limits=limits))
            return Run(None, by_step=False, can_fail=False)
        told = list(optimizers if watched is None else watched)
        settings = {"profiling_steps": PROFILING_STEPS, "verbose": False, **settings}
        optimizer: Any = told[0] if len(told) == 1 else told or None
        if treatment.adapt == "loop":  # the attacks are on what is watched, and no step of a loop can be retried
            settings = {"watch": "always", **settings}
        run = lowtide.adapt(model, optimizer, layers=paths[0], **settings)
        self.adaptives.append(run)
        if treatment.adapt == "loop":
            self._loops.enter_context(run)
        return Run(run, by_step=treatment.adapt == "steps", can_fail=self.device.type != "cpu")

    def record(self, name: str, value: Tensor | float | None) -> None:
        """Note a value that must be the same on both sides, bit by bit."""
        self.values[name] = _bits(value)

    def record_gradients(self, label: object, model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            self.record(f"gradient {label} {name}", parameter.grad)

    def tokens(self, step: int, shape: tuple[int, ...] = (2, 12), vocabulary: int = 64) -> Tensor:
        """A batch of token numbers."""
        generator = torch.Generator().manual_seed(step)
        return torch.randint(3, vocabulary, shape, generator=generator, device="cpu").to(self.device)

    def batch(self, step: int, *shape: int) -> Tensor:
        """A batch of random numbers."""
        generator = torch.Generator().manual_seed(step)
        return torch.randn(*shape, generator=generator, device="cpu").to(self.device)

    # The harness's part.

    def __enter__(self) -> Side:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._loops.__exit__(kind, error, trace)
            if error is None:
                for handle in self.handles:
                    handle.receipt()
        finally:
            for handle in self.handles:
                handle.remove()
            for run in self.adaptives:
                run.remove()

    def record_states(self) -> None:
        """Record what is left after lowtide is removed: parameters, buffers and optimizer states."""
        for number, model in enumerate(self.models):
            for name, parameter in model.named_parameters():
                self.record(f"model {number} parameter {name}", parameter)
            for name, buffer in model.named_buffers():
                self.record(f"model {number} buffer {name}", buffer)
        for number, optimizer in enumerate(self.optimizers):
            states: Mapping[Any, Any] = optimizer.state
            for place, state in enumerate(states.values()):
                for name, value in state.items() if isinstance(state, dict) else ():
                    if isinstance(value, Tensor | int | float) and not isinstance(value, bool):
                        self.record(f"optimizer {number} state {place} {name}", value)


def _bits(value: Tensor | float | None) -> Value:
    if not isinstance(value, Tensor):
        return value
    host = value.detach().cpu()
    if host.layout != torch.strided:
        host = host.to_dense()
    host = host.resolve_conj().resolve_neg().reshape(-1).contiguous()
    # No tensor is kept: those that are alive afterwards are counted.
    return f"{value.dtype} {tuple(value.shape)} {value.layout}", host.view(torch.uint8).numpy().tobytes()


def mean_square(model: nn.Module, batch: Tensor) -> Tensor:
    loss: Tensor = model(batch).square().mean()
    return loss


def train(
    side: Side,
    model: nn.Module,
    *,
    batch: Callable[[int], Tensor] | None = None,
    loss: Callable[[nn.Module, Any], Tensor] = mean_square,
    optimizer: Callable[..., Optimizer] | None = None,
    before: Callable[[nn.Module, int], None] | None = None,
    layers: str | tuple[str, ...] | None = None,
    steps: int | None = None,
    **settings: Any,
) -> Run:
    """Train as most people do, and record every loss and gradient."""
    model.to(side.device)
    make = optimizer or (lambda parameters: torch.optim.SGD(parameters, lr=0.05))
    made = make([parameter for parameter in model.parameters() if parameter.requires_grad])
    run = side.start(model, made, layers=layers, **settings)
    for step in range(steps or STEPS):
        if before is not None:
            before(model, step)
        data = batch(step) if batch is not None else side.batch(step, 8, 32)

        def one(step: int = step, data: Any = data) -> None:
            made.zero_grad()
            value = loss(model, data)
            value.backward()
            side.record(f"loss {step}", value)
            side.record_gradients(step, model)
            made.step()

        run.step(one)
    return run


STEPS = PROFILING_STEPS + 3
"""Enough for an adaptive run to measure, to plan and to run two steps under its plan."""
