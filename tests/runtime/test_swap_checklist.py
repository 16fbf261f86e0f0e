"""Swapping safely: one test for each mistake that has corrupted somebody's gradients. Here: ordering and lifetime.

Races are found by the virtual accelerator, whatever the numbers are. A slow link makes every copy last longer than the
steps it runs beside, so that whoever forgets to wait is early.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tide
from lowtide.policy import Swap
from lowtide.runtime.ledger import Ledger, Line
from lowtide.runtime.limits import Limits
from lowtide.runtime.link import Link
from lowtide.runtime.swap import SwapManager
from lowtide.runtime.swapped import Swapped
from lowtide.runtime.transfer import Transfer
from support.garbage import collect_garbage
from support.stacks import ROWS, WIDTH, gated, lines, same, swap, train
from tide.testing import expect_races, fresh_tide  # noqa: F401

EVERYTHING = 1 << 40


@pytest.fixture
def slow_link() -> None:
    tide.configure(preset="h100", device_to_host_bandwidth=10**6, host_to_device_bandwidth=10**6)


def batch() -> Tensor:
    return torch.randn(ROWS, WIDTH, device="tide")


def held() -> int:
    return int(torch.accelerator.memory_allocated())


@pytest.fixture
def manager() -> SwapManager:
    return SwapManager(Limits(minimum_bytes=1), Ledger())


def leave(manager: SwapManager, source: Tensor, line: Line | None = None, *, tier: Any = "host") -> Swapped:
    """Swap one tensor by hand."""
    swapped = manager.offload(source, source.nbytes, Swap(tier=tier), line or manager.ledger.line(0, "x"))
    assert swapped is not None
    return swapped


# Ordering


@pytest.mark.parametrize("prefetch", [1, 4, 1000])
def test_the_compute_stream_is_asked_for_at_each_use(slow_link: None, prefetch: int) -> None:
    """Every step runs on a stream of its own."""

    def around(number: int) -> torch.Stream:
        stream = torch.Stream("tide")
        stream.wait_stream(torch.accelerator.current_stream())
        torch.accelerator.synchronize()
        return stream

    expected = train(gated, None, around=around)
    assert same(expected.values, train(gated, swap(prefetch=prefetch), around=around).values)


@pytest.mark.parametrize("prefetch", [1, 4])
@pytest.mark.parametrize("tier", ["host", "disk"])
def test_a_copy_out_waits_for_compute(prefetch: int, tier: Any) -> None:
    tide.configure(preset="h100", flops_fp32=10**9)  # the computation is late
    expected = train(gated, None)
    assert same(expected.values, train(gated, swap(prefetch=prefetch, tier=tier)).values)


def test_a_gathered_view_is_gathered_before_its_copy_out(slow_link: None) -> None:
    def body(layer: Any, x: Tensor) -> Tensor:
        hidden = layer.up(layer.norm(x))
        return x + layer.down(hidden[:, ::5].sin().repeat(1, 5)[:, : hidden.shape[1]])

    expected = train(body, None)
    found = train(body, swap("up", prefetch=1))
    assert same(expected.values, found.values)
    assert lines(found.attached, "up")[0].spared_bytes > 0


@pytest.mark.parametrize("ahead", [True, False], ids=["ahead", "on demand"])
def test_every_copy_back_waits_for_its_copy_out(slow_link: None, manager: SwapManager, ahead: bool) -> None:
    """On a stream that has never heard of the computation that wrote the tensor."""
    source = torch.arange(4096.0).to("tide")
    swapped = leave(manager, source)
    swapped.release()
    del source
    with torch.Stream("tide"):
        if ahead:
            swapped.prefetch()
        found = swapped.tensor()
        assert torch.equal(found.cpu(), torch.arange(4096.0))


def test_a_copy_back_waits_for_compute_before_it_writes(slow_link: None) -> None:
    """Its memory comes from the compute stream's pool, where kernels may still be using it."""
    collect_garbage()
    torch.accelerator.empty_cache()
    held = torch.accelerator.memory_reserved()  # what other tests of this process still hold, in whole segments
    tide.configure(flops_fp32=10**8, memory_bandwidth=10**7, capacity=held + (2 << 20))
    expected = train(gated, None)
    assert same(expected.values, train(gated, swap(prefetch=3)).values)


