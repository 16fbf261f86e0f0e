import gc
import json

import pytest
import torch
from llama import Shape, build, step

import tide

# A machine with round numbers: a byte of memory or link takes a nanosecond, nothing has latency.
PLAIN = dict(
    launch=0,
    kernel_latency=0,
    copy_latency=0,
    flops_fp32=10**9,
    flops_half=2 * 10**9,
    memory_bandwidth=10**9,
    host_to_device_bandwidth=10**9,
    device_to_host_bandwidth=10**9,
)


def stream() -> torch.Stream:
    return torch.Stream("tide")


def makespan(program) -> int:
    """Nanoseconds from an idle device to an idle device."""
    torch.accelerator.synchronize()
    start = tide.now()
    program()
    torch.accelerator.synchronize()
    return tide.now() - start


def test_a_kernel_takes_the_longer_of_compute_and_memory():
    tide.configure(**PLAIN)
    x = torch.zeros(1000, device="tide")
    assert makespan(lambda: x.add_(1)) == 3 * 4000 - 4000  # read 4000 bytes, write 4000
    a, b = torch.zeros(10, 20, device="tide"), torch.zeros(20, 30, device="tide")
    assert makespan(lambda: a @ b) == 2 * 10 * 20 * 30
    a, b = a.bfloat16(), b.bfloat16()
    assert makespan(lambda: a @ b) == 10 * 20 * 30
    v = torch.zeros(1, 20, device="tide")
    w = torch.zeros(20, 400, device="tide")
    assert makespan(lambda: v @ w) == max(2 * 400 * 20, 4 * (20 + 400 * 20 + 400)) == 33680


def test_launch_and_latency_add_up():
    tide.configure(**{**PLAIN, "launch": 500, "kernel_latency": 70})
    x = torch.zeros(1000, device="tide")
    assert makespan(lambda: x.add_(1)) == 500 + 70 + 8000
    tide.configure(launch=10_000)

    def two() -> None:
        x.add_(1)
        x.add_(1)

    assert makespan(two) == 2 * 10_000 + 8070  # the host is slower than the device


def offload(size: int, compute: int, copies: int, overlapped: bool):
    """`compute` kernels of 8000 ns each, and copies of `size` bytes beside or after them."""
    x = torch.zeros(1000, device="tide")
    y = [torch.zeros(size, dtype=torch.uint8, device="tide") for _ in range(copies)]
    host = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(copies)]
    sides = [stream() for _ in range(copies)]

    def program() -> None:
        main = torch.accelerator.current_stream()
        for side, source, target in zip(sides, y, host, strict=True):
            side.wait_stream(main)
            with side:
                target.copy_(source, non_blocking=True)
            if not overlapped:
                main.wait_stream(side)
        for _ in range(compute):
            x.add_(1)

    return program


def test_an_overlapped_copy_is_hidden():
    tide.configure(**PLAIN)
    assert makespan(offload(size=30_000, compute=5, copies=1, overlapped=True)) == 5 * 8000


def test_an_exposed_copy_is_added():
    tide.configure(**PLAIN)
    assert makespan(offload(size=30_000, compute=5, copies=1, overlapped=False)) == 70_000


def test_a_copy_longer_than_the_compute_shows_its_rest():
    tide.configure(**PLAIN)
    assert makespan(offload(size=50_000, compute=5, copies=1, overlapped=True)) == 50_000


def test_two_copies_share_one_link():
    tide.configure(**PLAIN)
    assert makespan(offload(size=30_000, compute=5, copies=2, overlapped=True)) == 60_000


def test_the_two_directions_do_not_share():
    tide.configure(**PLAIN)
    out, back = stream(), stream()
    x = torch.zeros(30_000, dtype=torch.uint8, device="tide")
    y = torch.zeros(30_000, dtype=torch.uint8, device="tide")
    host = torch.empty(30_000, dtype=torch.uint8, pin_memory=True)
    other = torch.empty(30_000, dtype=torch.uint8, pin_memory=True)
    torch.accelerator.synchronize()

    def program() -> None:
        with out:
            host.copy_(x, non_blocking=True)
        with back:
            y.copy_(other, non_blocking=True)

    assert makespan(program) == 30_000


def test_events_measure_and_order():
    tide.configure(**PLAIN)
    main, side = torch.accelerator.current_stream(), stream()
    x = torch.zeros(1000, device="tide")
    torch.accelerator.synchronize()
    first, second, third = (torch.Event("tide", enable_timing=True) for _ in range(3))
    first.record()
    x.add_(1)
    second.record()
    side.wait_event(second)
    with side:
        x.add_(1)
        third.record()
    assert not third.query()
    third.synchronize()
    assert first.elapsed_time(second) == 0.008
    assert first.elapsed_time(third) == 0.016
    assert third.query() and tide.now() == tide.idle_at(side)
    main.wait_event(third)


def test_elapsed_time_needs_timing():
    a, b = torch.Event("tide"), torch.Event("tide")
    a.record()
    b.record()
    with pytest.raises(ValueError, match="enable_timing"):
        a.elapsed_time(b)


def test_polling_an_event_ends():
    x = torch.zeros(2**20, device="tide")
    x.add_(1)
    event = torch.Event("tide")
    event.record()
    polls = 0
    while not event.query():
        polls += 1
    assert polls > 0 and tide.now() >= tide.idle_at()


