"""The share of dropped slots, and its lines."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lowtide.config.schema.callbacks import MoEDropRateCallback
from lowtide.train.drop_rate import DropRateMonitor, drop_rate, mean_drop_rates, summed_drop_rates
from lowtide.train.record import StepRecord


@given(st.lists(st.integers(0, 50), min_size=1, max_size=16), st.floats(0.1, 4.0))
def test_the_rate_is_what_a_capacity_would_drop(chosen: list[int], factor: float) -> None:
    total = sum(chosen)
    rate = drop_rate([one / total if total else 0.0 for one in chosen], factor)
    if total == 0:
        assert rate is None
        return
    capacity = factor * total / len(chosen)
    assert rate == pytest.approx(sum(max(0.0, one - capacity) for one in chosen) / total, abs=1e-9)


def test_the_rate_is_the_mean_over_ranks_that_routed_anything() -> None:
    rows = [[1.0, 0.0, 0.0, 0.0], [0.25] * 4, [0.0] * 4]
    assert drop_rate(rows, 1.1) == pytest.approx(0.725 / 2)
    layers = [torch.tensor([row, [0.0] * 4, [0.7, 0.1, 0.1, 0.1]]) for row in rows]
    added = torch.stack([summed_drop_rates(rank, 1.1) for rank in layers]).sum(0)  # what an all-reduce does
    assert mean_drop_rates(added) == pytest.approx({0: 0.725 / 2, 2: 0.425})


def record(rates: dict[int, float]) -> StepRecord:
    return StepRecord(
        step=1,
        steps=1,
        epoch=1,
        epochs=1,
        step_in_epoch=1,
        steps_in_epoch=1,
        loss=1.0,
        seconds=1.0,
        learning_rate=0.1,
        overflow=False,
        loss_scale=1.0,
        global_norm=None,
        skipped=False,
        tokens=1,
        samples=1,
        drop_rates=rates,
    )


def test_the_monitor_logs_the_layers_that_routed_in_order() -> None:
    lines: list[str] = []
    settings = MoEDropRateCallback(expert_num=4, capacity_factor=1.5, num_layers=8, mtp_depth=1)
    monitor = DropRateMonitor(settings, lines.append)
    monitor.step(record({8: 0.5, 2: 0.325, 9: 0.1}))
    assert lines == ["layer: 2, drop_rate: 0.32500", "layer: 8, drop_rate: 0.50000"]
    monitor.close()
