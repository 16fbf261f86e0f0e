"""The receipt says what happened, and what did not."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import tide
from lowtide.policy import Keep, LayerPolicy, Pattern, Policy, Recompute, Rule, Swap
from lowtide.runtime.apply import Handle, apply
from lowtide.runtime.ledger import WAITING
from lowtide.runtime.limits import Limits
from lowtide.runtime.receipt import Receipt, SettingReceipt

LAYERS, WIDTH = 4, 256


@pytest.fixture(autouse=True)
def _device() -> Iterator[None]:
    tide.configure(preset="h100")
    yield
    assert not tide.races()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.silu(self.up(self.norm(x))))


def run(policy: LayerPolicy, *, limits: Limits | None = None, device: str = "tide") -> Handle:
    """Two steps, and a receipt in between: the first one learns."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(LAYERS))).to(device)
    handle = apply(model, Policy((policy,) * LAYERS), limits=limits or Limits())
    for _ in range(2):
        handle.receipt()
        model(torch.randn(64, WIDTH, device=device)).sum().backward()
    return handle


TENSOR = 64 * WIDTH * 4


@pytest.mark.parametrize("device", ["cpu", "tide"])
def test_it_counts_what_each_setting_moved_and_freed(device: str) -> None:
    policy = LayerPolicy(rules=(Rule(Pattern("silu"), Swap(1)), Rule(Pattern("norm"), Recompute())), boundary=Swap(1))
    receipt = run(policy, device=device).receipt()
    swapped, recomputed, boundary = receipt.settings
    assert (swapped.setting, swapped.action, swapped.operators) == ("silu", "swap(1)", ("silu",))
    assert swapped.layers == (0, 1, 2, 3)
    assert swapped.moved_bytes == LAYERS * TENSOR
    assert recomputed.freed_bytes == LAYERS * (TENSOR + 2 * 64 * 4)  # the output, and what the norm saves inside
    assert recomputed.recompute_seconds > 0
    assert boundary.setting == "the layer's input"
    if device == "tide":
        assert swapped.copy_seconds > 0
    assert {line.layer for line in receipt.operators} == {0, 1, 2, 3}


def test_it_begins_anew_each_time() -> None:
    handle = run(LayerPolicy(rules=(Rule(Pattern("silu"), Swap(1)),)))
    assert handle.receipt().settings[0].moved_bytes > 0
    assert handle.receipt().settings[0].moved_bytes == 0


def test_it_says_when_recomputing_saves_nothing() -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            total = x + self.linear(x)
            return total * total.sigmoid()

    model = nn.Sequential(*(Residual() for _ in range(LAYERS)))
    handle = apply(model, Policy((LayerPolicy(rules=(Rule(Pattern("add"), Recompute()),)),) * LAYERS))
    model(torch.randn(64, WIDTH)).sum().backward()
    (setting,) = handle.receipt().settings
    assert setting.freed_bytes is not None
    assert setting.freed_bytes <= 0
    assert "no effect" in setting.notes[-1]


def test_it_says_what_lost_to_another_setting() -> None:
    rules = (Rule(Pattern("silu"), Swap(1)), Rule(Pattern("silu"), Keep()))
    receipt = run(LayerPolicy(rules=rules)).receipt()
    assert any("silu (swap(1)) has no effect" in line and "exclude" in line for line in receipt.without_effect)


def test_it_says_what_had_to_stay_for_lack_of_room() -> None:
    receipt = run(LayerPolicy(rules=(Rule(Pattern("silu"), Swap(1)),)), limits=Limits(host_bytes=2 * TENSOR)).receipt()
    (setting,) = receipt.settings
    assert setting.moved_bytes == 2 * TENSOR
    assert setting.kept_bytes == 2 * TENSOR
    assert setting.notes == ("the limit of host memory is reached (2 x)",)


def test_it_says_what_was_still_there_when_backward_began() -> None:
    (setting,) = run(LayerPolicy(rules=(Rule(Pattern("silu"), Swap(30)),))).receipt().settings
    assert setting.freed_bytes is not None
    assert setting.moved_bytes > setting.freed_bytes
    assert "still on the device" in setting.notes[-1]


def test_a_stall_is_counted_where_the_link_is_too_slow() -> None:
    tide.configure(preset="h100", device_to_host_bandwidth=100_000_000, host_to_device_bandwidth=100_000_000)
    (setting,) = run(LayerPolicy(rules=(Rule(Pattern("silu"), Swap(1)),))).receipt().settings
    assert setting.stall_seconds > 0.5 * setting.copy_seconds / 2 > 0


def test_whole_layers_are_timed() -> None:
    (setting,) = run(LayerPolicy(Recompute())).receipt().settings
    assert (setting.setting, setting.layers) == ("the whole layer", (0, 1, 2, 3))
    assert setting.recompute_seconds > 0


def test_it_is_json_and_a_table() -> None:
    receipt = run(LayerPolicy(Swap(2), (Rule(Pattern("up"), Recompute()),))).receipt()
    again = json.loads(json.dumps(receipt.as_json()))
    assert again["settings"][0]["setting"] == "up"
    assert "the whole layer: swap(2)" in str(receipt)
    assert "KiB" in str(receipt)


def test_a_run_without_receipts_does_not_gather_events() -> None:
    model = nn.Sequential(*(Block() for _ in range(LAYERS))).to("tide")
    handle = apply(model, Policy((LayerPolicy(Swap(2)),) * LAYERS), limits=Limits(minimum_bytes=1))
    for _ in range(60):
        model(torch.randn(4, WIDTH, device="tide")).sum().backward()
        torch.accelerator.synchronize()
    assert sum(line.swaps for line in handle.ledger.lines.values()) > 2 * WAITING
    assert len(handle.ledger.timed) <= WAITING
    assert handle.receipt().operators
    handle.remove()


def test_a_pattern_with_brackets_is_printed_as_it_is_written() -> None:
    setting = SettingReceipt(r"mlp\[\*\]", "recompute", (0,), ("mlp[*]",), 0, 0, 0, 0.0, 0.0, 0.0, ())
    text = str(Receipt((setting,), (), (r"up[\d]: nothing matches",)))
    assert r"mlp\[\*\]: recompute" in text
    assert "mlp[*]" in text
    assert r"up[\d]: nothing" in text
