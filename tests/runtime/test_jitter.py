"""How fast the host is changes neither the peak nor the bytes that move: no decision asks for the time."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tide
from lowtide._torch_private.modes import TorchDispatchMode
from lowtide.policy import LayerPolicy, Pattern, Recompute, Rule, Swap
from lowtide.runtime.limits import Limits
from support.garbage import collect_garbage
from support.stacks import ROWS, WIDTH, gated, same, swap, train
from tide.testing import fresh_tide  # noqa: F401

MICROSECONDS = 50
POLICIES = {
    "swap operators": swap("silu", "mul", prefetch=2),
    "swap everything": swap(prefetch=5),
    "swap everything at once": swap(prefetch=1),
    "swap late": swap(prefetch=12),
    "swap and recompute": LayerPolicy(Swap(3), (Rule(Pattern("silu"), Recompute()),)),
    "swap the input of recomputed layers": LayerPolicy(Recompute(), boundary=Swap(2)),
    "swap within a few bytes": swap(prefetch=20),
}


class Jitter(TorchDispatchMode):
    """Slows the host down before every operator."""

    def __init__(self, slow: Callable[[], None]) -> None:
        super().__init__()
        self.slow = slow

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.slow()
        return func(*args, **(kwargs or {}))


def really(draw: random.Random) -> None:
    time.sleep(draw.random() * MICROSECONDS / 1e6)


def virtually(draw: random.Random) -> None:
    tide.advance(draw.randrange(1000 * MICROSECONDS))


def measured(
    policy: LayerPolicy, limits: Limits, slow: Callable[[random.Random], None] | None, seed: int
) -> tuple[tuple[int, int, int, int], list[Tensor]]:
    """Peak, bytes held after forward and bytes over the link each way of one step, and all values."""
    collect_garbage()
    tide.reset()
    tide.configure(preset=tide.scaled("h100", 1 / 16))
    trained = train(gated, policy, limits=limits, count=6)
    x = torch.linspace(-1, 1, ROWS * WIDTH).view(ROWS, WIDTH).to("tide")
    for parameter in trained.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    draw = random.Random(seed)
    torch.accelerator.synchronize()
    torch.accelerator.reset_peak_memory_stats()
    with tide.record() as timeline, Jitter(lambda: slow(draw) if slow is not None else None):
        loss = trained.model(x).square().mean()
        held = int(torch.accelerator.memory_allocated())
        loss.backward()
    torch.accelerator.synchronize()
    moved = [sum(span["bytes"] for span in timeline.spans if span["lane"] == f"link {way}") for way in ("out", "in")]
    values = [parameter.grad.cpu() for parameter in trained.model.parameters() if parameter.grad is not None]
    peak = int(torch.accelerator.max_memory_allocated())
    trained.attached.remove()
    return (peak, held, *moved), values


@pytest.mark.parametrize(
    ("name", "slow"),
    [
        pytest.param(name, slow, id=f"{name}-{slow.__name__}", marks=[pytest.mark.slow] if (place + late) % 2 else [])
        for place, name in enumerate(POLICIES)
        for late, slow in enumerate((really, virtually))
    ],
)
def test_a_host_that_stutters_changes_neither_peak_nor_moved_bytes(
    name: str, slow: Callable[[random.Random], None]
) -> None:
    limits = Limits(minimum_bytes=1, in_flight_bytes=30_000 if name == "swap within a few bytes" else 1 << 30)
    policy = POLICIES[name]
    expected, values = measured(policy, limits, None, 0)
    assert expected[2] > 0
    for seed in range(3):
        found, same_values = measured(policy, limits, slow, seed)
        assert found == expected
        assert same(values, same_values)
