"""Peak and time of one training step, by what is done with its activations: the chart of the front page.

    python benchmarks/at_a_budget.py --json

A Mistral 7B at an eighth, on the virtual accelerator as an H100 at an eighth (see ``models.py``); time is simulated.
One model, trained from the same start in every configuration, two steps, the second measured:

- ``keep``: everything kept;
- ``full recompute``: every layer under ``torch.utils.checkpoint``;
- ``SAC``: every layer under torch's selective checkpointing that saves matrix products and attention;
- ``save_on_cpu``: every layer under torch's ``save_on_cpu`` with pinned memory, spared the parameters;
- ``TRL offload``: every layer under TRL's ``OffloadActivations`` as it comes (``pip install --no-deps trl``);
- ``lowtide 80 %`` and so on: the plan for that share of the peak that keeping everything has.

For each: ``peak``, the bytes of the device at their highest above parameters and gradients, and ``time``, both over
``keep``'s, and whether loss and gradients are bitwise ``keep``'s. ``over_budget`` counts plans whose peak is above what
they were given, ``beaten`` how often one of the others fits what a plan was given and is faster than it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import baselines
from lowtide import Policy
from lowtide.adaptive.machine import profile_device
from lowtide.adaptive.step_profiler import StepProfiler
from lowtide.planner.make import make_plan
from lowtide.trace.trace import kernels_of
from models import EIGHTH, QUICK, Attach, Trainer
from stamp import stamped

SHARES = (0.8, 0.6, 0.4, 0.2)
SAVED = tuple(getattr(torch.ops.aten, name).default for name in ("mm", "bmm", "addmm"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--quick", action="store_true", help="a model of a sixteenth")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    console, begin = Console(stderr=True, width=100), time.perf_counter()
    trainer = Trainer(QUICK if arguments.quick else EIGHTH)
    kept, _ = trainer.run(baselines.bare)
    ways: dict[str, Attach] = {
        "full recompute": baselines.checkpointed,
        "SAC": partial(baselines.checkpointed, context_fn=products_are_saved),
        "save_on_cpu": partial(baselines.on_cpu, parameters=False),
    }
    module = baselines.peer_offloading()
    if module is not None:
        ways["TRL offload"] = baselines.peer(module, 5)
    for share, policy in plans(trainer, kept.peak).items():
        ways[f"lowtide {share:.0%}".replace("%", " %")] = baselines.applied(policy)
    points = [{"name": "keep", "peak": 1.0, "time": 1.0, "bitwise": True}]
    for name, attach in track(ways.items(), "", console=console, disable=not console.is_terminal, transient=True):
        figures, _ = trainer.run(attach)
        points.append(
            {
                "name": name,
                "peak": round(figures.peak / kept.peak, 4),
                "time": round(figures.nanoseconds / kept.nanoseconds, 4),
                "bitwise": figures.different == 0,
            }
        )
    show(points, console)
    ours = {share: by_name(points, f"lowtide {share * 100:.0f} %") for share in SHARES}
    others = [one for one in points if not one["name"].startswith("lowtide")]
    result = {
        "peak_mib": round(kept.peak / 2**20),
        "step_ms": round(kept.nanoseconds / 1e6, 2),
        "over_budget": sum(one["peak"] > share for share, one in ours.items()),
        "beaten": sum(
            one["peak"] <= share and one["time"] < mine["time"] for one in others for share, mine in ours.items()
        ),
        "not_bitwise": sum(not one["bitwise"] for one in ours.values()),
        "without": [] if module is not None else ["TRL offload"],
        "points": points,
        "seconds": round(time.perf_counter() - begin),
    }
    if arguments.json:
        print(json.dumps(stamped(result)))
    return 0


def plans(trainer: Trainer, peak: int) -> dict[float, Policy]:
    """The plan for each share of the peak, from a Trace of the device itself."""
    profiler = StepProfiler(trainer.model)
    while not profiler.complete:
        with profiler.step():
            trainer.model(trainer.tokens, labels=trainer.tokens).loss.backward()
        trainer.model.zero_grad(set_to_none=False)
    trace = profiler.trace()
    device = profile_device(torch.device("tide"), kernels_of(trace))
    static = torch.accelerator.memory_allocated()
    return {share: make_plan(trace, static + int(share * peak), device).policy for share in SHARES}


def products_are_saved() -> Any:
    """What torchtitan's selective checkpointing does by default, with all products saved instead of every other one."""
    attention = "scaled_dot_product"

    def decide(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        saved = operator in SAVED or attention in str(operator)
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(decide)


def by_name(points: list[dict[str, Any]], name: str) -> dict[str, Any]:
    return next(one for one in points if one["name"] == name)


def show(points: list[dict[str, Any]], console: Console) -> None:
    table = Table("", "peak", "time", "bitwise")
    for one in points:
        table.add_row(one["name"], f"{one['peak']:.1%}", f"{one['time']:.3f}x", "yes" if one["bitwise"] else "no")
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
