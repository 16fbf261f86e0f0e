"""Ranks agree on one Policy, and prove it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lowtide import LayerPolicy, Policy, PolicyError, Recompute
from lowtide.adaptive.decide import Decided
from lowtide.adaptive.ranks import Ranks, _with_seconds
from lowtide.planner.make import make_plan
from lowtide.trace.trace import kernels_of
from support.traced_cases import DEVICE, hand_made_trace


def test_a_policy_that_is_not_what_its_digest_says_is_refused() -> None:
    plan = make_plan(hand_made_trace(2), "4GiB", DEVICE)
    policy = Policy((LayerPolicy(Recompute()), LayerPolicy()))
    decided = Decided(plan=plan, policy=policy, budget=plan.budget, reason="")
    ranks = Ranks()
    assert ranks.decided(decided) is decided
    other = replace(decided, policy=Policy((LayerPolicy(), LayerPolicy())))
    vars(other.policy)["digest"] = policy.digest  # as if it had changed in transit
    with pytest.raises(PolicyError, match="do not have the same Policy"):
        ranks.decided(other)


def test_each_kernel_gets_its_own_time_and_what_was_not_timed_gets_none() -> None:
    trace = hand_made_trace(2)
    first = trace.parts[0]
    untimed = replace(
        trace, parts=(replace(first, kernels=(first.kernels[0]._replace(seconds=None), *first.kernels[1:])),)
    )
    count = len(kernels_of(untimed))
    changed = kernels_of(_with_seconds(untimed, [float(place) for place in range(count)]))
    expected = [None if one.seconds is None else float(place) for place, one in enumerate(kernels_of(untimed))]
    assert [one.seconds for one in changed] == expected
    assert expected.count(None) == 1
