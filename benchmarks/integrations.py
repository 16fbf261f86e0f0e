"""lowtide inside other people's frameworks, at their newest versions: exact, and alive where the script alone dies.

    pip install .[dev,integrations] -c constraints-integrations.txt
    python benchmarks/integrations.py --json

The same small training of a Llama in each framework that is installed, a process each
(``tests/support/framework_cases.py``).
Lightning has two modes and DeepSpeed three: a framework counts if all its modes pass. Counted are those in which

- ``bitwise``: with a fixed Policy that recomputes and swaps, losses and weights are bitwise those without lowtide;
- ``adapted``: so they are with ``lowtide.attach(…)`` alone, with gradient accumulation, evaluation in between, and with
  gradient checkpointing that was on beforehand, and the run did switch to a plan;
- ``survived``: on the virtual accelerator, at a capacity at which the script dies of OOM without lowtide, the training
  goes on to its end, and losses and weights are bitwise those of a device that is large enough;
- ``resumed``: a checkpoint that was saved and resumed under lowtide leads where it leads without, and holds no other
  names.

DeepSpeed is told of the virtual accelerator by its own interface for devices. ``refused`` says what is not possible, in
the words of the error. ``--quick`` runs two frameworks without the device, in a minute.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from importlib.metadata import version
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import tide

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from lowtide import LowtideError, Policy, Recompute, Swap
from stamp import stamped
from support.framework_cases import CASES, Case, Job, tight

POLICY = Policy.uniform({"mlp.*": Recompute()}, default=Swap(2))
WHOLE = Policy.uniform(default=Recompute())
PACKAGES = {"fabric": "lightning"}
QUICK = ("transformers", "peft")
CHECKS = ("bitwise", "adapted", "survived", "resumed")


def package_of(name: str) -> str:
    return PACKAGES.get(name, name.split()[0])


def measure(name: str, quick: bool) -> dict[str, Any]:
    """Every check of one framework; what is not possible in it is missing, and ``refused`` says why."""
    torch.set_num_threads(1)
    case, begun = CASES[name], time.monotonic()
    found: dict[str, Any] = {"name": name, "version": version(package_of(name)), "refused": []}
    plain = case(Job())
    try:
        found["bitwise"] = not case(Job(attach={"policy": POLICY})).differs(plain)
    except LowtideError as error:
        found["refused"].append(str(error))
        found["bitwise"] = not case(Job(attach={"policy": WHOLE})).differs(plain)
    settings: dict[str, Any] = {}
    try:
        found["adapted"] = _adapts(name, case)
    except LowtideError as error:
        found["refused"].append(str(error))
        settings = {"policy": WHOLE}
    found["resumed"] = _resumes(case, settings)
    if not quick and "adapted" in found:
        found |= _survives(name, case)
    return found | {"seconds": round(time.monotonic() - begun, 1)}


def _adapts(name: str, case: Case) -> bool:
    job = Job(accumulate=2, evaluate=True)
    plain = case(job)
    for checkpointing in (False, True):
        found = case(replace(job, attach={}, checkpointing=checkpointing))
        run = found.attachment if name == "peft" else found.attachment.run
        if found.differs(plain) or not any(event.kind == "switched" for event in run.events):
            return False
    return True


def _resumes(case: Case, settings: dict[str, Any]) -> bool:
    job, ends = Job(accumulate=2), []
    with tempfile.TemporaryDirectory() as folder:
        for attach in (None, settings):
            here = Path(folder) / ("plain" if attach is None else "attached")
            here.mkdir()
            names = case(replace(job, attach=attach, save=here)).saved
            (*_, last) = [here, *here.glob(f"checkpoint-{(job.steps + 1) // 2}")]
            ends.append((names, case(replace(job, attach=attach, resume=last))))
    (names, plain), (found_names, found) = ends
    return bool(names) and names == found_names and not found.differs(plain)


def _survives(name: str, case: Case) -> dict[str, Any]:
    job, share = tight(name)
    tide.configure(capacity=1 << 30)
    torch.accelerator.reset_peak_memory_stats()
    plain = case(job)
    peak = int(torch.accelerator.max_memory_allocated())
    capacity = int(share * peak)
    _fresh(capacity)
    died = False
    try:
        case(job)
    except torch.OutOfMemoryError:
        died = True
    _fresh(capacity)
    try:
        survived = not case(replace(job, attach={})).differs(plain)
    except (LowtideError, torch.OutOfMemoryError) as error:
        survived = False
        print(f"{name}: {error}", file=sys.stderr)
    return {"survived": died and survived, "peak": peak, "capacity": capacity, "plain_died": died}


def _fresh(capacity: int) -> None:
    gc.collect()
    torch.accelerator.empty_cache()
    tide.configure(capacity=capacity)


def passed(modes: list[dict[str, Any]], check: str) -> bool:
    """Whether a framework passes a check: in all its modes that have it, and in one at least."""
    results = [mode[check] for mode in modes if check in mode]
    return bool(results) and all(results)


def show(rows: list[dict[str, Any]], absent: list[str]) -> Table:
    table = Table(title="lowtide inside other frameworks")
    for column in ("framework", "version", *CHECKS, "capacity", "seconds"):
        table.add_column(column)
    for row in rows:
        cells = ["-" if check not in row else "yes" if row[check] else "NO" for check in CHECKS]
        share = f"{row['capacity'] / 2**20:.1f} of {row['peak'] / 2**20:.1f} MiB" if "peak" in row else "-"
        table.add_row(row["name"], row["version"], *cells, share, str(row["seconds"]))
    for name in absent:
        table.add_row(name, "not installed")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--quick", action="store_true", help="two frameworks, without the virtual accelerator")
    arguments = parser.parse_args()
    wanted = [name for name in CASES if not arguments.quick or name in QUICK]
    absent = [name for name in wanted if find_spec(package_of(name)) is None]
    rows = []
    for name in wanted:
        if name in absent:
            continue
        # A process each: frameworks keep state, and one that fails must not take the others with it.
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            rows.append(pool.submit(measure, name, arguments.quick).result())
        print(f"{name}: {rows[-1]['seconds']} s", file=sys.stderr)
    Console(stderr=True, width=None if sys.stderr.isatty() else 120).print(show(rows, absent))
    refused = {row["name"]: row["refused"] for row in rows if row["refused"]}
    for name, texts in refused.items():
        print(f"{name} refuses: {texts[0]}", file=sys.stderr)
    modes: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        modes.setdefault(row["name"].split()[0], []).append(row)
    counts = {check: sum(passed(mode, check) for mode in modes.values()) for check in CHECKS}
    result = {"frameworks": len(modes), **counts, "not_installed": absent, "refused": refused, "rows": rows}
    if arguments.json:
        print(json.dumps(stamped(result)))


if __name__ == "__main__":
    main()
