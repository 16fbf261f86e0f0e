"""``lowtide train`` with ``adapt``: the run decides for itself, and trains the same bits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from layout_cases import SHARD, data, pipeline
from ranks import Ranks
from train import adaptive_runs
from train.adaptive_runs import Ran

pytestmark = pytest.mark.xdist_group("layouts")

ADAPT = {"adapt": {"budget": "auto", "profiling_step": 4, "verbosity": "quiet"}}
STEPS = 8


@pytest.fixture(scope="module")
def one() -> Iterator[Ranks]:
    """One process, as a group."""
    alone = Ranks(1)
    yield alone
    alone.stop()


def both(ranks: Ranks, settings: dict[str, Any], *more: Any, model: str = "llama") -> list[Ran]:
    """An adaptive run on every rank; the same run without lowtide had the same losses."""
    settings = {**settings, "runner_config.stop_step": STEPS}
    plain = ranks.run(adaptive_runs.run, model, settings, STEPS)
    adapted: list[Ran] = ranks.run(adaptive_runs.run, model, {**settings, **ADAPT}, STEPS, *more)
    for without, with_it in zip(plain, adapted, strict=True):
        assert with_it.told == without.told
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


@pytest.mark.parametrize("settings", [{**data(2, 1), **SHARD}, pipeline()], ids=["shards", "stages"])
def test_ranks_switch_together_to_one_policy(ranks: Ranks, settings: dict[str, Any]) -> None:
    adapted = both(ranks, settings)
    assert len({ran.digest for ran in adapted}) == 1
    assert len({tuple(ran.phases) for ran in adapted}) == 1
    assert "planned" in adapted[0].phases


def test_an_allocation_that_fails_on_a_device_ends_no_run(one: Ranks) -> None:
    settings = data(1, 2)
    (plain,) = one.run(adaptive_runs.run, "llama", settings, STEPS, "tide")
    failures = {1: 40, 3: 60, 7: 30, 8: 90}
    (ran,) = one.run(adaptive_runs.run, "llama", {**settings, **ADAPT}, STEPS, "tide", None, failures)
    assert ran.told == plain.told
    assert ran.rescued >= len(failures)
    assert {kind for _, kind in ran.events} & {"rescued", "repeated"}
