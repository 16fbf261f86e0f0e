"""Write docs/benchmarks.md from the files in ``benchmarks/results``: ``python docs/make_benchmarks.py``.

A test fails if it is out of date.
"""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "benchmarks.md"
BENCHMARKS = ROOT / "benchmarks"
TEXT = """\
# Benchmarks

Every figure that these pages claim comes from a program in `benchmarks/`. Each is run by
`python benchmarks/NAME.py --json`, says in its docstring what it measures and against what, and puts commit, date,
versions and machine into its result. This page is written by `docs/make_benchmarks.py` from those results; a test fails
if it is out of date.

**Simulated** means that the benchmark runs on the virtual accelerator, `packages/tide`: bytes are those of an
allocator that follows CUDA's, numbers are computed, and times are those of a clock that counts kernels, copies and
waiting at a data sheet's rates. Times of the host, such as overheads, are measured on the machine that is named. No
GPU has run any of them.
"""
GROUPS = {
    "Exactness": (
        "parity",
        "compiled",
        "attacks",
        "communication",
        "layouts",
        "integrations",
        "zero_code",
        "check_fuzz",
    ),
    "Memory and speed": (
        "at_a_budget",
        "runtime",
        "plan_quality",
        "plan_scale",
        "protocol_scale",
        "real_budgets",
        "predict",
        "predict_ranks",
        "layouts_search",
        "moe",
        "runner",
        "runner_memory",
    ),
    "Surviving": ("adaptive", "adaptive_lengths", "adaptive_long", "adaptive_overhead", "oom_sweep", "crash"),
    "Tools": ("check_start",),
}


def rendered() -> str:
    """The page as the results are now."""
    found = {
        file.stem: json.loads(file.read_text(encoding="utf-8")) for file in (BENCHMARKS / "results").glob("*.json")
    }
    unknown = set(found) - {name for names in GROUPS.values() for name in names} - {"selftest-cpu", "slow_tests"}
    assert not unknown, f"which group of the page has {', '.join(sorted(unknown))}?"
    parts = [TEXT]
    for group, names in GROUPS.items():
        parts.append(f"## {group}\n")
        parts += [section(name, found[name]) for name in names if name in found]
    return "\n".join(parts)


def section(name: str, figures: dict[str, Any]) -> str:
    """One benchmark: what it is, where it ran, what came out."""
    docstring = ast.get_docstring(ast.parse((BENCHMARKS / f"{name}.py").read_text(encoding="utf-8"))) or ""
    title = " ".join(docstring.split("\n\n")[0].split())
    rows = [f"| `{key}` | {shown(value)} |" for key, value in figures.items() if is_plain(value)]
    lines = [f"### {name}", "", title, "", where(figures.get("stamp")), "", "| figure | |", "|---|---|", *rows, ""]
    return "\n".join(lines)


def where(stamp: dict[str, Any] | None) -> str:
    """Where a result comes from."""
    if stamp is None:
        return "*Recorded before benchmarks stamped their results.*"
    simulated = "**simulated** where it is time; " if stamp["virtual_accelerator"] else ""
    versions = f"torch {stamp['torch']}, Python {stamp['python']}"
    return f"*{simulated}commit {stamp['commit']}, {stamp['date']}, {versions}, {stamp['machine']}.*"


def is_plain(value: Any) -> bool:
    """Whether a value is a figure, and not a list of what is behind it."""
    return isinstance(value, bool | int | float) or (isinstance(value, str) and 0 < len(value) < 60)


def shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.5g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


if __name__ == "__main__":
    PAGE.write_text(rendered(), encoding="utf-8")
