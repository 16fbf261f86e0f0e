from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from lowtide.errors import PolicyError, UnmatchedError
from lowtide.policy import (
    Catalogue,
    CollectiveRule,
    Decision,
    Keep,
    LayerPolicy,
    Operator,
    Pattern,
    Policy,
    Recompute,
    Resolution,
    Rule,
    Swap,
    resolve,
)
from support.strategies import catalogues, policies

LAYER = (
    Operator("norm", ("attention.wq", "attention.wk")),
    Operator("attention.wq", ("attention.softmax",)),
    Operator("attention.wk", ("attention.softmax",)),
    Operator("attention.softmax", ("mlp.up",)),
    Operator("mlp.up", ("mlp.silu",)),
    Operator("mlp.silu", ("mlp.down",)),
    Operator("mlp.down"),
)


def resolved(layer: LayerPolicy, *, origin: str = "file", require_match: bool = True) -> Resolution:
    policy = Policy((layer,), origin=origin)  # type: ignore[arg-type]
    return resolve(policy, Catalogue((LAYER,)), require_match=require_match)


def decisions(*rules: Rule, default: Decision = Keep(), origin: str = "file") -> dict[str, Decision]:  # noqa: B008
    return dict(resolved(LayerPolicy(default, rules), origin=origin).layers[0].decisions)


def rule(pattern: str, decision: Decision, **more: bool) -> Rule:
    return Rule(Pattern(pattern), decision, **more)


@given(st.data(), catalogues())
def test_every_operator_gets_exactly_one_decision(data: st.DataObject, catalogue: Catalogue) -> None:
    policy = data.draw(policies(num_layers=len(catalogue.layers)))
    resolution = resolve(policy, catalogue, require_match=False)
    for operators, layer in zip(catalogue.layers, resolution.layers, strict=True):
        assert list(layer.decisions) == [operator.name for operator in operators]
        for decision in layer.decisions.values():
            assert isinstance(decision, (Keep, Recompute, Swap))
            assert not isinstance(decision, Swap) or decision.unit == "operators"


@given(st.data(), catalogues())
def test_no_swapped_operator_of_a_file_feeds_a_recomputed_one(data: st.DataObject, catalogue: Catalogue) -> None:
    policy = data.draw(policies(num_layers=len(catalogue.layers)))
    resolution = resolve(policy, catalogue, require_match=False)
    for operators, layer in zip(catalogue.layers, resolution.layers, strict=True):
        feeding = [
            operator.name
            for operator in operators
            if isinstance(layer.decisions[operator.name], Swap)
            and any(layer.decisions[reader] == Recompute() for reader in operator.consumers)
        ]
        assert policy.origin == "solver" or not feeding


def test_a_rule_decides_the_operators_below_a_module() -> None:
    found = decisions(rule("mlp", Recompute()))
    assert [name for name, decision in found.items() if decision == Recompute()] == ["mlp.up", "mlp.silu", "mlp.down"]


def test_exclude_wins_over_full_recompute() -> None:
    found = decisions(rule(r"mlp\.silu", Keep()), default=Recompute())
    assert found["mlp.silu"] == Keep()
    assert found["mlp.up"] == Recompute()


def test_recompute_wins_over_swap() -> None:
    found = decisions(rule(r"mlp\.silu", Swap(3)), rule(r"mlp\.silu", Recompute()))
    assert found["mlp.silu"] == Recompute()


def test_an_operators_entry_wins_over_its_layers_and_the_first_entry_over_later_ones() -> None:
    found = decisions(rule(r"attention\.wq", Swap(3)), rule("attention", Swap(5)), default=Swap(9))
    assert found["attention.wq"] == Swap(3)
    assert found["attention.wk"] == Swap(5)
    assert found["norm"] == Swap(9)


def test_in_a_file_what_directly_feeds_a_recomputed_operator_is_not_swapped() -> None:
    rules = (rule("mlp", Recompute()), rule("attention", Swap(4)))
    resolution = resolved(LayerPolicy(rules=(rule(r"mlp\.up", Recompute()), rule(r"attention\.softmax", Swap(4)))))
    assert resolution.layers[0].decisions["attention.softmax"] == Keep()
    (unused,) = resolution.unused
    assert "attention.softmax directly feeds mlp.up, which is recomputed" in str(unused)
    assert decisions(*rules)["attention.wq"] == Swap(4)
    assert decisions(*rules, origin="solver")["attention.softmax"] == Swap(4)


def test_a_pattern_that_matches_nothing_is_an_error_with_the_nearest_names() -> None:
    with pytest.raises(UnmatchedError, match=r"mlp\.sil .*did you mean mlp\.silu"):
        resolved(LayerPolicy(rules=(rule("mlp.sil", Recompute()),)))


