"""Training scripts that know nothing of lowtide, under ``lowtide run``: alive where they die alone, with equal results.

    python benchmarks/zero_code.py --json

The scripts are those in ``benchmarks/scripts``; the virtual accelerator is their device. Each is run

- alone, on a device that is large enough: its peak, and the results to compare with;
- alone, at a share of that peak: it must die of OOM, or nothing is shown;
- under ``lowtide run`` at that capacity;
- under ``lowtide run`` on the large device.

``attached`` counts the scripts whose models were found; ``survived`` those that end well at the capacity at which they
die alone, with results that are bitwise those of the large device; ``bitwise`` those with such results wherever they
ended well; ``broken`` those that fail under ``lowtide run`` on the large device, or have other results there, or do not
end by the same error as alone. Scripts of frameworks that are not installed are left out, and named. ``--quick`` runs
three of them.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import tide  # noqa: F401  results are saved on its device

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from stamp import stamped
from support.script_cases import LARGE, SCRIPTS, Ended, same, start


@dataclass(frozen=True)
class Script:
    """A script, how it is started, and the share of its peak that it is given."""

    name: str
    file: str
    share: float = 0.5
    arguments: tuple[str, ...] = ()
    ranks: int = 0
    needs: str = ""
    """The package that it is for."""
    has_layers: bool = True


CASES = (
    Script("plain loop", "plain_loop.py"),
    Script("nanoGPT-like", "nanogpt.py", 0.6),
    Script("GAN", "gan.py"),
    Script("distillation, bf16", "distillation.py", 0.6),
    Script("no repeated layers", "no_layers.py", has_layers=False),
    Script("DDP, two ranks", "ddp.py", 0.6, ranks=2),
    Script("transformers Trainer", "trainer.py", 0.6, needs="accelerate"),
    Script("TRL SFT", "trl_sft.py", 0.8, needs="trl"),
    Script("accelerate", "accelerate_loop.py", needs="accelerate"),
    Script("Lightning", "lightning_fit.py", needs="lightning"),
    Script("Lightning, manual", "lightning_fit.py", arguments=("--manual",), needs="lightning"),
)
QUICK = ("plain loop", "GAN", "no repeated layers")


def run(script: Script, folder: Path, capacity: int, *, under: bool) -> Ended:
    """Run a script once, alone or under ``lowtide run``."""
    return start(
        SCRIPTS / script.file,
        *script.arguments,
        folder=folder,
        under=["--quiet", "--json"] if under else None,
        capacity=capacity,
        ranks=script.ranks,
        environment={"TIDE_PEAK": str(folder / "peak")},
    )


def died(ended: Ended) -> bool:
    return ended.code != 0 and "OutOfMemoryError" in ended.error


def measure(script: Script) -> dict[str, Any]:
    """All runs of one script."""
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        alone = run(script, folder, LARGE, under=False)
        if alone.code:
            raise RuntimeError(f"{script.file} fails alone: {alone.error[-2000:]}")
        peak = int((folder / "peak").read_text())
        capacity = int(script.share * peak)
        tight = run(script, folder, capacity, under=False)
        large = run(script, folder, LARGE, under=True)
        under = run(script, folder, capacity, under=True)
        unbroken = large.code == 0 and same(large.results, alone.results)
        ends_well = under.code == 0 and same(under.results, alone.results)
    models = len(json.loads(large.output.splitlines()[-1])["attached"]) if large.code == 0 else 0
    failed = large.error if not unbroken else under.error if under.code and script.has_layers else ""
    return {
        "name": script.name,
        "peak": peak,
        "capacity": capacity,
        "dies_alone": died(tight),
        "attached": models > 0,
        "models": models,
        "survived": died(tight) and ends_well,
        "bitwise": unbroken and (ends_well or under.code != 0),
        "broken": not unbroken or (under.code == 0 and not ends_well) or (under.code != 0 and not died(under)),
        "seconds": round(time.monotonic() - begun, 1),
        "error": failed[-1500:],
    }


def show(rows: list[dict[str, Any]], absent: list[str]) -> Table:
    table = Table(title="Unmodified scripts under lowtide run, on the virtual accelerator")
    for column in ("script", "capacity of peak", "alone", "attached", "under lowtide run", "results", "seconds"):
        table.add_column(column)
    for row in rows:
        table.add_row(
            row["name"],
            f"{row['capacity'] / 2**20:.1f} of {row['peak'] / 2**20:.1f} MiB",
            "dies" if row["dies_alone"] else "LIVES",
            f"{row['models']} model{'s' * (row['models'] != 1)}",
            "survives" if row["survived"] else "dies",
            "BROKEN" if row["broken"] else "bitwise equal" if row["bitwise"] else "DIFFER",
            str(row["seconds"]),
        )
    for name in absent:
        table.add_row(name, "not installed")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--quick", action="store_true", help="three scripts")
    arguments = parser.parse_args()
    wanted = [one for one in CASES if not arguments.quick or one.name in QUICK]
    absent = [one.name for one in wanted if one.needs and find_spec(one.needs) is None]
    with ThreadPoolExecutor(2) as pool:
        rows = []
        for row in pool.map(measure, [one for one in wanted if one.name not in absent]):
            rows.append(row)
            print(f"{row['name']}: {row['seconds']} s", file=sys.stderr, flush=True)
    Console(stderr=True, width=None if sys.stderr.isatty() else 130).print(show(rows, absent))
    for row in rows:
        if row["error"]:
            print(f"{row['name']}: {row['error']}", file=sys.stderr)
    counts = {check: sum(row[check] for row in rows) for check in ("attached", "survived", "bitwise", "broken")}
    if arguments.json:
        print(json.dumps(stamped({"scripts": len(rows), **counts, "not_installed": absent, "rows": rows})))


if __name__ == "__main__":
    main()
