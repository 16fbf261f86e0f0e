"""Predicted against measured: peaks, reserved memory and step times of Policies, on tide and on the CPU.

    python benchmarks/predict.py --json

A case is a model, a layout and a Policy. Models: Llama of transformers, and the reference Llama and DeepSeek of this
project, in single precision and under bfloat16 autocast. Layouts: one micro-batch, two that accumulate, and two
pipeline stages (GPipe, 1F1B) in two processes, each with torch's own pipelining. Policies: nothing, everything, and
random ones over keep, recompute and swap of single operators and whole layers.

Each model is traced once. Its Trace goes through ``simulate``, which shares no code with tide; what tide's allocator
shows in a warm step is the truth. tide runs with efficiencies of kernels and links that follow from a seed; the times
that were measured with the Trace are thrown away, and what is predicted with is a device as ``lowtide calibrate``
measures it. The fabric between two processes is not calibrated: its bandwidth is the nominal one.

On the CPU the peak is the tensors' own bytes by the profiler's memory events. Times there: for every two Policies, the
ratio of their measured times against the ratio of their predicted ones. Swaps are left out, as the host is the device.

``peak_*`` and ``time_p95`` are relative errors over all cases on tide and, for peaks, on the CPU; ``reserved_p95``
those of what the allocator has taken from the device.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import tide
from lowtide.cost.calibrate import calibrate
from lowtide.cost.device import Device
from lowtide.planner.pipeline import Pipeline, ScheduleName, even_pipeline
from lowtide.planner.simulate import simulate
from lowtide.trace.trace import Kernel, Trace, kernels_of

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from predict_cases import (
    LAYERS,
    MODELS,
    Setting,
    Subject,
    measure_on_cpu,
    measure_stage,
    policies_for,
    use_machine,
)
from stamp import stamped
from support.ranks import Ranks

SETTINGS: tuple[Setting, ...] = ("fp32", "bf16")
MICRO_BATCHES = {"one": 1, "accumulated": 2}
PIPELINES: tuple[tuple[str, ScheduleName], ...] = (("llama", "1f1b"), ("llama", "gpipe"), ("deepseek", "1f1b"))
IN_PIPELINE = 4
"""Micro-batches of a pipeline's step."""
ADDING = Kernel("aten::add_", touched=1)
"""What adds the gradients of two micro-batches: a Trace of one has none."""


@dataclass(frozen=True)
class Case:
    """What was predicted for a case, and what was found."""

    name: str
    where: str
    peak: float
    """The relative error of the predicted peak."""
    reserved: float | None = None
    seconds: float | None = None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--quick", action="store_true", help="a few cases, in less than a minute")
    options = parser.parse_args()
    torch.set_num_threads(1)
    console = Console(stderr=True)
    begin = time.perf_counter()
    policies = 3 if options.quick else 7
    cases: list[Case] = []
    for name in ("llama",) if options.quick else tuple(MODELS):
        for setting in SETTINGS[:1] if options.quick else SETTINGS:
            for case in on_tide(name, setting, policies):
                cases.append(case)
        console.print(f"{name}: {len(cases)} cases, {time.perf_counter() - begin:.0f} s")
    if not options.quick:
        cases += in_pipelines(policies - 1)
        console.print(f"pipelines: {len(cases)} cases, {time.perf_counter() - begin:.0f} s")
    found, ratios = on_cpu(3 if options.quick else 6, rounds=2 if options.quick else 5)
    cases += found
    summary = summarise(cases, ratios)
    show(console, cases, summary)
    if options.json:
        print(json.dumps(stamped(summary)))


def on_tide(name: str, setting: Setting, count: int) -> Iterator[Case]:
    """A model in one process."""
    use_machine(hidden=True)
    subject = Subject(name, setting, "tide")
    trace = subject.trace.without_seconds()
    device = calibrated(trace)
    for label, policy in policies_for(trace, seed_of(name, setting), count).items():
        for layout, micro_batches in MICRO_BATCHES.items():
            measured = subject.measure(policy, micro_batches)
            pipeline = even_pipeline(LAYERS, micro_batches=micro_batches)
            predicted = simulate(trace, policy, device, pipeline, optimizer=False)
            yield Case(
                f"{name}, {setting}, {layout}, {label}",
                "tide",
                error(predicted.peak, measured.peak),
                error(predicted.reserved, measured.reserved),
                error(predicted.seconds, measured.seconds),
            )


