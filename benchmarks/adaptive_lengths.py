"""Batches of every length: an adaptive run that plans for each, against one that always recomputes everything.

    python benchmarks/adaptive_lengths.py --json

A Llama of 4 layers is trained for 500 steps on batches of one sequence whose length is drawn from a log-normal
distribution, 32 to 2,048 tokens; attention keeps a number for every pair of tokens. The device holds what the longest
batch needs with every layer recomputed, and one segment of the allocator more. The longest exceeds that under the plan
of the mean. The run is given each step, ``run.step(...)``, and nothing about lengths. Then the same on two
ranks with a copy of the model each, which draw different lengths and average their gradients.

- ``died``: steps that raised; ``not_bitwise``: losses that differ from those of an undisturbed run on a large device.
- ``over_mean_plan``: whether the longest batch, under the plan for the mean length, runs out of memory here.
- ``replans``, ``plans``, ``rescues``: new plans because the old ones did not hold, buckets of lengths that have a plan,
  failed allocations. ``measured``: steps that were measured.
- ``full_died``: the step at which always recomputing every layer runs out of memory on the same device, as batches of
  other lengths have left segments that do not fit; None if it does not.
- ``goodput``: tokens a second on the virtual clock, against always recomputing every layer, where memory suffices;
  ``goodput_limit`` what keeping everything on a large device would give.
- ``ranks_``…: the same on two ranks; the time is that of the slower rank.

Plans after the first are made in a process of their own while steps run. When they arrive is real time and not virtual,
so the figures differ a little from run to run.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import lowtide
import tide
from lowtide import LayerPolicy, Policy, Recompute
from models import Shape, llama, use_machine
from stamp import stamped
from support.ranks import Ranks

SHORTEST, LONGEST = 32, 2048
FACTOR = 1 / 32
PLENTY = 8 << 30
SEGMENT = 20 << 20
"""What the allocator takes from the device for a tensor between 1 and 10 MiB."""


class Training:
    """The model, its optimizer and its batches, the same from the same start every time; ranks draw other batches."""

    def __init__(self, layers: int, steps: int) -> None:
        shape = Shape(
            layers=layers, sequence=LONGEST, hidden=128, intermediate=448, heads=2, vocabulary=500, factor=FACTOR
        )
        gc.collect()  # the model before this one
        torch.accelerator.empty_cache()
        use_machine(FACTOR)
        tide.configure(capacity=PLENTY)
        self.model = llama(shape).to("tide")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        rank = dist.get_rank() if dist.is_initialized() else 0
        generator = torch.Generator().manual_seed(2 + rank)
        drawn = torch.exp(5.6 + 0.8 * torch.randn(steps, generator=generator)).long()
        self.lengths = [int(one) for one in drawn.clamp(SHORTEST, LONGEST)]
        self.lengths[steps // 3 + rank] = LONGEST
        self.tokens = torch.randint(3, shape.vocabulary, (1, LONGEST), generator=generator)

    def step(self, number: int) -> float:
        """A whole step, and its loss."""
        self.optimizer.zero_grad(set_to_none=True)
        tokens = self.tokens[:, : self.lengths[number]].to("tide")
        loss = self.model(tokens, labels=tokens).loss
        loss.backward()
        if dist.is_initialized():
            for parameter in self.model.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()
        self.optimizer.step()
        return float(loss.item())


@dataclass
class Adapted:
    """An adaptive run."""

    losses: list[float]
    seconds: float
    died: str
    replans: int
    plans: int
    rescues: int
    measured: int
    of_mean: Policy | None
    races: int
    events: list[str]


def reserved_by(layers: int, steps: int, policy: Policy) -> int:
    """What the longest batch reserves under a Policy."""
    training = Training(layers, steps)
    training.lengths[:3] = [SHORTEST, LONGEST, LONGEST]
    handle = lowtide.apply(training.model, policy)
    training.step(0)
    training.step(1)
    torch.accelerator.empty_cache()
    torch.accelerator.reset_peak_memory_stats()
    training.step(2)
    handle.remove()
    return int(torch.accelerator.max_memory_reserved())


def plain(layers: int, steps: int, policy: Policy | None, capacity: int = PLENTY) -> tuple[list[float], float]:
    """The losses, and the seconds of all steps; fewer losses if memory runs out."""
    training = Training(layers, steps)
    tide.configure(capacity=capacity)
    handle = lowtide.apply(training.model, policy) if policy is not None else None
    begin = tide.now()
    losses = []
    with suppress(torch.OutOfMemoryError):
        for number in range(steps):
            losses.append(training.step(number))
    torch.accelerator.synchronize()
    seconds = (tide.now() - begin) * 1e-9
    if handle is not None:
        handle.remove()
    return losses, seconds


def adapted(layers: int, steps: int, capacity: int) -> Adapted:
    """The same under :func:`lowtide.adapt`, with nothing set."""
    training = Training(layers, steps)
    mean = sum(training.lengths) // steps
    tide.configure(capacity=capacity)
    run = lowtide.adapt(training.model, training.optimizer, verbose=False)
    losses: list[float] = []
    died = ""
    of_mean: Policy | None = None
    begin = tide.now()
    for number in range(steps):
        try:
            losses.append(run.step(partial(training.step, number)) or 0.0)
        except (torch.OutOfMemoryError, lowtide.LowtideError) as error:
            died = f"step {number + 1} of {training.lengths[number]} tokens: {error}"
            break
        near = min((bucket for bucket in run.plans if bucket[1] >= mean), default=None)
        of_mean = run.plans[near].policy if near is not None else of_mean
    torch.accelerator.synchronize()
    seconds = (tide.now() - begin) * 1e-9
    kinds = [event.kind for event in run.events]
    found = Adapted(
        losses=losses,
        seconds=seconds,
        died=died,
        replans=kinds.count("replanned"),
        plans=len(run.plans),
        rescues=sum(step.rescued for step in run.steps),
        measured=kinds.count("measured"),
        of_mean=of_mean,
        races=len(tide.races()),
        events=[f"step {event.step}: {event.text}" for event in run.events],
    )
    run.remove()
    return found


def exceeds(layers: int, steps: int, policy: Policy, capacity: int) -> bool:
    """Whether the longest batch runs out of memory under a Policy, after two of the shortest."""
    training = Training(layers, steps)
    training.lengths = [SHORTEST, SHORTEST, LONGEST]
    tide.configure(capacity=capacity)
    handle = lowtide.apply(training.model, policy)
    training.step(0)
    training.step(1)
    try:
        training.step(2)
    except torch.OutOfMemoryError:
        return True
    finally:
        handle.remove()
    return False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--quick", action="store_true", help="40 steps of 2 layers, one process")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    console, start = Console(stderr=True, width=140), time.perf_counter()
    layers, steps = (2, 40) if arguments.quick else (4, 500)

    lengths = Training(layers, steps).lengths
    recomputed = Policy((LayerPolicy(Recompute()),) * layers)
    capacity = reserved_by(layers, steps, recomputed) + SEGMENT
    expected, kept = plain(layers, steps, None)
    reached, full = plain(layers, steps, recomputed, capacity)
    full_died = len(reached) + 1 if len(reached) < steps else None
    if full_died is not None:
        _, full = plain(layers, steps, recomputed)
    run = adapted(layers, steps, capacity)
    console.print(*run.events, run.died, sep="\n", highlight=False, markup=False)
    result: dict[str, Any] = {
        "steps": len(run.losses),
        "died": int(bool(run.died)),
        "not_bitwise": sum(one != other for one, other in zip(run.losses, expected, strict=False)),
        "measured": run.measured,
        "replans": run.replans,
        "plans": run.plans,
        "rescues": run.rescues,
        "goodput": round(full / run.seconds, 4),
        "goodput_limit": round(full / kept, 4),
        "over_mean_plan": run.of_mean is not None and exceeds(layers, steps, run.of_mean, capacity),
        "full_died": full_died,
        "mean_tokens": sum(lengths) // len(lengths),
        "capacity": capacity,
        "races": run.races,
    }
    if not arguments.quick:
        result |= on_ranks(layers, steps, capacity, recomputed, console)
    result["seconds"] = round(time.perf_counter() - start)
    table = Table("figure", "value", "limit")
    limits = {"died": "0", "not_bitwise": "0", "goodput": ">= 1.15"}
    limits |= {f"ranks_{name}": limit for name, limit in limits.items()} | {"over_mean_plan": "True"}
    for key, value in result.items():
        table.add_row(key, str(value), limits.get(key, ""))
    console.print(table)
    if arguments.json:
        print(json.dumps(stamped(result)))
    return 0


def on_ranks(layers: int, steps: int, capacity: int, recomputed: Policy, console: Console) -> dict[str, Any]:
    """The figures of two ranks that draw different lengths."""
    ranks = Ranks(2)
    expected = ranks.run(plain, layers, steps, None)
    full = ranks.run(plain, layers, steps, recomputed)
    runs: list[Adapted] = ranks.run(adapted, layers, steps, capacity)
    ranks.stop()
    for rank, run in enumerate(runs):
        console.print(f"rank {rank}:", run.died, *run.events, sep="\n", highlight=False, markup=False)
    pairs = [pair for run, (losses, _) in zip(runs, expected, strict=True) for pair in zip(run.losses, losses)]  # noqa: B905
    seconds = max(run.seconds for run in runs)
    return {
        "ranks_steps": min(len(run.losses) for run in runs),
        "ranks_died": sum(bool(run.died) for run in runs),
        "ranks_not_bitwise": sum(one != other for one, other in pairs),
        "ranks_measured": runs[0].measured,
        "ranks_plans": [run.plans for run in runs],
        "ranks_rescues": sum(run.rescues for run in runs),
        "ranks_goodput": round(max(taken for _, taken in full) / seconds, 4),
        "ranks_goodput_limit": round(max(taken for _, taken in full) / max(taken for _, taken in expected), 4),
        "ranks_races": sum(run.races for run in runs),
    }


if __name__ == "__main__":
    sys.exit(main())
