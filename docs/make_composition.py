"""Write docs/composition.md from the tests that prove it: ``python docs/make_composition.py [--check]``.

Every test marked ``composes`` is a cell: its parameters ``row`` and ``column`` say which, and the marker's ``refused``
whether what it proves is that the combination is refused rather than exact.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "composition.md"
TESTS = ROOT / "tests" / "numerics"
RECORD = ROOT / "benchmarks" / "results" / "slow_tests.json"
COLUMNS = (
    "recompute operators", "recompute layers", "swap", "swap to disk", "boundary swap", "mixed",
)  # fmt: skip

TEXT = """\
# With everything else

What lowtide is combined with, and the result. This page is written by `docs/make_composition.py` from the tests in
`tests/numerics`; a test fails if it is out of date. Rows that only the nightly run proves say when that was. *Exact*
means that the loss and every gradient of some steps, with the optimizer's steps between them, are bitwise those of the
same run without lowtide. *Refused* means a `PolicyError`.

Apply the Policy before `fully_shard` and before `DistributedDataParallel`, after or before `parallelize_module`, and to
the layers of each stage of a pipeline.

The columns: every operator recomputed; whole layers recomputed; all that layers save swapped, their inputs too; the
same on disk; whole layers recomputed with their inputs swapped; and operators of one layer decided differently.

{table}

## Communication

| setting | what happens | where it has no effect |
|---|---|---|
| `reissue_collectives=False` (`mp_comm_recompute: false`) | a recomputed layer keeps the results of its tensor-parallel collectives, also where some of its operators are excluded | layers without tensor-parallel parameters |
| `reshard_after_forward=True` (`parallel_optimizer_comm_recompute: true`) | `reshard_after_forward` is set for layers that `fully_shard` sharded; `false` leaves what you chose there | other layers |
| `slice_inputs=True` (`recompute_slice_activation: true`) | each tensor-parallel rank holds its slice of a recomputed layer's input, and they gather it in backward | inputs that are sharded already, such as with sequence parallelism; inputs that are swapped; layers some of whose operators are excluded |
| `collectives` of a layer (`select_comm_recompute`) | the collective that reads the named operator's output, such as the gather after a sequence-parallel norm, is re-issued in backward | operators without one; layers that are recomputed as a whole; collectives whose result is swapped |

Where a setting has no effect a warning says so, when the Policy is applied or when the layer first runs. A sliced input
has to be the same on all tensor-parallel ranks; this is checked when a layer first runs.

Ranks re-issue the same collectives whatever each of them does: a rank whose control flow differs in a step, such as one
with an expert that got no tokens, takes part all the same. When a layer first runs, the ranks of each collective ask
each other once whether they all recompute its result. `benchmarks/communication.py` trains with every setting in six
layouts on gloo. An operator that communicates inside as well as computes is kept, and the receipt says so. Not covered:
a whole layer is recomputed that exchanges tokens by `torch.distributed`'s functions in place alone (functional ones are
seen), if the ranks' control flow differs there.

## torch.compile

Operators and whole layers are recomputed inside compiled graphs, of layers and of models. What is swapped is swapped by
hooks around compiled layers, so the layers are compiled *before* the Policy is applied; inside a compiled model that is
refused in the first step. In compiled tensor-parallel layers torch 2.13 cannot recompute, and neither can its own
checkpoint; torch 2.14 and 2.15 can, and are exact there. [](guides/compile.md) has the rest.
"""  # noqa: E501


class Cell(NamedTuple):
    """What one test proves."""

    row: str
    column: str
    outcome: str
    test: str
    slow: bool
    """Whether only the nightly run has it."""


class Collector:
    """Gathers the cells of all tests that pytest finds."""

    def __init__(self) -> None:
        self.cells: list[Cell] = []

    def pytest_collection_finish(self, session: Any) -> None:
        for item in session.items:
            marker = item.get_closest_marker("composes")
            if marker is not None:
                given = item.callspec.params
                outcome = "refused" if marker.kwargs.get("refused") else "exact"
                name = f"{item.path.name}::{item.originalname}"
                slow = item.get_closest_marker("slow") is not None
                self.cells.append(Cell(given["row"], given["column"], outcome, name, slow))


def collect() -> list[Cell]:
    """The cells of all tests, slow ones included."""
    collector = Collector()
    arguments = ["--collect-only", "-q", "-m", "slow or not slow", "-p", "no:cacheprovider", str(TESTS)]
    with contextlib.redirect_stdout(io.StringIO()) as output:
        code = pytest.main(arguments, plugins=[collector])
    if code != 0:
        raise SystemExit(output.getvalue())
    return collector.cells


def table(cells: list[Cell]) -> str:
    """The matrix, with the tests that prove each row."""
    rows = dict.fromkeys(cell.row for cell in cells)
    lines = [f"| | {' | '.join(COLUMNS)} | proved by |", "|---" * (len(COLUMNS) + 2) + "|"]
    for row in rows:
        mine = [cell for cell in cells if cell.row == row]
        outcomes = [{cell.outcome for cell in mine if cell.column == column} for column in COLUMNS]
        if any(len(outcome) > 1 for outcome in outcomes):
            raise SystemExit(f"{row}: a combination is proved to be exact and to be refused")
        shown = [next(iter(outcome), "–") for outcome in outcomes]
        tests = ", ".join(f"`{test}`" for test in dict.fromkeys(cell.test for cell in mine))
        nightly = f" ({last_run()})" if all(cell.slow for cell in mine) else ""
        lines.append(f"| {row} | {' | '.join(shown)} | {tests}{nightly} |")
    return "\n".join(lines)


def last_run() -> str:
    """When the slow tests ran last, as ``scripts/nightly slow`` has recorded it."""
    if not RECORD.exists():
        return "nightly; no run is recorded yet"
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    return f"nightly, last on {record['date']} at {record['commit']}"


def main() -> None:
    text = TEXT.replace("{table}", table(collect()))
    if "--check" in sys.argv:
        if PAGE.read_text(encoding="utf-8") != text:
            raise SystemExit("docs/composition.md is out of date: run python docs/make_composition.py")
    else:
        PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
