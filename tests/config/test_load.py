from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from lowtide.config.load import load_policy
from lowtide.errors import ConfigError, PolicyError
from lowtide.planner.make import make_plan
from lowtide.planner.plan_file import plan_as_json, save_plan
from lowtide.policy import LayerPolicy, Policy, Recompute
from support.traced_cases import DEVICE, hand_made_trace

MODEL = "model: {model_config: {num_layers: 4}}\n"


def test_load_policy_knows_what_a_plan_wrote_by_its_content(tmp_path: Path) -> None:
    policy = Policy((LayerPolicy(Recompute()), LayerPolicy()), origin="solver")
    file = tmp_path / "policy.txt"
    file.write_text(policy.to_json())
    assert load_policy(file) == policy
    file.write_text('{"lowtide_policy": 99}')
    with pytest.raises(PolicyError, match="not a Policy"):
        load_policy(file)


def test_load_policy_gives_the_policy_or_all_problems(tmp_path: Path) -> None:
    file = tmp_path / "train.yaml"
    file.write_text(MODEL + "recompute_config: {recompute: true}\n")
    assert len(load_policy(file).layers) == 4
    file.write_text(MODEL + "recompute_config: {recompute: 3}\n")
    with pytest.raises(ConfigError, match=r"train\.yaml:2:31: `recompute` cannot be the number 3"):
        load_policy(file)
    file.write_text("runner_config: {epochs: 1}\n")
    with pytest.raises(ConfigError, match="no recompute or swap settings"):
        load_policy(file)


def test_load_policy_reads_the_policy_of_a_whole_plan(tmp_path: Path) -> None:
    plan = make_plan(hand_made_trace(2), "4GiB", DEVICE)
    for name in ("plan.json", "plan.json.gz"):
        save_plan(plan, tmp_path / name)
        assert load_policy(tmp_path / name) == plan.policy
    printed = tmp_path / "printed.txt"
    printed.write_text(json.dumps(plan_as_json(plan)))
    assert load_policy(printed) == plan.policy
    training = tmp_path / "plan.yaml"
    training.write_text(plan.yaml)
    assert load_policy(training).layers == plan.policy.layers


@pytest.mark.parametrize(
    "data",
    [
        b'{"lowtide_policy": 1, ',
        b'{"lowtide_plan": 1}',
        b"lowtide_policy: 99",
        b"lowtide_policy: 1\nlayers: 3",
        gzip.compress(b'{"lowtide_plan": 1}'),
        gzip.compress(b'{"lowtide_plan": 1}')[:-9],
    ],
    ids=range(6),
)
def test_a_damaged_policy_is_refused_with_the_name_of_its_file(tmp_path: Path, data: bytes) -> None:
    file = tmp_path / "policy.json"
    file.write_bytes(data)
    with pytest.raises(PolicyError, match=r"policy\.json"):
        load_policy(file)


def test_a_policy_in_broken_yaml_is_refused_with_its_position(tmp_path: Path) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text("lowtide_policy: 1\nlayers: [\n")
    with pytest.raises(PolicyError, match=r"policy\.yaml: line \d+, column \d+"):
        load_policy(file)


def test_a_training_file_in_flow_style_is_no_policy(tmp_path: Path) -> None:
    file = tmp_path / "train.yaml"
    file.write_text('{"model": {"model_config": {"num_layers": 2}}, "recompute_config": {"recompute": true}}')
    assert load_policy(file) == Policy((LayerPolicy(Recompute()),) * 2)
