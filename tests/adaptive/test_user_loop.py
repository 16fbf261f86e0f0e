"""Steps of the user's loop: where they begin and end, exact, and nothing left on, whatever else is on."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.optim.optimizer import _global_optimizer_pre_hooks
from torch.utils import _python_dispatch
from torch.utils.flop_counter import FlopCounterMode

import lowtide
import tide
from lowtide._torch_private.modes import dispatch_modes_on
from lowtide._torch_private.saved_tensor_hooks import top_saved_tensors_hooks
from lowtide.adaptive.session import Adaptive
from lowtide.errors import RescueError
from tide import faults

WIDTH, STEPS, PROFILING = 32, 8, 5
DEVICES = ["cpu", "tide"]
RESIZE = torch.UntypedStorage.resize_
Step = Callable[[int], Tensor]


class Net(nn.Module):
    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1)) for _ in range(layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


class Program:
    """A model in training, the same every time."""

    def __init__(self, device: str, seed: int = 0) -> None:
        tide.configure(preset="h100", capacity=1 << 30)
        torch.manual_seed(seed)
        self.device = device
        self.model = Net().to(device)
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        torch.manual_seed(seed + 1)

    def batch(self, number: int) -> Tensor:
        return torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(number)).to(self.device)

    def step(self, number: int) -> Tensor:
        self.optimizer.zero_grad()
        loss: Tensor = self.model(self.batch(number))
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def adapt(self, **options: Any) -> Adaptive:
        return lowtide.adapt(self.model, self.optimizer, profiling_steps=PROFILING, verbose=False, **options)


def run(step: Step, count: int = STEPS) -> list[float]:
    return [float(step(number)) for number in range(count)]


def is_on() -> list[Any]:
    """Everything that is on for the whole process or thread."""
    found: list[Any] = [*dispatch_modes_on(), *_global_optimizer_pre_hooks.values()]
    if (hooks := top_saved_tensors_hooks(False)) is not None:
        found.append(hooks)
    if torch.UntypedStorage.resize_ is not RESIZE:
        found.append("resize_")
    if _python_dispatch.is_in_torch_dispatch_mode():
        found.append("torch believes that a mode is on")
    return found


def hooks_of(program: Program) -> int:
    """How many hooks are on a model and its optimizer, and how many of its modules have a forward of their own."""
    optimizer = program.optimizer
    of_modules = [
        len(module._forward_hooks) + len(module._forward_pre_hooks) + len(module._state_dict_pre_hooks)
        + ("forward" in vars(module))
        for module in program.model.modules()
    ]  # fmt: skip
    return sum(of_modules) + len(optimizer._optimizer_step_pre_hooks) + len(optimizer._optimizer_step_post_hooks)


@pytest.fixture(autouse=True)
def _all_off() -> Iterator[None]:
    tide.reset()
    assert is_on() == []
    yield
    faults.disarm()
    assert is_on() == []


@pytest.mark.parametrize("device", DEVICES)
def test_nothing_is_on_before_a_step_and_between_two(device: str) -> None:
    program = Program(device)
    adapted = program.adapt()
    assert is_on() == []
    with adapted:
        for number in range(STEPS):
            assert is_on() == []
            program.step(number)
    assert is_on() == []
    assert hooks_of(program) == 0
    assert adapted.plan is not None


def test_a_step_begins_with_the_first_forward_that_has_gradients() -> None:
    program = Program("tide")
    with program.adapt() as adapted:
        with torch.no_grad():
            program.model(program.batch(0))
        assert is_on() == []
        loss = program.model(program.batch(0))
        assert is_on() != []
        loss.backward()
        assert is_on() != []
        program.optimizer.step()
        assert is_on() == []
        assert adapted.number == 1


@pytest.mark.parametrize("device", DEVICES)
def test_a_second_adapt_replaces_the_first(device: str) -> None:
    expected = run(Program(device).step)
    program = Program(device)
    first = program.adapt()
    second = program.adapt()
    assert [event.kind for event in second.events] == ["warned"]
    assert "replaces it" in second.events[0].text
    with second:
        assert run(program.step) == expected
    assert first.number == 0
    assert hooks_of(program) == 0


@pytest.mark.parametrize("of", ["a part", "the optimizer"])
def test_an_adapt_of_what_another_one_has_replaces_it(of: str) -> None:
    program = Program("cpu")
    first = program.adapt()
    if of == "a part":
        other = lowtide.adapt(program.model.layers, verbose=False)
    else:
        net = Net()
        program.optimizer.add_param_group({"params": list(net.parameters())})
        other = lowtide.adapt(net, program.optimizer, verbose=False)
    assert "replaces it" in other.events[0].text
    other.remove()
    assert hooks_of(program) == 0
    first.remove()


def test_a_scheduler_can_be_made_inside() -> None:
    program = Program("cpu")
    with program.adapt() as adapted:
        scheduler = torch.optim.lr_scheduler.LambdaLR(program.optimizer, lambda step: 1.0)
        for number in range(3):
            program.step(number)
            scheduler.step()
    assert adapted.number == 3


class Around(torch.optim.Optimizer):
    """What frameworks put around an optimizer: another one, that is not made as optimizers are."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.plain = optimizer, optimizer.step

    param_groups = property(lambda self: self.optimizer.param_groups)
    state = property(lambda self: self.optimizer.state)

    def step(self, closure: Any = None) -> None:
        """With a scaler, some note whether the optimizer has stepped, and put its own ``step`` back."""
        self.optimizer.step = self.plain  # type: ignore[method-assign]
        self.optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)