def in_pipelines(count: int) -> Iterator[Case]:
    """Two stages in two processes."""
    ranks = Ranks(2)
    try:
        for name, schedule in PIPELINES:
            use_machine(hidden=True)
            subject = Subject(name, "fp32", "tide")
            trace = subject.trace.without_seconds()
            device = calibrated(trace)
            policies = policies_for(trace, seed_of(name, schedule), count)
            texts = [policy.to_json() for policy in policies.values()]
            measured = ranks.run(measure_stage, name, schedule, IN_PIPELINE, texts)
            half = LAYERS // 2
            placement = ((tuple(range(half)),), (tuple(range(half, LAYERS)),))
            pipeline = Pipeline(placement=placement, micro_batches=IN_PIPELINE, schedule=schedule)
            for number, (label, policy) in enumerate(policies.items()):
                predicted = simulate(trace, policy, device, pipeline, optimizer=False)
                for stage in predicted.stages:
                    one = measured[stage.stage][number]
                    given = subject.given * IN_PIPELINE  # the whole batch; the one it was made of is in the Trace
                    yield Case(
                        f"{name}, fp32, {schedule} stage {stage.stage}, {label}",
                        "tide",
                        error(stage.peak + given, one.peak),
                        error(stage.reserved, one.reserved),
                        error(predicted.seconds, one.seconds),
                    )
    finally:
        ranks.stop()


def on_cpu(count: int, rounds: int) -> tuple[list[Case], list[float]]:
    """Peaks on the CPU, and the errors of predicted ratios of times."""
    subject = Subject("llama", "fp32", "cpu")
    trace = subject.trace.without_seconds()
    device = calibrate(torch.device("cpu"), [*kernels_of(trace), ADDING], standard=False, seconds=30).device
    policies = policies_for(trace, seed_of("llama", "cpu"), count, swap=False)
    measured = measure_on_cpu(subject, policies, rounds)
    cases, seconds = [], {}
    for label, policy in policies.items():
        stage = simulate(trace, policy, device, optimizer=False).stages[0]
        there = sum(sum(part.static.parameters) + sum(part.static.buffers) for part in parts(trace))
        cases.append(Case(f"llama, fp32, one, {label}", "cpu", error(stage.requested - there, measured[label][0])))
        seconds[label] = stage.seconds
    ratios = [
        error(seconds[one] / seconds[other], measured[one][1] / measured[other][1])
        for one, other in combinations(policies, 2)
    ]
    return cases, ratios


def parts(trace: Trace) -> list[Any]:
    """The parts of the whole model, one for each layer."""
    return [trace.before, trace.after, *(trace.parts[place] for place in trace.layers)]


def calibrated(trace: Trace) -> Device:
    """The device as a calibration measures it; the fabric as it is written on the box."""
    device = calibrate(torch.device("tide"), [*kernels_of(trace), ADDING], standard=False).device
    settings = tide.configuration()
    fabric = float(settings["fabric_bandwidth"])
    return replace(device, interconnect=fabric, network=fabric, collective_latency=settings["fabric_latency"] * 1e-9)


def seed_of(*names: str) -> int:
    """Other Policies for every model and setting."""
    return sum(map(ord, "".join(names)))


def error(predicted: float, measured: float) -> float:
    """How far off, as a share of what was measured."""
    return abs(predicted / measured - 1)


def at(values: Sequence[float], share: float) -> float:
    """The value that this share of the values does not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def summarise(cases: Sequence[Case], ratios: Sequence[float]) -> dict[str, Any]:
    """The figures."""
    peaks = [case.peak for case in cases]
    times = [case.seconds for case in cases if case.seconds is not None]
    reserved = [case.reserved for case in cases if case.reserved is not None]
    worst = sorted(cases, key=lambda case: -case.peak)[:3]
    slowest = sorted((case for case in cases if case.seconds is not None), key=lambda case: -(case.seconds or 0.0))[:3]
    return {
        "cases": len(cases),
        "peak_p50": at(peaks, 0.5),
        "peak_p95": at(peaks, 0.95),
        "peak_worst": max(peaks),
        "time_p95": at(times, 0.95),
        "time_worst": max(times),
        "reserved_p95": at(reserved, 0.95),
        "cpu_ratio_p95": at(ratios, 0.95),
        "worst_peaks": {f"{case.where}: {case.name}": case.peak for case in worst},
        "worst_times": {f"{case.where}: {case.name}": case.seconds for case in slowest},
    }


def show(console: Console, cases: Sequence[Case], summary: dict[str, Any]) -> None:
    """A table for people."""
    table = Table(title=f"Predicted against measured: {summary['cases']} cases")
    for column in ("", "half", "95 %", "worst"):
        table.add_column(column, justify="left" if not column else "right")
    rows = {
        "peak on tide": [case.peak for case in cases if case.where == "tide"],
        "peak on the CPU": [case.peak for case in cases if case.where == "cpu"],
        "reserved on tide": [case.reserved for case in cases if case.reserved is not None],
        "time on tide": [case.seconds for case in cases if case.seconds is not None],
    }
    for label, values in rows.items():
        table.add_row(label, *(f"{value:.3%}" for value in (at(values, 0.5), at(values, 0.95), max(values, default=0))))
    table.add_row("ratio of times on the CPU", "", f"{summary['cpu_ratio_p95']:.2%}", "")
    console.print(table)
    for label, value in summary["worst_peaks"].items():
        console.print(f"worst peak: {label}: {value:.3%}")
    for label, value in summary["worst_times"].items():
        console.print(f"worst time: {label}: {value:.3%}")


if __name__ == "__main__":
    main()
