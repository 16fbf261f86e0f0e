"""Record a run that would have died, for docs/adapt.md: ``python docs/make_adapt_images.py``.

On the virtual accelerator; needs Chromium and the extra ``report``, and takes about a minute. The run is real: first
without lowtide, until it runs out of memory, then with it, on the same device. Some memory goes away in the middle
of one step.
"""

from __future__ import annotations

import gc
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import torch
from make_images import IMAGES, console, save
from make_plan_images import screenshot
from rich.text import Text

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import tide
from adaptive import Training
from lowtide.adaptive.session import Adaptive
from lowtide.report.adapt import print_adaptive

LAYERS = 6
STEPS = 24
SHRINKS = 17
"""The step in which memory goes."""


def capacity() -> int:
    """What is static, and 60 % of what keeping everything takes in addition."""
    training = Training(LAYERS)
    for number in range(2):
        training.step(number)
    static, reserved = torch.accelerator.memory_allocated(), torch.accelerator.max_memory_reserved()
    del training
    gc.collect()
    return static + (reserved - static) * 6 // 10


def main() -> None:
    torch.set_num_threads(1)
    room = capacity()
    terminal = console(118)
    terminal.print(Text("$ python train.py", style="bold"))
    training = Training(LAYERS)
    tide.configure(capacity=room)
    try:
        for number in range(STEPS):
            training.step(number)
    except torch.OutOfMemoryError as error:
        terminal.print(Text(f"torch.OutOfMemoryError: {str(error)[:200]} …"))
    del training
    gc.collect()

    terminal.print(Text("\n$ python train.py    # now with lowtide.adapt(model, optimizer) around the loop", "bold"))
    training = Training(LAYERS)
    tide.configure(capacity=room)
    with tempfile.TemporaryDirectory() as directory:
        run = Adaptive(
            [training.model],
            [training.optimizer],
            directory=Path(directory),
            say=lambda text: terminal.print(f"lowtide: {text}"),
            report=lambda plan: print_adaptive(plan, terminal),
        )

        def step(number: int, attempts: list[int]) -> float:
            attempts.append(number)
            if number == SHRINKS and len(attempts) == 1:
                tide.faults.shrink_capacity(150, room // 12)
            elif number == SHRINKS:
                tide.faults.disarm()
                tide.configure(capacity=room)
            return training.step(number)

        for number in range(STEPS):
            loss = run.step(partial(step, number, []))
            run._settle()
            if number + 1 in (1, 5, 6, 11, 12, SHRINKS + 1, STEPS):
                took = run.steps[-1].seconds * 1e3
                terminal.print(f"step {number + 1:3}  loss {loss:.4f}  {took:7.1f} ms")
        run.remove()
        save(terminal, "adapt", "an adaptive run")
        (IMAGES / "last.log").unlink()
        page = Path(directory) / "page.html"
        subprocess.run([sys.executable, "-m", "lowtide", "report", directory, "-o", str(page)], check=True)
        screenshot(page, "adapt-report", [(1180, 0), (420, 0)], 1120)


if __name__ == "__main__":
    main()
