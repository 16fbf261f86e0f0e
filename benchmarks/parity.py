"""Train tiny models under random Policies and compare every loss, gradient and parameter bit by bit.

    python benchmarks/parity.py --json
    python benchmarks/parity.py --json --cases 10000
    python benchmarks/parity.py --case 115

Each case is a random Policy (keep, recompute and swap by operator and by layer, boundaries, excludes, prefetches of 1
to 30, both tiers, small and large limits) on a model of one of sixteen families (decoders, encoders, both at once,
experts, state spaces, vision, speech), in single precision, under bfloat16 autocast or with dropout, on the CPU or on
the virtual accelerator ``tide``, with optimizer steps between. The same run without lowtide is made once for each
model, setting, device and order of micro-batches. Besides equal values, a case must show no race on tide, as many
device bytes after each step as the run without, and every host buffer and piece of disk returned. Two processes run
side by side. A case is known by its number: ``--case`` runs one.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from queue import Queue

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from stamp import stamped
from support.parity_cases import DEVICES, GRID, Outcome, case, run_case

CASES, QUICK = 1020, len(GRID)


def table_of(outcomes: list[Outcome]) -> Table:
    """By model, setting and device."""
    table = Table(
        "model", "setting", "device", "cases", "swaps", "recomputes", "not bitwise", "races", "leaks", "errors"
    )
    for cell in GRID:
        found = [one for one in outcomes if (one.case.model, one.case.setting, one.case.device) == cell]
        counts = counts_of(found)
        table.add_row(*cell, *(f"{count:,}" for count in counts.values()))
    table.add_section()
    table.add_row("all", "", "", *(f"{count:,}" for count in counts_of(outcomes).values()))
    return table


def counts_of(outcomes: list[Outcome]) -> dict[str, int]:
    return {
        "cases": len(outcomes),
        "swaps": sum(one.swaps for one in outcomes),
        "recomputes": sum(one.recomputes for one in outcomes),
        "not_bitwise": sum(bool(one.different) for one in outcomes),
        "races": sum(bool(one.races) for one in outcomes),
        "leaks": sum(bool(one.leaks) for one in outcomes),
        "errors": sum(bool(one.error) for one in outcomes),
    }


def run_all(numbers: range, workers: int, console: Console) -> list[Outcome]:
    """The outcomes, in order; whatever is wrong is printed as soon as it is known."""
    outcomes: list[Outcome] = []
    shown = Progress(console=console, disable=not console.is_terminal, transient=True)
    with shown:
        task = shown.add_task("cases", total=len(numbers))
        for outcome in _outcomes(numbers, min(workers, len(numbers))):
            outcomes.append(outcome)
            shown.advance(task)
            if not outcome.exact:
                console.print(str(outcome), markup=False, highlight=False, style="red")
    return sorted(outcomes, key=lambda outcome: outcome.case.number)


def _outcomes(numbers: range, workers: int) -> Iterator[Outcome]:
    if workers <= 1:
        yield from map(_outcome, numbers)
        return
    # A process has its models, and their runs without lowtide, for itself: a cell of the grid belongs to one process.
    shares = [[number for number in numbers if number // len(DEVICES) % workers == worker] for worker in range(workers)]
    done: Queue[Outcome | None] = Queue()
    with ThreadPoolExecutor(workers) as threads:
        running = [threads.submit(_in_process, share, done) for share in shares]
        for _ in running:
            yield from iter(done.get, None)
        for share in running:
            share.result()  # or what was raised in it


def _in_process(numbers: list[int], done: Queue[Outcome | None]) -> None:
    """Run cases in a process, and in another one if it dies; None at the end."""
    waiting = deque(numbers)
    try:
        while waiting:
            with ProcessPoolExecutor(1, get_context("spawn"), initializer=torch.set_num_threads, initargs=(1,)) as one:
                try:
                    while waiting:
                        done.put(one.submit(_outcome, waiting[0]).result())
                        waiting.popleft()
                except BrokenProcessPool:
                    done.put(Outcome(case(waiting.popleft()), error="its process died"))
    finally:
        done.put(None)


def _outcome(number: int) -> Outcome:
    return run_case(case(number))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--cases", type=int, default=CASES, metavar="N", help=f"how many; {CASES} unless given")
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="processes side by side")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK} cases only")
    parser.add_argument("--case", type=int, metavar="NUMBER", help="one case only, and print its Policy")
    parser.add_argument("--first", type=int, default=0, metavar="NUMBER", help="the first case; others are others")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # two threads on a busy machine wait for each other
    console, begin = Console(stderr=True, width=140), time.perf_counter()
    numbers = range(arguments.first, arguments.first + (QUICK if arguments.quick else arguments.cases))
    if arguments.case is not None:
        numbers = range(arguments.case, arguments.case + 1)
        console.print(str(case(arguments.case)), markup=False, highlight=False)
    outcomes = run_all(numbers, arguments.workers, console)
    console.print(table_of(outcomes))
    wrong = [one.case.number for one in outcomes if not one.exact]
    seconds = round(time.perf_counter() - begin)
    console.print(f"{len(outcomes)} cases in {seconds} s, {len(wrong)} wrong {wrong or ''}", highlight=False)
    if arguments.json:
        print(json.dumps(stamped({**counts_of(outcomes), "wrong": wrong, "seconds": seconds})))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
