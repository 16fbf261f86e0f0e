"""What is decided for the root: bitwise, freeing what it says, and nothing of it in the layers."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers
from tide.testing import fresh_tide  # noqa: F401
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional

import tide
from lowtide import verify
from lowtide._torch_private.saved_tensor_hooks import top_saved_tensors_hooks
from lowtide.errors import PolicyError, UnmatchedError
from lowtide.operators.survey import survey
from lowtide.policy import CommRule, Decision, Keep, LayerPolicy, Pattern, Policy, Recompute, Rule, Swap
from lowtide.runtime.apply import Handle, apply
from lowtide.runtime.ledger import ROOT
from lowtide.runtime.limits import Limits

ALL = Limits(minimum_bytes=1)
LAYERS, WIDTH, VOCABULARY = 3, 32, 96


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        hidden = self.up(x)
        return self.down(functional.silu(hidden) * hidden.sigmoid() * scale)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gated = Gated()

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return x + self.gated(x, scale)


class Model(nn.Module):
    """Functions and modules before and after the layers, dropout among them, and the loss."""

    def __init__(self, between: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        super().__init__()
        self.embedding, self.dropout = nn.Embedding(VOCABULARY, WIDTH), nn.Dropout(0.2)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.between = between

    def forward(self, tokens: Tensor) -> Tensor:
        scale = torch.linspace(0.5, 1.5, 2 * WIDTH, device=tokens.device).exp()
        x = self.dropout(torch.tanh(self.embedding(tokens)))
        for layer in self.layers:
            x = self.between(layer(x, scale))
        logits = self.head(functional.silu(self.norm(x)))
        return functional.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())


def model_of(**settings: Any) -> Model:
    torch.manual_seed(0)
    return Model(**settings).to("tide")


def tokens_of(step: int) -> Tensor:
    return torch.randint(VOCABULARY, (4, 8), generator=torch.Generator().manual_seed(step)).to("tide")


def values(model: nn.Module, steps: int = 3) -> list[Tensor]:
    """The losses and gradients of some steps."""
    found = []
    for step in range(steps):
        torch.manual_seed(step)
        model.zero_grad()
        loss = model(tokens_of(step))
        loss.backward()
        found += [loss.detach().cpu(), *(one.grad.cpu() for one in model.parameters() if one.grad is not None)]
    return found


def same(first: list[Tensor], second: list[Tensor]) -> bool:
    return len(first) == len(second) and all(map(torch.equal, first, second))


def outside(*names: str, decision: Decision, layers: LayerPolicy | None = None) -> Policy:
    """These operators of the root, or all of them, are decided so."""
    root = LayerPolicy(rules=tuple(Rule(Pattern(name), decision) for name in names)) if names else LayerPolicy(decision)
    return Policy((layers or LayerPolicy(),) * LAYERS, root=root)


def applied(policy: Policy, **settings: Any) -> tuple[Model, Handle]:
    model = model_of(**settings)
    return model, apply(model, policy, limits=ALL)


NAMES = ("tanh", "dropout", "norm", "silu", "head", "cross_entropy")
HELD = ("tanh", "norm", "silu", "cross_entropy")
"""Those of which something is saved outside the layers; dropout's mask is a boolean, and its result layer 0's input."""


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("decision", [Recompute(), Swap(1), Swap(9), Swap(2, "disk")], ids=str)
def test_each_operator_of_the_root_is_exact(name: str, decision: Decision) -> None:
    expected = values(model_of())
    model, handle = applied(outside(name, decision=decision))
    assert same(values(model), expected)
    assert not tide.races()
    lines = [line for (layer, _), line in handle.ledger.lines.items() if layer == ROOT]
    assert sum(line.swaps + line.recomputes for line in lines) > 0 or name not in HELD
    setting = handle.receipt().settings[0]
    assert setting.layers == ()
    assert bool(setting.notes) or name in HELD


LAYER_POLICIES = {
    "kept": LayerPolicy(),
    "recomputed": LayerPolicy(Recompute()),
    "recomputed, inputs swapped": LayerPolicy(Recompute(), boundary=Swap(2)),
    "swapped": LayerPolicy(Swap(3), boundary=Swap(5)),
    "silu recomputed": LayerPolicy(rules=(Rule(Pattern("gated.silu"), Recompute()),)),
    "linear recomputed": LayerPolicy(rules=(Rule(Pattern("gated.up"), Recompute()),)),
}


@pytest.mark.parametrize("layers", LAYER_POLICIES)
@pytest.mark.parametrize("decision", [Recompute(), Swap(1), Swap(4), Swap(1, unit="layers")], ids=str)
def test_the_root_and_the_layers_together_are_exact(layers: str, decision: Decision) -> None:
    expected = values(model_of(), steps=4)
    model, _ = applied(outside(decision=decision, layers=LAYER_POLICIES[layers]))
    assert same(values(model, steps=4), expected)
    assert not tide.races()


def held_after_forward(model: nn.Module) -> int:
    """What a forward leaves on the device, in bytes that were asked for, once the Policy is known."""
    values(model, steps=2)
    model.zero_grad()
    gc.collect()
    before = requested()
    loss = model(tokens_of(5))
    torch.accelerator.synchronize()
    held = requested() - before
    del loss
    return held


def requested() -> int:
    return int(torch.accelerator.memory_stats()["requested_bytes.all.current"])


def test_what_leaves_is_what_the_operators_own() -> None:
    model = model_of()
    found = {one.name: one for one in survey(model, lambda: model(tokens_of(0))).root.operators}
    bare = held_after_forward(model)
    for name in ("tanh", "norm", "silu"):
        model, _ = applied(outside(name, decision=Swap(1)))
        assert bare - held_after_forward(model) == found[name].owned > 0, name
    for name in ("norm", "silu", "cross_entropy"):
        model, _ = applied(outside(name, decision=Recompute()))
        assert bare - held_after_forward(model) == found[name].net, name


def test_in_the_layers_the_roots_hooks_are_off_and_after_them_on_again() -> None:
    seen: list[Any] = []
    model, handle = applied(outside("norm", decision=Swap(1)))
    values(model, steps=2)
    for layer in model.layers:
        layer.gated.up.register_forward_pre_hook(lambda *_: seen.append(top_saved_tensors_hooks(False)))
    model.norm.register_forward_pre_hook(lambda *_: seen.append(top_saved_tensors_hooks(False)))
    values(model, steps=1)
    assert seen[:LAYERS] == [None] * LAYERS
    assert seen[LAYERS] is not None
    assert top_saved_tensors_hooks(False) is None
    assert handle.root is not None
    assert handle.root.decided is not None


def test_a_layer_without_hooks_stays_without_them() -> None:
    """Silu is recomputed from its node, which is done without hooks where nobody else has any."""
    layers = LAYER_POLICIES["silu recomputed"]
    alone, known = applied(Policy((layers,) * LAYERS))
    both, handle = applied(outside("norm", decision=Recompute(), layers=layers))
    assert same(values(alone), values(both))
    for one in (known, handle):
        decided = [follower.decided for follower in one.followers]
        assert all(layer is not None and layer.graft is not None for layer in decided)


@pytest.mark.parametrize("where", ["layer", "root"])
def test_an_exception_leaves_no_hooks_behind(where: str) -> None:
    expected = values(model_of())
    model, _ = applied(outside(decision=Swap(2)))
    values(model)

    def fail(*_: Any) -> None:
        raise RuntimeError("on purpose")

    hook = (model.layers[1].gated.down if where == "layer" else model.head).register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="on purpose"):
        model(tokens_of(0))
    hook.remove()
    assert top_saved_tensors_hooks(False) is None
    assert same(values(model), expected)


def test_hooks_of_others_around_the_layers_are_left_alone() -> None:
    packed: list[int] = []

    class Theirs(nn.Module):
        def __init__(self, layer: nn.Module) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, *args: Any) -> Any:
            with saved_tensors_hooks(lambda tensor: packed.append(1) or tensor, lambda tensor: tensor):
                return self.layer(*args)

    def build(policy: Policy | None) -> Model:
        model = model_of()
        inner = list(model.layers)
        if policy is not None:
            apply(model, policy, limits=ALL)
        model.layers = nn.ModuleList(map(Theirs, inner))
        return model

    found, asked = [], []
    for policy in (None, outside(decision=Swap(2))):
        model = build(policy)
        first = values(model, steps=1)  # while a layer is learnt, our hooks are the inner ones
        packed.clear()
        found.append(first + values(model))
        asked.append(len(packed))
    assert same(*found)
    assert asked[0] == asked[1] > 0


def test_functions_between_layers_are_the_roots_too() -> None:
    expected = values(model_of(between=torch.tanh))
    for decision in (Swap(1), Recompute()):
        model, handle = applied(outside("tanh", "tanh_1", "tanh_3", decision=decision), between=torch.tanh)
        assert same(values(model), expected)
        assert handle.ledger.lines[ROOT, "tanh_1"]


def test_layers_that_are_learnt_while_the_root_is_at_work() -> None:
    """They have a structure of their own, and do not run in the first steps."""

    class Other(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(WIDTH)

        def forward(self, x: Tensor, scale: Tensor) -> Tensor:
            return super().forward(self.norm(x), scale)

    class Skipping(Model):
        skip = True

        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Layer(), Other(), Layer()])

        def forward(self, tokens: Tensor) -> Tensor:
            scale = torch.linspace(0.5, 1.5, 2 * WIDTH, device=tokens.device).exp()
            x = torch.tanh(self.embedding(tokens))
            for layer in self.layers:
                if not (self.skip and isinstance(layer, Other)):
                    x = layer(x, scale)
            return self.head(functional.silu(self.norm(x))).float().square().mean()

    def run(policy: Policy | None) -> list[Tensor]:
        torch.manual_seed(0)
        model = Skipping().to("tide")
        if policy is not None:
            apply(model, policy, layers="layers", limits=ALL)
        found = values(model)
        model.skip = False
        return found + values(model)

    expected = run(None)
    for decision in (Swap(2), Recompute()):
        assert same(run(outside(decision=decision, layers=LAYER_POLICIES["swapped"])), expected)
    assert top_saved_tensors_hooks(False) is None


def test_a_root_that_takes_another_way_is_learnt_again() -> None:
    flag = [False]

    def between(x: Tensor) -> Tensor:
        return x.sigmoid() if flag[0] else x

    def run(model: nn.Module) -> list[Tensor]:
        found = []
        for chosen in (False, False, True, True, True, False, False):
            flag[0] = chosen
            found += values(model, steps=1)
        return found

    expected = run(model_of(between=between))
    model, handle = applied(outside(decision=Swap(2)), between=between)
    assert same(run(model), expected)
    assert handle.root is not None
    assert handle.root.kind is not None
    assert not any("sigmoid" in one.name for one in handle.root.kind.operators)


def test_nothing_is_left_on_the_model() -> None:
    model = model_of()
    expected = values(model)
    before = {name: (dict(vars(one)), len(one._forward_hooks)) for name, one in model.named_modules()}
    handle = apply(model, outside(decision=Recompute(), layers=LAYER_POLICIES["swapped"]), limits=ALL)
    values(model)
    handle.remove()
    after = {name: (dict(vars(one)), len(one._forward_hooks)) for name, one in model.named_modules()}
    assert {name: set(one) for name, (one, _) in after.items()} == {name: set(one) for name, (one, _) in before.items()}
    assert [count for _, count in after.values()] == [count for _, count in before.values()]
    assert not any(one._forward_pre_hooks for one in model.modules())
    assert same(values(model), expected)


def test_nothing_is_silent() -> None:
    model, _ = applied(outside("nrom", decision=Swap(1)))
    with pytest.raises(UnmatchedError, match=r"in the root.*did you mean norm"):
        model(tokens_of(0))
    model, handle = applied(outside("norm", decision=Swap(1)))
    assert "has not run as a whole" in str(handle.receipt())
    values(model)
    receipt = handle.receipt()
    assert receipt.operators[0].layer == ROOT
    assert "root" in str(receipt)
    model, handle = applied(outside("exp", decision=Swap(1)))  # what the layers save of it
    values(model)
    assert "no effect: nothing of it is saved for backward outside the layers" in str(handle.receipt())


def test_what_cannot_be_done_is_refused_when_applied() -> None:
    rule = CommRule(Pattern("head"), repeat=True)
    with pytest.raises(PolicyError, match="collectives outside the layers"):
        apply(model_of(), Policy((LayerPolicy(),) * LAYERS, root=LayerPolicy(communication=(rule,))))
    model = model_of()
    model.layers[0].compile(backend="eager")
    with pytest.raises(PolicyError, match="outside compiled layers"):
        apply(model, outside(decision=Recompute()))


@pytest.fixture(params=["llama", "gpt2"])
def of_transformers(request: pytest.FixtureRequest) -> Iterator[nn.Module]:
    torch.manual_seed(0)
    if request.param == "llama":
        config: Any = transformers.LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=64, num_hidden_layers=LAYERS,
            num_attention_heads=4, num_key_value_heads=2, use_cache=False,
        )  # fmt: skip
        yield transformers.LlamaForCausalLM(config).to("tide")
    else:
        config = transformers.GPT2Config(
            vocab_size=VOCABULARY, n_embd=WIDTH, n_layer=LAYERS, n_head=4, n_positions=16, use_cache=False,
            bos_token_id=1, eos_token_id=2,
        )  # fmt: skip
        yield transformers.GPT2LMHeadModel(config).to("tide")


@pytest.mark.parametrize("decision", [Recompute(), Swap(2)], ids=str)
def test_models_of_transformers_with_their_loss(of_transformers: nn.Module, decision: Decision) -> None:
    batch = {"input_ids": tokens_of(0), "labels": tokens_of(0)}
    found = verify(of_transformers, outside(decision=decision, layers=LayerPolicy(Recompute())), batch, limits=ALL)
    assert any(one.layer == ROOT for one in found.receipt.operators)


def test_keep_in_the_root_is_nothing() -> None:
    model = model_of()
    handle = apply(model, outside("norm", decision=Keep()))
    values(model)
    assert handle.root is not None
    assert handle.root.decided is None
    assert not any(one._forward_pre_hooks for one in model.modules())


@pytest.mark.parametrize("root", [LayerPolicy(), LayerPolicy(Swap(3)), LayerPolicy(Recompute())], ids=str)
def test_two_stacks_of_layers_get_a_policy_each(root: LayerPolicy) -> None:
    """To the Policy of one stack, the other is a part of the root."""

    def build() -> nn.Module:
        torch.manual_seed(0)
        config = transformers.T5Config(
            vocab_size=VOCABULARY, d_model=WIDTH, d_kv=8, d_ff=64, num_layers=2, num_decoder_layers=3, num_heads=4,
            use_cache=False, decoder_start_token_id=0,
        )  # fmt: skip
        return transformers.T5ForConditionalGeneration(config).to("tide")

    def run(model: nn.Module) -> list[Tensor]:
        found = []
        for step in range(3):
            torch.manual_seed(step)
            model.zero_grad()
            loss = model(input_ids=tokens_of(step), labels=tokens_of(step + 1)).loss
            loss.backward()
            found += [loss.detach().cpu(), *(one.grad.cpu() for one in model.parameters() if one.grad is not None)]
        return found

    expected, model = run(build()), build()
    encoder = apply(model, Policy((LayerPolicy(Swap(2)),) * 2, root=root), layers="encoder.block", limits=ALL)
    decoder = apply(
        model, Policy((LayerPolicy(Recompute(), boundary=Swap(1)),) * 3), layers="decoder.block", limits=ALL
    )
    assert same(run(model), expected)
    assert not tide.races()
    for handle in (encoder, decoder):
        assert any(one.swaps for one in handle.receipt().operators)
        handle.remove()
    assert same(run(model), expected)
