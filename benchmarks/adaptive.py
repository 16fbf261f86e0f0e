"""How close an adaptive run comes to the best there is: measured on the virtual accelerator.

    python benchmarks/adaptive.py --json

A Llama of 16 layers with Adam, on devices whose capacity is what is static and 40, 50, 60, 70, 80 and 90 % of the
activations' peak. The run gets no settings: ``lowtide.adapt(model, optimizer)`` and ``run.step(...)``. Each time:

- ``worst_over_optimum``: its step after the switch against that of the plan made with perfect knowledge: a Trace taken
  with memory to spare, and the whole capacity as the budget. Both run on the same device; the virtual clock decides.
- ``speedup_over_full_at_60``, ``gain_share_at_60``: against recomputing every layer, and the share of the ceiling's
  gain, the ceiling being a device on which everything can be kept.
- ``worst_steps_to_final``: the step after which the Policy did not change any more.
- ``not_bitwise``: steps whose loss is not that of an undisturbed run on a large device, of all capacities.

Static is what stays allocated between steps and the gradients; the activations' peak is what a step that keeps
everything reserves above that.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import lowtide
import tide
from lowtide import LayerPolicy, Policy, Recompute
from lowtide.adaptive.machine import profile_device
from lowtide.adaptive.step_profiler import StepProfiler
from lowtide.planner.make import make_plan
from lowtide.trace.trace import Trace, kernels_of
from models import Shape, llama, use_machine
from stamp import stamped

SHARES = (0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
PLENTY = 4 << 30
FACTOR = 1 / 32
MORE = 2
"""Steps at the end that are measured."""


@dataclass
class Training:
    """A model, its optimizer and its batches, the same from the same start every time."""

    layers: int

    def __post_init__(self) -> None:
        self.shape = Shape(
            layers=self.layers, sequence=128, hidden=256, intermediate=896, heads=2, vocabulary=2000, factor=FACTOR
        )
        use_machine(FACTOR)
        tide.configure(capacity=PLENTY)
        self.model = llama(self.shape).to("tide")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        generator = torch.Generator().manual_seed(1)
        self.batches = [
            torch.randint(3, self.shape.vocabulary, (8, self.shape.sequence), generator=generator) for _ in range(8)
        ]

    def step(self, number: int) -> float:
        """A whole step, and its loss."""
        self.optimizer.zero_grad(set_to_none=True)
        tokens = self.batches[number % len(self.batches)].to("tide")
        loss = self.model(tokens, labels=tokens).loss
        loss.backward()
        self.optimizer.step()
        return float(loss.item())


def timed(step: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds on the virtual clock, and what the step returned."""
    torch.accelerator.synchronize()
    begin = tide.now()
    result = step()
    torch.accelerator.synchronize()
    return (tide.now() - begin) * 1e-9, result