def test_targets_are_allocated_on_the_compute_stream(manager: SwapManager, monkeypatch: pytest.MonkeyPatch) -> None:
    swapped = leave(manager, torch.ones(1024, device="tide"))
    swapped.release()
    real, seen = torch.empty, []

    def empty(*args: Any, **kwargs: Any) -> Tensor:
        seen.append(torch.accelerator.current_stream())
        return real(*args, **kwargs)

    monkeypatch.setattr(torch, "empty", empty)
    side = torch.Stream("tide")
    with side:
        swapped.prefetch()
    assert seen == [side]


def test_a_stream_is_what_it_was_after_copies_on_several_threads(manager: SwapManager) -> None:
    """A stream remembers the one it replaced in itself, for all threads."""
    link = Link(torch.device("tide", 0), manager.pinned_pool, manager.ledger)
    transfer = link.transfer
    assert transfer is not None
    inside, done = threading.Event(), threading.Event()

    class Slow(torch.Tensor):
        """Its copy begins while the other thread's is under way, and ends first."""

        def copy_(self, *args: Any, **kwargs: Any) -> Any:
            thread.start()
            inside.wait(0.2)
            return self

    class Slower(torch.Tensor):
        def copy_(self, *args: Any, **kwargs: Any) -> Any:
            inside.set()
            done.wait(0.2)
            return self

    source = torch.ones(4, device="tide")
    target = torch.empty(4).as_subclass(Slower)
    thread = threading.Thread(target=transfer.reload, args=(source, target, None))
    side = torch.Stream("tide")
    with side:
        transfer.reload(source, torch.empty(4).as_subclass(Slow), None)
        done.set()
        thread.join()
        assert transfer.compute() == side


# Lifetime


def test_nothing_is_recorded_on_other_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> None:
        raise AssertionError("record_stream")

    monkeypatch.setattr(Tensor, "record_stream", refuse)
    for tier in ("host", "disk"):
        train(gated, swap(prefetch=2, tier=tier))


def test_a_graph_that_ends_outside_its_stream_returns_its_memory_in_order(slow_link: None) -> None:
    model = train(gated, swap(prefetch=1000)).model
    x = batch()
    torch.accelerator.synchronize()
    side = torch.Stream("tide")
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        loss = model(x).sum()
    del loss
    gc.collect()
    with side:  # the memory of what was still leaving is here
        kept = [torch.zeros(ROWS, 2 * WIDTH, device="tide") for _ in range(30)]
    assert len(kept) == 30


def test_every_stream_that_uses_what_came_back_waits_for_it(slow_link: None, manager: SwapManager) -> None:
    swapped = leave(manager, torch.arange(4096.0).to("tide"))
    swapped.release()
    swapped.prefetch()
    streams = [torch.Stream("tide") for _ in range(2)]
    found = []
    for stream in streams:
        with stream:
            found.append(swapped.tensor() + 1)
    del swapped
    kept = [torch.zeros(4096, device="tide") for _ in range(4)]  # must not be given memory that is still read
    torch.accelerator.synchronize()
    assert all(torch.equal(one.cpu(), torch.arange(4096.0) + 1) for one in found)
    assert len(kept) == 4


def test_what_is_in_flight_in_forward_is_bounded_by_bytes(slow_link: None) -> None:
    def after_forward(in_flight: int) -> int:
        limits = Limits(minimum_bytes=1, in_flight_bytes=in_flight)
        trained = train(gated, swap("silu", "sigmoid", "mul", prefetch=1000), limits=limits)
        x, before = batch(), held()
        loss = trained.model(x).sum()
        assert trained.attached.manager.schedule.freeing_bytes <= in_flight
        used = held() - before
        loss.backward()
        return used

    one = ROWS * 2 * WIDTH * 4
    unbounded, three = after_forward(EVERYTHING), after_forward(3 * one)
    assert unbounded - three == 6 * one  # nine were to leave, three are still on their way


