"""An evaluation has the same loss in every layout, and training goes on as if it had not been."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from support.commands import TINY, log, merged, train
from support.layout_cases import MODELS, SHARD, data, pipeline
from support.ranks import Ranks
from train import runs

SIZES = 16  # a multiple of what every layout evaluates at a time
EVALUATED = {
    "do_eval": True,
    "eval_step_interval": 2,
    "eval_dataset": {"data_loader": {"type": "SyntheticDataLoader", "sizes": [SIZES, 0, 0], "seed": 5}},
}
DROPOUT = {"model.model_config.hidden_dropout": 0.1}
LAYOUTS: dict[str, dict[str, Any]] = {
    "ddp": data(2, 2),
    "fsdp": {**data(2, 2), **SHARD},
    "tensor, sequence": {**data(1, 4), "parallel_config.model_parallel": 2, "parallel_config.use_seq_parallel": True},
    "context": {**data(1, 4), "parallel_config.context_parallel": 2},
    "pipeline": pipeline(),
    "pipeline, chunked loss": {**pipeline(), "model.model_config.head_loss": "chunked"},
    "interleaved": {**pipeline(), "model.model_config.pp_interleave_num": 2},
    "zero bubble V": {
        **pipeline(),
        "model.model_config.pp_interleave_num": 2,
        "parallel.pipeline_config.pipeline_scheduler": "zero_bubble_v",
    },
    "pipeline, everything recomputed": {**pipeline(), "recompute_config.recompute": True},
    "fsdp, attention swapped": {**data(2, 2), **SHARD, "swap_config.swap": True},
}


QUICK = ("pipeline", "fsdp, attention swapped")


def losses(model: str, settings: dict[str, Any]) -> list[tuple[str, float | None]]:
    """Losses of training, to the bit, and of evaluations."""
    records = runs.records_of(MODELS[model], settings, steps=5)
    return [(record.loss.hex(), record.evaluation_loss) for record in records]


@pytest.fixture(scope="module")
def alone(one: Ranks) -> Any:
    @cache
    def run(model: str) -> list[tuple[str, float | None]]:
        return one.run(losses, model, {**data(1, 4), **EVALUATED})[0]  # type: ignore[no-any-return]

    return run


@pytest.mark.parametrize(
    ("layout", "model"),
    [
        *(pytest.param(name, "llama", marks=[] if name in QUICK else [pytest.mark.slow]) for name in LAYOUTS),
        *(pytest.param(name, "deepseek", marks=pytest.mark.slow) for name in ("fsdp", "interleaved")),
    ],
)
def test_an_evaluation_is_the_same_in_every_layout_and_leaves_nothing_behind(
    layout: str, model: str, alone: Any, ranks: Ranks
) -> None:
    settings = {**LAYOUTS[layout], **(DROPOUT if layout != "tensor, sequence" else {})}
    without = ranks.run(losses, model, settings)
    with_it = ranks.run(losses, model, {**settings, **EVALUATED})
    assert [[loss for loss, _ in one] for one in with_it] == [[loss for loss, _ in one] for one in without]
    assert [evaluated is not None for _, evaluated in with_it[0]] == [False, True, False, True, False]
    assert with_it[0][1][1] == with_it[1][1][1]
    if layout == "tensor, sequence":  # dropout draws other numbers in another layout
        assert with_it[0][1][1] == pytest.approx(alone(model)[1][1], rel=1e-6)


def first_evaluation(model: str, settings: dict[str, Any]) -> float:
    """The loss over the evaluation data before anything was trained."""
    changes = {**settings, "eval_step_interval": 1, "lr_schedule.learning_rate": 0.0}
    (record,) = runs.records_of(MODELS[model], changes, steps=1)
    assert record.evaluation_loss is not None
    return record.evaluation_loss


@pytest.mark.slow
def test_untrained_models_evaluate_alike_in_every_layout(one: Ranks, ranks: Ranks) -> None:
    (expected,) = one.run(first_evaluation, "llama", {**data(1, 4), **EVALUATED})
    for name, settings in LAYOUTS.items():
        for found in ranks.run(first_evaluation, "llama", {**settings, **EVALUATED}):
            assert found == pytest.approx(expected, rel=1e-6), name


def test_evaluations_are_in_the_log_and_in_the_metrics(tmp_path: Path) -> None:
    layout = {"parallel_config": {"pipeline_stage": 2, "micro_batch_num": 2}}
    run = train(tmp_path, merged(TINY, layout, EVALUATED), "--nproc", "2")
    assert run.returncode == 0, run.stderr
    first, second = (json.loads(line) for line in (tmp_path / "output" / "metrics.jsonl").read_text().splitlines())
    assert first["evaluation_loss"] is None
    assert f"evaluation after step 2: loss: {second['evaluation_loss']:.6f} over 16 samples" in log(tmp_path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"eval_dataset": None}, "there is no `eval_dataset`"),
        ({"eval_step_interval": -1}, "no interval says when"),
        ({"eval_dataset": {"data_loader": {"type": "MindDataset"}}}, "this data loader is not supported"),
        ({"eval_dataset": {"data_loader": {"type": "SyntheticDataLoader", "sizes": [1, 0, 0]}}}, "has 1 samples"),
        (
            {"eval_dataset": {"data_loader": {"config": {"split": "9, 1, 0"}}}},
            "does not read the second share",
        ),
    ],
)
def test_an_evaluation_that_cannot_be_done_is_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    run = train(tmp_path, {**TINY, **EVALUATED, **changes})
    assert run.returncode == 1
    assert words in run.stderr


def test_data_of_an_evaluation_that_is_not_asked_for_is_not_read(tmp_path: Path) -> None:
    run = train(tmp_path, {**TINY, "eval_dataset": {"data_loader": {"type": "MindDataset"}}})
    assert run.returncode == 0, run.stderr
    assert "eval_dataset has no effect: do_eval is false" in log(tmp_path)
