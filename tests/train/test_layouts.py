"""Every layout trains what one process trains."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from support.layout_cases import CONTEXT, LAYOUTS, MODELS, SHARD, Layout, close, data, pipeline
from support.ranks import Ranks
from train import runs

OPTIMIZER = "parallel.parallel_optimizer_config"
MORE = (
    Layout("gpipe", 2, {**pipeline(), "parallel.pipeline_config.pipeline_scheduler": "gpipe"}),
    Layout("per token", 2, {**data(2, 2), **SHARD, "runner_wrapper.calculate_per_token_loss": True}),
    Layout("each micro-step reduced", 2, {**data(2, 2), **SHARD, f"{OPTIMIZER}.gradient_accumulation_shard": True}),
    Layout("fixed loss scale", 2, {**data(2, 2), "runner_wrapper.scale_sense": 1024.0}),
    Layout("hsdp 2 x 2", 4, {**data(4, 1), **SHARD, f"{OPTIMIZER}.optimizer_weight_shard_size": 2}),
    Layout(
        "zero bubble V",
        2,
        {
            **pipeline(),
            "model.model_config.pp_interleave_num": 2,
            "parallel.pipeline_config.pipeline_scheduler": "zero_bubble_v",
        },
    ),
    Layout("ep2 x fsdp2", 4, {**data(4, 1), **SHARD, "parallel_config.expert_parallel": 2}, only="deepseek"),
    Layout(
        "cp2, per token", 2, {**data(1, 4), **CONTEXT, "runner_wrapper.calculate_per_token_loss": True}, only="llama"
    ),
    Layout("cp2, recomputed", 2, {**data(1, 4), **CONTEXT, "recompute_config.recompute": True}, only="llama"),
    Layout("cp2, swapped", 2, {**data(1, 4), **CONTEXT, "swap_config.swap": True}, only="llama"),
    Layout("cp2 x pp2", 4, {**pipeline(), **CONTEXT}, only="llama"),
    Layout("everything recomputed", 2, {**data(2, 2), **SHARD, "recompute_config.recompute": True}),
    Layout("attention swapped", 2, {**pipeline(), "swap_config.swap": True}),
)


@pytest.fixture(scope="session")
def alone(one: Ranks) -> Any:
    """What one process trains, each model once."""

    @cache
    def run(model: str, micro_steps: int = 4) -> list[tuple[float, float]]:
        return one.run(runs.train, model, data(1, micro_steps))[0]

    return run


SLOW = {
    "ep2 x fsdp2", "ep2 x tp2", "tp2 x fsdp2", "hsdp 2 x 2", "cp2 x fsdp2", "cp2 x pp2", "cp2, recomputed",
    "cp2, per token", "gpipe", "zero bubble V", "each micro-step reduced", "fixed loss scale", "attention swapped",
    "fsdp2, compiled layers",
}  # fmt: skip
"""With every change each degree is tested by itself, and one pair; ``benchmarks/layouts.py`` has most of these too."""
EXPERTS = ("fsdp2", "tp2", "pp2 interleaved")
CASES = [
    pytest.param(
        model,
        layout,
        id=f"{model}-{layout.name}",
        # Experts see nothing of how a step is sharded further, but where they are sharded themselves.
        marks=[pytest.mark.slow]
        if layout.name in SLOW or (model == "deepseek" and layout.only is None and layout.name not in EXPERTS)
        else [],
    )
    for model in MODELS
    for layout in (*LAYOUTS, *MORE)
    if layout.only in (None, model)
]


@pytest.mark.parametrize(("model", "layout"), CASES)
def test_a_layout_trains_what_one_process_trains(
    model: str, layout: Layout, alone: Any, ranks: Ranks, four_ranks: Ranks
) -> None:
    for found in (ranks if layout.processes == 2 else four_ranks).run(runs.train, model, layout.settings):
        close(found, alone(model))


@pytest.mark.parametrize("model", MODELS)
def test_accumulated_micro_steps_are_one_large_batch(model: str, alone: Any) -> None:
    close(alone(model, micro_steps=1), alone(model))


def test_norms_of_queries_and_keys_are_right_under_tensor_parallel(one: Ranks, ranks: Ranks) -> None:
    normed = {**data(1, 4), "model.model_config.qk_layernorm": True}
    (expected,) = one.run(runs.train, "llama", normed)
    for found in ranks.run(runs.train, "llama", {**normed, "parallel_config.model_parallel": 2}):
        close(found, expected)


@pytest.mark.slow
def test_context_parallel_goes_with_tensor_parallel(one: Ranks, four_ranks: Ranks) -> None:
    heads = {**data(1, 4), "model.model_config.num_key_value_heads": 4}
    (expected,) = one.run(runs.train, "llama", heads)
    both = {**heads, **CONTEXT, "parallel_config.model_parallel": 2}
    for sequence in (False, True):
        for found in four_ranks.run(runs.train, "llama", {**both, "parallel_config.use_seq_parallel": sequence}):
            close(found, expected)


def test_latent_attention_and_experts_go_with_context_parallel(one: Ranks, ranks: Ranks) -> None:
    plain = {**data(1, 4), "model.model_config.moe_aux_loss_coeff": 0.0}
    (expected,) = one.run(runs.train, "deepseek", plain)
    for found in ranks.run(runs.train, "deepseek", {**plain, **CONTEXT}):
        close(found, expected)


def test_a_checkpoint_is_read_under_another_context_degree(one: Ranks, ranks: Ranks, tmp_path: Path) -> None:
    alone, spread = data(1, 4), {**data(1, 4), **CONTEXT}
    expected = one.run(runs.train, "llama", alone, 4)[0][2:]
    for saving, reading in ((spread, alone), (alone, spread)):
        directory = tmp_path / str(len(saving))
        directory.mkdir()
        (ranks if saving is spread else one).run(runs.saved, "llama", saving, directory)
        for found in (ranks if reading is spread else one).run(runs.resumed, "llama", reading, directory):
            close(found, expected)
