"""Plans for clusters, from this machine: how long they take, and what they win over a hand-made one.

    python benchmarks/plan_scale.py --json

deepseek-v3 on 2,048 devices (16 pipeline stages of 2 chunks, experts over 8, parameters shared by 128) and llama3-405b
on 16,384 (tensor parallel 8, 16 stages, shared by 128), both on H100. One rank is traced with imagined tensors, every
stage is solved, and the step is simulated. ``*_total_s`` is all of that, ``*_solve_s`` the solver alone, with the
expansion of its counts into layers and without the import of scipy, which is part of the total; ``*_processor_s`` is
what this process computed for, which on a busy machine is less. ``device_count_ratio`` is the solver's time for
llama3-405b on 16,384 devices over that on 256, each the best of three: parameters are shared by 128 ranks or by 2,
everything else is the same.

For deepseek-v3 the MindSpore Transformers guide recomputes ``[3, 4, 4, …, 3, 2, 0]`` whole layers of each stage. That
is simulated, and what its worst stage reserves is the budget of our plan: ``guide_policy_speedup`` is the guide's step
over ours. ``plan_speedup_without_swap`` is the same for a plan that only recomputes.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from lowtide.cli.traced import LayoutOptions, trace_of
from lowtide.config.check import check_text
from lowtide.cost.devices import find_device
from lowtide.cost.kernel import kernel_seconds
from lowtide.planner.make import make_plan
from lowtide.planner.pipeline import Pipeline
from lowtide.planner.plan import Plan
from lowtide.planner.problem import stage_problems
from lowtide.planner.simulate import simulate
from lowtide.planner.solve import solve_least, solve_stage
from lowtide.policy import Policy
from lowtide.trace.trace import Trace
from lowtide.units import format_bytes, format_seconds
from stamp import stamped

GUIDE = [3, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 3, 2, 0]
"""Whole layers that the guide's file for deepseek-v3 recomputes in each of 16 stages."""
DEEPSEEK = LayoutOptions(
    data=128, tensor=1, expert=8, pipeline=16, chunks=2, micro_batches=64, sequence=4096, samples=1
)
LLAMA_405 = LayoutOptions(data=128, tensor=8, pipeline=16, micro_batches=32, sequence=8192, samples=1)
LLAMA_BUDGET = "72GiB"


@dataclass
class Planned:
    """A plan and the seconds that it took."""

    trace: Trace
    pipeline: Pipeline
    trace_seconds: float
    plan: Plan | None = None
    plan_seconds: float = 0.0
    processor_seconds: float = 0.0
    """What this process computed for, tracing included: on a busy machine less than the seconds that went by."""

    @property
    def total(self) -> float:
        return self.trace_seconds + self.plan_seconds

    def make(self, budget: int | str, *, swap: bool = True) -> Plan:
        begin, processor = time.perf_counter(), time.process_time()
        self.plan = make_plan(self.trace, budget, DEVICE, self.pipeline, swap=swap)
        self.plan_seconds = time.perf_counter() - begin
        self.processor_seconds += time.process_time() - processor
        return self.plan


DEVICE = find_device("h100")


