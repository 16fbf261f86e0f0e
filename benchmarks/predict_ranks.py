"""Predicted against measured on several ranks: the slowest rank's time, and every rank's peak.

    python benchmarks/predict_ranks.py --json

A case is a model, a layout and a Policy. Models: the reference Llama, dense and with experts, in single precision and
in bfloat16. Layouts: FSDP, HSDP, tensor parallel with and without sequence parallel, pipelines under 1F1B, interleaved
1F1B and zero bubble, expert parallel, and two of them together, on two processes or four, which are two nodes of two
devices with a slower network between them. Policies: nothing, everything, and random ones over keep, recompute and
swap of single operators and whole layers.

What is predicted comes from ranks that are imagined in one process: no device, no other process. What is measured is
the model as the runner builds it, in real processes on tide. Kernels and links reach efficiencies that follow from a
seed; the prediction is given a device as ``lowtide calibrate`` measures it, and the bandwidths of the fabric and the
network that one gather of 64 MiB shows. How many tokens the experts of a rank get is not predicted: it is given, as
routers report it, for each layer. The simulator shares no code with the device.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

import tide
from lowtide.cost.calibrate import calibrate
from lowtide.cost.device import Device
from lowtide.cost.imagined import device_kernels
from lowtide.models.experts_shape import ExpertsShape
from lowtide.models.shape import DecoderShape
from lowtide.planner.pipeline import Pipeline, ScheduleName, even_pipeline
from lowtide.planner.simulate import simulate
from lowtide.policy import Policy
from lowtide.trace.trace import Kernel, Trace, kernels_of
from lowtide.train.run import DataType, Degrees, Precision
from lowtide.train.traced import TracedRank, trace_rank

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from predict_cases import llama_shape, policies_for, use_machine
from stamp import stamped
from support.predicted_ranks import Measured, given_bytes, measured_skew, measured_steps
from support.ranks import Ranks

LIMITS = {"peak_p95": 0.01, "peak_worst": 0.03, "time_p95": 0.03, "time_worst": 0.08}
PER_NODE, MICRO_BATCHES, LAYERS, SAMPLES, LENGTH = 2, 4, 4, 4, 128
ADDING = Kernel("aten::add_", touched=1)
"""What adds the gradients of two micro-batches: a Trace of one has none."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How ranks share the work."""

    name: str
    degrees: Degrees
    schedule: ScheduleName = "1f1b"
    chunks: int = 1
    moe: Literal["both", "no", "only"] = "no"
    precision: DataType = "bfloat16"

    @property
    def pipeline(self) -> Pipeline:
        """The stages."""
        stages = self.degrees.pipeline
        count = MICRO_BATCHES if stages > 1 else 1
        return even_pipeline(LAYERS, stages, self.chunks, micro_batches=count, schedule=self.schedule)


LAYOUTS = (
    Layout(name="fsdp2", degrees=Degrees(shard=2), moe="both"),
    Layout(name="fsdp4 over two nodes", degrees=Degrees(shard=4)),
    Layout(name="hsdp 2x2", degrees=Degrees(replicate=2, shard=2)),
    Layout(name="tp2", degrees=Degrees(tensor=2)),
    Layout(name="tp2 in float32", degrees=Degrees(tensor=2), precision="float32"),
    Layout(name="tp2, sequence", degrees=Degrees(tensor=2, sequence_parallel=True), moe="both"),
    Layout(name="pp2 1F1B", degrees=Degrees(pipeline=2), moe="both"),
    Layout(name="pp2 1F1B in float32", degrees=Degrees(pipeline=2), precision="float32"),
    Layout(name="pp2 interleaved", degrees=Degrees(pipeline=2), schedule="interleaved", chunks=2),
    Layout(name="pp2 zero bubble", degrees=Degrees(pipeline=2), schedule="zero_bubble_v", chunks=2),
    Layout(name="ep2", degrees=Degrees(shard=2, expert=2), moe="only"),
    Layout(name="ep2 x fsdp2", degrees=Degrees(shard=4, expert=2), moe="only"),
    Layout(name="cp2", degrees=Degrees(context=2)),
    Layout(name="cp2 x fsdp2", degrees=Degrees(context=2, shard=2)),
    Layout(name="tp2 x fsdp2", degrees=Degrees(tensor=2, shard=2)),
    Layout(name="pp2 x fsdp2", degrees=Degrees(pipeline=2, shard=2), moe="both"),
    Layout(name="pp2 x tp2", degrees=Degrees(pipeline=2, tensor=2)),
)


