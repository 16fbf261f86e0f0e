from __future__ import annotations

import pytest
from hypothesis import given

from lowtide.errors import PolicyError
from lowtide.policy import Decision, Swap
from lowtide.policy.decision import decision_as_json, decision_from_json
from support.strategies import decisions


@given(decisions)
def test_decision_survives_json(decision: Decision) -> None:
    assert decision_from_json(decision_as_json(decision)) == decision


@pytest.mark.parametrize("prefetch", [0, -1, True, 1.5, "1", 10**9])
def test_prefetch_is_a_whole_number_from_one(prefetch: object) -> None:
    with pytest.raises(PolicyError, match="whole number from 1"):
        Swap(prefetch)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "value", ["swap", None, 3, {"swap": 3}, {"swap": {"prefetch": 1, "speed": 2}}, {"swap": {"tier": "tape"}}]
)
def test_what_is_no_decision_is_refused(value: object) -> None:
    with pytest.raises(PolicyError, match=r"found"):
        decision_from_json(value)
