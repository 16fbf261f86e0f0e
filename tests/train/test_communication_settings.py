"""Settings of communication through the runner, on gloo: the same losses bit by bit, and no rank waits for ever."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from support.layout_cases import TENSOR, data
from support.ranks import Ranks
from train import adaptive_runs

STEPS = 12
SEQUENCE = {
    **data(1, 4),
    **TENSOR,
    "parallel_config.use_seq_parallel": True,
    "runner_config.gradient_accumulation_steps": 1,
    "model.model_config.num_layers": 2,
    "runner_config.stop_step": STEPS,
}
EXPERTS = {
    **data(2, 4),
    "parallel_config.expert_parallel": 2,
    "runner_config.gradient_accumulation_steps": 1,
    "model.model_config.num_layers": 2,
    "runner_config.stop_step": STEPS,
}
SETTINGS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gathers after norms": ("llama", SEQUENCE, {"select_comm_recompute": True}),
    "every operator": ("llama", SEQUENCE, {"select_recompute": {".*": True}}),
    "kept where operators are excluded": (
        "llama",
        SEQUENCE,
        {"recompute": True, "mp_comm_recompute": False, "select_recompute_exclude": {r"feed_forward\.mul": True}},
    ),
    "every operator of experts": ("deepseek", EXPERTS, {"select_recompute": {".*": True}}),
    "kept in layers with sharded experts and buffers": (
        "deepseek",
        EXPERTS,
        {"recompute": True, "mp_comm_recompute": False},
    ),
}


@pytest.fixture(scope="module")
def plain(ranks: Ranks) -> Callable[[str], list[Any]]:
    """What is reported without any setting, each model once."""
    layouts = {model: layout for model, layout, _ in SETTINGS.values()}

    @cache
    def run(model: str) -> list[Any]:
        return [one.reported for one in ranks.run(adaptive_runs.run, model, layouts[model], STEPS)]

    return run


SLOW = {"gathers after norms", "every operator of experts"}


@pytest.mark.parametrize(
    "what", [pytest.param(one, marks=[pytest.mark.slow] if one in SLOW else []) for one in SETTINGS]
)
def test_losses_are_those_without_the_setting(what: str, ranks: Ranks, plain: Callable[[str], list[Any]]) -> None:
    model, layout, recompute = SETTINGS[what]
    found = ranks.run(adaptive_runs.run, model, {**layout, "recompute_config": recompute}, STEPS)
    assert [one.reported for one in found] == plain(model)
