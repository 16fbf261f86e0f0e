"""Ranks agree on one Policy, and prove it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lowtide import LayerPolicy, Policy, PolicyError, Recompute
from lowtide.adapt.decide import Decided
from lowtide.adapt.ranks import Ranks
from lowtide.plan.make import make_plan
from traced_cases import DEVICE, hand_made_trace


def test_a_policy_that_is_not_what_its_digest_says_is_refused() -> None:
    plan = make_plan(hand_made_trace(2), "4GiB", DEVICE)
    policy = Policy((LayerPolicy(Recompute()), LayerPolicy()))
    decided = Decided(plan=plan, policy=policy, budget=plan.budget, margin=0, reason="")
    ranks = Ranks()
    assert ranks.decided(decided) is decided
    other = replace(decided, policy=Policy((LayerPolicy(), LayerPolicy())))
    vars(other.policy)["digest"] = policy.digest  # as if it had changed on its way
    with pytest.raises(PolicyError, match="do not have the same Policy"):
        ranks.decided(other)