def with_policy(layers: int, policy: Policy, capacity: int | None = None) -> tuple[float, int]:
    """The step's seconds and the reserved peak of a Policy applied by hand."""
    training = Training(layers)
    if capacity is not None:
        tide.configure(capacity=capacity)
    handle = lowtide.apply(training.model, policy)
    seconds = 0.0
    for number in range(4):
        gc.collect()
        torch.accelerator.empty_cache()
        torch.accelerator.reset_peak_memory_stats()
        seconds, _ = timed(partial(training.step, number))
    handle.remove()
    return seconds, torch.accelerator.max_memory_reserved()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--quick", action="store_true", help="4 layers, two capacities")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    console, begin = Console(stderr=True, width=140), time.perf_counter()
    layers, shares = (4, (0.6, 0.8)) if arguments.quick else (16, SHARES)
    keep, again = (Policy((one,) * layers) for one in (LayerPolicy(), LayerPolicy(Recompute())))
    ceiling, kept = with_policy(layers, keep)
    full, _ = with_policy(layers, again)

    gc.collect()  # the models before this one
    training = Training(layers)
    steps = 10 + 2 + MORE
    expected = [training.step(number) for number in range(steps)]
    static = torch.accelerator.memory_allocated()  # with the gradients of the last step
    trace = perfect(training)
    del training
    console.print(
        f"static {static / 2**20:.0f} MiB, activations {(kept - static) / 2**20:.0f} MiB, a step {ceiling * 1e3:.2f} ms"
        f" with everything kept, {full * 1e3:.2f} ms with every layer recomputed: at most {full / ceiling:.3f} times",
        highlight=False,
    )
    with ProcessPoolExecutor(2, get_context("spawn"), max_tasks_per_child=1) as processes:
        capacities = {share: static + int(share * (kept - static)) for share in shares}
        begun = [processes.submit(point, layers, *one, expected, trace) for one in capacities.items()]
        points = [_shown(one.result(), console) for one in begun]
    at_60 = next(one for one in points if one["share"] == 0.6)
    result = {
        "worst_over_optimum": round(max(one["seconds"] / one["optimum"] for one in points) - 1, 5),
        "speedup_over_full_at_60": round(full / at_60["seconds"], 4),
        "gain_share_at_60": round((full - at_60["seconds"]) / (full - ceiling), 4),
        "worst_steps_to_final": max(one["final"] for one in points),
        "not_bitwise": sum(one["not_bitwise"] for one in points),
        "ceiling": round(full / ceiling, 4),
        "races": len(tide.races()) + sum(one["races"] for one in points),
        "points": points,
        "seconds": round(time.perf_counter() - begin),
    }
    table = Table("figure", "value", "limit")
    for key, limit in (
        ("worst_over_optimum", "<= 0.02"), ("speedup_over_full_at_60", ">= 1.20"), ("gain_share_at_60", ">= 0.90"),
        ("worst_steps_to_final", "<= 15"), ("not_bitwise", "0"), ("ceiling", ""),
    ):  # fmt: skip
        table.add_row(key, f"{result[key]:g}", limit)
    console.print(table)
    if arguments.json:
        print(json.dumps(stamped(result)))
    return 0


def perfect(training: Training) -> Trace:
    """The Trace of steps with memory to spare."""
    measuring = StepProfiler(training.model, optimizers=[training.optimizer])
    while not measuring.complete:
        with measuring.step():
            training.step(0)
    return measuring.trace()


def point(layers: int, share: float, capacity: int, expected: list[float], trace: Trace) -> dict[str, Any]:
    """One capacity, in a process of its own."""
    torch.set_num_threads(1)
    training = Training(layers)
    tide.configure(capacity=capacity)
    run = lowtide.adapt(training.model, training.optimizer, verbose=False)
    wrong, seconds = 0, []
    for number in range(len(expected)):
        taken, loss = timed(partial(run.step, partial(training.step, number)))
        seconds.append(taken)
        wrong += loss != expected[number]
    final = max(event.step for event in run.events if event.kind == "switched")
    rescued = sum(step.rescued for step in run.steps)
    plan = run.plan
    assert plan is not None
    run.remove()
    budget = plan.budget
    gc.collect()
    best = make_plan(trace, capacity, profile_device(torch.device("tide"), kernels_of(trace)))
    optimum, _ = with_policy(layers, best.policy)
    return {
        "share": share,
        "capacity": capacity,
        "budget": budget,
        "seconds": statistics.median(seconds[-MORE:]),
        "predicted": plan.simulation.seconds,
        "optimum": optimum,
        "final": final,
        "rescued": rescued,
        "not_bitwise": wrong,
        "races": len(tide.races()),
    }


def _shown(found: dict[str, Any], console: Console) -> dict[str, Any]:
    console.print(
        f"{found['share']:4.0%} of the activations, {found['capacity'] / 2**20:5.0f} MiB:"
        f" {found['seconds'] * 1e3:8.2f} ms a step, {found['seconds'] / found['optimum'] - 1:+.3%} of the optimum;"
        f" final after step {found['final']}, {found['rescued']} rescues, {found['not_bitwise']} losses differ",
        highlight=False,
    )
    return found


if __name__ == "__main__":
    sys.exit(main())
