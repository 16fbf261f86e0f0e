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


@pytest.mark.parametrize(
    ("parallel", "said"),
    [
        ({"pipeline_stage": 2, "micro_batch_num": 2}, "with 2 pipeline stages these are on the first and the last"),
        ({"model_parallel": 2, "use_seq_parallel": True}, "with sequence parallel that token is on another rank"),
    ],
)
def test_layouts_that_prediction_does_not_go_with_are_refused(
    tmp_path: Path, parallel: dict[str, Any], said: str
) -> None:
    done = train(tmp_path, merged(TINY, DEEPER, {"parallel_config": parallel}), "--dry-run")
    assert done.returncode == 1
    assert said in done.stderr
