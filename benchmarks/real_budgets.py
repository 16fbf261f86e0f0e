"""Lists of layers to recompute, as guides write them, against plans, within the memory of devices that are sold.

    python benchmarks/real_budgets.py --json

llama3-70b on 128 H100, llama3-405b on 2,048 Ascend 910C, deepseek-v3 on 2,048 Ascend 910B and on 2,048 H100. The budget
is what a device has, less what it reserves for other things than tensors. At that budget these are compared, in the
same layout, as the simulator counts:

- *the guide's list* for deepseek-v3, ``[3, 4, 4, …, 3, 2, 0]`` whole layers of 16 stages;
- *fewest layers*: the best list of that form, the fewest whole layers of each stage that fit, found by simulating;
- *fewest layers and operators*: the same, where all layers also recompute ``feed_forward.w1.activation.silu`` and
  ``feed_forward.mul``, as the guide's second example does;
- the plan, and the plan that swaps nothing.

``*_speedup`` is a list's step over the plan's. A list that does not fit has none.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from lowtide.cli.traced import LayoutOptions, Traced, trace_of
from lowtide.cost.device import Device
from lowtide.cost.devices import find_device
from lowtide.cost.imagined import device_kernels
from lowtide.cost.kernels import family_of
from lowtide.planner.budget import budget_of
from lowtide.planner.make import make_plan
from lowtide.planner.simulate import simulate
from lowtide.planner.simulation import Simulation
from lowtide.units import format_bytes, format_seconds
from plan_scale import GUIDE, written_policy
from stamp import stamped

OPERATORS = {r"feed_forward\.w1\.activation\.silu": True, r"feed_forward\.mul": True}


class Case(NamedTuple):
    """A model on devices that are sold."""

    model: str
    device: str
    layout: LayoutOptions
    guide: list[int] | None = None
    """What the guide recomputes in a pipeline of so many stages."""


EXPERTS = LayoutOptions(data=64, tensor=2, expert=64, pipeline=16, micro_batches=64, sequence=4096, samples=1)
CASES = (
    Case("llama3-70b", "h100", LayoutOptions(data=8, tensor=4, pipeline=4, micro_batches=16, sequence=8192)),
    Case("llama3-405b", "910c", LayoutOptions(data=16, tensor=8, pipeline=16, micro_batches=32, sequence=8192)),
    Case("deepseek-v3", "910b", EXPERTS, GUIDE),
    Case("deepseek-v3", "h100", EXPERTS, GUIDE),
)
QUICK = (Case("llama3-8b", "910b", LayoutOptions(data=4, pipeline=4, micro_batches=8, sequence=8192)),)


def main() -> None:
    """Compare, and print what came out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--quick", action="store_true", help="a small model on few devices, in less than a minute")
    parser.add_argument("--only", metavar="MODEL", help="one of the models")
    options = parser.parse_args()
    torch.set_num_threads(1)
    table = Table(title="Lists of layers and plans, at the budget of a device")
    for column in ("model", "device", "budget", "what", "reserved", "step", "against the plan"):
        table.add_column(column, justify="left" if column in ("model", "device", "what") else "right")
    result: dict[str, Any] = {}
    begin = time.perf_counter()
    for case in QUICK if options.quick else CASES:
        if options.only in (None, case.model):
            result |= compare(case, table)
            print(f"{time.perf_counter() - begin:.0f} s", file=sys.stderr, flush=True)
    result["seconds"] = round(time.perf_counter() - begin, 1)
    Console(file=sys.stderr, width=140).print(table)
    if options.json:
        print(json.dumps(stamped(result)))


def compare(case: Case, table: Table) -> dict[str, Any]:
    """The lists and the plans of a model, at its device's budget."""
    device = find_device(case.device)
    print(f"{case.model} on {case.device}", file=sys.stderr, flush=True)
    with device_kernels(family_of(device.name)):
        traced = trace_of(case.model, case.layout)
    budget = budget_of(device, traced.trace, traced.pipeline).bytes
    runs = {
        "plan": _planned(traced, device, budget, swap=True),
        "plan_without_swap": _planned(traced, device, budget, swap=False),
    }
    lists = {
        "fewest_layers": fewest(traced, device, budget, {}),
        "fewest_layers_and_operators": fewest(traced, device, budget, OPERATORS),
    }
    if case.guide is not None:
        lists["guide_list"] = {"recompute": case.guide}
    for name, recompute in lists.items():
        runs[name] = simulate(traced.trace, written_policy(traced.pipeline, recompute), device, traced.pipeline)
    prefix = f"{case.model}_{case.device}".replace("-", "_").replace(".", "_")
    found: dict[str, Any] = {f"{prefix}_budget": budget}
    best = runs["plan"].seconds
    for name, one in runs.items():
        fits = one.reserved <= budget
        faster = f"{one.seconds / best:.3f}" if fits else "does not fit"
        print(f"  {name}: {format_bytes(one.reserved)}, {format_seconds(one.seconds)}", file=sys.stderr, flush=True)
        table.add_row(
            case.model,
            case.device,
            format_bytes(budget),
            name.replace("_", " "),
            format_bytes(one.reserved),
            format_seconds(one.seconds),
            faster,
        )
        found[f"{prefix}_{name}_step_s"] = round(one.seconds, 4)
        found[f"{prefix}_{name}_reserved"] = one.reserved
        if name != "plan":
            found[f"{prefix}_{name}_speedup"] = round(one.seconds / best, 4) if fits else "does not fit"
    found[f"{prefix}_fewest_layers"] = " ".join(map(str, lists["fewest_layers"]["recompute"]))
    return found


def _planned(traced: Traced, device: Device, budget: int, *, swap: bool) -> Simulation:
    return make_plan(traced.trace, budget, device, traced.pipeline, swap=swap, polish=False).simulation


def fewest(traced: Traced, device: Device, budget: int, operators: dict[str, Any]) -> dict[str, Any]:
    """The fewest whole layers of each stage that fit, with some operators of all layers; all of a stage's where not
    even these do."""
    stages = traced.pipeline.stages
    found = []
    for stage, chunks in enumerate(traced.pipeline.placement):
        low, high = 0, sum(map(len, chunks))
        while low < high:
            middle = (low + high) // 2
            counts = [middle if one == stage else 0 for one in range(stages)]
            policy = written_policy(traced.pipeline, {"recompute": counts, "select_recompute": operators or False})
            if simulate(traced.trace, policy, device, traced.pipeline, stages=[stage]).reserved <= budget:
                high = middle
            else:
                low = middle + 1
        found.append(low)
    return {"recompute": found, "select_recompute": operators or False}


if __name__ == "__main__":
    main()
