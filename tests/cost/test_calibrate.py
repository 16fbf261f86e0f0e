"""A device is measured: on the virtual one, whose efficiencies are hidden, to the nanosecond; on a CPU, roughly."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import tide
from lowtide.cost.calibrate import calibrate, measure_more
from lowtide.cost.device import Device, Reserve
from lowtide.cost.kernel import copy_seconds, kernel_seconds
from lowtide.cost.stopwatch import settled_seconds, watch_for
from lowtide.trace.capture import capture
from lowtide.trace.trace import Kernel, Trace, kernels_of
from models.shapes import built, deepseek, llama, loss_of, tokens
from tide.testing import fresh_tide  # noqa: F401

TIDE = torch.device("tide")


def hidden(seed: int) -> None:
    tide.configure(preset=tide.scaled("h100", 1 / 8), efficiency_seed=seed)


def estimated(device: Device, trace: Trace) -> float:
    """Seconds of all kernels of a step."""
    parts = [trace.before, *(trace.parts[place] for place in trace.layers), trace.after]
    return sum(kernel_seconds(device, kernel._replace(seconds=None)) for part in parts for kernel in part.kernels)


@pytest.mark.parametrize(("seed", "shape"), [(1, llama()), (2, deepseek()), (3, llama(qk_norm=True, num_layers=2))])
def test_kernels_of_a_trace_are_measured_to_a_thousandth_whatever_the_hidden_efficiencies(
    seed: int, shape: Any
) -> None:
    hidden(seed)
    model, given = built(shape).to(TIDE), tokens().to(TIDE)
    trace = capture(model, lambda: loss_of(model(given), given))
    found = calibrate(TIDE, kernels_of(trace), standard=False)
    with tide.record() as timeline:
        loss_of(model(given), given).backward()
    truth = sum(span["duration"] for span in timeline.spans if span["lane"].startswith("stream")) / 1e9
    assert found.failed == {}
    assert estimated(found.device, trace) == pytest.approx(truth, rel=1e-3)


@pytest.mark.parametrize("seed", [1, 2])
def test_links_and_latencies_are_found(seed: int) -> None:
    hidden(seed)
    found = calibrate(TIDE, standard=False).device
    size = 3 << 20
    there, host = torch.zeros(size, dtype=torch.uint8, device=TIDE), torch.zeros(size, dtype=torch.uint8).pin_memory()
    with tide.record() as timeline:
        host.copy_(there, non_blocking=True)
        there.copy_(host, non_blocking=True)
    for way, span in zip(("out", "in"), timeline.spans, strict=True):
        assert copy_seconds(found, size, "out" if way == "out" else "in") == pytest.approx(
            span["duration"] / 1e9, rel=1e-3
        )
    settings = tide.configuration()
    assert found.launch == pytest.approx(settings["launch"] / 1e9, rel=1e-3)
    assert found.kernel_latency == pytest.approx(settings["kernel_latency"] / 1e9, rel=5e-3)
    assert found.capacity == settings["capacity"]
    assert found.reserve == replace(Reserve(), driver=0)  # nothing of its memory is anyone's but torch's


def test_more_kernels_are_measured_on_a_device_that_is_known_and_the_others_stay() -> None:
    hidden(4)
    first, second = (Kernel("aten::exp", shape=f"f32[{size}]", touched=8 * size) for size in (4096, 65536))
    known = calibrate(TIDE, [first], standard=False).device
    found = measure_more(known, TIDE, [first, second])
    assert found.kernels == 1
    assert found.device.efficiency == known.efficiency
    assert set(found.device.measured) == {"aten::exp|float32|f32[4096]", "aten::exp|float32|f32[65536]"}
    assert kernel_seconds(known, second) == pytest.approx(kernel_seconds(found.device, second), rel=0.01)


def test_measuring_draws_no_random_number_of_a_training() -> None:
    kernels = [
        Kernel("aten::native_dropout", shape="f32[8,8],0.5,True"),
        Kernel("aten::bernoulli_", shape="f32[8],0.5"),
    ]
    for device in (TIDE, torch.device("cpu")):
        torch.manual_seed(3)
        expected = torch.rand(3, device=device).cpu()
        torch.manual_seed(3)
        assert len(calibrate(device, kernels, standard=False).device.measured) == 2
        assert torch.equal(torch.rand(3, device=device).cpu(), expected)


def test_issuing_that_hides_behind_any_kernel_costs_nothing() -> None:
    tide.configure(preset="h100", launch=1000)
    assert calibrate(TIDE, standard=False).device.launch == 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_kernels_that_were_never_measured_are_estimated_to_a_hundredth(seed: int) -> None:
    hidden(seed)
    found = calibrate(TIDE).device
    left, right = torch.randn(300, 700, device=TIDE), torch.randn(700, 900, device=TIDE)
    with tide.record() as timeline:
        left @ right
        torch.nn.functional.silu(left)
        left.softmax(-1)
    kernels = [
        Kernel("aten::mm", flops=2 * 300 * 700 * 900, touched=4 * (300 * 700 + 700 * 900 + 300 * 900)),
        Kernel("aten::silu", touched=2 * 4 * 300 * 700),
        Kernel("aten::_softmax", touched=2 * 4 * 300 * 700),
    ]
    for kernel, span in zip(kernels, timeline.spans, strict=True):
        assert kernel_seconds(found, kernel) == pytest.approx(span["duration"] / 1e9, rel=0.01)


def test_a_cpu_is_measured_too_and_the_file_says_what_was_not(tmp_path: Path) -> None:
    kernels = [
        Kernel("aten::mm", shape="f32[128,128],f32[128,128]", flops=2 * 128**3, touched=3 * 4 * 128**2),
        Kernel("aten::mul", shape="f32[256,256],f32[256,256]", touched=3 * 4 * 256**2),
        Kernel("aten::no_such_thing", shape="f32[3]"),
        Kernel("aten::view", shape="f32[3],(3)"),
        Kernel("c10d::allreduce_", ranks=2, message=8),
    ]
    found = calibrate(torch.device("cpu"), kernels, standard=False, seconds=1)
    assert set(found.device.measured) == {
        "aten::mm|float32|f32[128,128],f32[128,128]",
        "aten::mul|float32|f32[256,256],f32[256,256]",
    }
    assert all(1e-7 < seconds < 1 for seconds in found.device.measured.values())
    assert list(found.failed) == ["aten::no_such_thing|float32|f32[3]"]
    assert any("aten::no_such_thing" in note for note in found.device.notes)
    assert any("network" in note for note in found.device.notes)
    found.device.save(tmp_path / "cpu.json")
    assert Device.load(tmp_path / "cpu.json") == found.device


def test_a_kernel_is_timed_without_what_issuing_it_takes() -> None:
    tide.configure(preset="h100", launch=50_000)
    tensor = torch.ones(4, device=TIDE)
    watch = watch_for(TIDE)
    (seconds,) = settled_seconds([tensor.neg], watch, rounds=3)
    assert seconds == pytest.approx(2e-6, rel=0.01)
    assert watch.issued(tensor.neg, 10) > 40e-6
