"""Compiled layers train what eager ones train, and decisions change nothing in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.commands import TINY, log, merged, receipts, train
from support.layout_cases import COMPILED, SHARD, data
from support.ranks import Ranks
from train import runs

RECOMPUTED: dict[str, Any] = {"recompute_config.select_recompute": {r"feed_forward\.mul": True}}
SWAPPED: dict[str, Any] = {"swap_config.swap": True}


@pytest.mark.parametrize(
    "decisions",
    [
        pytest.param(RECOMPUTED, id="recomputed", marks=pytest.mark.slow),
        pytest.param(SWAPPED, id="swapped", marks=pytest.mark.slow),
        pytest.param(RECOMPUTED | SWAPPED, id="recomputed and swapped"),
    ],
)
def test_compiled_layers_under_fsdp_train_what_eager_ones_train(decisions: dict[str, Any], ranks: Ranks) -> None:
    layout = {**data(2, 2), **SHARD}
    eager = ranks.run(runs.train, "llama", layout)
    plain = ranks.run(runs.train, "llama", {**layout, **COMPILED})
    for found, expected in zip(plain[0], eager[0], strict=True):
        assert found == pytest.approx(expected, rel=1e-5)
    assert ranks.run(runs.train, "llama", {**layout, **COMPILED, **decisions}) == plain


def test_the_command_compiles_and_the_receipt_has_the_graphs(tmp_path: Path) -> None:
    decided = {"recompute_config": {"select_recompute": {r"feed_forward\.mul": True}}}
    run = train(tmp_path, merged(TINY, COMPILED, decided))  # on two ranks it is compiled above
    assert run.returncode == 0, run.stderr
    assert "error" not in log(tmp_path)
    assert any("compiled" in str(one) or "graph" in str(one) for one in receipts(tmp_path)), receipts(tmp_path)


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        ({"pipeline_stage": 2, "micro_batch_num": 2}, "with 2 pipeline stages"),
        ({"model_parallel": 2}, "with 2 tensor-parallel ranks"),
    ],
)
def test_layouts_that_were_not_proved_are_refused(tmp_path: Path, layout: dict[str, int], words: str) -> None:
    run = train(tmp_path, merged(TINY, COMPILED, {"parallel_config": layout}), "--nproc", "2")
    assert run.returncode == 1
    assert f"compile is true, {words}" in run.stderr