@pytest.mark.parametrize("given", ["the optimizer", "what is around it"])
def test_a_wrapped_optimizer_is_unwrapped(given: str) -> None:
    expected = run(Program("tide").step)
    program = Program("tide")
    around = Around(program.optimizer)
    optimizer = program.optimizer if given == "the optimizer" else around
    with lowtide.adapt(program.model, optimizer, profiling_steps=PROFILING, verbose=False) as adapted:
        program.optimizer = around
        assert run(program.step) == expected
    assert adapted.number == STEPS
    assert adapted.plan is not None


@pytest.mark.parametrize("device", DEVICES)
def test_two_runs_in_one_loop(device: str) -> None:
    def both(adapted: bool) -> tuple[list[float], list[Adaptive]]:
        programs = [Program(device, seed) for seed in (1, 2)]
        with ExitStack() as stack:
            runs = [stack.enter_context(one.adapt()) for one in programs if adapted]
            losses = [float(one.step(number)) for number in range(STEPS) for one in programs]
        assert sum(map(hooks_of, programs)) == 0
        return losses, runs

    expected, _ = both(False)
    losses, runs = both(True)
    assert losses == expected
    assert all(one.plan is not None for one in runs)


def test_two_models_one_of_which_runs_in_the_others_step() -> None:
    def both(adapted: bool) -> list[float]:
        generator, critic = Program("tide", 1), Program("tide", 2)
        losses = []
        with ExitStack() as stack:
            for one in (generator, critic) if adapted else ():
                stack.enter_context(one.adapt())
            for number in range(STEPS):
                x = generator.batch(number)
                made = generator.model(x)
                loss = critic.model(x * made)
                loss.backward()
                generator.optimizer.step()
                generator.optimizer.zero_grad()
                critic.optimizer.step()
                critic.optimizer.zero_grad()
                losses.append(float(loss.detach()))
        return losses

    assert both(True) == both(False)


class Mine(saved_tensors_hooks):
    """Hooks of the user's, which count what they are asked."""

    def __init__(self) -> None:
        self.packed = 0
        super().__init__(self._pack, lambda held: held)

    def _pack(self, tensor: Tensor) -> Tensor:
        self.packed += 1
        return tensor.detach()


@pytest.mark.parametrize("device", DEVICES)
def test_hooks_of_the_users_stay_where_they_are(device: str) -> None:
    expected = run(Program(device).step)
    program, losses, asked = Program(device), [], []
    with program.adapt() as adapted, Mine() as _:
        for number in range(STEPS):
            losses.append(float(program.step(number)))
            top = top_saved_tensors_hooks(False)
            asked.append(top is not None and isinstance(getattr(top[0], "__self__", None), Mine))
    assert losses == expected
    assert asked == [True] * STEPS
    assert "hooks of your own" in adapted.events[-1].text  # so that nothing could be measured


