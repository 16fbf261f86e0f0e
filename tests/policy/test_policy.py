from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowtide.config.load import load_policy
from lowtide.errors import PolicyError
from lowtide.policy import (
    Catalogue,
    Communication,
    Keep,
    LayerPolicy,
    Operator,
    Pattern,
    Policy,
    Recompute,
    Rule,
    Swap,
    format_layers,
    parse_layers,
    resolve,
)
from support.strategies import policies


@given(policies())
def test_policy_survives_json(policy: Policy) -> None:
    again = Policy.from_json(policy.to_json())
    assert again == policy
    assert again.digest == policy.digest


@given(policies(), policies())
def test_digests_are_equal_exactly_for_equal_policies(one: Policy, other: Policy) -> None:
    assert (one.digest == other.digest) == (one == other)


def test_digest_does_not_change_between_machines_or_runs() -> None:
    program = (
        "from lowtide.policy import *;"
        "print(Policy((LayerPolicy(Swap(3), (Rule(Pattern('mlp'), Recompute()),)),) * 3).digest)"
    )
    printed = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONHASHSEED": "7"},
    )
    assert printed.stdout.strip() == "a02d18f0824d7562e865f1f570799c209af7437400a1970f6058b8313f66ffd4"


def test_equal_layers_share_an_entry_in_json() -> None:
    policy = Policy((LayerPolicy(Recompute()),) * 80)
    assert policy.as_json()["layers"] == [{"layers": "0-79", "default": "recompute"}]


def test_repr_names_layers_and_decisions() -> None:
    rule = Rule(Pattern(r"mlp\.mul"), Swap(4, "disk"))
    policy = Policy((LayerPolicy(Recompute()), LayerPolicy(rules=(rule,)), LayerPolicy(Recompute())))
    assert repr(policy) == f"Policy(3 layers, {policy.digest[:8]}: 0,2: recompute; 1: keep, mlp\\.mul: swap(4, disk))"


def test_boundary_cannot_be_recomputed() -> None:
    with pytest.raises(PolicyError, match="kept or swapped"):
        LayerPolicy(boundary=Recompute())  # type: ignore[arg-type]


BROKEN = [
    "",
    "[]",
    "{}",
    '{"lowtide_policy": 2}',
    '{"lowtide_policy": 1, "layrs": []}',
    '{"lowtide_policy": 1, "origin": "oracle"}',
    '{"lowtide_policy": 1, "communication": {"reissue_collectives": 1}}',
    '{"lowtide_policy": 1, "communication": {"mp_comm_recompute": true}}',
    '{"lowtide_policy": 1, "communication": []}',
    '{"lowtide_policy": 1, "layers": [{"layers": "*"}, {"layers": "0"}]}',
    '{"lowtide_policy": 1, "layers": [{"layers": "0-999999999"}]}',
    '{"lowtide_policy": 1, "layers": [{"layers": "1"}]}',
    '{"lowtide_policy": 1, "layers": [{"layers": "0"}, {"layers": "0"}]}',
    '{"lowtide_policy": 1, "layers": [{"layers": "0", "default": "maybe"}]}',
    '{"lowtide_policy": 1, "layers": [{"layers": "0", "boundary": "recompute"}]}',
    '{"lowtide_policy": 1, "layers": [{"layers": "0", "rules": [{"pattern": "("}]}]}',
    '{"lowtide_policy": 1, "layers": [{"layers": "0", "rules": [{"pattern": "(", "decision": "keep"}]}]}',
    '{"lowtide_policy": 1, "layers": [{"layers": "0", "collectives": [{"pattern": "a", "reissue": 1}]}]}',
    "[" * 100_000,
]


@pytest.mark.parametrize("text", BROKEN, ids=range(len(BROKEN)))
def test_what_is_no_policy_is_refused_in_words(text: str) -> None:
    with pytest.raises(PolicyError) as error:
        Policy.from_json(text)
    assert str(error.value)


def test_layers_are_written_in_short() -> None:
    assert format_layers([0, 1, 2, 5, 7, 8]) == "0-2,5,7-8"
    assert parse_layers("0-2,5,7-8") == [0, 1, 2, 5, 7, 8]
    assert parse_layers(format_layers([])) == []


def test_policy_is_plain_data() -> None:
    policy = Policy((LayerPolicy(),))
    assert json.loads(policy.to_json())["layers"] == [{"layers": "0", "default": "keep"}]
    assert policy.layers[0].default == Keep()


def test_a_uniform_policy_needs_no_number_of_layers() -> None:
    policy = Policy.uniform({r"mlp\.mul": Recompute()}, Swap(2), communication=Communication(slice_inputs=True))
    layer = LayerPolicy(Swap(2), (Rule(Pattern(r"mlp\.mul"), Recompute()),))
    assert policy.for_layers(3) == Policy((layer,) * 3, communication=Communication(slice_inputs=True))
    assert Policy.from_json(policy.to_json()) == policy != policy.for_layers(1)
    assert policy.as_json()["layers"][0]["layers"] == "*"
    assert Policy.uniform([Rule(Pattern("mlp"), Recompute())]).layers[0].rules[0].pattern == Pattern("mlp")
    decided = Policy((layer, layer))
    assert decided.for_layers(3) is decided


def test_a_uniform_policy_is_resolved_against_every_layer() -> None:
    operators = (Operator("up"), Operator("down"))
    resolution = resolve(Policy.uniform({"up": Recompute()}), Catalogue((operators,) * 5))
    assert [layer.decisions["up"] for layer in resolution.layers] == [Recompute()] * 5


def test_a_policy_for_any_depth_has_one_layer_policy() -> None:
    with pytest.raises(PolicyError, match="one LayerPolicy; found 2"):
        Policy((LayerPolicy(),) * 2, any_depth=True)


@given(policies(), st.sampled_from(["policy.json", "policy.yaml", "policy.yml", "policy"]))
def test_a_saved_policy_is_loaded_by_its_content(policy: Policy, name: str) -> None:
    with TemporaryDirectory() as directory:
        file, other = Path(directory) / name, Path(directory) / "any_name.txt"
        policy.save(file)
        file.rename(other)
        assert Policy.load(other) == policy
        assert load_policy(str(other)) == policy


def test_a_uniform_policy_survives_its_file(tmp_path: Path) -> None:
    for name in ("policy.json", "policy.yaml"):
        policy = Policy.uniform({"mlp": Swap(3, "disk")})
        policy.save(tmp_path / name)
        assert Policy.load(tmp_path / name) == policy
    assert (tmp_path / "policy.yaml").read_text().startswith("lowtide_policy: 1\n")
    assert (tmp_path / "policy.json").read_text().startswith("{")


def test_what_holds_no_policy_is_refused_with_the_name_of_its_file(tmp_path: Path) -> None:
    file = tmp_path / "train.yaml"
    for text in ("recompute_config: {recompute: true}\n", "", "- 1\n", "a: [\n", "{}"):
        file.write_text(text)
        with pytest.raises(PolicyError, match=r"train\.yaml: "):
            Policy.load(file)
    for wrong in (tmp_path / "missing.json", tmp_path):
        with pytest.raises(PolicyError):
            Policy.load(wrong)
