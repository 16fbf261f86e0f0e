"""A small offload engine, right or with one of its waits left out.

Tensors are made on the compute stream, copied to pinned memory on a copy stream, let go, and
brought back later. Every choice that does not matter for correctness is drawn from `random`.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

WAITS = (
    "before copy-out",  # the copy may read what compute has not written
    "after copy-back",  # compute may read what the copy has not written
    "before free",  # compute may reuse what the copy still reads
    "before copy-back",  # the copy may write what compute still uses
)


@dataclass
class Parked:
    host: torch.Tensor
    out: torch.Event
    expected: float


def event(stream: torch.Stream) -> torch.Event:
    made = torch.Event("tide")
    made.record(stream)
    return made


def offload(choices: random.Random, missing: str = "") -> int:
    """Runs the program; returns how many tensors came back with wrong values."""
    assert missing == "" or missing in WAITS
    compute = torch.accelerator.current_stream()
    copies = [torch.Stream("tide") for _ in range(choices.randint(1, 3))]
    window = choices.randint(1, 3)
    sizes = [choices.choice([1000, 3000, 5000]) for _ in range(choices.randint(4, 8))]

    parked: list[Parked] = []
    in_flight: list[tuple[torch.Tensor, torch.Event]] = []
    for number, size in enumerate(sizes):
        x = torch.full((size,), float(number + 1), device="tide")
        x.mul_(2)
        stream = choices.choice(copies)
        if missing != "before copy-out":
            stream.wait_stream(compute)
        with stream:
            host = torch.empty(size, pin_memory=True)
            host.copy_(x, non_blocking=True)
        out = event(stream)
        parked.append(Parked(host, out, 2.0 * (number + 1)))
        if choices.random() < 0.3 and missing != "before free":
            x.record_stream(stream)  # the other way to keep it
        else:
            in_flight.append((x, out))
        del x
        while len(in_flight) > (window if missing != "before free" else 0):
            _, done = in_flight.pop(0)
            if missing != "before free":
                compute.wait_event(done)
            del _
        if choices.random() < 0.2:
            torch.accelerator.synchronize()
        if choices.random() < 0.2:
            torch.full((500,), 7.0, device="tide")
    if missing != "before free":
        for _, done in in_flight:
            compute.wait_event(done)
    in_flight.clear()

    wrong = 0
    ahead = choices.randint(0, 2)
    arriving: list[tuple[torch.Tensor, torch.Event, float]] = []

    def use() -> int:
        y, back, expected = arriving.pop(0)
        if missing != "after copy-back":
            compute.wait_event(back)
        doubled = y * 2
        return int(not bool((doubled == 2 * expected).all()))

    for item in reversed(parked):
        stream = choices.choice(copies)
        # Scratch that compute has just let go of: the buffer below may well be its memory.
        scratch = torch.ones(item.host.shape, device="tide")
        scratch.add_(1)
        del scratch
        y = torch.empty(item.host.shape, device="tide")
        if missing != "before copy-back":
            stream.wait_stream(compute)
        stream.wait_event(item.out)
        with stream:
            y.copy_(item.host, non_blocking=True)
        arriving.append((y, event(stream), item.expected))
        if len(arriving) > ahead:
            wrong += use()
    while arriving:
        wrong += use()
    torch.accelerator.synchronize()
    return wrong
