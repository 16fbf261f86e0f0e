"""Multi-token-prediction layers through the command: they take the last layer's decision, or are refused plainly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.commands import TINY, log, merged, receipts, train

DEEPER: dict[str, Any] = {
    "model": {"model_config": {"num_nextn_predict_layers": 1}},
    "moe_config": {"expert_num": 4, "num_experts_chosen": 2, "first_k_dense_replace": 1},
}


def test_a_prediction_layer_is_recomputed_as_the_last_layer_is(tmp_path: Path) -> None:
    select = {"recompute_config": {"select_recompute": ["feed_forward\\.experts\\.mul", "feed_forward\\.mul"]}}
    done = train(tmp_path, merged(TINY, DEEPER, select))
    assert done.returncode == 0, done.stderr
    main, prediction = receipts(tmp_path)
    assert (main["layers"], prediction["layers"]) == ([0, 1], [2])
    recomputed = {one["operator"] for one in prediction["operators"] if one["recomputes"]}
    assert recomputed == {"feed_forward.experts.mul"}
    assert "keep their activations" not in log(tmp_path)


def test_a_prediction_layer_of_a_last_stage_takes_its_last_layers_decision(tmp_path: Path) -> None:
    stages = {"parallel_config": {"pipeline_stage": 2, "micro_batch_num": 2}, "recompute_config": {"recompute": True}}
    done = train(tmp_path, merged(TINY, DEEPER, stages), "--nproc", "2")
    assert done.returncode == 0, done.stderr
    assert [one["layers"] for rank in (0, 1) for one in receipts(tmp_path, rank)] == [[0], [1], [2]]


FOLDED = {
    "model": {"model_config": {"num_layers": 4, "pp_interleave_num": 2}},
    "parallel_config": {"pipeline_stage": 2, "micro_batch_num": 4},
    "parallel": {"pipeline_config": {"pipeline_scheduler": "zero_bubble_v"}},
}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (FOLDED, "num_nextn_predict_layers is 1, and in a folded pipeline"),
        (
            {"parallel_config": {"model_parallel": 2, "use_seq_parallel": True}},
            "with sequence parallel that token is on another rank",
        ),
    ],
    ids=["folded pipeline", "sequence parallel"],
)
def test_layouts_that_prediction_does_not_go_with_are_refused(
    tmp_path: Path, settings: dict[str, Any], said: str
) -> None:
    done = train(tmp_path, merged(TINY, DEEPER, settings), "--dry-run")
    assert done.returncode == 1
    assert said in done.stderr
