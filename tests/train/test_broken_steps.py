"""A step that is aborted anywhere and retried is as if it had run once."""

from __future__ import annotations

from typing import Any

import pytest

from support.layout_cases import SHARD, data
from support.ranks import Ranks
from train import broken_pipelines, broken_steps

SHARES = [0.0, 0.1, 0.3, 0.45, 0.6, 0.75, 0.9, 0.97, 1.0]
"""Where a step is broken off: in forward, in backward, in the norm, in the update."""
SCALE = {
    "runner_wrapper.scale_sense": {
        "type": "DynamicLossScaleUpdateCell",
        "loss_scale_value": 1024.0,
        "scale_factor": 2.0,
        "scale_window": 2,
    }
}


@pytest.mark.parametrize(
    ("model", "shares"),
    [
        ("llama", SHARES),
        ("deepseek", [0.6, 1.0]),  # its routers' biases change last
        pytest.param("deepseek", SHARES, marks=pytest.mark.slow),
    ],
)
def test_a_step_that_is_run_again_changes_nothing_twice(one: Ranks, model: str, shares: list[float]) -> None:
    settings = {**data(1, 1), **SCALE, "runner_config.gradient_accumulation_steps": 2}
    ((reported, bits, broken),) = one.run(broken_steps.same, model, settings, shares)
    assert reported
    assert bits
    assert broken == 2 * len(shares)


@pytest.mark.parametrize("sharing", [{}, SHARD], ids=["copies", "shards"])
def test_ranks_that_break_a_step_off_together_run_it_again_together(ranks: Ranks, sharing: dict[str, Any]) -> None:
    settings = {**data(2, 1), **sharing}
    for reported, bits, broken in ranks.run(broken_steps.same, "llama", settings, [0.2, 0.5, 0.7, 0.95]):
        assert reported
        assert bits
        assert broken == 8


def test_a_pipelines_step_is_broken_off_in_one_process_and_run_again(one: Ranks) -> None:
    """Of two chunks on one rank the second has taken its first input, and its next ones wait for it."""
    assert one.run(broken_pipelines.same, "interleaved", [None, 1]) == [True]
    assert one.run(broken_pipelines.same, "interleaved", [3, None]) == [True]


@pytest.mark.parametrize(
    ("schedule", "fails"),
    [
        ("gpipe", [3, 0]),  # three activations are sent, and one of them is received
        ("gpipe", [2, 1]),
        ("1f1b", [1, 0]),  # one is sent, and received
    ],
)
def test_what_a_pipelines_broken_off_step_had_sent_is_not_received_in_the_next(
    ranks: Ranks, schedule: str, fails: list[int]
) -> None:
    assert ranks.run(broken_pipelines.same, schedule, fails) == [True, True]
