"""What an adaptive run costs when nothing fails: after the switch, against the same Policy applied by hand.

    python benchmarks/adaptive_overhead.py --json

A Llama on the virtual accelerator, whose kernels run on the CPU: CPU time is Python's, dispatch's and theirs. The run
adapts itself, with the settings that all runs have and two decisions given for every layer. Then its steps and those of
a model to which its Policy was applied by hand take turns, in random order; each step's CPU time is compared with the
other's of the same round.

- ``overhead_step``: the median ratio where the run is given each step, ``overhead_with`` where it is around the loop.
- ``overhead_ranks``: with ``with`` on two ranks, under DistributedDataParallel; both ranks' CPU time together.
- ``overhead_always``: as ``overhead_with``, with every operator watched (``watch="always"``); ``host_us_always`` is the
  difference for each operator.
- ``virtual_*``: the same on the virtual clock, where issuing a kernel takes 5 microseconds of the host's time. It is
  exact, and sees kernels and waiting, but not Python.
- ``noise``, ``noise_ranks``: the ratio of two models that both have the Policy by hand.
- ``armed``: steps in which operators were watched, while steps were measured.

All models are made anew several times and the median of the medians is given: two that are built alike differ by some
percent, each time in another direction, with where their memory came to lie. ``spread_*`` are the smallest and the
largest of these medians.

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
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import nn

import lowtide
import tide
from lowtide import Pattern, Policy, Recompute, Rule
from lowtide.trace.trace import kernels_of
from models import Shape, llama

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from stamp import stamped
from support.ranks import Ranks

DECIDED = Policy.uniform([Rule(Pattern(name), Recompute()) for name in ("mlp.act_fn", "mlp.mul")])
SETTLED = 16
"""Steps before anything is measured: the plan is made after the fifth."""
LARGE = Shape(layers=8, sequence=256, hidden=384, intermediate=1024, heads=6, vocabulary=2000)
SMALL = Shape(layers=8, sequence=32, hidden=64, intermediate=128, heads=2, vocabulary=200)


class Training:
    """A model, its optimizer and a batch."""

    def __init__(self, shape: Shape) -> None:
        self.model: Any = llama(shape).to("tide")
        self.called: Any = self.model
        if dist.is_initialized():
            self.called = nn.parallel.DistributedDataParallel(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.tokens = torch.randint(3, shape.vocabulary, (2, shape.sequence)).to("tide")

    def step(self) -> float:
        """A whole step, and its loss."""
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.called(self.tokens, labels=self.tokens).loss
        loss.backward()
        self.optimizer.step()
        return float(loss.item())


class Steps(NamedTuple):
    """What each step took in this process, by configuration, and what the runs did."""

    cpu: dict[str, list[float]]
    virtual: dict[str, list[float]]
    operators: int
    armed: int
    decided_layers: int


class Figures(NamedTuple):
    """What steps of some configurations took, against those with the Policy by hand."""

    ratios: dict[str, float]
    virtual: dict[str, float]
    microseconds: dict[str, float]
    """The difference for each operator."""
    step_ms: float
    spread: tuple[float, float]
    """The smallest and the largest ratio with ``with`` that models made anew gave."""


def steps(shape: Shape, rounds: int, names: Sequence[str]) -> Steps:
    """Measure in this process, which may be one of several ranks."""
    torch.set_num_threads(1)
    tide.configure(preset="h100", capacity=8 << 30, launch=5_000)
    adapted = {name: Training(shape) for name in names}
    plain = [Training(shape), Training(shape)]
    runs: dict[str, Any] = {}
    ways: dict[str, Callable[[], object]] = {"by hand": plain[0].step, "noise": plain[1].step}
    for name, training in adapted.items():
        run = runs[name] = lowtide.adapt(
            training.called,
            training.optimizer,
            policy=DECIDED,
            watch="always" if name == "always" else "suspicion",
            verbose=False,
        )
        if name == "step":
            ways[name] = partial(run.step, training.step)
        else:
            run.__enter__()
            ways[name] = training.step
    for _ in range(SETTLED):
        for name in names:
            ways[name]()
    first = runs[names[0]]
    assert {run.policy for run in runs.values()} == {first.policy}
    assert first.plan is not None
    handles = [lowtide.apply(one.called, first.policy) for one in plain]
    trace = next(iter(first.profiling.lengths.traces.values()))
    operators = sum(len(trace.parts[place].kernels) for place in trace.layers)
    operators += len(kernels_of(trace)) - sum(len(part.kernels) for part in trace.parts)
    armed = 0

    def counted(name: str) -> None:
        nonlocal armed
        ways[name]()
        if name in runs and name != "always":
            armed += runs[name].rescue.armed

    cpu, virtual = measure({name: partial(counted, name) for name in ways}, rounds)
    for run in runs.values():
        run.remove()
    for handle in handles:
        handle.remove()
    decided = sum(layer != lowtide.LayerPolicy() for layer in first.policy.layers)
    return Steps(cpu, virtual, operators, armed, decided)


def figures(measured: Sequence[Steps]) -> Figures:
    """The medians of some measurements, each with models of its own."""
    ways, operators = list(measured[0].cpu), measured[0].operators

    def median(of: Callable[[Steps], float]) -> float:
        return statistics.median(of(one) for one in measured)

    withs = [_ratio(one.cpu["with"], one.cpu["by hand"]) for one in measured]
    return Figures(
        {name: median(lambda one, name=name: _ratio(one.cpu[name], one.cpu["by hand"])) for name in ways},
        {name: median(lambda one, name=name: _ratio(one.virtual[name], one.virtual["by hand"])) for name in ways},
        {
            name: median(lambda one, name=name: _difference(one.cpu[name], one.cpu["by hand"])) * 1e6 / operators
            for name in ways
        },
        median(lambda one: statistics.median(one.cpu["by hand"])) * 1e3,
        (min(withs), max(withs)),
    )


def together(ranks: Sequence[Steps]) -> Steps:
    """The steps of several ranks as one process's: their CPU time added, the slowest's virtual time."""
    cpu = {name: [sum(one) for one in zip(*(rank.cpu[name] for rank in ranks), strict=True)] for name in ranks[0].cpu}
    virtual = {name: [max(one) for one in zip(*(rank.virtual[name] for rank in ranks), strict=True)] for name in cpu}
    return ranks[0]._replace(cpu=cpu, virtual=virtual, armed=sum(one.armed for one in ranks))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--quick", action="store_true", help="a few rounds")
    parser.add_argument("--small", action="store_true", help="tiny operators")
    arguments = parser.parse_args()
    console, begin = Console(stderr=True, width=120), time.perf_counter()
    shape = SMALL if arguments.small else LARGE
    again, rounds = (1, 5) if arguments.quick else (5, 30)
    by_itself = [steps(shape, rounds, ("step", "with", "always")) for _ in range(again)]
    alone = figures(by_itself)
    ranks = Ranks(2)
    on_ranks = [together(ranks.run(steps, shape, rounds, ("with",))) for _ in range(again)]
    ranks.stop()
    both = figures(on_ranks)
    result = {
        "overhead_step": round(alone.ratios["step"], 4),
        "overhead_with": round(alone.ratios["with"], 4),
        "overhead_ranks": round(both.ratios["with"], 4),
        "overhead_always": round(alone.ratios["always"], 4),
        "noise": round(alone.ratios["noise"], 4),
        "noise_ranks": round(both.ratios["noise"], 4),
        "virtual_step": round(alone.virtual["step"], 5),
        "virtual_with": round(alone.virtual["with"], 5),
        "virtual_ranks": round(both.virtual["with"], 5),
        "host_us_with": round(alone.microseconds["with"], 3),
        "host_us_always": round(alone.microseconds["always"], 3),
        "spread_with": f"{alone.spread[0]:.4f} to {alone.spread[1]:.4f}",
        "spread_ranks": f"{both.spread[0]:.4f} to {both.spread[1]:.4f}",
        "armed": sum(one.armed for one in (*by_itself, *on_ranks)),
        "operators": by_itself[0].operators,
        "step_ms": round(alone.step_ms, 2),
        "decided_layers": by_itself[0].decided_layers,
        "seconds": round(time.perf_counter() - begin),
    }
    limits = {f"overhead_{name}": "<= 1.02" for name in ("step", "with", "ranks")}
    limits |= {f"virtual_{name}": "<= 1.005" for name in ("step", "with", "ranks")} | {"armed": "0"}
    table = Table("figure", "value", "limit")
    for key, value in result.items():
        table.add_row(key, value if isinstance(value, str) else f"{value:g}", limits.get(key, ""))
    console.print(table)
    if arguments.json:
        print(json.dumps(stamped(result)))
    return 0


def measure(
    ways: dict[str, Callable[[], object]], rounds: int
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """CPU seconds, and the virtual clock's, of each way's step, in turns; in the same order on all ranks."""
    order, names = random.Random(0), list(ways)
    cpu: dict[str, list[float]] = {name: [] for name in ways}
    virtual: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        gc.collect()
        order.shuffle(names)
        for name in names:
            torch.accelerator.synchronize()
            start, then = time.process_time(), tide.now()
            ways[name]()
            torch.accelerator.synchronize()
            cpu[name].append(time.process_time() - start)
            virtual[name].append(float(tide.now() - then))
    return cpu, virtual


def _ratio(one: list[float], other: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(one, other, strict=True))


def _difference(one: list[float], other: list[float]) -> float:
    return statistics.median(a - b for a, b in zip(one, other, strict=True))


if __name__ == "__main__":
    sys.exit(main())
