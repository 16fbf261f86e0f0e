"""Retried steps: what they had changed already is restored, or they are not retried."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from lowtide._torch_private.modes import current_dispatch_mode
from lowtide.adaptive.rescue import Rescue
from lowtide.adaptive.step_snapshot import Contents
from lowtide.errors import RescueError
from tide import faults
from tide.testing import fresh_tide  # noqa: F401

WIDTH = 32
Step = Callable[[], Tensor]


class Case:
    """A model in training; the second step runs out of memory once, where ``fails`` is called."""

    def __init__(self, rescued: bool) -> None:
        torch.manual_seed(0)
        self.rescued, self.steps = rescued, 0
        self.model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(3))).to("tide")
        self.x = torch.randn(16, WIDTH, device="tide")
        self.optimizer: torch.optim.Optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.more: list[Tensor] = []

    def fails(self, *, for_good: bool = False) -> None:
        self.steps += 1
        if self.rescued and self.steps == 2:
            if for_good:
                faults.shrink_capacity(1, 1 << 30)
            else:
                faults.fail_allocation(1)

    def train(self, step: Step, count: int = 3) -> list[Tensor]:
        rescue = Rescue(self.model, [self.optimizer])
        try:
            for _ in range(count):
                if self.rescued:
                    rescue.run(step)
                else:
                    step()
            assert rescue.counts.retried_steps == self.rescued
        finally:
            faults.disarm()
            rescue.remove()
        return [one.detach().cpu() for one in [*self.model.parameters(), *self.model.buffers(), *self.more]]


@pytest.fixture(autouse=True)
def _disarmed(fresh_tide: None) -> Iterator[None]:  # noqa: F811
    yield
    faults.disarm()


def exact(train: Callable[[Case], list[Tensor]]) -> None:
    expected, found = train(Case(rescued=False)), train(Case(rescued=True))
    assert len(expected) == len(found)
    assert all(map(torch.equal, expected, found))


def test_gradients_of_parameters_outside_the_model() -> None:
    def train(case: Case) -> list[Tensor]:
        scale = nn.Parameter(torch.ones(WIDTH, device="tide"))
        case.more = [scale]
        case.optimizer.add_param_group({"params": [scale]})

        def step() -> Tensor:
            loss = (case.model(case.x) * scale).square().mean()
            loss.backward()
            case.fails()
            loss = loss + case.x.square().mean()
            case.optimizer.step()
            case.optimizer.zero_grad(set_to_none=True)
            return loss.detach()

        return case.train(step)

    exact(train)


def test_buffers_that_are_put_in_place_of_others() -> None:
    def train(case: Case) -> list[Tensor]:
        case.model.register_buffer("mean", torch.zeros(WIDTH, device="tide"))

        def step() -> Tensor:
            case.model.mean = 0.9 * case.model.mean + case.x.mean(0)  # type: ignore[operator]
            case.optimizer.zero_grad()
            y = case.model(case.x - case.model.mean)
            case.fails()
            loss = y.square().mean()
            loss.backward()
            case.optimizer.step()
            return loss.detach()

        return case.train(step)

    exact(train)


def test_parameters_that_were_written_to_stop_the_run() -> None:
    case = Case(rescued=True)

    def step() -> Tensor:
        with torch.no_grad():
            next(case.model.parameters()).mul_(1.01)
        y = case.model(case.x)
        case.fails()
        return y.square().mean()

    with pytest.raises(RescueError, match="has changed a parameter"):
        case.train(step)


@pytest.mark.parametrize("clipped", [False, True])
def test_gradients_that_a_scaler_has_unscaled(clipped: bool) -> None:
    def train(case: Case) -> list[Tensor]:
        scaler = torch.amp.GradScaler("tide", init_scale=64.0)

        def step() -> Tensor:
            case.optimizer.zero_grad()
            loss = case.model(case.x).square().mean()
            scaler.scale(loss).backward()
            scaler.unscale_(case.optimizer)
            case.fails()
            if clipped:
                nn.utils.clip_grad_norm_(case.model.parameters(), 1.0)
            else:
                case.x.square()
            scaler.step(case.optimizer)
            scaler.update()
            return loss.detach()

        return case.train(step)

    exact(train)


class Numbered(torch.optim.Optimizer):
    """Counts its steps in Python, and puts new tensors in its states."""

    def __init__(self, parameters: Any, case: Case) -> None:
        super().__init__(parameters, {"lr": 0.1, "steps": 0})
        self.case = case

    def step(self, closure: Any = None) -> None:
        group = self.param_groups[0]
        group["steps"] += 1
        updates = []
        for parameter in group["params"]:
            state = self.state[parameter]
            state["number"] = state.get("number", 0) + 1
            state["mean"] = 0.9 * state["mean"] + parameter.grad if "mean" in state else parameter.grad.clone()
            if not updates:
                self.case.fails(for_good=True)
            updates.append(state["mean"] * (group["lr"] / state["number"] / group["steps"]))
        with torch.no_grad():
            for parameter, update in zip(group["params"], updates, strict=True):
                parameter.sub_(update)


def test_numbers_in_an_optimizer() -> None:
    """Nothing helps until the step is retried, as where another process has the memory for a moment."""

    def train(case: Case) -> list[Tensor]:
        case.optimizer = Numbered(case.model.parameters(), case)

        def step() -> Tensor:
            faults.disarm()
            case.optimizer.zero_grad()
            loss = case.model(case.x).square().mean()
            loss.backward()
            case.optimizer.step()
            return loss.detach()

        return case.train(step)

    exact(train)


def away(rescue: Rescue) -> bool:
    """Send the optimizer's states to the host, as a step does that ends short of memory."""
    rescue._mode.on()
    rescue.pager.page_out(float("inf"), set())
    return bool(rescue.pager.paged_out)


