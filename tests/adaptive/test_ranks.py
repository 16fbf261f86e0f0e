"""Ranks agree on one Policy, and prove it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lowtide import LayerPolicy, Policy, PolicyError, Recompute
from lowtide.adaptive.decide import Decided
from lowtide.adaptive.merge import slowest
from lowtide.adaptive.ranks import Ranks, _with_seconds
from lowtide.planner.make import make_plan
from lowtide.trace.trace import kernels_of
from support import agreeing_ranks
from support.ranks import Ranks as Processes
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


@pytest.mark.parametrize("members", [[0, 1, 2, 3], [0, 1, 3], [2]])
def test_ranks_merge_in_pairs_and_all_get_the_result(four_ranks: Processes, members: list[int]) -> None:
    found = four_ranks.run(agreeing_ranks.merged_numbers, members)
    assert [numbers for numbers, _ in found] == [members if rank in members else [] for rank in range(4)]
    merges = [count for _, count in found]
    assert sum(merges) == len(members) - 1  # each sends once, instead of to all
    assert max(merges) == (len(members) - 1).bit_length()


def test_ranks_with_other_kernels_and_sizes_agree_on_the_trace_that_one_process_would_merge(
    four_ranks: Processes,
) -> None:
    expected = slowest([agreeing_ranks.unlike_trace(rank) for rank in range(4)])
    assert "1 of 4 ranks did not run the same kernels" in expected.notes[-1]
    assert set(four_ranks.run(agreeing_ranks.agreed_trace)) == {expected.digest}


def test_a_run_without_stages_has_one_group(ranks: Processes) -> None:
    assert ranks.run(agreeing_ranks.group_count) == [1, 1]