@pytest.mark.parametrize("prefetch", [1, 3, 1000])
def test_before_one_is_dropped_compute_waits_for_its_copy_out(slow_link: None, prefetch: int) -> None:
    limits = Limits(minimum_bytes=1, in_flight_bytes=20_000)
    expected = train(gated, None)
    assert same(expected.values, train(gated, swap(prefetch=prefetch), limits=limits).values)


def test_what_came_back_goes_at_the_end_of_the_graph_task(slow_link: None) -> None:
    model = train(gated, swap(prefetch=2)).model
    x = batch()
    model.zero_grad()
    loss = model(x).sum()
    before = held()
    for _ in range(2):
        torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        wait_until(lambda: held() == before)  # the engine's thread lets go of what it held when it gets to it


def test_what_is_still_on_the_device_is_handed_back() -> None:
    expected = train(gated, None)
    found = train(gated, swap("mul", prefetch=1000))
    assert same(expected.values, found.values)
    for line in lines(found.attached, "mul"):
        assert line.swaps
        assert line.handed_back_bytes == line.moved_bytes
        assert line.freed_bytes == 0
    with tide.record() as timeline:
        found.model(batch()).sum().backward()
    assert not [span for span in timeline.spans if span["lane"] == "link in"]


@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize("device", ["cpu", "tide"])
def test_unpack_may_come_several_times(device: str, tier: Any) -> None:
    def twice(loss: Tensor) -> None:
        loss.backward(retain_graph=True)
        loss.backward()

    expected = train(gated, None, device=device, backward=twice)
    assert same(expected.values, train(gated, swap(tier=tier), device=device, backward=twice).values)


@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize("prefetch", [1, 1000])
def test_unpack_may_never_come(slow_link: None, prefetch: int, tier: Any) -> None:
    trained = train(gated, swap(prefetch=prefetch, tier=tier))
    x = batch()
    before, pool = held(), trained.attached.manager.pinned_pool
    for _ in range(3):
        trained.model(x).sum()
        collect_garbage()
    wait_until(lambda: pool.taken == sum(one.size for line in lines(trained.attached) for one in line.stash))
    assert held() == before


@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize("device", ["cpu", "tide"])
def test_unpack_may_come_from_another_thread(device: str, tier: Any) -> None:
    def elsewhere(loss: Tensor) -> None:
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()

    expected = train(gated, None, device=device)
    assert same(expected.values, train(gated, swap(tier=tier), device=device, backward=elsewhere).values)


def test_a_graph_may_be_used_after_the_handle_is_removed() -> None:
    for tier in ("host", "disk"):
        trained = train(gated, swap(prefetch=1, tier=tier))
        x = batch()
        trained.model.zero_grad()
        loss = trained.model(x).sum()
        trained.attached.remove()
        loss.backward()
        found = [one.grad for one in trained.model.parameters()]
        trained.model.zero_grad()
        trained.model(x).sum().backward()
        assert same(found, [one.grad for one in trained.model.parameters()])


def wait_until(condition: Callable[[], bool]) -> None:
    """The disk works on threads of its own."""
    end = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_the_race_detector_sees_a_missing_wait(
    expect_races: Callable[[], list[tide.Race]],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The control: this file would notice."""
    tide.configure(preset="h100", flops_fp32=10**9)
    real = Transfer.offload

    def without_waiting(self: Transfer, source: Tensor, target: Tensor, available: Any) -> Any:
        self.outward, outward = torch.Stream("tide"), self.outward
        monkeypatch.setattr(self, "compute", lambda: self.outward)
        try:
            return real(self, source, target, available)
        finally:
            self.outward = outward
            monkeypatch.undo()
            monkeypatch.setattr(Transfer, "offload", without_waiting)

    monkeypatch.setattr(Transfer, "offload", without_waiting)
    train(gated, swap(prefetch=2), steps=2)
    assert expect_races()
