"""Steps that run out of memory end as undisturbed ones do."""

from __future__ import annotations

import copy
import pickle
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowtide._torch_private.operators import scoped_library
from lowtide.adaptive.rescue import Rescue
from lowtide.errors import RescueError
from support.garbage import collect_garbage
from support.ranks import Ranks
from support.sweep_cases import (
    Subject,
    on_ranks,
    phase_of,
    single,
    spoilt_in_the_optimizer,
    spoilt_on,
    uneven_optimizers,
)
from tide import faults
from tide.testing import fresh_tide  # noqa: F401

ROWS, WIDTH = 64, 64


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.2))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.inner(x)
        return y


class Trained:
    """Some layers, trained for a few steps; the same every time."""

    def __init__(self, norm: bool = False, change: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        torch.manual_seed(0)
        layers: list[nn.Module] = [Block() for _ in range(6)]
        self.model = nn.Sequential(*([nn.BatchNorm1d(WIDTH)] if norm else []), *layers).to("tide")
        self.optimizer: torch.optim.Optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)
        self.x = torch.randn(ROWS, WIDTH, device="tide")
        self.change = change

    def step(self) -> Tensor:
        self.optimizer.zero_grad()
        loss = self.change(self.model(self.x)).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def train(self, run: Callable[[Callable[[], Tensor]], Tensor], steps: int = 3) -> list[Tensor]:
        """The losses, the parameters and the buffers."""
        losses = [run(self.step).cpu() for _ in range(steps)]
        self.optimizer.zero_grad()
        return [*losses, *(one.detach().cpu() for one in [*self.model.parameters(), *self.model.buffers()])]


MADE: list[Rescue] = []


@pytest.fixture(autouse=True)
def _removed(request: pytest.FixtureRequest) -> Iterator[None]:
    """A failed test leaves no mode on for the next ones."""
    request.getfixturevalue("fresh_tide")  # which ends after this
    yield
    faults.disarm()
    while MADE:
        MADE.pop().remove()


def rescue_of(trained: Trained) -> Rescue:
    MADE.append(Rescue(trained.model, [trained.optimizer]))
    return MADE[-1]


def differing(first: list[Tensor], second: list[Tensor]) -> list[str]:
    """Which of the tensors are not bitwise the same, and by how much."""
    assert len(first) == len(second)
    return [
        f"tensor {place} of shape {tuple(one.shape)}: {int((one != other).sum())} by {(one - other).abs().max():g}"
        for place, (one, other) in enumerate(zip(first, second, strict=True))
        if not torch.equal(one, other)
    ]


def same(first: list[Tensor], second: list[Tensor]) -> bool:
    return not differing(first, second)


def quiet() -> None:
    """Autograd's thread lets go of a graph a moment after backward has returned."""
    before = -1
    while (now := torch.accelerator.memory_allocated()) != before:
        before = now
        time.sleep(0.01)


def plainly(step: Callable[[], Tensor]) -> Tensor:
    return step()


@contextmanager
def less_memory(share: float, **settings: Any) -> Iterator[tuple[list[Tensor], Trained, Rescue]]:
    """What an undisturbed run gives; then a capacity with ``share`` of what its activations take."""
    undisturbed = Trained(**settings)
    before = torch.accelerator.memory_allocated()
    torch.accelerator.reset_peak_memory_stats()
    expected = undisturbed.train(plainly)
    activations = torch.accelerator.max_memory_allocated() - before
    del undisturbed
    collect_garbage()
    trained = Trained(**settings)
    held = torch.accelerator.memory_allocated()
    faults.shrink_capacity(1, -int(share * activations))  # from the next allocation on
    torch.empty(1, device="tide")
    assert torch.accelerator.memory_allocated() == held
    rescue = rescue_of(trained)
    yield expected, trained, rescue
    faults.disarm()


def test_without_a_rescue_the_run_dies() -> None:
    with less_memory(0.8) as (_, trained, _), pytest.raises(torch.OutOfMemoryError):
        trained.train(plainly)


@pytest.mark.parametrize("share", [0.9, 0.8])
def test_an_armed_run_with_less_memory_is_bitwise_the_same(share: float) -> None:
    with less_memory(share) as (expected, trained, rescue):
        rescue.arm()
        assert same(trained.train(rescue.run), expected)
        counts = rescue.counts.taken()
    assert counts.retried_operators > 0
    assert counts.retried_steps == 0
    assert counts.offloaded_bytes > 0
    assert "aten." in counts.reasons[0]
    assert not rescue.counts.any


