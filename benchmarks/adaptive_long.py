"""A long adaptive run, with all else that a training program does: does it die, drift, or change a bit?

    python benchmarks/adaptive_long.py --json

A Llama of 4 layers with dropout is trained for 2,000 steps on batches of 4 x 48 to 192 tokens, on a device that holds
what is static and 70 % of the activations of the longest. Beside it the program

- evaluates every 50 steps, on longer batches without gradients;
- generates 24 tokens every 80 steps, with cached keys and values;
- saves a checkpoint of model and optimizer every 100 steps, and loads it again every 500;
- holds a tensor of its own on the device for 30 of every 120 steps.

And a neighbour, another process on the same device, takes memory for some steps and gives it back: between two steps,
and in the middle of one. The run is given each step, ``run.step(...)``; what the program does between steps is not
rescued by anybody, and the neighbour pauses then.

- ``died``: whether it ended early; ``not_bitwise``: losses, of evaluations too, and generated tokens that differ from
  those of the same program without lowtide on a large device.
- ``drift_device``: bytes allocated at the end of the last checkpoint's step less those at the end of the first's;
  ``drift_host``: how much the process has grown on the host from the middle to the end, against its size;
  ``drift_in_use``: the same of what is allocated in it, by malloc's own count: the rest is what malloc holds in pieces.
  ``drift_host_without``: that of the program without lowtide.
- ``taken``, ``taken_within``: how often the neighbour took memory, between steps and within one.
- ``rescued``, ``retried``, ``replans``, ``plans``, ``races``: what the run did about it.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import io
import json
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

import lowtide
import tide
from models import Shape, llama, use_machine
from stamp import stamped
from tide import faults

SHAPE = Shape(layers=4, sequence=256, hidden=128, intermediate=448, heads=2, vocabulary=200, factor=1 / 32)
SAMPLES = 4
SHORTEST, LONGEST = 48, 192
PLENTY = 4 << 30


class Program:
    """Somebody's training program, the same from the same start every time."""

    def __init__(self) -> None:
        gc.collect()
        torch.accelerator.empty_cache()
        use_machine(SHAPE.factor)
        tide.configure(capacity=PLENTY)
        self.model: Any = llama(SHAPE).to("tide")
        for layer in self.model.model.layers:
            layer.self_attn.attention_dropout = 0.1
        self.model.train()
        torch.manual_seed(7)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.generator = torch.Generator().manual_seed(3)
        self.saved = io.BytesIO()
        self.own: Tensor | None = None

    def batch(self, samples: int, length: int) -> Tensor:
        return torch.randint(3, SHAPE.vocabulary, (samples, length), generator=self.generator).to("tide")

    def step(self, tokens: Tensor) -> float:
        """A whole step, and its loss."""
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.model(tokens, labels=tokens).loss
        loss.backward()
        self.optimizer.step()
        return float(loss.item())

    def beside(self, number: int) -> list[float]:
        """What is done between two steps, and what came out of it."""
        found: list[float] = []
        if number % 50 == 0:
            self.model.eval()
            with torch.no_grad():
                for _ in range(2):
                    tokens = self.batch(4, SHAPE.sequence)
                    found.append(float(self.model(tokens, labels=tokens).loss))
            self.model.train()
        if number % 80 == 0:
            found += self.generated()
        if number % 100 == 0:
            self.saved = io.BytesIO()
            torch.save({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}, self.saved)
        if number % 500 == 250:
            self.saved.seek(0)
            state = torch.load(self.saved)
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
        if number % 120 == 40:
            self.own = torch.ones(1 << 17, device="tide")
        if number % 120 == 70:
            found.append(float(self.own.sum()) if self.own is not None else 0.0)
            self.own = None
        return found

    @torch.no_grad()
    def generated(self) -> list[float]:
        """24 tokens after 8."""
        self.model.eval()
        tokens, cache, found = self.batch(2, 8), None, []
        for _ in range(24):
            answer = self.model(tokens, past_key_values=cache, use_cache=True)
            tokens, cache = answer.logits[:, -1:].argmax(-1), answer.past_key_values
            found += tokens.flatten().tolist()
        self.model.train()
        return [float(one) for one in found]


class Neighbour:
    """Another process on the device. It takes a part of what the program does not hold between its steps."""

    def __init__(self, capacity: int, static: int) -> None:
        self.capacity, self.free = capacity, capacity - static
        self.generator = torch.Generator().manual_seed(5)
        self.held = self.until = 0
        self.taken = self.taken_within = 0

    def drawn(self, most: int) -> int:
        return int(torch.randint(most, (), generator=self.generator))

    def before(self, number: int) -> None:
        """A step begins: give back what was held long enough, take something now and then."""
        if number >= self.until:
            self.held = 0
        if number > 50 and not self.held and self.drawn(40) == 0:
            if self.drawn(2):
                self.held, self.until = self.free * (10 + self.drawn(30)) // 100, number + 1 + self.drawn(25)
                torch.accelerator.empty_cache()  # it could not have had what this process has reserved
                self.taken += 1
            else:
                left = self.free * (20 + self.drawn(30)) // 100  # beside what the program has at that moment
                faults.shrink_capacity(1 + self.drawn(600), -left)
                self.taken_within += 1
        tide.configure(capacity=self.capacity - self.held)

    def pause(self) -> None:
        """A step has ended: what the program does before the next one is not rescued, and has all of the memory."""
        faults.disarm()
        tide.configure(capacity=self.capacity)