AROUND: dict[str, Callable[[], Any]] = {"hooks": Mine, "a mode": lambda: FlopCounterMode(display=False)}


@pytest.mark.parametrize("what", AROUND)
@pytest.mark.parametrize("where", ["forward", "backward and step", "forward to backward", "forward, and not the loss"])
def test_contexts_of_the_users_may_overlap_a_step(what: str, where: str) -> None:
    def step(program: Program, number: int) -> Tensor:
        x = program.batch(number)
        context = AROUND[what]()
        if where != "backward and step":
            context.__enter__()
        loss: Tensor = program.model(x)
        if where == "forward, and not the loss":
            context.__exit__(None, None, None)
            loss = loss.exp().sqrt()
        if where == "forward":
            context.__exit__(None, None, None)
        if where == "backward and step":
            context.__enter__()
        loss.backward()
        if where == "forward to backward":
            context.__exit__(None, None, None)
        program.optimizer.step()
        program.optimizer.zero_grad()
        if where == "backward and step":
            context.__exit__(None, None, None)
        assert is_on() == []
        return loss.detach()

    plain = Program("tide")
    expected = run(lambda number: step(plain, number))
    program = Program("tide")
    with program.adapt() as adapted:
        assert run(lambda number: step(program, number)) == expected
    assert adapted.number == STEPS


@pytest.mark.parametrize("device", DEVICES)
def test_a_step_may_run_inside_the_optimizers(device: str) -> None:
    def step(program: Program, number: int) -> Tensor:
        x = program.batch(number)

        def closure() -> Tensor:
            program.optimizer.zero_grad()
            loss: Tensor = program.model(x)
            loss.backward()
            return loss

        return program.optimizer.step(closure).detach()  # type: ignore[union-attr]

    plain = Program(device)
    expected = run(lambda number: step(plain, number))
    program = Program(device)
    with program.adapt() as adapted:
        assert run(lambda number: step(program, number)) == expected
    assert adapted.number == STEPS
    assert adapted.plan is not None
    assert next(iter(adapted.profiling.lengths.traces.values())).optimizer.kernels


def test_a_step_that_runs_inside_the_optimizers_can_be_retried() -> None:
    def train(adapted: bool) -> tuple[list[float], list[str]]:
        program, losses = Program("tide"), []
        run = program.adapt() if adapted else None
        for number in range(STEPS + 2):
            x, attempts = program.batch(number), []

            def step(x: Tensor = x, attempts: list[int] = attempts, number: int = number) -> Tensor:
                attempts.append(1)
                faults.disarm()

                def closure() -> Tensor:
                    program.optimizer.zero_grad()
                    if run is not None and number == STEPS and len(attempts) == 1:  # which is not watched
                        faults.fail_allocation(10)
                    loss: Tensor = program.model(x)
                    loss.backward()
                    faults.disarm()
                    return loss

                return program.optimizer.step(closure)  # type: ignore[return-value]

            loss = step() if run is None else run.step(step)
            assert loss is not None
            losses.append(float(loss.detach()))
        if run is not None:
            run.remove()
        return losses, [event.kind for event in run.events] if run is not None else []

    expected, _ = train(False)
    losses, kinds = train(True)
    assert losses == expected
    assert "retried" in kinds


def test_several_optimizers_end_a_step_together() -> None:
    def step(program: Program, others: list[torch.optim.Optimizer], number: int) -> Tensor:
        loss: Tensor = program.model(program.batch(number))
        loss.backward()
        for one in reversed(others):
            one.step()
            one.zero_grad()
        return loss.detach()

    def optimizers(program: Program) -> list[torch.optim.Optimizer]:
        parameters = list(program.model.parameters())
        return [torch.optim.Adam(parameters[:3]), torch.optim.SGD(parameters[3:], lr=0.1)]

    program = Program("tide")
    others = optimizers(program)
    expected = run(lambda number: step(program, others, number))
    program = Program("tide")
    others = optimizers(program)
    with lowtide.adapt(program.model, others, profiling_steps=PROFILING, verbose=False) as adapted:
        assert run(lambda number: step(program, others, number)) == expected
    assert adapted.number == STEPS