def test_a_builtin_pattern_that_matches_nothing_is_fine_if_a_sibling_does() -> None:
    there, missing = rule(r"mlp\.silu", Recompute(), builtin=True), rule(r"experts\.silu", Recompute(), builtin=True)
    assert not resolved(LayerPolicy(rules=(there, missing))).unused
    with pytest.raises(UnmatchedError, match="experts"):
        resolved(LayerPolicy(rules=(missing,)))


def test_a_pattern_need_only_match_in_one_layer() -> None:
    dense, sparse = (Operator("mlp.silu"),), (Operator("experts.silu"),)
    layer = LayerPolicy(rules=(rule(r"experts\.silu", Recompute()),))
    resolution = resolve(Policy((layer, layer)), Catalogue((dense, sparse)))
    assert not resolution.unused


def test_select_in_a_recomputed_layer_is_reported_only_if_it_did_nothing_anywhere() -> None:
    select = (rule(r"mlp\.silu", Recompute()),)
    full, some = LayerPolicy(Recompute(), select), LayerPolicy(rules=select)
    both = resolve(Policy((full, some)), Catalogue((LAYER, LAYER)))
    assert not both.unused
    (unused,) = resolve(Policy((full, full)), Catalogue((LAYER, LAYER))).unused
    assert str(unused) == r"mlp\.silu (recompute) has no effect in layers 0-1: the whole layer is recomputed"


def test_swap_that_recompute_overrules_is_reported_with_its_layers() -> None:
    rules = (rule(r"mlp\.silu", Recompute()), rule(r"mlp\.silu", Swap(2)))
    alone = LayerPolicy(rules=rules[1:])
    resolution = resolve(Policy((LayerPolicy(rules=rules), alone)), Catalogue((LAYER, LAYER)))
    (unused,) = resolution.unused
    assert unused.layers == (0,)
    assert unused.reason == "it is recomputed, which wins over swap"


def test_exclude_of_a_module_has_no_effect_where_only_operators_count() -> None:
    resolution = resolved(LayerPolicy(Recompute(), (rule("mlp", Keep(), operators_only=True),)))
    assert resolution.layers[0].decisions["mlp.silu"] == Recompute()
    assert "only operators can be excluded" in str(resolution.unused[0])


def test_collectives_are_reissued_at_operators_only() -> None:
    layer = LayerPolicy(collectives=(CollectiveRule(Pattern("norm")), CollectiveRule(Pattern("mlp"))))
    resolution = resolved(layer)
    assert resolution.layers[0].reissued_collectives == ("norm",)
    assert "only an operator has a collective" in str(resolution.unused[0])


def test_a_kept_collective_wins_over_a_reissued_one() -> None:
    layer = LayerPolicy(collectives=(CollectiveRule(Pattern("norm")), CollectiveRule(Pattern("no.*"), reissue=False)))
    resolution = resolved(layer)
    assert resolution.layers[0].reissued_collectives == ()
    assert resolution.layers[0].kept_collectives == ("norm",)


def test_prefetch_in_layers_becomes_operators_of_the_layers_behind() -> None:
    swapped = LayerPolicy(Swap(2, unit="layers"), boundary=Swap(1, unit="layers"))
    resolution = resolve(Policy((swapped,) * 4), Catalogue((LAYER, LAYER[:2], LAYER[:3], LAYER)))
    assert [layer.decisions["norm"] for layer in resolution.layers] == [Swap(5), Swap(10), Swap(7), Swap(1)]
    assert resolution.layers[0].boundary == Swap(2)


def test_policy_and_model_must_have_the_same_number_of_layers() -> None:
    with pytest.raises(PolicyError, match="decides 1 layers and the model has 2"):
        resolve(Policy((LayerPolicy(),)), Catalogue((LAYER, LAYER)))


def test_cost_follows_layer_kinds_not_layers() -> None:
    layer = LayerPolicy(rules=(rule(r"mlp\.silu", Recompute()),))
    resolution = resolve(Policy((layer,) * 5_000), Catalogue((LAYER,) * 5_000))
    assert len({id(one) for one in resolution.layers}) == 1