class Host(NamedTuple):
    """What this process has of the host, and how much of that is allocated by malloc's own count."""

    resident: int
    in_use: int


class _Malloc(ctypes.Structure):
    """glibc's ``struct mallinfo2``."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in [
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        ]
    ]


def host() -> Host:
    """The host's memory now, without what the virtual accelerator's allocator has cached: that is a device's."""
    gc.collect()
    torch.accelerator.empty_cache()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    library = ctypes.CDLL(None)
    library.mallinfo2.restype = _Malloc
    found = library.mallinfo2()
    return Host(pages * 4096, found.uordblks + found.hblkhd)


def drift(middle: Host) -> dict[str, float]:
    """How much the process has grown since the middle of the run."""
    now = host()
    return {
        "drift_host": round((now.resident - middle.resident) / now.resident, 4),
        "drift_in_use": round((now.in_use - middle.in_use) / now.in_use, 4),
    }


def activations() -> tuple[int, int]:
    """What is static, and what the longest batch takes beside it with everything kept."""
    program = Program()
    for _ in range(3):
        torch.accelerator.reset_peak_memory_stats()
        program.step(program.batch(SAMPLES, LONGEST))
    program.optimizer.zero_grad(set_to_none=True)
    static = int(torch.accelerator.memory_allocated())
    return static, int(torch.accelerator.max_memory_reserved()) - static


def trained(steps: int, capacity: int | None, static: int, console: Console) -> tuple[list[float], dict[str, Any]]:
    """Everything that came out of the program, and what the run did; without one if there is no capacity."""
    program = Program()
    run, neighbour = None, Neighbour(capacity or 0, static)
    if capacity is not None:
        tide.configure(capacity=capacity)
        run = lowtide.adapt(program.model, program.optimizer, verbose=False)
    found: list[float] = []
    died, device, middle = "", [], host()
    title = "adapted" if run is not None else "without lowtide"
    for number in track(range(1, steps + 1), title, console=console, disable=not console.is_terminal, transient=True):
        length = int(torch.randint(SHORTEST, LONGEST + 1, (), generator=program.generator))
        tokens = program.batch(SAMPLES, length)
        if run is None:
            found.append(program.step(tokens))
        else:
            neighbour.before(number)
            try:
                found.append(run.step(lambda tokens=tokens: program.step(tokens)) or 0.0)
            except (torch.OutOfMemoryError, lowtide.LowtideError) as error:
                died = f"step {number}: {type(error).__name__}: {error}"
                break
        del tokens
        if run is not None:
            neighbour.pause()
        found += program.beside(number)
        if number % 100 == 0:
            program.optimizer.zero_grad(set_to_none=True)
            gc.collect()
            device.append(int(torch.accelerator.memory_allocated()))
        if number == steps // 2:
            middle = host()
    result: dict[str, Any] = dict(drift(middle))
    if run is not None:
        kinds = [event.kind for event in run.events]
        console.print(*(f"step {one.step}: {one.text}" for one in run.events[:40]), sep="\n", highlight=False)
        result |= {
            "died": died[:300],
            "drift_device": device[-1] - device[0] if device else 0,
            "taken": neighbour.taken,
            "taken_within": neighbour.taken_within,
            "rescued": sum(step.rescued for step in run.steps),
            "retried": kinds.count("retried"),
            "replans": kinds.count("replanned"),
            "plans": len(run.plans),
            "races": len(tide.races()),
        }
        tide.configure(capacity=PLENTY)
        run.remove()
    return found, result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--quick", action="store_true", help="100 steps")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    console, start = Console(stderr=True, width=140), time.perf_counter()
    steps = 100 if arguments.quick else 2000
    static, more = activations()
    capacity = static + more * 7 // 10
    expected, without = trained(steps, None, static, console)
    found, figures = trained(steps, capacity, static, console)
    result = {
        "steps": steps,
        "numbers": len(found),
        "not_bitwise": sum(one != other for one, other in zip(found, expected, strict=False)),
        "missing": len(expected) - len(found),
        "capacity": capacity,
        **figures,
        "drift_host_without": without["drift_host"],
        "seconds": round(time.perf_counter() - start),
    }
    table = Table("figure", "value", "limit")
    limits = dict.fromkeys(("not_bitwise", "missing", "drift_device", "races"), "0") | {"drift_host": "<= 0.02"}
    for key, value in result.items():
        table.add_row(key, str(value), limits.get(key, ""))
    console.print(table)
    if arguments.json:
        print(json.dumps(stamped(result)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