def test_what_is_saved_is_whole() -> None:
    case = Case(rescued=False)

    def step() -> Tensor:
        loss = case.model(case.x).square().mean()
        loss.backward()
        case.optimizer.step()
        return loss.detach()

    rescue = Rescue(case.model, [case.optimizer])
    rescue.run(step)
    assert away(rescue)
    states = case.optimizer.state_dict()["state"].values()
    assert all(one["momentum_buffer"].untyped_storage().nbytes() for one in states)
    assert away(rescue)
    faults.shrink_capacity(1, 0)
    with pytest.raises(RescueError, match="cannot be saved"):
        case.optimizer.state_dict()
    faults.disarm()
    assert rescue.settle()
    rescue.remove()


def test_a_mode_of_other_code_is_not_taken_off() -> None:
    case = Case(rescued=False)
    rescue = Rescue(case.model, [case.optimizer])
    case.model(case.x).sum().backward()
    case.optimizer.step()
    assert away(rescue)
    with FlopCounterMode(display=False) as counter:
        assert rescue.settle()
        case.model(case.x)
    assert counter.get_total_flops() > 0
    assert current_dispatch_mode() is None
    rescue.remove()
    assert current_dispatch_mode() is not rescue._mode


def test_an_optimizer_that_steps_in_backward_is_not_retried() -> None:
    case = Case(rescued=True)
    optimizers = {one: torch.optim.SGD([one], lr=0.1) for one in case.model.parameters()}
    hooks = []
    for one, optimizer in optimizers.items():

        def at_once(parameter: Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        hooks.append(one.register_post_accumulate_grad_hook(at_once))
    rescue = Rescue(case.model, list(optimizers.values()))

    def step() -> Tensor:
        loss = case.model(case.x).square().mean()
        loss.backward()
        case.fails()
        return loss.detach() * 2

    rescue.run(step)
    with pytest.raises(RescueError, match="begun to change parameters"):
        rescue.run(step)
    rescue.remove()
    for hook in hooks:  # a cycle through autograd, which Python cannot collect
        hook.remove()


TWO_DEVICES = """
import os, torch, tide
from torch import nn
from tide import faults
from lowtide.adaptive.rescue import Rescue
from lowtide.adaptive.step_snapshot import Contents

def train(armed, rescued):
    torch.manual_seed(0)
    first, second = nn.Linear(64, 64).to("tide:0"), nn.Linear(64, 64).to("tide:1")
    model, x = nn.ModuleList([first, second]), torch.randn(64, 64, device="tide:0")
    optimizer, steps = torch.optim.SGD(model.parameters(), lr=0.1), []
    rescue = Rescue(model, [optimizer])
    if armed:
        rescue.arm()
    def step():
        steps.append(1)
        y = nn.functional.dropout(second(first(x).to("tide:1")), 0.3)
        weights = torch.sigmoid(y.detach())
        if rescued and len(steps) == 2:
            faults.fail_allocation(1)
        loss = (y * torch.poisson(weights)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    for _ in range(3):
        rescue.run(step) if rescued else step()
    faults.disarm()
    assert rescued == bool(rescue.counts.retried_operators if armed else rescue.counts.retried_steps)
    rescue.remove()
    return [one.detach().cpu() for one in model.parameters()]

for armed in (False, True):
    assert all(map(torch.equal, train(armed, False), train(armed, True))), armed
os._exit(0)  # torch may abort if the interpreter ends just after a backward
"""


def test_generators_of_all_devices() -> None:
    environment = {**os.environ, "TIDE_DEVICES": "2"}
    subprocess.run([sys.executable, "-c", TWO_DEVICES], check=True, env=environment)


def adam_and_sgd(case: Case) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    """Two that share the model's parameters."""
    parameters = list(case.model.parameters())
    return torch.optim.Adam(parameters[:3], lr=0.1), torch.optim.SGD(parameters[3:], lr=0.1)


def test_an_optimizer_that_was_not_passed_never_steps_twice() -> None:
    case = Case(rescued=True)
    first, second = adam_and_sgd(case)
    case.optimizer = second

    def step() -> Tensor:
        loss = case.model(case.x).square().mean()
        loss.backward()
        first.step()
        case.fails()
        torch.empty(1, device="tide")
        second.step()
        return loss.detach()

    with pytest.raises(RescueError, match="Adam has stepped in it, which was not passed to lowtide; pass every"):
        case.train(step)


def test_an_optimizer_that_was_not_passed_does_not_matter_before_it_steps() -> None:
    def train(case: Case) -> list[Tensor]:
        first, second = adam_and_sgd(case)
        case.optimizer = second

        def step() -> Tensor:
            case.fails()
            loss = case.model(case.x).square().mean()
            loss.backward()
            for one in (first, second):
                one.step()
                one.zero_grad()
            return loss.detach()

        return case.train(step)

    exact(train)


@pytest.mark.parametrize("how", ["out of place", "with a graph"])
@pytest.mark.parametrize("late", [False, True])
def test_gradients_of_the_step_before_are_not_lost(how: str, late: bool) -> None:
    """Each step drops them or adds to them; the optimizer steps in the end."""

    def train(case: Case) -> list[Tensor]:
        parameters = list(case.model.parameters())

        def step() -> Tensor:
            if not late:
                case.fails()
            loss = case.model(case.x).square().mean()
            if how == "with a graph":
                loss.backward(create_graph=True)
            else:
                for one, more in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
                    one.grad = more if one.grad is None else one.grad + more
            if late:
                case.fails()
            torch.empty(1, device="tide")
            return loss.detach()

        try:
            found = case.train(step)
            gradients = [one.grad.detach().cpu() for one in parameters if one.grad is not None]
        finally:  # a gradient with a graph is part of a cycle that Python cannot collect
            for one in parameters:
                one.grad = None
        return [*found, *gradients]

    if late:
        with pytest.raises(RescueError, match="added to gradients"):
            exact(train)
    else:
        exact(train)


@pytest.mark.parametrize("when", ["before forward", "before backward", "after the step"])
def test_gradients_may_be_dropped_anywhere_in_a_step(when: str) -> None:
    def train(case: Case) -> list[Tensor]:
        def step() -> Tensor:
            if when == "before forward":
                case.optimizer.zero_grad()
            loss = case.model(case.x).square().mean()
            if when == "before backward":
                case.optimizer.zero_grad()
            loss.backward()
            case.fails()
            torch.empty(1, device="tide")
            case.optimizer.step()
            if when == "after the step":
                case.optimizer.zero_grad()
            return loss.detach()

        return case.train(step)

    exact(train)


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("armed", [True, False])
def test_a_scaler_that_has_unscaled_does_so_again(enabled: bool, armed: bool) -> None:
    scaler = torch.amp.GradScaler("tide", init_scale=4.0, enabled=enabled)
    unused = torch.amp.GradScaler("tide", enabled=False)

    def train(case: Case) -> list[Tensor]:
        def step() -> Tensor:
            case.optimizer.zero_grad()
            loss = case.model(case.x).square().mean()
            scaler.scale(loss).backward()
            scaler.unscale_(case.optimizer)
            torch.nn.utils.clip_grad_norm_(case.model.parameters(), 0.1)
            case.fails(for_good=armed)
            if case.rescued and case.steps == 2:  # offloading cannot make so much room
                torch.empty(1 << 20, device="tide")
            scaler.step(case.optimizer)
            scaler.update()
            return loss.detach()

        return case.train(step)

    if armed:
        rescued = Case(rescued=True)
        with pytest.raises(RescueError, match="begun 4 times"):
            train(rescued)  # and not that gradients were unscaled twice
    else:
        exact(train)
    del unused


def test_a_generator_of_the_steps_own_is_restored() -> None:
    def train(case: Case) -> list[Tensor]:
        generator = torch.Generator("tide").manual_seed(3)
        rescue = Rescue(case.model, [case.optimizer])
        rescue.arm()
        losses = []

        def step() -> Tensor:
            case.optimizer.zero_grad()
            noise = torch.randn(16, WIDTH, generator=generator, device="tide")
            loss = (case.model(case.x + noise) - noise).square().mean()
            loss.backward()
            case.fails()
            torch.empty(1, device="tide")
            case.optimizer.step()
            return loss.detach()

        for number in range(3):
            losses.append(rescue.run(step).cpu())
            if number == 0:
                rescue.disarm()  # from now on no one sees what operators draw from
        rescue.remove()
        assert rescue.counts.retried_steps == case.rescued
        return losses

    exact(train)


class Counting(nn.Module):
    """Has a state that is neither parameters nor buffers."""

    def __init__(self, model: nn.Module, *, in_place: bool = False) -> None:
        super().__init__()
        self.model, self.in_place = model, in_place
        self.forwards = 0
        self.mean: Tensor | None = torch.zeros((), device="tide") if in_place else None

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        y: Tensor = self.model(x)
        mean = y.detach().mean()
        if self.in_place:
            assert self.mean is not None
            self.mean.mul_(0.9).add_(mean)
        else:
            self.mean = mean if self.mean is None else 0.9 * self.mean + 0.1 * mean
        return (y - self.mean) * self.forwards


@pytest.mark.parametrize("in_place", [False, True])
def test_attributes_of_modules_are_restored_or_the_step_is_not_retried(in_place: bool) -> None:
    def train(case: Case) -> list[Tensor]:
        case.model = Counting(case.model, in_place=in_place)  # type: ignore[assignment]

        def step() -> Tensor:
            case.optimizer.zero_grad()
            loss = case.model(case.x).square().mean()
            loss.backward()
            case.fails()
            torch.empty(1, device="tide")
            case.optimizer.step()
            return loss.detach()

        return case.train(step)

    if in_place:
        with pytest.raises(RescueError, match=r"changed the tensor 'mean' of a Counting.*register it"):
            exact(train)
    else:
        exact(train)


def test_buffers_that_were_made_in_inference_mode_are_restored() -> None:
    def train(case: Case) -> list[Tensor]:
        with torch.inference_mode():
            made = torch.zeros(WIDTH, device="tide")
        case.model.register_buffer("made", made)

        def step() -> Tensor:
            with torch.inference_mode():
                case.model.made.add_(1)
            case.optimizer.zero_grad()
            loss = (case.model(case.x) * case.model.made.clone()).square().mean()
            loss.backward()
            case.fails()
            torch.empty(1, device="tide")
            case.optimizer.step()
            return loss.detach()

        return case.train(step)

    exact(train)


@pytest.mark.parametrize("change", ["parameter", "buffer", "module", "attribute", "dictionary"])
def test_contents_of_a_model_that_was_changed_between_steps_are_listed_again(change: str) -> None:
    model = Counting(nn.Sequential(nn.Linear(2, 2), nn.GELU()), in_place=False)
    contents = Contents(model, None)
    assert contents.current
    model(torch.ones(2))  # sets a tensor and a number as attributes
    assert not contents.current
    model.mean = None
    contents = Contents(model, contents)
    assert contents.current
    inner = model.model[0]
    match change:
        case "parameter":
            inner.weight = nn.Parameter(torch.ones(2, 2))
        case "buffer":
            inner.register_buffer("scale", torch.ones(2))
        case "module":
            model.model[1] = nn.ReLU()
        case "attribute":
            model.forwards = 7
        case "dictionary":
            inner._parameters = dict(inner._parameters, more=nn.Parameter(torch.ones(2)))
    assert not contents.current
    found = Contents(model, contents)
    assert set(map(id, found.parameters)) == set(map(id, model.parameters()))
    assert [whole for whole, *_ in found.buffers] == [name for name, _ in model.named_buffers()]
    assert found.attributes.modules[model].saved["forwards"] == model.forwards