def main() -> None:
    """Plan, and print what it took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--quick", action="store_true", help="a small model on few devices, for a first look")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    result = quick() if arguments.quick else full()
    show(result)
    if arguments.json:
        print(json.dumps(stamped(result)))


def full() -> dict[str, Any]:
    """Everything."""
    deepseek = traced("deepseek-v3", DEEPSEEK)
    guide = simulate(deepseek.trace, guide_policy(deepseek.pipeline), DEVICE, deepseek.pipeline)
    plan = deepseek.make(guide.reserved)
    total, processor = deepseek.total, deepseek.processor_seconds
    alone = deepseek.make(guide.reserved, swap=False)
    llama = traced("llama3-405b", LLAMA_405)
    large = llama.make(LLAMA_BUDGET)
    few = traced("llama3-405b", LLAMA_405._replace(data=2))
    return {
        "deepseek_total_s": round(total, 2),
        "deepseek_solve_s": round(plan.solve_seconds, 2),
        "llama405_total_s": round(llama.total, 2),
        "llama405_solve_s": round(large.solve_seconds, 2),
        "device_count_ratio": round(solving_seconds(llama) / solving_seconds(few), 3),
        "guide_policy_speedup": round(guide.seconds / plan.simulation.seconds, 4),
        "plan_speedup_without_swap": round(guide.seconds / alone.simulation.seconds, 4),
        "guide_step_s": round(guide.seconds, 3),
        "guide_reserved": guide.reserved,
        "deepseek_step_s": round(plan.simulation.seconds, 3),
        "deepseek_reserved": plan.simulation.reserved,
        "deepseek_gap": round(plan.gap, 4) if plan.gap is not None else None,
        "deepseek_processor_s": round(processor, 2),
        "deepseek_trace_s": round(deepseek.trace_seconds, 2),
        "llama405_step_s": round(large.simulation.seconds, 3),
        "llama405_reserved": large.simulation.reserved,
        "llama405_gap": round(large.gap, 4) if large.gap is not None else None,
        "llama405_processor_s": round(llama.processor_seconds, 2),
        "llama405_trace_s": round(llama.trace_seconds, 2),
        "feasible": plan.feasible and alone.feasible and large.feasible,
    }


def quick() -> dict[str, Any]:
    """A first look."""
    small = traced("llama3-8b", LayoutOptions(data=8, pipeline=8, micro_batches=16, sequence=4096, samples=1))
    plan = small.make("24GiB")
    return {
        "quick_total_s": round(small.total, 2),
        "quick_solve_s": round(plan.solve_seconds, 2),
        "quick_gap": round(plan.gap, 4) if plan.gap is not None else None,
        "feasible": plan.feasible,
    }


def traced(name: str, layout: LayoutOptions) -> Planned:
    begin, processor = time.perf_counter(), time.process_time()
    found = trace_of(name, layout)
    planned = Planned(found.trace, found.pipeline, time.perf_counter() - begin)
    planned.processor_seconds = time.process_time() - processor
    return planned


def guide_policy(pipeline: Pipeline) -> Policy:
    """The guide's list, read as the guide's own file is."""
    return written_policy(pipeline, {"recompute": GUIDE})


def written_policy(pipeline: Pipeline, recompute: dict[str, Any]) -> Policy:
    """What a file's ``recompute_config`` means for the layers of a pipeline."""
    layers = sum(len(chunk) for stage in pipeline.placement for chunk in stage)
    base = layers // (pipeline.stages * pipeline.chunks)
    offset = [[len(stage[chunk]) - base for stage in pipeline.placement] for chunk in range(pipeline.chunks)]
    text = json.dumps(
        {
            "recompute_config": recompute,
            "model": {"model_config": {"num_layers": layers, "pp_interleave_num": pipeline.chunks, "offset": offset}},
            "parallel_config": {"pipeline_stage": pipeline.stages},
        }
    )
    check = check_text(text)
    check.raise_errors()
    assert check.policy is not None
    return check.policy


def solving_seconds(planned: Planned) -> float:
    """The time to solve every stage once, with a third of what its activations want; the best of three."""
    problems = stage_problems(planned.trace, DEVICE, planned.pipeline, lambda kernel: kernel_seconds(DEVICE, kernel))
    budgets = []
    for problem in problems:
        least = solve_least(problem).memory
        wanted = max(
            sum(case.in_flight[group.chunk] * len(group.layers) * group.cost.saved for group in problem.groups)
            for case in problem.cases
        )
        budgets.append(least + wanted // 3)
    times = []
    for _ in range(3):
        begin = time.perf_counter()
        for problem, budget in zip(problems, budgets, strict=True):
            solve_stage(problem, budget)
        times.append(time.perf_counter() - begin)
    return min(times)


def show(result: dict[str, Any]) -> None:
    limits = {
        "deepseek_total_s": "< 45",
        "deepseek_solve_s": "< 4",
        "llama405_total_s": "< 45",
        "llama405_solve_s": "< 4",
        "device_count_ratio": "<= 1.2",
        "guide_policy_speedup": "> 1",
    }
    table = Table(title="Plans for clusters")
    for column in ("figure", "measured", "wanted"):
        table.add_column(column, justify="left" if column == "figure" else "right")
    for name, value in result.items():
        text = format_bytes(value) if name.endswith("_reserved") else str(value)
        if name.endswith("_step_s"):
            text = format_seconds(value)
        table.add_row(name, text, limits.get(name, ""))
    Console(file=sys.stderr).print(table)


if __name__ == "__main__":
    main()
