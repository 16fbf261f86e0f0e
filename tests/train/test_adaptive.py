"""``lowtide train`` with ``adapt``: the run decides for itself, and trains the same bits."""

from __future__ import annotations

from typing import Any

import pytest

from support.layout_cases import SHARD, TENSOR, Layout, data, pipeline
from support.ranks import Ranks
from train import adaptive_runs
from train.adaptive_runs import Ran

ADAPT = {"adapt": {"budget": "auto", "profiling_step": 4, "verbosity": "quiet"}}
STEPS = 8
LONG = {"model.model_config.seq_length": 256}
"""So that a plan has something to decide: an allocator's smallest segments hold all of the others."""
INTERLEAVED = {**pipeline(), "model.model_config.pp_interleave_num": 2}
SCHEDULE, SEQUENCE = "parallel.pipeline_config.pipeline_scheduler", "parallel_config.use_seq_parallel"
LAYOUTS = (
    Layout("dp2", 2, data(2, 2)),
    Layout("fsdp2", 2, {**data(2, 2), **SHARD}),
    Layout("tp2 + sequence", 2, {**data(1, 2), **TENSOR, SEQUENCE: True}),
    Layout("pp2", 2, pipeline()),
    Layout("pp2 interleaved", 2, INTERLEAVED),
    Layout("gpipe", 2, {**pipeline(), SCHEDULE: "gpipe"}),
    Layout("zero bubble V", 2, {**INTERLEAVED, SCHEDULE: "zero_bubble_v"}),
    Layout("fsdp4", 4, {**data(4, 1), **SHARD}),
    Layout("tp2 x fsdp2", 4, {**data(2, 2), **SHARD, **TENSOR}),
    Layout("pp2 x tp2 + sequence", 4, {**pipeline(), **TENSOR, SEQUENCE: True}),
    Layout("pp4", 4, {**pipeline(), "parallel_config.pipeline_stage": 4}),
    Layout("ep2 x fsdp2", 4, {**data(4, 1), **SHARD, "parallel_config.expert_parallel": 2}, only="deepseek"),
)


def both(ranks: Ranks, settings: dict[str, Any], *, model: str = "llama", budget: str = "auto") -> list[Ran]:
    """An adaptive run on every rank; the same run without lowtide had the same losses."""
    settings = {**settings, "runner_config.stop_step": STEPS}
    plain = ranks.run(adaptive_runs.run, model, settings, STEPS)
    adapt = {"adapt": {**ADAPT["adapt"], "budget": budget}}
    adapted: list[Ran] = ranks.run(adaptive_runs.run, model, {**settings, **adapt}, STEPS)
    for without, with_it in zip(plain, adapted, strict=True):
        assert with_it.reported == without.reported
    return adapted


@pytest.mark.parametrize("model", ["llama", pytest.param("deepseek", marks=pytest.mark.slow)])
def test_a_run_measures_itself_switches_and_trains_the_same_bits(one: Ranks, model: str) -> None:
    (ran,) = both(one, data(1, 2), model=model)
    assert [kind for _, kind in ran.events] == ["measured", "switched"]
    switched = ran.events[-1][0]
    assert switched <= 6
    assert ran.phases == ["measuring"] * switched + ["planned"] * (STEPS - switched)
    assert {"adaptive.json", "plan.json", "policy.json", "policy.yaml", "receipts.jsonl", "trace.json"} < set(ran.files)


def test_what_the_file_decides_stays_decided(one: Ranks) -> None:
    (ran,) = both(one, {**data(1, 1), "recompute_config": {"recompute": [1]}})
    assert ran.decisions[0].startswith("recompute")
    assert not any(layer.startswith("recompute") for layer in ran.decisions[1:])  # a CPU's memory has no limit here


def agreed(adapted: list[Ran]) -> Ran:
    """What all ranks did alike."""
    assert len({ran.digest for ran in adapted}) == 1
    assert len({tuple(ran.phases) for ran in adapted}) == 1
    assert "planned" in adapted[0].phases
    return adapted[0]


def test_ranks_that_share_matrices_switch_together_to_a_policy_for_a_budget(ranks: Ranks) -> None:
    few = {"model.model_config.num_layers": 2}
    ran = agreed(both(ranks, {**data(1, 2), **TENSOR, **LONG, **few}, budget="4MiB"))
    assert set(ran.decisions) != {"keep"}


@pytest.mark.slow
def test_so_do_stages_whose_ranks_share_parameters(four_ranks: Ranks) -> None:
    ran = agreed(both(four_ranks, {**pipeline(2), **SHARD, **LONG}, budget="3MiB"))
    assert set(ran.decisions) != {"keep"}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
@pytest.mark.parametrize("model", ["llama", "deepseek"])
def test_ranks_switch_together_in_every_layout(model: str, layout: Layout, ranks: Ranks, four_ranks: Ranks) -> None:
    if layout.only not in (None, model):
        pytest.skip("the model has no experts")
    agreed(both(ranks if layout.processes == 2 else four_ranks, layout.settings, model=model))


def test_an_allocation_that_fails_on_a_device_ends_no_run(one: Ranks) -> None:
    settings = data(1, 2)
    (plain,) = one.run(adaptive_runs.run, "llama", settings, STEPS, "tide")
    failures = {1: 40, 3: 60, 7: 30, 8: 90}
    (ran,) = one.run(adaptive_runs.run, "llama", {**settings, **ADAPT}, STEPS, "tide", None, failures)
    assert ran.reported == plain.reported
    assert ran.rescued >= len(failures)
    assert {kind for _, kind in ran.events} & {"rescued", "retried"}
