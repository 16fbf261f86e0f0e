"""Feed ``lowtide check`` mutated files: it must never raise, and every error must have its place.

    python benchmarks/check_fuzz.py --json

Documents are the repository's examples and the recorded vectors, changed at random in their values
(types, keys, nesting, huge numbers, unicode), in their text (aliases, truncation, indentation) and in
their bytes. Each is checked and its outcome rendered, as on a terminal. The random seed is fixed.
"""

from __future__ import annotations

import argparse
import json
import random
import string
import sys
import tempfile
import time
import traceback
from io import StringIO
from pathlib import Path
from typing import Any

from rich.console import Console

from lowtide.config.check import Check, check_file
from lowtide.config.parse import parse_value
from lowtide.operators.names import layer_operators
from lowtide.report.terminal import print_check, print_problems
from stamp import stamped

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "golden"))
from vectors import file_2026, graph_file, vectors  # noqa: E402

ODD: list[Any] = [
    None, True, False, 0, 1, -1, 2, 7, 10**6, 10**18, 10**30, -(10**30), 1.5, 1e308, float("inf"), float("nan"),
    "", "0", "1", "true", "None", "full", "a" * 5_000, "\u0000", "\ud800", "\u202e", "日本語", "💥",
    "feed_forward\\.mul", "(", "(a+)+$", ".*" * 20, "[", "\\", "0-3", "9-1", "0-999999999", "!!int",
    [], {}, [[]], [{}], {"": None}, [0] * 500, [[0] * 300] * 300, {"a": {"a": {"a": {}}}}, [True, [1]],
    ["x", 1], {"layers": True},
]  # fmt: skip
TEXTS = [
    "&a [*a]", "*x", "&x 1", "!!python/object:os.system {}", "!!python/tuple [1]", "!!binary x", "<<: *x", "...", "---",
    "%YAML 1.1", "\t", "? [1]", "- - - -", "{" * 50, "[" * 50, "'", '"\\x', "|", ">", "#", ": :", "a: b: c", "\x85",
    "\ufeff", "0x", "0o9", "9" * 1_000, "- " * 50, "key=value",
]  # fmt: skip


def mutate_value(value: Any, random_: random.Random) -> Any:
    """Change one thing somewhere in a document's values."""
    if isinstance(value, dict) and value and random_.random() < 0.9:
        key = random_.choice(list(value))
        changed = dict(value)
        kind = random_.random()
        if kind < 0.7:
            changed[key] = mutate_value(value[key], random_)
        elif kind < 0.78:
            del changed[key]
        elif kind < 0.88:
            changed[misspelt(str(key), random_)] = changed.pop(key)
        else:
            changed[random_.choice([*value, "recompute", "swap", "layers", "x", "model"])] = random_.choice(ODD)
        return changed
    if isinstance(value, list) and value and random_.random() < 0.7:
        changed_list = list(value)
        index = random_.randrange(len(value))
        changed_list[index] = mutate_value(value[index], random_)
        return changed_list if random_.random() < 0.8 else changed_list * random_.randrange(3)
    return random_.choice(ODD) if random_.random() < 0.8 else [value]


def misspelt(name: str, random_: random.Random) -> str:
    position = random_.randrange(len(name) + 1)
    return name[:position] + random_.choice(string.printable + "é\u2028") + name[position + random_.randrange(2) :]


def mutate_text(text: str, random_: random.Random) -> str:
    """Change the text itself: cut it, indent it, put something odd into it."""
    lines = text.splitlines() or [""]
    kind = random_.random()
    if kind < 0.25:
        return text[: random_.randrange(len(text) + 1)]
    if kind < 0.5:
        position = random_.randrange(len(text) + 1)
        return text[:position] + random_.choice(TEXTS) + text[position:]
    index = random_.randrange(len(lines))
    if kind < 0.65:
        lines[index] = " " * random_.randrange(9) + lines[index].lstrip()
    elif kind < 0.8:
        lines.insert(index, random_.choice(TEXTS))
    elif kind < 0.9:
        lines[index] = lines[index].replace(": ", random_.choice([":", " = ", ": &x ", ": *x "]), 1)
    else:
        lines = lines[:index] + lines[index : index + 3] * 3 + lines[index + 3 :]
    return "\n".join(lines)


def dump(value: Any) -> str:
    """Write values in YAML's flow style, a section a line; JSON is YAML but for its infinities."""
    if not isinstance(value, dict):
        return json.dumps(value)
    text = "".join(f"{json.dumps(str(key))}: {json.dumps(item)}\n" for key, item in value.items())
    return text.replace("Infinity", ".inf").replace("NaN", ".nan")


def sources() -> list[str]:
    """The documents that are mutated."""
    texts = [file.read_text(encoding="utf-8") for file in sorted((ROOT / "examples" / "yaml").glob("*.yaml"))]
    texts += [graph_file(vector) for vector in vectors("golden")[::6]]
    texts += [file_2026(vector) for vector in vectors("golden_extra") if vector["kind"] == "pynative"]
    return texts


def documents(count: int) -> Any:
    """Mutated documents, as bytes."""
    random_ = random.Random(20260101)
    texts = sources()
    values = [parse_value(text) for text in texts]
    for _ in range(count):
        index = random_.randrange(len(texts))
        kind = random_.random()
        if kind < 0.55:
            value = values[index]
            for _ in range(random_.randrange(1, 3)):
                value = mutate_value(value, random_)
            data = dump(value).encode("utf-8", "replace")
        else:
            text = texts[index]
            for _ in range(random_.randrange(1, 3)):
                text = mutate_text(text, random_)
            data = text.encode("utf-8", "replace")
        if kind > 0.95:
            damaged = bytearray(data)
            for _ in range(random_.randrange(1, 6)):
                if damaged:
                    damaged[random_.randrange(len(damaged))] = random_.randrange(256)
            data = bytes(damaged)
        yield data


def has_place(check: Check) -> bool:
    """Whether every error points into the file."""
    lines = check.document.text.count("\n") + 2
    return all(1 <= problem.line <= lines and problem.column >= 1 for problem in check.problems.errors)


def render(check: Check) -> None:
    """Print it as a terminal would show it, and as JSON."""
    console = Console(file=StringIO(), force_terminal=True, width=80, highlight=False, markup=False, emoji=False)
    print_check(check, console)
    print_problems(check, console)
    json.dumps(check.as_json())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--quick", action="store_true", help="fewer documents, in under a minute")
    arguments = parser.parse_args()
    count = 1_000 if arguments.quick else 12_000
    result = {"documents": 0, "accepted": 0, "tracebacks": 0, "without_position": 0, "slowest_s": 0.0}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "fuzzed.yaml"
        for data in documents(count):
            file.write_bytes(data)
            result["documents"] += 1
            start = time.perf_counter()
            try:
                check = check_file(file, layer_operators)
                render(check)
            except Exception:
                result["tracebacks"] += 1
                sys.stderr.write(f"--- {data[:2_000]!r}\n{traceback.format_exc()}\n")
                continue
            seconds = time.perf_counter() - start
            if seconds > result["slowest_s"]:
                result["slowest_s"] = round(seconds, 4)
                if seconds > 0.5:
                    sys.stderr.write(f"--- {seconds:.2f} s: {data[:2_000]!r}\n")
            result["accepted"] += check.ok
            if not has_place(check):
                result["without_position"] += 1
                sys.stderr.write(f"--- no position: {data[:500]!r}\n")
    for name, value in result.items():
        sys.stderr.write(f"{name:>18}  {value}\n")
    if arguments.json:
        print(json.dumps(stamped(result)))


if __name__ == "__main__":
    main()
