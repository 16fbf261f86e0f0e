"""Train the same model on one process and in every layout, by ``lowtide train``, and compare the losses and norms.

    python benchmarks/layouts.py --json

Each run is the real command in processes of its own over gloo, in single precision, with the same samples in each
step; the metrics it writes are compared with those of the run on one process. Weights shared by the embedding and the
head, multi-token prediction and packed documents are trained in some layouts more. One line for each model compares
gradients accumulated over micro-steps with one large batch.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from stamp import stamped
from support.layout_cases import LAYOUTS, MODELS, ONE, WHOLE, Layout, Variant, variants, write_documents

STEPS, QUICK_STEPS = 20, 5


class Curve(NamedTuple):
    """The losses and norms of a run, step by step."""

    losses: list[float]
    norms: list[float]
    seconds: float


def train(variant: Variant, layout: Layout, steps: int, directory: Path) -> Curve:
    """Run the command and read the metrics it wrote."""
    place = directory / variant.name.replace(" ", "_") / layout.name.replace(" ", "_")
    place.mkdir(parents=True)
    file = place / "run.yaml"
    file.write_text(MODELS[variant.model])
    more = {"runner_config.stop_step": steps, "output_dir": str(place / "output")}
    settings = {**variant.settings, **layout.settings, **more}
    given = [part for key, value in settings.items() for part in ("--set", f"{key}={json.dumps(value)}")]
    command = [sys.executable, "-m", "lowtide", "train", str(file), "--nproc", str(layout.processes), *given]
    begin = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, cwd=place)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}")
    lines = [json.loads(line) for line in (place / "output" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, steps + 1)), lines
    return Curve([line["loss"] for line in lines], [line["global_norm"] for line in lines], time.perf_counter() - begin)


def difference(first: list[float], second: list[float]) -> float:
    """The largest relative difference."""
    return max(abs(a - b) / abs(b) for a, b in zip(first, second, strict=True))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_STEPS} steps, llama, four layouts")
    parser.add_argument("--model", metavar="NAME", action="append", help="this model only, such as 'llama tied'")
    parser.add_argument("--only", metavar="NAME", action="append", help="this layout only, such as 'pp2 interleaved'")
    arguments = parser.parse_args()
    steps = QUICK_STEPS if arguments.quick else STEPS
    console = Console(stderr=True, width=120)
    table = Table("model", "layout", "processes", "first loss", "last loss", "loss differs by", "norm differs by", "s")
    worst_loss = worst_norm = 0.0
    accumulation = 0.0
    names = []
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        plain = [
            Variant(model, model, {}, tuple(one for one in LAYOUTS if one.only in (None, model))) for model in MODELS
        ]
        more = variants(write_documents(directory / "documents"))
        for variant in [plain[0]._replace(layouts=LAYOUTS[1:8:2])] if arguments.quick else [*plain, *more]:
            model = variant.name
            if arguments.model and model not in arguments.model:
                continue
            alone = train(variant, ONE, steps, directory)
            table.add_row(model, ONE.name, "1", *_ends(alone), "", "", f"{alone.seconds:.0f}")
            for layout in variant.layouts:
                if arguments.only and layout.name not in arguments.only:
                    continue
                console.print(f"{model}, {layout.name}", style="dim")
                curve = train(variant, layout, steps, directory)
                loss, norm = difference(curve.losses, alone.losses), difference(curve.norms, alone.norms)
                worst_loss, worst_norm = max(worst_loss, loss), max(worst_norm, norm)
                row = (f"{loss:.1e}", f"{norm:.1e}", f"{curve.seconds:.0f}")
                table.add_row(model, layout.name, str(layout.processes), *_ends(curve), *row)
                names.append(f"{model} {layout.name}")
            if variant in more:
                continue
            whole = train(variant, WHOLE, steps, directory)
            found = difference(alone.losses, whole.losses)
            accumulation = max(accumulation, found)
            table.add_row(model, "4 x batch 2 against batch 8", "1", *_ends(whole), f"{found:.1e}", "", "")
    console.print(table)
    if arguments.json:
        result = {
            "layouts": names,
            "steps": steps,
            "worst_relative_loss": worst_loss,
            "worst_relative_norm": worst_norm,
            "accumulation_difference": accumulation,
        }
        print(json.dumps(stamped(result)))
    return 0 if worst_loss <= 1e-5 and worst_norm <= 1e-5 and accumulation <= 1e-6 else 1


def _ends(curve: Curve) -> tuple[str, str]:
    return f"{curve.losses[0]:.4f}", f"{curve.losses[-1]:.4f}"


if __name__ == "__main__":
    sys.exit(main())
