"""The share of dropped slots, and its lines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lowtide.train.drop_rate import drop_rate, mean_drop_rates, summed_drop_rates
from support.commands import TINY, log, merged, train


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


EXPERTS: dict[str, Any] = {
    "moe_config": {"expert_num": 4, "num_experts_chosen": 2, "capacity_factor": 0.5, "callback_moe_droprate": True},
    "callback": [
        {"type": "MoEDropRateCallback", "expert_num": 4, "capacity_factor": 0.5, "num_layers": 2, "mtp_depth": 0}
    ],
}


@pytest.mark.parametrize(
    ("grouped", "said"),
    [(False, "Experts drop them micro-batch by micro-batch"), (True, "This run drops no token (use_gmm, or no")],
)
def test_the_log_says_what_the_rates_mean(tmp_path: Path, grouped: bool, said: str) -> None:
    done = train(tmp_path, merged(TINY, EXPERTS, {"moe_config": {"use_gmm": grouped}}))
    assert done.returncode == 0, done.stderr
    lines = log(tmp_path).splitlines()
    (meaning,) = [line for line in lines if "drop_rate: of the slots" in line]
    assert said in meaning
    assert len([line for line in lines if "layer: 1, drop_rate: " in line]) == 2  # a step each
