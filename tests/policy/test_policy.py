from __future__ import annotations

import json
import subprocess
import sys

import pytest
from hypothesis import given

from lowtide.errors import PolicyError
from lowtide.policy import Keep, LayerPolicy, Pattern, Policy, Recompute, Rule, Swap, format_layers, parse_layers
from strategies import policies


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
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": "7"}
    )
    assert printed.stdout.strip() == "e2e3266e224bb75a8a820a0af819db2e89ee542f18412978cb4821346413911c"


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
    '{"lowtide_policy": 1, "mp_comm_recompute": 1}',
    '{"lowtide_policy": 1, "layers": [{"layers": "0-999999999"}]}',
    '{"lowtide_policy": 1, "layers": [{"layers": "1"}]}',
    '{"lowtide_policy": 1, "layers": [{"layers": "0"}, {"layers": "0"}]}',
    '{"lowtide_policy": 1, "layers": [{"layers": "0", "default": "maybe"}]}',
    '{"lowtide_policy": 1, "layers": [{"layers": "0", "boundary": "recompute"}]}',
    '{"lowtide_policy": 1, "layers": [{"layers": "0", "rules": [{"pattern": "("}]}]}',
    '{"lowtide_policy": 1, "layers": [{"layers": "0", "rules": [{"pattern": "(", "decision": "keep"}]}]}',
    '{"lowtide_policy": 1, "layers": [{"layers": "0", "communication": [{"pattern": "a", "repeat": 1}]}]}',
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