def test_a_model_that_the_loop_does_not_call_is_warned_of_once() -> None:
    class Outer(nn.Module):
        def __init__(self, net: nn.Module) -> None:
            super().__init__()
            self.net = net

    program = Program("cpu")
    with lowtide.adapt(Outer(program.model), program.optimizer, verbose=False) as adapted:
        run(program.step, 6)
    assert [event.kind for event in adapted.events] == ["warned"]
    assert "not called the Outer" in adapted.events[0].text
    assert "'net'" in adapted.events[0].text


def test_a_loop_none_of_whose_steps_ends_is_warned_of_once() -> None:
    program = Program("tide")
    with lowtide.adapt(program.model, verbose=False) as adapted:
        run(program.step, 10)
    assert [event.kind for event in adapted.events] == ["warned"]
    assert "pass the optimizer" in adapted.events[0].text


@pytest.mark.parametrize("device", DEVICES)
def test_the_model_can_be_copied_and_saved_at_any_time(device: str) -> None:
    program = Program(device)
    with program.adapt():
        for number in range(STEPS):
            program.step(number)
            torch.save(program.model, io.BytesIO())
            copied = copy.deepcopy(program.model)
            with torch.no_grad():
                for one in copied.parameters():
                    one.zero_()
            x = program.batch(number)
            assert torch.equal(copied(x), x.square().mean())
            copied(x).backward()
    assert hooks_of(program) == 0


@pytest.mark.parametrize("steps", [1, 2, 4, 5, 6])
def test_a_loop_may_end_after_any_step(steps: int) -> None:
    program = Program("tide")
    with program.adapt():
        run(program.step, steps)
        program.model(program.batch(0))  # and one more forward, the rest of whose step never comes
    assert hooks_of(program) == 0


class _Stopped(BaseException):
    """As KeyboardInterrupt, which pytest takes for its own."""


@pytest.mark.parametrize("where", ["forward", "backward", "optimizer", "between"])
@pytest.mark.parametrize("at", [0, 1, 2])  # not profiled, surveyed, recorded
def test_an_interrupt_leaves_nothing_on(where: str, at: int) -> None:
    program = Program("tide")
    number = 0

    def stop(here: str) -> None:
        if number == at and where == here:
            raise _Stopped

    program.model.layers[1].register_forward_hook(lambda *_: stop("forward"))
    program.model.layers[0][0].weight.register_hook(lambda _: stop("backward"))
    program.optimizer.register_step_post_hook(lambda *_: stop("optimizer"))
    before = hooks_of(program)

    def loop() -> None:
        nonlocal number
        with program.adapt():
            for number in range(STEPS):
                program.step(number)
                stop("between")

    with pytest.raises(_Stopped):
        loop()
    assert is_on() == []
    assert hooks_of(program) == before


def test_an_operator_that_had_written_is_a_rescue_error_in_the_users_loop() -> None:
    program = Program("tide")
    program.model.layers.append(nn.BatchNorm1d(WIDTH).to("tide"))

    def loop() -> None:
        with program.adapt(layers="layers"):
            for allocation in range(10, 40):
                faults.disarm()
                faults.fail_allocation(allocation)
                program.step(allocation)

    with pytest.raises(RescueError, match=r"may have written.*run\.step"):
        loop()


def test_a_step_for_which_nothing_is_left_to_offload_is_a_rescue_error() -> None:
    program = Program("tide")
    adapted = program.adapt()

    def loop() -> None:
        with adapted:
            program.step(0)
            faults.shrink_capacity(5, 1 << 30)
            program.step(1)

    with pytest.raises(RescueError, match=r"nothing is left to offload; at least .* needed") as raised:
        loop()
    assert ["call remove() again" in note for note in raised.value.__notes__] == [True]  # states are on the host
    faults.disarm()
    adapted.remove()
    assert is_on() == []
    assert hooks_of(program) == 0
    program.step(2)


