"""What an adaptive run costs when nothing fails: after the switch, against the same Policy applied by hand.

    python benchmarks/adaptive_overhead.py --json

A Llama on the virtual accelerator, whose kernels run on the CPU: CPU time is Python's, dispatch's and theirs. The run
adapts itself to a budget, with the settings that all runs have; then its steps and those of a model to which its Policy
was applied by hand take turns, in random order; each step's CPU time is compared with the other's of the same round.

- ``overhead``: the median ratio after the switch, where a single process is disarmed and only the optimizer is watched.
- ``overhead_armed``: of a loop of one's own, around which the rescue is armed, as it is on several ranks.
- ``host_us``, ``host_us_armed``: the difference for each operator that runs in a step.
- ``noise``: the ratio of two models that both have the Policy by hand.

``--small`` takes a model of tiny operators, for which a dispatch mode costs most.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial

import torch
from rich.console import Console
from rich.table import Table

import lowtide
import tide
from lowtide.trace.trace import kernels_of
from models import Shape, llama

LARGE = Shape(layers=8, sequence=256, hidden=384, intermediate=1024, heads=6, vocabulary=2000)
SMALL = Shape(layers=8, sequence=32, hidden=64, intermediate=128, heads=2, vocabulary=200)


class Training:
    """A model, its optimizer and a batch."""

    def __init__(self, shape: Shape) -> None:
        self.model = llama(shape).to("tide")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.tokens = torch.randint(3, shape.vocabulary, (2, shape.sequence)).to("tide")

    def step(self) -> float:
        """A whole step, and its loss."""
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.model(self.tokens, labels=self.tokens).loss
        loss.backward()
        self.optimizer.step()
        return float(loss.item())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--quick", action="store_true", help="a few rounds")
    parser.add_argument("--small", action="store_true", help="tiny operators")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    console, begin = Console(stderr=True, width=120), time.perf_counter()
    shape = SMALL if arguments.small else LARGE
    tide.configure(preset="h100", capacity=8 << 30)

    adapted = [Training(shape), Training(shape)]
    plain = [Training(shape), Training(shape)]
    runs = [lowtide.adapt(one.model, one.optimizer, budget=_budget(shape), verbose=False) for one in adapted]
    armed = runs[1].rescue
    assert armed is not None

    def own_step() -> None:
        """The step cannot be retried, so that the rescue stays armed."""
        adapted[1].step()
        assert armed.armed
        runs[1].step()

    for _ in range(12):
        runs[0].step(adapted[0].step)
        own_step()
    policy = runs[0].policy
    handles = [lowtide.apply(one.model, policy) for one in plain]
    trace = runs[0].lengths.traces[0]
    operators = sum(len(trace.parts[place].kernels) for place in trace.layers)
    operators += len(kernels_of(trace)) - sum(len(part.kernels) for part in trace.parts)
    ways: dict[str, Callable[[], object]] = {
        "by hand": plain[0].step,
        "by hand again": plain[1].step,
        "adaptive": partial(runs[0].step, adapted[0].step),
        "armed": own_step,
    }
    seconds = measure(ways, rounds=5 if arguments.quick else 40)
    found = {name: _ratio(seconds[name], seconds["by hand"]) for name in ways}
    micro = {name: _difference(seconds[name], seconds["by hand"]) * 1e6 / operators for name in ways}
    result = {
        "overhead": round(found["adaptive"], 4),
        "overhead_armed": round(found["armed"], 4),
        "host_us": round(micro["adaptive"], 3),
        "host_us_armed": round(micro["armed"], 3),
        "noise": round(found["by hand again"], 4),
        "operators": operators,
        "step_ms": round(statistics.median(seconds["by hand"]) * 1e3, 2),
        "decided_layers": sum(layer != lowtide.LayerPolicy() for layer in policy.layers),
        "seconds": round(time.perf_counter() - begin),
    }
    for handle in handles:
        handle.remove()
    for run in runs:
        run.remove()
    table = Table("figure", "value", "limit")
    for key, value in result.items():
        table.add_row(key, f"{value:g}", "<= 1.02" if key == "overhead" else "")
    console.print(table)
    if arguments.json:
        print(json.dumps(result))
    return 0


def _budget(shape: Shape) -> int:
    """Less than keeping everything takes, so that there is something to decide."""
    model = sum(parameter.nbytes for parameter in llama(shape).parameters())
    saved = shape.layers * 2 * shape.sequence * (10 * shape.hidden + 4 * shape.intermediate) * 4
    return 4 * model + saved // 2 + 2 * shape.sequence * shape.vocabulary * 12


def measure(ways: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """CPU seconds of each way's step, in turns."""
    order, seconds = random.Random(0), {name: [] for name in ways}
    names = list(ways)
    for _ in range(rounds):
        gc.collect()
        order.shuffle(names)
        for name in names:
            start = time.process_time()
            ways[name]()
            seconds[name].append(time.process_time() - start)
    return seconds


def _ratio(one: list[float], other: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(one, other, strict=True))


def _difference(one: list[float], other: list[float]) -> float:
    return statistics.median(a - b for a, b in zip(one, other, strict=True))


if __name__ == "__main__":
    sys.exit(main())
