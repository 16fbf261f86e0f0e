"""Shrink the device's memory at every allocation of a training step, and compare what the step leaves bit by bit.

    python benchmarks/oom_sweep.py --json
    python benchmarks/oom_sweep.py --quick

On the virtual accelerator ``tide``. At the k-th allocation of a step with Adam the capacity drops to what is then
allocated less x, for the rest of the step: forward, backward and optimizer. Where a step is retried, the capacity
is lifted. x is 1/64, 1/16, 1/8 and 1/4 of the activations' peak, one after another. A Llama-like and a MoE-like model,
both with dropout.

- A run of ``lowtide.adapt`` as users start it, with a fixed Policy that recomputes a layer and some
  operators: it is measured and planned, and then each k has a step of it, for every k.
- Its rescue alone, under no Policy, full recompute, and a mixed one that swaps and recomputes single operators; armed,
  and disarmed: every 7th k, always from the same state.
- Runs of ``lowtide.adapt`` on two ranks (FSDP2, a pipeline of two with 1F1B, and split matrices), all of whose steps
  are watched, where the memory of one of them shrinks, in turns: every 101st k of each.
- ``unsuspected``, counted apart: every 23rd k in steps that gave no reason to be watched, in a single process, where
  the run is given each step and where it is around the loop. ``retried`` steps are exact; ``plain_error`` is torch's
  own OutOfMemoryError, ``refused`` a step whose optimizer had begun to write.

Compared are the loss, parameters, optimizer states and generators; races and leaks are counted. ``hung`` counts ranks
that gave no answer, ``died`` steps that ended in an error. ``host_us_armed``: what the armed rescue costs for each
operator of a step in which nothing fails, on the real clock, and ``host_us_any_mode`` what a dispatch mode that does
nothing costs; ``host_us_optimizer`` the same for the optimizer's step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from lowtide._torch_private.modes import TorchDispatchMode
from lowtide.adaptive.rescue import Rescue
from stamp import stamped
from support.ranks import Ranks
from support.session_cases import session_of, session_on_ranks, unsuspected
from support.sweep_cases import LAYOUTS, MODELS, PHASES, POLICIES, Outcome, rescued

RESCUE_STRIDE, RANKS_STRIDE, UNSUSPECTED_STRIDE = 7, 101, 23
QUICK_STRIDE, QUICK_RESCUE_STRIDE, QUICK_RANKS_STRIDE, QUICK_UNSUSPECTED_STRIDE = 41, 97, 600, 120
console = Console(stderr=True, width=140)


def in_one_process(stride: int, rescue_stride: int) -> dict[str, list[Outcome]]:
    """Both models, in adaptive runs and with the rescue alone; a process for each, two at a time."""
    found: dict[str, list[Outcome]] = {}
    with ProcessPoolExecutor(2, get_context("spawn"), max_tasks_per_child=1) as pool:
        runs = {f"{model}, adaptive run": pool.submit(session_of, model, stride) for model in MODELS}
        for model, policy in product(MODELS, POLICIES):
            runs[f"{model}, {policy}"] = pool.submit(rescued, model, policy, rescue_stride)
        for key, outcomes in runs.items():
            found[key] = outcomes.result()
            for outcome in found[key]:
                if not outcome.exact:
                    console.print(f"{key}, {outcome}", style="red", markup=False)
            console.print(f"{key}: {counts_of(found[key])}", highlight=False)
    return found


def without_a_reason(stride: int) -> dict[str, dict[str, int]]:
    """What became of steps that ran out of memory without having given a reason to be watched."""
    found: dict[str, dict[str, int]] = {}
    with ProcessPoolExecutor(2, get_context("spawn"), max_tasks_per_child=1) as pool:
        runs = {
            f"{model}, {'steps' if given else 'loop'}": pool.submit(unsuspected, model, stride, given)
            for model, given in product(MODELS, (True, False))
        }
        for key, outcomes in runs.items():
            ended = [one.died for one in outcomes.result()]
            found[key] = {
                "steps": len(ended),
                "needed_nothing": sum(one.line == 0 and not one.died for one in outcomes.result()),
                "retried": sum(one.line == 3 for one in outcomes.result()),
                "plain_error": sum(one.startswith("OutOfMemoryError") for one in ended),
                "refused": sum(one.startswith("RescueError") for one in ended),
                "not_bitwise": sum(bool(one.different) for one in outcomes.result()),
            }
            console.print(f"unsuspected, {key}: {found[key]}", highlight=False)
            for one in {text.partition(":")[0]: text for text in ended if text}.values():
                console.print(f"  such as {one}", highlight=False, markup=False)
    return found


def on_two_ranks(stride: int) -> tuple[dict[str, list[Outcome]], int]:
    """Adaptive runs of two ranks that fail in turns; and how often one did not answer."""
    ranks, hung = Ranks(2), 0
    found: dict[str, list[Outcome]] = {}
    for layout in LAYOUTS:
        key = f"{layout}, adaptive run"
        try:
            answers = ranks.run(session_on_ranks, layout, stride)
        except AssertionError as error:
            text = str(error)
            hung += text.count("no answer")
            console.print(f"{key}: {text[-600:]}", style="red", markup=False)
            found[key] = [Outcome(key, "forward", died=text)]
            continue
        of_failing = [answers[turn % 2][turn] for turn in range(len(answers[0]))]
        others = [answers[1 - turn % 2][turn] for turn in range(len(answers[0]))]
        found[key] = of_failing + [one for one in others if not one.exact]  # which must not be touched
        console.print(f"{key}: {counts_of(found[key])}", highlight=False)
    ranks.stop()
    return found, hung


def counts_of(outcomes: list[Outcome]) -> dict[str, int]:
    return {
        "runs": len(outcomes),
        "died": sum(bool(one.died) for one in outcomes),
        "not_bitwise": sum(bool(one.different) for one in outcomes),
        "races": sum(bool(one.races) for one in outcomes),
        "leaks": sum(bool(one.leaked) for one in outcomes),
        "needed_nothing": sum(one.line == 0 for one in outcomes),
        "operator_retried": sum(one.line == 2 for one in outcomes),
        "step_retried": sum(one.line == 3 for one in outcomes),
        "paged": sum(one.paged for one in outcomes),
    }


def table_of(found: dict[str, list[Outcome]]) -> Table:
    """By model, Policy and state."""
    table = Table("step", *(name.replace("_", " ") for name in counts_of([])))
    for key, outcomes in found.items():
        table.add_row(key, *(f"{count:,}" for count in counts_of(outcomes).values()))
    table.add_section()
    everything = [one for outcomes in found.values() for one in outcomes]
    for phase in PHASES:
        in_phase = [one for one in everything if one.phase == phase]
        table.add_row(f"in {phase}", *(f"{count:,}" for count in counts_of(in_phase).values()))
    table.add_section()
    table.add_row("all", *(f"{count:,}" for count in counts_of(everything).values()))
    return table


class _Nothing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operators, and does nothing else: what any mode costs."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def host_time(repeats: int) -> dict[str, float]:
    """What watching costs on the real clock, on the host's own device: for each operator, in microseconds."""
    torch.manual_seed(0)
    width, layers = 64, 8
    model = torch.nn.Sequential(
        *(
            torch.nn.TransformerEncoderLayer(width, 4, 128, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(layers)
        )
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, foreach=True)
    x = torch.randn(2, 16, width)
    rescue = Rescue(model, [optimizer])

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()

    def timed(function: Any) -> float:
        seconds = []
        for _ in range(repeats):
            begin = time.process_time()
            function()
            seconds.append(time.process_time() - begin)
        return statistics.median(seconds)

    counting = _Nothing()  # type: ignore[no-untyped-call]
    with counting:
        step()
        operators, counting.count = counting.count, 0
        optimizer.step()
    with_optimizer = counting.count
    plain, plain_optimizer = timed(step), timed(optimizer.step)
    with counting:
        least = timed(step)

    def watched_optimizer() -> None:
        with rescue.watching():
            optimizer.step()

    watched = timed(watched_optimizer)
    rescue.arm()
    armed = timed(lambda: rescue.run(step))
    rescue.remove()
    return {
        "host_us_armed": round((armed - plain) / operators * 1e6, 2),
        "host_us_any_mode": round((least - plain) / operators * 1e6, 2),
        "host_share_armed": round(armed / plain - 1, 3),
        "operators": operators,
        "host_us_optimizer": round((watched - plain_optimizer) / with_optimizer * 1e6, 2),
        "host_share_optimizer": round((watched - plain_optimizer) / (plain + plain_optimizer), 4),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--quick", action="store_true", help=f"every {QUICK_STRIDE}-th allocation")
    parser.add_argument("--stride", type=int, default=1, metavar="N", help="in adaptive runs, every N-th allocation")
    parser.add_argument("--rescue-stride", type=int, default=RESCUE_STRIDE, metavar="N", help="with the rescue alone")
    parser.add_argument("--ranks-stride", type=int, default=RANKS_STRIDE, metavar="N", help="on two ranks")
    parser.add_argument("--without-ranks", action="store_true", help="one process only")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    begin = time.perf_counter()
    costs = host_time(10 if arguments.quick else 40)
    strides = (QUICK_STRIDE, QUICK_RESCUE_STRIDE) if arguments.quick else (arguments.stride, arguments.rescue_stride)
    found = in_one_process(*strides)
    apart = without_a_reason(QUICK_UNSUSPECTED_STRIDE if arguments.quick else UNSUSPECTED_STRIDE)
    hung = 0
    if not arguments.without_ranks:
        together, hung = on_two_ranks(QUICK_RANKS_STRIDE if arguments.quick else arguments.ranks_stride)
        found |= together
    console.print(table_of(found))
    everything = counts_of([one for outcomes in found.values() for one in outcomes])
    by_phase = Counter(one.phase for outcomes in found.values() for one in outcomes)
    seconds = round(time.perf_counter() - begin)
    console.print(f"{everything['runs']:,} steps in {seconds} s; {costs}", highlight=False)
    if arguments.json:
        figures = {**everything, "hung": hung, **dict(by_phase), "unsuspected": apart, **costs, "seconds": seconds}
        print(json.dumps(stamped(figures)))
    wrong = sum(everything[name] for name in ("died", "not_bitwise", "races", "leaks")) + hung
    wrong += sum(counts["not_bitwise"] for counts in apart.values())
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
