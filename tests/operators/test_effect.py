"""The bytes that a Policy frees: counted for sets of operators, and the same as a device measures."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tide
from lowtide import Keep, LayerPolicy, Pattern, Policy, Recompute, Rule, Swap, apply
from lowtide.operators.effect import Effect, effect_of, freed_by_recompute, freed_by_swap
from lowtide.operators.kinds import LayerKind
from lowtide.operators.survey import Survey, survey
from lowtide.policy import Catalogue, resolve
from support.garbage import collect_garbage
from support.tiny_models import surveyed, tiny


@cache
def known(name: str) -> Survey:
    return surveyed(name)[0]


def owned(kind: LayerKind, names: Any) -> int:
    return sum(operator.owned for operator in kind.operators if operator.name in names)


def effect(*rules: Rule, model: str = "llama", **settings: Any) -> Effect:
    found = known(model)
    policy = Policy((LayerPolicy(rules=rules, **settings),) * 3)
    return effect_of(resolve(policy, found.catalogue), found)


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
def test_one_operator_frees_its_net_bytes(name: str) -> None:
    kind = known(name).kinds[0]
    for operator in kind.operators:
        if operator.owned and operator.repeatable:
            assert freed_by_recompute(kind, [operator.name]) == operator.net, operator.name


def test_a_chain_frees_all_that_it_holds() -> None:
    """The rotary products free nothing alone; with the projections before them they are rebuilt from held values."""
    kind = known("llama").kinds[0]
    bytes_of = {operator.name: operator for operator in kind.operators}
    assert bytes_of["self_attn.add"].net < 0
    attention = [operator.name for operator in kind.operators if operator.name.startswith("self_attn.")]
    assert freed_by_recompute(kind, attention) == owned(kind, attention) > sum(bytes_of[name].net for name in attention)


@given(st.data())
def test_more_operators_never_hold_more_than_they_free_together(data: st.DataObject) -> None:
    kind = known("llama").kinds[0]
    names = [operator.name for operator in kind.operators]
    chosen = data.draw(st.sets(st.sampled_from(names)))
    assert freed_by_recompute(kind, chosen) <= owned(kind, chosen)
    assert freed_by_recompute(kind, names) == owned(kind, names)
    assert freed_by_swap(kind, chosen) == owned(kind, chosen)


def test_settings_and_the_whole_are_counted_over_layers() -> None:
    found = effect(
        Rule(Pattern(r"mlp\.(act_fn|mul)"), Recompute()), Rule(Pattern("attention"), Swap(5)), boundary=Swap(1)
    )
    kind = known("llama").kinds[0]
    first, second, boundary = found.settings
    assert (first.setting.operators, first.freed) == (("mlp.act_fn", "mlp.mul"), 3 * owned(kind, first.setting.decided))
    assert second.freed == 3 * owned(kind, second.setting.decided) > 0
    assert (boundary.setting.setting, boundary.freed) == ("the layer's input", 3 * kind.boundary)
    assert (found.recomputed, found.swapped) == (first.freed, second.freed + boundary.freed)
    held = known("llama").held
    assert found.freed < found.held == held.total - held.static


def test_the_whole_layer_frees_what_its_operators_hold() -> None:
    (one,) = effect(default=Recompute()).settings
    assert one.setting.setting == "the whole layer"
    assert one.freed == known("llama").held.layers


def test_what_saves_nothing_is_named() -> None:
    (add,) = effect(Rule(Pattern("add"), Recompute())).settings
    assert (add.freed, add.idle) == (0, ("add",))
    (mixed,) = effect(Rule(Pattern("(add|input_layernorm)"), Recompute())).settings
    assert mixed.freed > 0
    assert mixed.idle == ("add",)
    (nothing,) = effect(Rule(Pattern(r"self_attn\.o_proj"), Recompute())).settings
    assert (nothing.freed, nothing.idle) == (0, ())


def test_what_cannot_be_replayed_is_named_and_frees_nothing() -> None:
    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x).exp().add_(1.0).sin()

    model = torch.nn.Sequential(Block(), Block())
    found = survey(model, lambda: model(torch.randn(2, 4, requires_grad=True)))
    policy = Policy((LayerPolicy(rules=(Rule(Pattern("add"), Recompute()),)),) * 2)
    (one,) = effect_of(resolve(policy, found.catalogue), found).settings
    assert (one.freed, one.kept, one.idle) == (0, ("add",), ())


def test_an_exclude_and_a_collective_free_nothing() -> None:
    found = effect(Rule(Pattern(r"mlp\.mul"), Keep()), Rule(Pattern("mlp"), Recompute()))
    exclude, rest = found.settings
    assert exclude.freed == 0
    assert "mlp.mul" in rest.setting.operators
    assert "mlp.mul" not in rest.setting.decided


@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "autocast"])
@pytest.mark.parametrize(
    "pattern", [r"(self_attn|mlp)\..*", r"self_attn\.(add|mul|cat|q_proj).*", r".*(norm|mul|_proj)"]
)
def test_a_device_measures_what_was_counted(pattern: str, autocast: bool) -> None:
    rule = Rule(Pattern(pattern, "path"), Recompute())

    def held(rules: tuple[Rule, ...]) -> tuple[int, LayerKind | None]:
        model = tiny("llama", hidden_size=128, intermediate_size=256, num_attention_heads=4, vocab_size=128).to("tide")
        handle = apply(model, Policy((LayerPolicy(rules=rules),) * 3)) if rules else None
        tokens = torch.randint(3, 128, (4, 64)).to("tide")
        for _ in range(2):  # the first step learns
            before = torch.accelerator.memory_allocated()
            with torch.autocast("tide", torch.bfloat16, enabled=autocast):
                loss = model(tokens, labels=tokens).loss
            held = torch.accelerator.memory_allocated() - before
            loss.backward()
            model.zero_grad(set_to_none=True)
        kind = next(iter(handle.profiles.values())) if handle is not None else None
        del model, handle, loss
        collect_garbage()
        return held, kind

    collect_garbage()  # what earlier tests left on the device is not to be freed in between
    tide.reset()
    tide.configure(preset="h100")
    (plain, _), (freed, kind) = held(()), held((rule,))
    assert kind is not None
    decisions = resolve(Policy((LayerPolicy(rules=(rule,)),)), Catalogue((kind.catalogue,))).layers[0].decisions
    chosen = [name for name, decision in decisions.items() if decision == Recompute()]
    assert len(chosen) > 3
    assert plain - freed == 3 * freed_by_recompute(kind, chosen)
    tide.reset()
