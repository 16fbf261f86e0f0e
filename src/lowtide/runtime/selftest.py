"""Prove lowtide on the device that is here: is it exact, does a swap hide behind the computation, what does it free."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from lowtide.errors import LowtideError
from lowtide.policy import LayerPolicy, Pattern, Policy, Recompute, Rule, Swap
from lowtide.runtime.apply import apply
from lowtide.runtime.limits import Limits
from lowtide.runtime.verify import verify

__all__ = ["Size", "run_selftest", "size_for"]

ATTENTION = r"scaled_dot_product_attention"


@dataclass(frozen=True)
class Size:
    """How large the model is that the device is tested with."""

    layers: int
    width: int
    sequence: int
    batch: int
    rounds: int
    """How often each step is timed; the fastest counts."""


def size_for(device: torch.device) -> Size:
    """Large enough that the device, not the host, sets the pace."""
    return Size(4, 128, 128, 2, 3) if device.type == "cpu" else Size(16, 2048, 2048, 2, 8)


class _Layer(nn.Module):
    """A transformer layer without surprises."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.feed_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.gate = nn.Linear(width, 2 * width, bias=False), nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)
        self.dropout = nn.Dropout(0.1)
        self.heads = max(1, width // 64)

    def forward(self, x: Tensor) -> Tensor:
        batch, sequence, width = x.shape
        shape = (batch, sequence, self.heads, width // self.heads)
        q, k, v = (part.view(shape).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, dim=-1))
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(attended.transpose(1, 2).reshape(x.shape)))
        hidden = self.feed_norm(x)
        fed: Tensor = self.down(functional.silu(self.gate(hidden)) * self.up(hidden))
        return x + fed


POLICIES: dict[str, LayerPolicy] = {
    "recompute whole layers": LayerPolicy(Recompute()),
    "recompute every operator": LayerPolicy(rules=(Rule(Pattern(".*", "path"), Recompute()),)),
    "recompute silu and mul": LayerPolicy(
        rules=(Rule(Pattern("silu"), Recompute()), Rule(Pattern("mul"), Recompute()))
    ),
    "swap everything": LayerPolicy(Swap(4), boundary=Swap(4)),
    "swap attention": LayerPolicy(rules=(Rule(Pattern(ATTENTION), Swap(8)),)),
    "swap to disk": LayerPolicy(rules=(Rule(Pattern(ATTENTION), Swap(8, "disk")),)),
    "recompute layers, swap their inputs": LayerPolicy(Recompute(), boundary=Swap(4)),
    "swap some, recompute some": LayerPolicy(
        Swap(4), (Rule(Pattern("silu"), Recompute()), Rule(Pattern("mul"), Recompute()))
    ),
}


def run_selftest(device: torch.device, size: Size, tell: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """Test lowtide on ``device``; the result is plain JSON values. ``tell`` hears of each part as it begins."""
    torch.manual_seed(0)
    model = nn.Sequential(*(_Layer(size.width) for _ in range(size.layers))).to(device)
    batch = torch.randn(size.batch, size.sequence, size.width, device=device)
    began = time.time()
    parity = []
    for name, policy in POLICIES.items():
        for dtype in (torch.float32, torch.bfloat16):
            tell(f"parity: {name}, {_short(dtype)}")
            parity.append({"policy": name, "dtype": _short(dtype)} | _parity(model, policy, batch, dtype))
    steps = []
    for name, settings in (("bare", None), *POLICIES.items()):
        tell(f"step: {name}")
        steps.append({"policy": name} | _measure(model, settings, batch, size.rounds))
    bare = steps[0]
    for step in steps:
        step["time_ratio"] = round(step["seconds"] / bare["seconds"], 4)
        step["peak_saved_bytes"] = bare["peak_bytes"] - step["peak_bytes"] if bare["peak_bytes"] is not None else None
    return {
        "device": str(device),
        "device_name": _name(device),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "size": vars(size),
        "exact": all(case["exact"] for case in parity),
        "parity": parity,
        "steps": steps,
        "seconds": round(time.time() - began, 1),
    }


def _parity(model: nn.Module, policy: LayerPolicy, batch: Tensor, dtype: torch.dtype) -> dict[str, Any]:
    autocast = torch.autocast(batch.device.type, dtype, enabled=dtype is not torch.float32)
    whole = Policy((policy,) * len(list(model.children())), origin="solver")
    try:
        with autocast:
            compared = verify(model, whole, batch, limits=Limits(minimum_bytes=0)).compared
    except LowtideError as error:
        return {"exact": False, "error": f"{type(error).__name__}: {error}"}
    return {"exact": True, "compared": compared}


def _measure(model: nn.Module, policy: LayerPolicy | None, batch: Tensor, rounds: int) -> dict[str, Any]:
    """The fastest of several steps, and the most memory one took."""
    device = batch.device
    whole = Policy((policy,) * len(list(model.children())), origin="solver") if policy is not None else None
    handle = apply(model, whole) if whole is not None else None
    best, peak, receipt = float("inf"), None, None
    for number in range(rounds + 2):  # the first profiles, the second fills the pools
        model.zero_grad()
        if handle is not None:
            handle.receipt()
        _synchronize(device)
        if device.type != "cpu":
            torch.accelerator.reset_peak_memory_stats()
        begin = time.perf_counter()
        model(batch).square().mean().backward()
        _synchronize(device)
        if number >= 2:
            best = min(best, time.perf_counter() - begin)
            peak = int(torch.accelerator.max_memory_allocated()) if device.type != "cpu" else None
    if handle is not None:
        receipt = handle.receipt()
        handle.remove()
    model.zero_grad()
    operators = receipt.operators if receipt is not None else ()
    return {
        "seconds": best,
        "peak_bytes": peak,
        "moved_bytes": sum(one.moved_bytes for one in operators),
        "copy_seconds": sum(one.copy_seconds for one in operators),
        "stall_seconds": sum(one.stall_seconds for one in operators),
        "recompute_seconds": sum(one.recompute_seconds for one in operators),
    }


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize()


def _name(device: torch.device) -> str:
    module: Any = getattr(torch, device.type, None)
    if device.type == "cpu" or not hasattr(module, "get_device_name"):
        return platform.processor() or platform.machine()
    return str(module.get_device_name())


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