@pytest.fixture
def npu_like() -> Iterator[Callable[[Tensor], Tensor]]:
    """Calls an operator that fails for lack of memory, once, as a backend does that has no exception for it."""
    with scoped_library("npu_test", "FRAGMENT") as library:
        library.define("plain_error(Tensor x) -> Tensor")
        calls = 0

        def fail_once(x: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            if calls == 1:
                raise RuntimeError("NPU out of memory. Tried to allocate 4.00 KiB (NPU 0; 60.97 GiB total capacity)")
            return x.clone()

        library.impl("plain_error", fail_once, "PrivateUse1")
        yield lambda x: x * torch.ops.npu_test.plain_error(x.detach())


@pytest.mark.parametrize("armed", [True, False])
def test_a_backend_that_raises_a_plain_error_is_rescued_too(npu_like: Callable[[Tensor], Tensor], armed: bool) -> None:
    trained = Trained(change=npu_like)
    rescue = rescue_of(trained)
    if armed:
        rescue.arm()
    found = trained.train(rescue.run, steps=1)
    counts = rescue.counts.taken()
    assert (counts.retried_operators, counts.retried_steps) == ((1, 0) if armed else (0, 1))
    assert same(found, Trained(change=npu_like).train(plainly, steps=1))


def test_a_disarmed_run_retries_its_first_step_and_is_armed_then() -> None:
    with less_memory(0.8) as (expected, trained, rescue):
        assert same(trained.train(rescue.run), expected)
        assert rescue.counts.retried_steps == 1
        assert rescue.armed


def test_the_watermark_offloads_tensors_before_anything_fails() -> None:
    with less_memory(2.0) as (expected, trained, rescue):
        rescue.watermark = torch.accelerator.memory_allocated() + 3 * ROWS * WIDTH * 4
        rescue.arm()
        assert same(trained.train(rescue.run), expected)
        assert rescue.counts.watermark > 0
        assert rescue.counts.retried_operators == 0


def test_a_step_that_cannot_fit_reports_the_missing_bytes_and_restores_the_model() -> None:
    with less_memory(0.05) as (_, trained, rescue):
        before = [one.detach().cpu() for one in trained.model.parameters()]
        with pytest.raises(RescueError, match=r"begun 4 times .* were missing.* at least [\d.]+ \wiB are needed"):
            rescue.run(trained.step)
        faults.disarm()
        assert rescue.settle()
        assert same([one.detach().cpu() for one in trained.model.parameters()], before)


def test_buffers_and_generators_are_restored_before_a_step_is_retried() -> None:
    with less_memory(0.7, norm=True) as (expected, trained, rescue):
        assert same(trained.train(rescue.run), expected)
        assert rescue.counts.retried_steps == 1


def test_a_step_that_adds_to_gradients_cannot_be_retried_and_says_so() -> None:
    trained = Trained()
    rescue = rescue_of(trained)

    def accumulate() -> None:
        trained.model(trained.x).square().mean().backward()

    accumulate()
    faults.disarm()
    accumulate()
    faults.fail_allocation(faults.allocations_seen())
    with pytest.raises(RescueError, match="whole step"):
        rescue.run(accumulate)


@pytest.fixture
def careless() -> Iterator[Callable[[Tensor], Tensor]]:
    """Calls an operator that writes before it allocates. The allocation fails, once."""
    with scoped_library("rescue_test", "FRAGMENT") as library:
        library.define("careless(Tensor(a!) x) -> ()")

        def write(x: Tensor) -> None:
            x.mul_(2)
            torch.empty(1 << 14, dtype=torch.uint8, device=x.device)

        library.impl("careless", write, "PrivateUse1")
        calls = 0

        def change(x: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            changed = x.detach().clone()
            if calls == 1:
                faults.fail_allocation(1)
            torch.ops.rescue_test.careless(changed)
            return x * changed

        yield change


def test_an_operator_that_wrote_before_it_failed_is_not_retried_but_the_step_is(
    careless: Callable[[Tensor], Tensor],
) -> None:
    trained = Trained(change=careless)
    rescue = rescue_of(trained)
    rescue.arm()
    found = trained.train(rescue.run, steps=1)
    assert rescue.counts.retried_steps == 1
    assert "may have written" in rescue.counts.reasons[0]
    assert same(found, Trained(change=careless).train(plainly, steps=1))


def test_where_no_step_can_be_retried_a_spoilt_one_is_an_error(careless: Callable[[Tensor], Tensor]) -> None:
    trained = Trained(change=careless)
    rescue = rescue_of(trained)
    rescue.arm()
    with pytest.raises(RescueError, match="may have written"), rescue.watching():
        trained.step()


class Careless(torch.optim.SGD):
    """Writes into parameters before it allocates."""

    def step(self, closure: Any = None) -> None:
        faults.fail_allocation(1)
        torch.ops.rescue_test.careless(self.param_groups[0]["params"][0].detach())
        super().step()


@pytest.mark.usefixtures("careless")
def test_an_optimizer_whose_first_write_fails_is_not_retried() -> None:
    trained = Trained()
    trained.optimizer = Careless(trained.model.parameters(), lr=1e-3)
    with pytest.raises(RescueError, match="after the optimizer had begun to change parameters"):
        rescue_of(trained).run(trained.step)


def test_the_optimizer_alone_is_watched_where_nothing_is_armed() -> None:
    trained = Trained()
    expected = trained.train(plainly)
    trained = Trained()
    rescue = rescue_of(trained)
    for _ in range(2):
        rescue.run(trained.step)
    faults.disarm()
    step = trained.optimizer.step
    parameters = sum(one.nbytes for one in trained.model.parameters())

    def with_less(*args: Any) -> Any:
        quiet()
        faults.shrink_capacity(1, parameters)
        return step(*args)

    trained.optimizer.step = with_less  # type: ignore[method-assign]
    found = trained.train(rescue.run, steps=1)
    faults.disarm()
    assert differing(found[1:], expected[3:]) == [], str(rescue.counts)
    assert rescue.counts.retried_steps == 0
    assert rescue.counts.paged_bytes > parameters


def test_what_could_not_be_paged_in_is_paged_in_when_it_is_read() -> None:
    trained = Trained()
    expected = trained.train(plainly)
    trained = Trained()
    rescue = rescue_of(trained)
    rescue.arm()
    for _ in range(2):
        rescue.run(trained.step)
    trained.optimizer.zero_grad()
    room = sum(one.nbytes for one in trained.model.parameters()) // 2
    faults.shrink_capacity(1, room)  # less than what is there for good
    loss = rescue.run(trained.step)
    assert rescue.pager.paged_out
    faults.disarm()
    found = [one.detach().cpu() for one in trained.model.parameters()]
    assert same([loss.cpu(), *found], expected[2:])
    assert rescue.settle()
    assert not rescue.pager.paged_out


def test_a_copy_of_the_model_is_a_model_of_its_own() -> None:
    trained = Trained()
    rescue = rescue_of(trained)
    rescue.arm()
    rescue.run(trained.step)
    copied = copy.deepcopy(trained.model)
    pickle.loads(pickle.dumps(trained.model))
    copied(trained.x).sum().backward()
    assert copied.state_dict().keys() == trained.model.state_dict().keys()


def test_remove_restores_the_model_and_the_optimizer() -> None:
    trained, resize = Trained(), torch.UntypedStorage.resize_
    rescue = rescue_of(trained)
    rescue.arm()
    rescue.run(trained.step)
    rescue.remove()
    assert not trained.optimizer._optimizer_step_pre_hooks
    assert not trained.optimizer._optimizer_step_post_hooks
    assert not trained.optimizer._optimizer_state_dict_pre_hooks
    assert not trained.model._state_dict_pre_hooks
    assert not any(module._forward_pre_hooks for module in trained.model.modules())
    assert torch.UntypedStorage.resize_ is resize


def test_remove_without_room_is_an_error_and_works_once_there_is_room() -> None:
    trained = Trained()
    expected = trained.train(plainly)
    trained = Trained()
    rescue = rescue_of(trained)
    rescue.arm()
    for _ in range(2):
        rescue.run(trained.step)
    trained.optimizer.zero_grad()
    faults.shrink_capacity(1, sum(one.nbytes for one in trained.model.parameters()) // 2)
    loss = rescue.run(trained.step)
    assert rescue.pager.paged_out
    with pytest.raises(RescueError, match=r"parameters, gradients or optimizer states .* call remove\(\) again"):
        rescue.remove()
    faults.disarm()
    rescue.remove()
    assert not rescue.pager.paged_out
    assert all(one.untyped_storage().nbytes() for one in trained.model.parameters())
    states = [one for state in trained.optimizer.state.values() for one in state.values() if isinstance(one, Tensor)]
    assert all(one.untyped_storage().nbytes() for one in states)
    assert same([loss.cpu(), *(one.detach().cpu() for one in trained.model.parameters())], expected[2:])


@pytest.fixture(scope="module")
def llama_like() -> Subject:
    return single("reference", "mixed")


@pytest.mark.parametrize("armed", [True, False])
def test_allocations_of_every_phase_may_fail_under_a_policy(llama_like: Subject, armed: bool) -> None:
    marks = llama_like.allocations(armed)
    for number in range(3, marks["optimizer"], 97):
        outcome = llama_like.disturbed(armed, number, llama_like.activations // 4, phase_of(number, marks))
        assert outcome.exact, outcome
        assert outcome.line


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["fsdp2", "pp2", "tp2"])
def test_an_oom_on_one_rank_does_not_affect_the_others(ranks: Ranks, layout: str) -> None:
    outcomes = ranks.run(on_ranks, layout, 1, 40, 300, 0.25, 3)
    assert all(outcome.exact for seen in outcomes for outcome in seen)
    assert all(outcome.line == 2 for outcome in outcomes[1])
    assert all(outcome.line == 0 for outcome in outcomes[0])


@pytest.mark.slow
def test_a_step_that_is_spoilt_on_one_rank_is_retried_on_all(ranks: Ranks) -> None:
    assert ranks.run(spoilt_on, 1) == [(1, []), (1, [])]


@pytest.mark.slow
def test_an_optimizer_that_fails_in_a_write_stops_its_rank(ranks: Ranks) -> None:
    first, second = ranks.run(spoilt_in_the_optimizer, 1)
    assert first == ""
    assert "after the optimizer had begun to change parameters" in second


@pytest.mark.slow
def test_ranks_with_different_numbers_of_optimizers_agree(ranks: Ranks) -> None:
    assert ranks.run(uneven_optimizers, 3) == [3, 3]
