from __future__ import annotations

from lowtide.planner.planned import planned_operators
from lowtide.policy import Keep, LayerPolicy, Pattern, Policy, Recompute, Rule, Swap
from support.hand_made_traces import llama_trace


def test_every_operator_that_holds_something_has_the_policys_decision() -> None:
    trace = llama_trace(layers=3)
    name = next(one.name for one in trace.parts[0].operators if one.owned)
    swapped = LayerPolicy(rules=(Rule(Pattern(name.replace(".", r"\.")), Swap(4)),), boundary=Swap(2))
    layers = planned_operators(trace, Policy((LayerPolicy(), LayerPolicy(Recompute()), swapped), origin="solver"))
    owned = {one.name: one.owned for one in trace.parts[0].operators if one.owned}
    for layer in layers:
        assert {one.name: one.bytes for one in layer if one.name != "input"} == owned
    assert {one.decision for one in layers[0]} == {Keep()}
    assert {one.decision for one in layers[1] if one.name != "input"} == {Recompute()}
    assert {one.name: one.decision for one in layers[2]}["input"] == Swap(2)
    assert {one.name for one in layers[2] if one.decision == Swap(4)} == {name}


def test_layers_that_are_treated_alike_share_one_tuple() -> None:
    layers = planned_operators(llama_trace(layers=4), Policy((LayerPolicy(),) * 4))
    assert len(set(map(id, layers))) == 1
