"""How long ``lowtide check`` takes from the shell, against Python importing the same third-party packages.

    python benchmarks/check_start.py --json

Three commands, interleaved: ``lowtide check`` on an example of the MindSpore Transformers guide; ``python -c`` that
only imports the third-party modules that check loads; and bare ``python -c pass``. The ratio is the median, over all
rounds, of two neighbouring runs; the seconds are the best.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from stamp import stamped

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "yaml" / "llama_48_layers.yaml"
PACKAGES = {
    "annotated_types",
    "click",
    "pydantic",
    "pydantic_core",
    "rich",
    "ruamel",
    "shellingham",
    "typer",
    "typing_extensions",
    "typing_inspection",
}

LIST = """
import sys
from lowtide.cli.main import app
try:
    app(["check", sys.argv[1]])
except SystemExit:
    pass
sys.stderr.write("\\n" + " ".join(name for name in sys.modules if name != "__main__"))
"""


def environment() -> dict[str, str]:
    """Bytecode is cached, as for any user after the first run."""
    return {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}


def loaded_modules() -> list[str]:
    """Every module that is there after a check."""
    command = [sys.executable, "-c", LIST, str(EXAMPLE)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, env=environment())
    return printed.stderr.splitlines()[-1].split()


def seconds(command: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True, env=environment())
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    arguments = parser.parse_args()
    rounds = 10 if arguments.quick else 60
    modules = loaded_modules()
    third_party = sorted({name.partition(".")[0] for name in modules} & PACKAGES)
    imported = [name for name in modules if name.partition(".")[0] in third_party]
    commands = {
        "check": [sys.executable, "-m", "lowtide", "check", str(EXAMPLE)],
        "imports": [sys.executable, "-c", "import " + ", ".join(imported)],
        "bare": [sys.executable, "-c", "pass"],
    }
    times: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(rounds + 1):
        for name, command in commands.items():
            times[name].append(seconds(command))
    times = {name: values[1:] for name, values in times.items()}  # the first round fills caches
    best = {name: min(values) for name, values in times.items()}
    pairs = [check / imports for check, imports in zip(times["check"], times["imports"], strict=True)]
    result = {
        "ratio": round(statistics.median(pairs), 3),
        "ratio_of_best": round(best["check"] / best["imports"], 3),
        "check_s": round(best["check"], 4),
        "imports_s": round(best["imports"], 4),
        "bare_s": round(best["bare"], 4),
        "packages": third_party,
        "torch_imported": "torch" in modules,
        "rounds": rounds,
    }
    for name, value in result.items():
        sys.stderr.write(f"{name:>16}  {value}\n")
    if arguments.json:
        print(json.dumps(stamped(result)))


if __name__ == "__main__":
    main()