class Rates(NamedTuple):
    """Bytes a second of one device."""

    interconnect: float
    network: float


@dataclass(frozen=True)
class Case:
    """How far off a prediction was, of what was measured."""

    name: str
    layout: str
    peaks: tuple[float, ...]
    """Of each rank."""
    seconds: float
    """Of the slowest rank."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--quick", action="store_true", help="a few cases, in less than a minute")
    names = [layout.name for layout in LAYOUTS]
    parser.add_argument("--only", metavar="NAME", choices=names, help="one layout, such as 'pp2 x tp2'")
    options = parser.parse_args()
    torch.set_num_threads(1)
    console, begin = Console(stderr=True), time.perf_counter()
    groups = {size: Ranks(size) for size in (2, 4)}
    cases: list[Case] = []
    try:
        rates = Rates(*groups[4].run(measure_rates)[0])
        for layout in LAYOUTS:
            if options.only not in (None, layout.name) or (options.quick and layout.name not in ("fsdp2", "tp2")):
                continue
            for shape in shapes(layout)[: 1 if options.quick else 2]:
                found = list(compare(layout, shape, groups[layout.degrees.world], rates, 2 if options.quick else 5))
                cases += found
                console.print(
                    f"{label(layout, shape)}: time {span([case.seconds for case in found])},"
                    f" peak {span([peak for case in found for peak in case.peaks])},"
                    f" {time.perf_counter() - begin:.0f} s"
                )
    finally:
        for group in groups.values():
            group.stop()
    summary = summarise(cases)
    show(console, cases, summary)
    if options.json:
        print(json.dumps(stamped(summary)))


def compare(layout: Layout, shape: DecoderShape, ranks: Ranks, rates: Rates, count: int) -> Iterator[Case]:
    """All Policies of one model in one layout."""
    use_machine(devices_per_node=PER_NODE)
    rank = TracedRank(
        shape=shape,
        degrees=layout.degrees,
        precision=Precision(parameters="float32", compute=layout.precision),
        samples=SAMPLES,
        sequence=LENGTH,
        reshard=layout.degrees.pipeline == 1,
    )
    skews = ranks.run(measure_skew, rank) if layout.degrees.expert > 1 else [(1.0,) * LAYERS] * layout.degrees.world
    # A rank's memory depends on what its own experts get. Its time depends on the fullest, for whom all others wait.
    fullest = tuple(map(max, *skews))
    traces = {skew: traced(replace(rank, expert_skew=skew)) for skew in dict.fromkeys([*skews, fullest])}
    devices = {skew: calibrated(trace, rates) for skew, trace in traces.items()}
    pipeline = layout.pipeline
    policies = policies_for(traces[skews[0]], sum(map(ord, label(layout, shape))), count)
    measured = ranks.run(measure, rank, list(policies.values()), pipeline)
    each, given = layout.degrees.world // pipeline.stages, given_bytes(rank, pipeline)
    for number, (name, policy) in enumerate(policies.items()):
        simulated = {skew: simulate(trace, policy, devices[skew], pipeline) for skew, trace in traces.items()}
        found = [one[number] for one in measured]
        yield Case(
            f"{label(layout, shape)}, {name}",
            label(layout, shape),
            tuple(
                (simulated[skew].stages[place // each].peak + given) / one.peak - 1
                for place, (skew, one) in enumerate(zip(skews, found, strict=True))
            ),
            simulated[fullest].seconds / max(one.seconds for one in found) - 1,
        )


def traced(rank: TracedRank) -> Trace:
    """The Trace of a rank that is not there."""
    with device_kernels("other"):
        return trace_rank(rank)


def measure_skew(rank: TracedRank) -> tuple[float, ...]:
    """On each rank: what its experts get of the tokens, in each layer."""
    use_machine(devices_per_node=PER_NODE)
    return measured_skew(rank)


def measure(rank: TracedRank, policies: Sequence[Policy], pipeline: Pipeline) -> list[Measured]:
    """On each rank: a warm step for each Policy."""
    use_machine(devices_per_node=PER_NODE)
    return measured_steps(rank, policies, pipeline)


def calibrated(trace: Trace, rates: Rates) -> Device:
    """The device as a calibration measures it."""
    device = calibrate(torch.device("tide"), [*kernels_of(trace), ADDING], standard=False).device
    latency = tide.configuration()["fabric_latency"] * 1e-9
    return replace(device, **rates._asdict(), collective_latency=latency, devices_per_node=PER_NODE)


def measure_rates() -> tuple[float, float]:
    """On each of four ranks: the bandwidths of the fabric and the network, by a gather over two ranks."""
    use_machine(devices_per_node=PER_NODE)
    latency, size = tide.configuration()["fabric_latency"] * 1e-9, 64 << 20
    found = []
    for pairs in (((0, 1), (2, 3)), ((0, 2), (1, 3))):
        groups = [dist.new_group(list(pair)) for pair in pairs]
        mine = next(group for group, pair in zip(groups, pairs, strict=True) if dist.get_rank() in pair)
        part = torch.zeros(size // 8, device="tide")
        whole = torch.zeros(size // 4, device="tide")
        torch.accelerator.synchronize()
        dist.barrier()
        begin = tide.now()
        dist.all_gather_into_tensor(whole, part, group=mine)
        torch.accelerator.synchronize()
        found.append(size / 2 / ((tide.now() - begin) * 1e-9 - latency))
    return found[0], found[1]


def shapes(layout: Layout) -> list[DecoderShape]:
    """The models that are trained in a layout."""
    experts = ExpertsShape(
        count=8, chosen=2, intermediate_size=128, shared=1, first_dense=1, scoring="sigmoid", groups=4,
        chosen_groups=2, normalised=True, scaling=1.5, auxiliary=0.01, balancing="seq_aux_loss", bias=True,
        bias_rate=0.01,
    )  # fmt: skip
    dense, mixture = llama_shape(num_layers=LAYERS), llama_shape(num_layers=LAYERS, experts=experts)
    return {"no": [dense], "both": [dense, mixture], "only": [mixture]}[layout.moe]


def label(layout: Layout, shape: DecoderShape) -> str:
    """A layout and a model in words."""
    return f"{layout.name}, {'experts' if shape.experts else 'dense'}"


def at(values: Sequence[float], share: float) -> float:
    """The size that this share of the values does not exceed."""
    ordered = sorted(map(abs, values))
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def span(values: Sequence[float]) -> str:
    """From the least to the most."""
    return f"{min(values):+.2%} to {max(values):+.2%}"


def summarise(cases: Sequence[Case]) -> dict[str, Any]:
    """The figures."""
    peaks = [peak for case in cases for peak in case.peaks]
    seconds = [case.seconds for case in cases]
    return {
        "cases": len(cases),
        "peaks": len(peaks),
        "peak_p50": at(peaks, 0.5),
        "peak_p95": at(peaks, 0.95),
        "peak_worst": at(peaks, 1.0),
        "time_p50": at(seconds, 0.5),
        "time_p95": at(seconds, 0.95),
        "time_worst": at(seconds, 1.0),
        "worst_peaks": {
            case.name: max(case.peaks, key=abs) for case in sorted(cases, key=lambda one: -at(one.peaks, 1.0))[:5]
        },
        "by_layout": {
            layout: {
                "time": [min(one.seconds for one in found), max(one.seconds for one in found)],
                "peak": [min(min(one.peaks) for one in found), max(max(one.peaks) for one in found)],
            }
            for layout in dict.fromkeys(case.layout for case in cases)
            for found in [[case for case in cases if case.layout == layout]]
        },
        "worst_times": {case.name: case.seconds for case in sorted(cases, key=lambda one: -abs(one.seconds))[:5]},
    }


def show(console: Console, cases: Sequence[Case], summary: dict[str, Any]) -> None:
    """A table for people."""
    table = Table(title=f"Predicted against measured on ranks: {summary['cases']} cases, {summary['peaks']} peaks")
    for column in ("", "half", "95 %", "worst"):
        table.add_column(column, justify="left" if not column else "right")
    for what in ("peak", "time"):
        table.add_row(what, *(f"{summary[f'{what}_{share}']:.3%}" for share in ("p50", "p95", "worst")))
    console.print(table)
    for what in ("peak", "time"):
        for name, value in summary[f"worst_{what}s"].items():
            console.print(f"worst {what}: {name}: {value:+.3%}")
    for name, limit in LIMITS.items():
        if summary[name] > limit:
            console.print(f"{name} is {summary[name]:.3%}; the limit is {limit:.0%}")


if __name__ == "__main__":
    main()
