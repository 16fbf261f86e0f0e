"""Asynchronous mode: the streams are threads, so what is late is really late."""

import random
import threading

import pytest
import torch
from offload import WAITS, offload

import tide
from tide import faults


@pytest.fixture(autouse=True)
def asynchronous(fresh_tide):
    tide.configure(mode="async")
    yield
    torch.accelerator.synchronize()


def slow_kernel() -> torch.Tensor:
    """Some tenths of a second of work."""
    a = torch.ones(1200, 1200, device="tide", dtype=torch.float64)
    torch.accelerator.synchronize()
    for _ in range(4):
        a = (a @ a).clamp_(max=1)
    return a


def test_kernels_are_queued_and_events_end_when_they_have_run():
    slow_kernel()
    event = torch.Event("tide")
    event.record()
    assert not event.query()
    assert not torch.accelerator.current_stream().query()
    event.synchronize()
    assert event.query()


def test_streams_run_beside_each_other_and_wait_for_events():
    main, side = torch.accelerator.current_stream(), torch.Stream("tide")
    x = torch.zeros(8, device="tide")
    torch.accelerator.synchronize()
    slow_kernel()
    with side:
        quick = torch.ones(8, device="tide")
    side.synchronize()
    assert not main.query()  # the other stream did not wait for this one
    side.wait_stream(main)
    with side:
        x.add_(quick)
    side.synchronize()
    assert main.query()
    assert x[0].item() == 1


def test_a_copy_that_nobody_waits_for_is_late(expect_races):
    x = torch.full((1000,), 3.0, device="tide")
    host = torch.zeros(1000).pin_memory()
    torch.accelerator.synchronize()
    faults.delay_copy(1, 10**6)
    host.copy_(x, non_blocking=True)
    assert host.sum().item() == 0
    torch.accelerator.synchronize()
    assert host.sum().item() == 3000
    assert expect_races()


def test_a_freed_block_is_poisoned_in_its_streams_order():
    for _ in range(20):
        x = torch.ones(2**16, device="tide")
        y = x.sum()
        del x
        assert y.item() == 2**16


def test_an_error_in_a_queued_kernel_surfaces_at_the_next_synchronisation():
    x = torch.zeros(4, device="tide")
    bad = torch.tensor([9], device="tide")
    torch.gather(x, 0, bad)
    with pytest.raises(RuntimeError, match="out of bounds"):
        torch.accelerator.synchronize()
    torch.accelerator.synchronize()
    assert (x + 1).sum().item() == 4


def test_reset_drops_an_error_nobody_waited_for():
    torch.gather(torch.zeros(4, device="tide"), 0, torch.tensor([9], device="tide"))
    tide.reset()
    torch.accelerator.synchronize()


@pytest.mark.parametrize("missing", WAITS)
def test_missing_waits_are_reported_here_too(missing, expect_races):
    offload(random.Random(1), missing)
    assert expect_races()


def test_the_correct_program_is_right_over_many_schedules():
    for seed in range(60):
        assert offload(random.Random(seed)) == 0, seed


def test_random_numbers_are_those_of_virtual_mode():
    torch.manual_seed(3)
    a = [torch.randn(50, device="tide"), torch.nn.functional.dropout(torch.ones(50, device="tide"))]
    tide.configure(mode="virtual")
    torch.manual_seed(3)
    b = [torch.randn(50, device="tide"), torch.nn.functional.dropout(torch.ones(50, device="tide"))]
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_waiting_does_not_hold_the_interpreter():
    ticks = []
    stop = threading.Event()

    def tick() -> None:
        while not stop.wait(0.005):
            ticks.append(1)

    thread = threading.Thread(target=tick)
    thread.start()
    slow_kernel()
    before = len(ticks)
    torch.accelerator.synchronize()
    after = len(ticks)
    stop.set()
    thread.join()
    assert after > before


def test_segments_are_given_back_only_when_their_streams_are_done():
    tide.configure(capacity=64 * 2**20)
    for value in range(8):
        x = torch.full((10 * 2**20,), float(value), device="tide")
        y = x.sum()
        del x
        assert y.item() == value * 10 * 2**20
        torch.empty(60 * 2**20, dtype=torch.uint8, device="tide")
