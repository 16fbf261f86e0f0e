import gc
import time

import pytest
import torch
from llama import Shape, build, step

import tide
from tide import faults


def allocated() -> int:
    return torch.accelerator.memory_allocated()


def settles_at(nbytes: int) -> bool:
    """Autograd's device thread lets go of a failed graph a moment after the caller is told."""
    deadline = time.monotonic() + 5
    while allocated() != nbytes and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.001)
    return allocated() == nbytes


@pytest.mark.parametrize("autocast", [False, True])
def test_every_allocation_of_a_step_can_fail_and_nothing_leaks(autocast):
    model, tokens = build(Shape(layers=1, width=32, hidden=64), "tide")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step(model, optimizer, tokens, autocast)
    gc.collect()
    before = allocated()
    faults.disarm()
    step(model, optimizer, tokens, autocast)
    count = faults.allocations_seen()
    assert count > 100
    for number in range(1, count + 1):
        faults.fail_allocation(number)
        with pytest.raises(torch.OutOfMemoryError):
            step(model, optimizer, tokens, autocast)
        assert faults.allocations_seen() == number
        faults.disarm()
        optimizer.zero_grad(set_to_none=True)
        assert settles_at(before), f"allocation {number} of {count} leaked"
    print(f"{count} allocations failed one by one (autocast {autocast}), none leaked")


def test_capacity_can_shrink_below_what_is_allocated():
    held = [torch.empty(2**20, dtype=torch.uint8, device="tide") for _ in range(4)]
    faults.shrink_capacity(2, 2**20)
    torch.empty(512, dtype=torch.uint8, device="tide")
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(512, dtype=torch.uint8, device="tide")
    del held[0]
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(512, dtype=torch.uint8, device="tide")
    del held[0]
    torch.empty(512, dtype=torch.uint8, device="tide")


def test_a_copy_can_fail_and_the_next_one_works():
    x = torch.ones(4)
    faults.fail_copy(2)
    x.to("tide")
    with pytest.raises(RuntimeError, match="copy 2 failed"):
        x.to("tide")
    assert x.to("tide").tolist() == [1] * 4


def test_a_delayed_copy_takes_longer_by_exactly_the_delay():
    x = torch.ones(2**20, pin_memory=True)

    def duration() -> int:
        with tide.record() as timeline:
            x.to("tide", non_blocking=True)
        return timeline.spans[0]["duration"]

    plain = duration()
    faults.delay_copy(1, 12345)
    assert duration() == plain + 12345
    faults.reorder_copy(1)
    assert duration() == 2 * plain
    faults.disarm()
    assert duration() == plain


def test_pinned_memory_can_run_out():
    faults.exhaust_pinned_memory()
    with pytest.raises(RuntimeError, match="could not pin"):
        torch.empty(4, pin_memory=True)
    faults.disarm()
    torch.empty(4, pin_memory=True)


def test_a_callback_may_make_room_and_ask_for_another_try():
    tide.configure(capacity=8 * 2**20)
    hoard = [torch.ones(2**18, device="tide") for _ in range(8)]
    calls = []

    def make_room(nbytes: int, device: int) -> bool:
        calls.append((nbytes, device))
        hoard.pop()
        hoard.pop()
        hoard[0].add_(1)  # the device may be used inside
        return len(calls) < 3

    faults.on_allocation_failure(make_room)
    x = torch.empty(2**20, dtype=torch.uint8, device="tide")
    assert calls == [(2**20, 0)]
    assert x.numel() == 2**20
    assert hoard[0][0].item() == 2
    faults.on_allocation_failure(lambda nbytes, device: False)
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(2**23, dtype=torch.uint8, device="tide")


def test_numbers_start_at_one():
    with pytest.raises(ValueError, match="one"):
        faults.fail_copy(0)