@pytest.mark.parametrize("form", ["step", "loop"])
def test_a_step_with_transforms_that_allow_no_hooks_is_a_rescue_error(form: str) -> None:
    program = Program("tide")
    adapted = program.adapt()

    def step() -> None:
        torch.func.grad(lambda x: x.square().sum())(program.batch(0) * program.model(program.batch(0)).detach())

    def loop() -> None:
        with adapted:
            step()

    with pytest.raises(RescueError, match=r"torch\.func, which allows no saved-tensor hooks"):
        loop() if form == "loop" else adapted.step(step)
    adapted.remove()
    assert hooks_of(program) == 0


def test_a_default_device_changes_nothing() -> None:
    expected = run(Program("tide").step)
    program = Program("tide")
    program.batch = lambda number, batch=program.batch: _on_host(batch, number)  # type: ignore[method-assign, misc]
    with program.adapt() as adapted:
        torch.set_default_device("tide")
        try:
            assert run(program.step) == expected
        finally:
            torch.set_default_device(None)
    assert adapted.plan is not None


def _on_host(batch: Callable[[int], Tensor], number: int) -> Tensor:
    """Drawn as without a default device."""
    with torch.device("cpu"):
        return batch(number)


@pytest.mark.parametrize("wrong", ["a Policy for other layers", "no optimizer"])
def test_what_cannot_be_adapted_is_refused_before_anything_changes(wrong: str) -> None:
    program = Program("tide")
    if wrong == "no optimizer":
        with pytest.raises(TypeError, match=r"takes optimizers of torch\.optim"):
            lowtide.adapt(program.model, object(), verbose=False)  # type: ignore[arg-type]
    else:
        with pytest.raises(lowtide.PolicyError, match="decides 7 layers and the model has 3"):
            program.adapt(policy=lowtide.Policy((lowtide.LayerPolicy(),) * 7))
    assert hooks_of(program) == 0


def test_a_model_that_is_moved_to_its_device_later_is_rescued() -> None:
    program = Program("cpu")
    adapted = program.adapt()
    assert adapted.rescue is None
    program.model.to("tide")
    program.device = "tide"
    with adapted:
        run(program.step)
        assert adapted.rescue is not None
        assert adapted.clock.device.type == "tide"
        assert not [event for event in adapted.events if event.kind == "warned"]


def test_a_model_on_the_cpu_though_there_is_a_device_is_warned_of() -> None:
    program = Program("cpu")
    with program.adapt() as adapted:
        run(program.step, 2)
    assert ["on the CPU" in event.text for event in adapted.events] == [True]


def test_a_model_whose_first_parameters_are_on_the_host_is_rescued() -> None:
    class Embedded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(20, WIDTH)
            self.net = Net().to("tide")

        def forward(self, numbers: Tensor) -> Tensor:
            loss: Tensor = self.net(self.table(numbers).to("tide"))
            return loss

    def train(adapted: bool) -> list[float]:
        program = Program("tide")
        program.model = Embedded()  # type: ignore[assignment]
        program.optimizer = torch.optim.AdamW(program.model.parameters())
        program.batch = lambda number: torch.arange(number, number + 8)  # type: ignore[method-assign]
        torch.manual_seed(5)
        if not adapted:
            return run(program.step)
        with program.adapt(layers="net.layers") as found:
            losses = run(program.step)
        assert found.rescue is not None
        assert found.plan is not None
        return losses

    assert train(True) == train(False)


def test_a_model_on_the_cpu_is_planned_without_swaps_which_free_nothing_there() -> None:
    layer = nn.TransformerEncoderLayer(64, 4, batch_first=True)
    model = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)  # 70 MiB with all kept, 48 with all recomputed
    optimizer = torch.optim.AdamW(model.parameters())
    with lowtide.adapt(model, optimizer, budget="60MiB", verbose=False) as run:
        for _ in range(PROFILING + 1):
            model(torch.randn(8, 32, 64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    (decided,) = run.plans.values()
    assert decided.plan.feasible
    decisions = {type(decision) for layer in decided.policy.layers for decision in decisions_of(layer)}
    assert decisions == {lowtide.Keep, lowtide.Recompute}


def decisions_of(layer: lowtide.LayerPolicy) -> Iterator[Any]:
    yield layer.default
    yield layer.boundary
    yield from (rule.decision for rule in layer.rules)
