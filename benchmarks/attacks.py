"""Run training programs that once broke lowtide, or that try to, and say what became of each.

    python benchmarks/attacks.py --json
    python benchmarks/attacks.py --case functional_batch_norm

An attack is a small training program: layers that draw random numbers, write buffers or hide state, loops with
schedulers, scalers and closures, models of transformers as they come, modes, hooks, signals, full devices. Each is run
without lowtide and then with it in several forms: recompute by operator and by layer, swap to host and disk, and
adaptive runs; on the CPU, and on the virtual accelerator ``tide`` where that makes a difference. Its
outcome is the worst of these:

- ``exact``: losses, gradients, parameters, buffers and optimizer states are bitwise those of the run without lowtide,
  and nothing stays: no hook, mode, wrapper, thread, tensor or byte.
- ``refused``: a typed error of lowtide, or a documented message, with its text.
- ``left_behind``, ``leaked``, ``crashed`` (another error that the program alone does not raise), ``silently_wrong``
  (races included), ``hung``.

Each attack runs in a process of its own, two side by side. ``--quick`` runs each on one device in two forms.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: two threads on a busy machine wait for each other
from attacks.catalogue import ATTACKS
from attacks.outcome import KINDS, WRONG, Outcome
from attacks.runner import Runner
from stamp import stamped

STYLES = {"exact": "green", "refused": "yellow"}


def table_of(outcomes: list[Outcome]) -> Table:
    """One row for each attack, and what was found where it is not exact."""
    table = Table("attack", "what it tries", "outcome", "s", show_lines=False)
    for outcome in outcomes:
        style = STYLES.get(outcome.kind, "red")
        tries = outcome.tries + (f"\n[{style}]{_escaped(outcome.text)}[/]" if outcome.text else "")
        table.add_row(outcome.name, tries, f"[{style}]{outcome.kind}[/]", f"{outcome.seconds:.1f}")
    return table


def _escaped(text: str) -> str:
    return text.replace("[", r"\[")


def run_all(names: list[str], *, quick: bool, workers: int, console: Console) -> list[Outcome]:
    """The outcomes, in the order of the names; whatever is wrong is printed as soon as it is known."""
    runner = Runner(quick=quick)
    outcomes = []
    with ThreadPoolExecutor(workers) as pool:  # a thread waits for a process
        for outcome in pool.map(runner.run, names):
            outcomes.append(outcome)
            if outcome.kind in WRONG:
                console.print(f"{outcome.name}: {outcome.kind}: {outcome.text}", style="red", markup=False)
    return outcomes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--quick", action="store_true", help="each attack on one device, in two forms")
    parser.add_argument("--case", action="append", metavar="NAME", help="this attack only, with all its findings")
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="attacks at a time")
    arguments = parser.parse_args()
    console, begin = Console(stderr=True, width=160), time.perf_counter()
    names = arguments.case or list(ATTACKS)
    if unknown := [name for name in names if name not in ATTACKS]:
        parser.error(f"no attack {', '.join(unknown)}; there are {', '.join(ATTACKS)}")
    outcomes = run_all(names, quick=arguments.quick, workers=arguments.workers, console=console)
    console.print(table_of(outcomes))
    for outcome in outcomes if arguments.case else ():
        for finding in outcome.findings:
            console.print(f"  {finding}", markup=False, highlight=False)
    counts = {kind: sum(outcome.kind == kind for outcome in outcomes) for kind in KINDS}
    seconds = round(time.perf_counter() - begin)
    console.print(f"{len(outcomes)} attacks in {seconds} s: {counts}", highlight=False)
    if arguments.json:
        wrong = {kind: counts[kind] for kind in ("silently_wrong", "hung", "leaked", "left_behind", "crashed")}
        refusals = [[one.name, one.text] for one in outcomes if one.kind == "refused"]
        figures = {"attacks": len(outcomes), **wrong, "refused": counts["refused"], "seconds": seconds}
        print(json.dumps(stamped({**figures, "refusals": refusals})))
    return 1 if any(outcome.kind in WRONG for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
