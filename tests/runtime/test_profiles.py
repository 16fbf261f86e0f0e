"""What one Handle has profiled, the next need not profile."""

from __future__ import annotations

import torch
from torch import nn

import lowtide
from lowtide import LayerPolicy, Pattern, Policy, Recompute, Rule

POLICY = Policy((LayerPolicy(rules=(Rule(Pattern("1"), Recompute()),)),) * 3)


def test_a_policy_that_follows_another_is_at_work_in_its_first_step() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.SiLU(), nn.Linear(8, 8)) for _ in range(3)))

    def recomputed(before: lowtide.Handle | None) -> tuple[lowtide.Handle, int]:
        handle = lowtide.apply(model, POLICY, profiles=before.profiles if before is not None else None)
        model(torch.ones(2, 8, requires_grad=True)).sum().backward()
        handle.remove()
        return handle, sum(one.recomputes for one in handle.receipt().operators)

    first, without = recomputed(None)
    _, with_it = recomputed(first)
    assert (without, with_it) == (2, 3)  # a layer that is being profiled keeps everything


def test_a_uniform_policy_is_applied_to_as_many_layers_as_there_are() -> None:
    for layers in (2, 4):
        model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.SiLU()) for _ in range(layers)))
        handle = lowtide.apply(model, Policy.uniform({"1": Recompute()}))
        assert handle.policy == Policy.uniform({"1": Recompute()}).for_layers(layers)
        handle.remove()
        assert lowtide.verify(model, Policy.uniform(default=Recompute()), torch.ones(2, 8, requires_grad=True)).compared