def test_a_pattern_on_an_alias_decides_by_the_operators_own_name() -> None:
    layer = (
        Operator("mlp.gate", ("mlp.act",), ("feed_forward.w1.matmul", "mlp.fc1")),
        Operator("mlp.up", ("mlp.act",), ("feed_forward.w3.matmul", "mlp.fc1")),
        Operator("mlp.act", (), ("feed_forward.w1.activation.silu",)),
    )

    def recomputed(pattern: str) -> list[str]:
        policy = Policy((LayerPolicy(rules=(rule(pattern, Recompute()),)),))
        decided = resolve(policy, Catalogue((layer,))).layers[0].decisions
        assert list(decided) == ["mlp.gate", "mlp.up", "mlp.act"]
        return [name for name, decision in decided.items() if decision == Recompute()]

    assert recomputed(r"feed_forward\.w3\.matmul") == ["mlp.up"]
    assert recomputed(r"mlp\.fc1") == ["mlp.gate", "mlp.up"]  # two operators share it
    assert recomputed(r"feed_forward\.w1") == ["mlp.gate", "mlp.act"]  # a module of the aliases
    assert recomputed("feed_forward") == ["mlp.gate", "mlp.up", "mlp.act"]
    assert recomputed("mlp") == ["mlp.gate", "mlp.up", "mlp.act"]


def test_an_alias_that_is_another_operators_own_name_means_that_one() -> None:
    layer = (Operator("mul", (), ("attention.mul",)), Operator("attention.mul"))
    policy = Policy((LayerPolicy(rules=(rule(r"attention\.mul", Recompute()),)),))
    assert dict(resolve(policy, Catalogue((layer,))).layers[0].decisions) == {
        "mul": Keep(),
        "attention.mul": Recompute(),
    }


def test_a_collective_is_named_by_an_alias_and_kept_by_the_own_name() -> None:
    layer = (Operator("ln_1", (), ("attention_norm.norm",)), Operator("mlp"))
    policy = Policy((LayerPolicy(collectives=(CollectiveRule(Pattern(r".*\.norm")),)),))
    assert resolve(policy, Catalogue((layer,))).layers[0].reissued_collectives == ("ln_1",)


def test_the_nearest_names_of_an_unmatched_pattern_may_be_aliases() -> None:
    layer = (Operator("mlp.act", (), ("feed_forward.w1.activation.silu",)),)
    policy = Policy((LayerPolicy(rules=(rule(r"feed_forward\.w1\.activation\.sil", Recompute()),)),))
    with pytest.raises(UnmatchedError, match=r"did you mean feed_forward\.w1\.activation\.silu"):
        resolve(policy, Catalogue((layer,)))


@given(st.data(), catalogues())
def test_an_alias_is_as_good_as_a_name(data: st.DataObject, catalogue: Catalogue) -> None:
    policy = data.draw(policies(num_layers=len(catalogue.layers)))
    assume(not any(".*" in str(r.pattern) for layer in policy.layers for r in (*layer.rules, *layer.collectives)))

    def renamed(layer: tuple[Operator, ...]) -> tuple[Operator, ...]:
        return tuple(Operator(f"own-{o.name}", tuple(f"own-{c}" for c in o.consumers), (o.name,)) for o in layer)

    first = resolve(policy, catalogue, require_match=False)
    others = Catalogue(tuple(renamed(layer) for layer in catalogue.layers))
    second = resolve(policy, others, require_match=False)
    for plain, aliased in zip(first.layers, second.layers, strict=True):
        assert {f"own-{name}": decision for name, decision in plain.decisions.items()} == aliased.decisions
        assert [f"own-{name}" for name in plain.reissued_collectives] == list(aliased.reissued_collectives)


def test_each_setting_says_which_operators_it_names_and_which_it_decides() -> None:
    settings = resolved(
        LayerPolicy(Swap(2), (rule("mlp", Recompute()), rule(r"mlp\.up", Keep()), rule("norm", Swap(9))), Swap(3))
    ).settings
    found = {(one.setting, one.action): (one.layers, one.operators, one.decided) for one in settings}
    attention = ("attention.wq", "attention.wk", "attention.softmax")
    names = tuple(operator.name for operator in LAYER)
    assert found == {
        ("mlp", "recompute"): ((0,), ("mlp.up", "mlp.silu", "mlp.down"), ("mlp.silu", "mlp.down")),
        (r"mlp\.up", "keep"): ((0,), ("mlp.up",), ("mlp.up",)),
        ("norm", "swap(9)"): ((0,), ("norm",), ("norm",)),
        ("the whole layer", "swap(2)"): ((0,), names, attention),
        ("the layer's input", "swap(3)"): ((0,), (), ()),
    }


@given(st.data(), catalogues())
def test_every_decision_but_keep_is_due_to_exactly_one_kind_of_setting(
    data: st.DataObject, catalogue: Catalogue
) -> None:
    policy = data.draw(policies(num_layers=len(catalogue.layers)))
    resolution = resolve(policy, catalogue, require_match=False)
    for index, layer in enumerate(resolution.layers):
        due = {
            name
            for one in resolution.settings
            if index in one.layers and "collective" not in one.action and one.action != "keep"
            for name in one.decided
        }
        assert due == {name for name, decision in layer.decisions.items() if decision != Keep()}