WAITING = {
    "item": lambda x, host: x[0].item(),
    "nonzero": lambda x, host: x.nonzero(),
    "boolean index": lambda x, host: x[x > 0],
    "pageable copy": lambda x, host: x.cpu(),
    "blocking copy to pinned": lambda x, host: host.copy_(x),
    "pageable copy in, non_blocking": lambda x, host: x.copy_(host.clone(), non_blocking=True),
    "equal": lambda x, host: torch.equal(x, x.clone()),
    "synchronize": lambda x, host: torch.accelerator.synchronize(),
}
NOT_WAITING = {
    "kernel": lambda x, host: x + 1,
    "pinned copy out": lambda x, host: host.copy_(x, non_blocking=True),
    "pinned copy in": lambda x, host: x.copy_(host, non_blocking=True),
}


@pytest.mark.parametrize("name", WAITING)
def test_the_host_waits_at(name):
    x, host = torch.zeros(2**20, device="tide"), torch.zeros(2**20).pin_memory()
    before = tide.idle_at()
    assert before > tide.now()
    WAITING[name](x, host)
    assert tide.now() >= before


@pytest.mark.parametrize("name", NOT_WAITING)
def test_the_host_does_not_wait_at(name):
    tide.configure(launch=10)
    x, host = torch.zeros(2**20, device="tide"), torch.zeros(2**20).pin_memory()
    before = tide.idle_at()
    NOT_WAITING[name](x, host)
    assert tide.now() < before < tide.idle_at()
    torch.accelerator.synchronize()


def test_every_stream_is_its_own():
    streams = [stream() for _ in range(100)]
    assert len({s.stream_id for s in streams}) == 100
    x = torch.zeros(2**20, device="tide")
    torch.accelerator.synchronize()
    with streams[0]:
        x.add_(1)
    assert tide.idle_at(streams[0]) > tide.now()
    assert all(tide.idle_at(s) <= tide.now() for s in streams[1:])
    torch.accelerator.synchronize()


def test_virtual_time_is_the_same_in_twenty_runs():
    times, peaks = set(), set()
    for _ in range(20):
        gc.collect()
        tide.reset()
        tide.configure(preset=tide.scaled("h100", 1 / 8))
        model, tokens = build(Shape(layers=2), "tide")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for _ in range(2):
            step(model, optimizer, tokens, autocast=True)
        torch.accelerator.synchronize()
        times.add(tide.now())
        peaks.add(tuple(torch.accelerator.memory_stats().items()))
        del model, optimizer, tokens
    print(f"20 runs: {times} ns")
    assert len(times) == 1
    assert len(peaks) == 1  # every statistic of the allocator, not only the peak


def test_virtual_time_is_the_same_in_asynchronous_mode():
    times = []
    for mode in ("virtual", "async"):
        tide.reset()
        tide.configure(mode=mode)
        model, tokens = build(Shape(layers=2), "tide")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        step(model, optimizer, tokens, autocast=True)
        torch.accelerator.synchronize()
        times.append(tide.now())
    assert times[0] == times[1]


def test_a_scaled_machine_keeps_the_proportions():
    def times(factor: int) -> list[int]:
        base = tide.preset("h100")
        tide.configure(preset=base if factor == 1 else tide.scaled(base, 1 / factor))
        width, rows = 512 // factor, 256 // factor
        a = torch.zeros(rows, width, device="tide", dtype=torch.bfloat16)
        b = torch.zeros(width, width, device="tide", dtype=torch.bfloat16)
        host = torch.empty(rows, width, dtype=torch.bfloat16, pin_memory=True)
        with tide.record() as timeline:
            a @ b
            a.add_(1)
            host.copy_(a, non_blocking=True)
        return [span["duration"] for span in timeline.spans]

    small, full = times(4), times(1)
    assert all(abs(a - b) <= 1 for a, b in zip(small, full, strict=True)), (small, full)


def test_hidden_efficiencies_are_seeded_and_bounded():
    def times(seed: int) -> list[int]:
        tide.configure(**PLAIN, efficiency_seed=seed)
        x = torch.zeros(1000, device="tide")
        a = torch.zeros(100, 100, device="tide")
        return [makespan(lambda: x.add_(1)), makespan(lambda: x.exp_()), makespan(lambda: a @ a)]

    plain, seeded = times(0), times(3)
    assert times(3) == seeded != times(4)
    ratios = [a / b for a, b in zip(plain, seeded, strict=True)]
    assert all(0.299 <= ratio <= 0.901 for ratio in ratios) and len(set(ratios)) == 3


def test_presets_have_the_promised_names():
    assert {"h100", "a100", "910b", "ascend_910b"} <= set(tide.PRESETS)
    with pytest.raises(ValueError, match="h100"):
        tide.preset("v100")
    with pytest.raises(TypeError, match="bandwith"):
        tide.configure(bandwith=3)


def test_a_timeline_can_be_exported(tmp_path):
    tide.configure(launch=0)
    x = torch.zeros(1000, device="tide")
    host = torch.empty(1000, pin_memory=True)
    with tide.record() as timeline:
        y = x + 1
        host.copy_(y, non_blocking=True)
        del y
    assert [span["lane"] for span in timeline.spans] == ["stream 0", "link out"]
    assert timeline.makespan() == timeline.busy("stream 0") + timeline.busy("link out")
    assert [sample["allocated"] for sample in timeline.memory] == [8192, 4096]
    timeline.save(tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())
    phases = [event["ph"] for event in trace["traceEvents"]]
    assert phases.count("X") == 2 and phases.count("C") == 2 and "M" in phases


def test_host_work_can_be_put_on_the_clock():
    before = tide.now()
    tide.advance(1234)
    assert tide.now() == before + 1234
