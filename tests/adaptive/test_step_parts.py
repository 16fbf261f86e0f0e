"""Steps whose micro-batches are passed to the run one by one: retried together, exactly."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

import lowtide
import tide
from lowtide.errors import RescueError
from support.ranks import Ranks
from support.step_part_cases import MICRO, WIDTH, Net, spoilt_on_one_rank
from tide import faults
from tide.testing import fresh_tide  # noqa: F401

STEPS = 8
Disturb = Callable[[int, int], None]


@pytest.fixture(autouse=True)
def _disarmed(fresh_tide: None) -> Iterator[None]:  # noqa: F811
    yield
    faults.disarm()


def train(device: str, disturb: Disturb | None = None, *, given: bool = True) -> tuple[list[Tensor], set[str]]:
    """Losses and final values of a loop with accumulation; the kinds of events. Without ``given`` lowtide is not on."""
    if device == "tide":
        tide.configure(preset="h100", capacity=1 << 30)
    torch.manual_seed(0)
    model = Net().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    run = lowtide.adapt(model, optimizer, verbose=False) if given else None
    if run is not None:
        run.__enter__()
    losses: list[Tensor] = []
    try:
        for step in range(STEPS):
            for number in range(MICRO):
                batch = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(MICRO * step + number))
                batch = batch.to(device)
                begun: list[int] = []

                def micro_batch(
                    batch: Tensor = batch, step: int = step, number: int = number, begun: list[int] = begun
                ) -> Tensor:
                    loss = model(batch)
                    begun.append(1)
                    if disturb is not None and len(begun) == 1:
                        disturb(step, number)
                    loss.backward()
                    return loss.detach()

                losses.append(run.part(micro_batch, last=number == MICRO - 1) if run is not None else micro_batch())
            optimizer.step()
            optimizer.zero_grad()
        kinds = {event.kind for event in run.events} if run is not None else set()
    finally:
        if run is not None:
            run.remove()
    return [one.detach().cpu() for one in [*losses, *model.state_dict().values()]], set(kinds)


def out_of_memory(in_step: int, in_part: int) -> Disturb:
    """OOM in the backward of one micro-batch, by an error that no operator can be retried from."""

    def disturb(step: int, number: int) -> None:
        if (step, number) == (in_step, in_part):
            raise torch.OutOfMemoryError("tide out of memory. Tried to allocate 1.00 KiB.")

    return disturb


@pytest.mark.parametrize("device", ["cpu", "tide"])
def test_a_loop_in_parts_is_exact(device: str) -> None:
    expected, _ = train(device, given=False)
    found, _ = train(device)
    assert all(map(torch.equal, expected, found))


@pytest.mark.parametrize(
    ("step", "number"),
    [
        pytest.param(step, number, id=f"{name}-{number}", marks=[] if number == place % MICRO else [pytest.mark.slow])
        for place, (name, step) in enumerate({"safe": 0, "profiled first": 1, "profiled": 3, "planned": 7}.items())
        for number in range(MICRO)
    ],
)
def test_the_micro_batches_so_far_are_retried_together(step: int, number: int) -> None:
    expected, _ = train("tide", given=False)
    found, kinds = train("tide", out_of_memory(step, number))
    assert "retried" in kinds
    assert all(map(torch.equal, expected, found))


def test_another_error_is_the_loops_own() -> None:
    def disturb(step: int, number: int) -> None:
        raise RuntimeError("a shape is wrong")

    with pytest.raises(RuntimeError, match="a shape is wrong"):
        train("tide", disturb)


def test_a_micro_batch_that_never_fits_is_a_rescue_error() -> None:
    tide.configure(preset="h100", capacity=1 << 30)
    model = Net().to("tide")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def never_fits() -> None:
        model(torch.ones(4, WIDTH, device="tide"))
        raise torch.OutOfMemoryError("tide out of memory. Tried to allocate 1.00 KiB.")

    with lowtide.adapt(model, optimizer, verbose=False) as run, pytest.raises(RescueError, match="begun 4 times"):
        run.part(never_fits)


def test_a_part_in_which_an_optimizer_has_stepped_is_not_retried() -> None:
    tide.configure(preset="h100", capacity=1 << 30)
    model = Net().to("tide")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def whole() -> None:
        model(torch.ones(4, WIDTH, device="tide")).backward()
        optimizer.step()
        raise torch.OutOfMemoryError("tide out of memory. Tried to allocate 1.00 KiB.")

    run = lowtide.adapt(model, optimizer, verbose=False)
    with run, pytest.raises(RescueError, match="after the optimizer had begun"):
        run.part(whole)


def test_ranks_retry_their_parts_together(ranks: Ranks) -> None:
    expected = ranks.run(spoilt_on_one_rank, -1)
    found = ranks.run(spoilt_on_one_rank, 1)
    assert [runs for _, runs in expected] == [3 * MICRO] * 2
    assert [runs for _, runs in found] == [4 * MICRO] * 2
    for (mine, _), (its, _) in zip(expected, found, strict=True):
        assert all(map(torch.equal, mine, its))
