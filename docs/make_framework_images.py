"""Record scripts that die alone and do not with lowtide, one a framework: ``python docs/make_framework_images.py``.

On the virtual accelerator; needs the extra ``integrations``, and takes some minutes. The scripts are those of
``benchmarks/scripts``, run as they are, then with one line more, or under ``lowtide run``.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from difflib import unified_diff
from pathlib import Path
from typing import NamedTuple

from make_images import IMAGES, console, save
from rich.text import Text

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from support.script_cases import SCRIPTS, on_tide

LINES = 15
"""The most lines that are shown of what a script prints."""


class Recording(NamedTuple):
    """A script, the memory of its device in MiB, and the line that is put before another one; none: ``lowtide run``."""

    name: str
    script: str
    capacity: float
    line: str = ""
    before: str = ""


RECORDINGS = (
    Recording("transformers", "trainer.py", 12.2, "lowtide.attach(trainer)", "trainer.train()"),
    Recording("trl", "trl_sft.py", 57.0, "lowtide.attach(trainer)", "trainer.train()"),
    Recording("accelerate", "accelerate_loop.py", 23.0, "lowtide.attach(accelerator)", "config = "),
    Recording("lightning", "lightning_fit.py", 32.4, "lowtide.attach(trainer)", "trainer.fit("),
    Recording("run", "nanogpt.py", 18.9),
)


def run(command: list[str], folder: Path, capacity: float) -> list[str]:
    """What a command prints, as a terminal shows it."""
    environment = os.environ | on_tide(int(capacity * 2**20))
    environment |= {
        "PYTHONWARNINGS": "ignore",
        "TRANSFORMERS_VERBOSITY": "error",
        "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "116",
    }
    done = subprocess.run(
        command, cwd=folder, env=environment, text=True, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    return [line for line in done.stdout.splitlines() if line.strip()]


def record(recording: Recording) -> None:
    terminal = console(118)
    text = (SCRIPTS / recording.script).read_text()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        file = folder / "train.py"
        file.write_text(text)
        terminal.print(Text("$ python train.py model.pt", "bold"))
        terminal.print(Text(run([sys.executable, "train.py", "model.pt"], folder, recording.capacity)[-1]))
        command = ["-m", "lowtide", "run", "train.py", "model.pt"]
        if recording.line:
            changed = text.replace("import torch\n", "import lowtide\nimport torch\n", 1)
            changed = changed.replace(f"\n{recording.before}", f"\n{recording.line}\n{recording.before}", 1)
            file.write_text(changed)
            for line in unified_diff(text.splitlines(), changed.splitlines(), lineterm="", n=0):
                if line.startswith("+") and not line.startswith("+++"):
                    terminal.print(Text(line, "green"))
            command = ["train.py", "model.pt"]
        shown = " ".join(command).removeprefix("-m ") if not recording.line else "python train.py model.pt"
        terminal.print(Text(f"\n$ {shown}", "bold"))
        printed = [line for line in run([sys.executable, *command], folder, recording.capacity) if is_shown(line)]
        for line in printed[:LINES]:
            terminal.print(Text(line))
        if len(printed) > LINES:
            terminal.print(Text("…"))
        terminal.print(Text("\n$ ls model.pt", "bold"))
        terminal.print(Text("model.pt" if (folder / "model.pt").exists() else "ls: cannot access 'model.pt'"))
    save(terminal, f"framework-{recording.name}", f"{recording.script}, {recording.capacity} MiB, virtual accelerator")


def is_shown(line: str) -> bool:
    """Whether a line is of lowtide or of the script; frameworks say much else."""
    return not any(word in line for word in ("WARNING", "Warning", "warn(", "💡", "GPU available", "TPU available"))


def main() -> None:
    wanted = sys.argv[1:]
    for recording in RECORDINGS:
        if not wanted or recording.name in wanted:
            record(recording)
    (IMAGES / "last.log").unlink(missing_ok=True)


if __name__ == "__main__":
    main()
