"""Recompute is exact: loss and gradients are bitwise those of the same run without it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from lowtide.errors import PolicyError, RebuildError, UnmatchedError
from lowtide.operators.survey import survey
from lowtide.policy import Keep, LayerPolicy, Pattern, Policy, Recompute, Rule, Swap
from lowtide.runtime.apply import Handle, apply
from lowtide.runtime.limits import Limits


class Block(nn.Module):
    """A layer around a function; ``step`` lets it change from step to step."""

    def __init__(self, body: Callable[..., Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(8, 16), nn.Linear(16, 8), nn.LayerNorm(8)
        self.body = body
        self.step = 0

    def forward(self, x: Tensor) -> Tensor:
        self.step += 1
        return self.body(self, x)


def train(body: Callable[..., Tensor], policy: LayerPolicy | None, *, steps: int = 4, autocast: bool = False) -> Any:
    """Losses and gradients of a few steps, with or without a Policy on each of three layers."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(body) for _ in range(3)))
    handle = apply(model, Policy((policy,) * 3)) if policy is not None else None
    record: list[Tensor] = []
    for step in range(steps):
        torch.manual_seed(100 + step)
        x = torch.randn(4, 8, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(x).float().square().mean()
        model.zero_grad()
        loss.backward()
        assert x.grad is not None
        record += [loss.detach(), x.grad.clone(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
    return record, handle


def recompute(*names: str) -> LayerPolicy:
    return LayerPolicy(rules=tuple(Rule(Pattern(name), Recompute()) for name in names))


def same(first: list[Tensor], second: list[Tensor]) -> bool:
    return len(first) == len(second) and all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def gated(self: Any, x: Tensor) -> Tensor:
    hidden = self.up(self.norm(x))
    return x + self.down(functional.silu(hidden) * hidden.sigmoid())


def with_dropout(self: Any, x: Tensor) -> Tensor:
    return x + self.down(functional.dropout(functional.gelu(self.up(self.norm(x))), 0.3, training=True))


def with_a_scalar_that_changes(self: Any, x: Tensor) -> Tensor:
    return x + self.down(torch.exp(self.up(x) * (0.1 * self.step)) * (1.0 / self.step))


def with_another_way_every_other_step(self: Any, x: Tensor) -> Tensor:
    hidden = self.up(self.norm(x))
    hidden = functional.silu(hidden) if self.step % 2 else functional.gelu(hidden).tanh() * 2.0
    return x + self.down(hidden)


def with_a_write_in_place(self: Any, x: Tensor) -> Tensor:
    hidden = self.up(x) * 0.1
    hidden = hidden.add_(0.5)
    return x + self.down(hidden.sin())


def with_views_and_pieces(self: Any, x: Tensor) -> Tensor:
    first, second = torch.sigmoid(self.up(x)).chunk(2, dim=-1)
    turned = torch.sin(first).transpose(0, 1).reshape(4, 8)
    return x + self.down(torch.cat([turned * second, second.exp()], dim=-1))


def with_a_permutation(self: Any, x: Tensor) -> Tensor:
    hidden = functional.silu(self.up(x))
    order = hidden.detach().sum(-1).argsort()
    shuffled = torch.empty_like(hidden).index_put((order,), hidden)
    return x + self.down(shuffled.tanh())[order]


def with_complex_views(self: Any, x: Tensor) -> Tensor:
    turned = torch.view_as_complex(torch.sin(self.up(x)).unflatten(-1, (-1, 2)))
    return x + self.down(torch.view_as_real(turned * turned).flatten(-2))


class Opaque(torch.autograd.Function):
    """Fills its output behind the dispatcher, as a hand-written kernel does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        result = torch.empty_like(x)
        result.detach().numpy()[:] = x.detach().numpy() ** 2 + 0.5
        ctx.save_for_backward(x, result)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        x, result = ctx.saved_tensors
        return grad * 2 * x * (result / (x**2 + 0.5))


class OpaqueModule(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Opaque.apply(x)


def with_an_opaque_kernel(self: Any, x: Tensor) -> Tensor:
    if not hasattr(self, "opaque"):
        self.opaque = OpaqueModule()
    return x + self.down(self.opaque(functional.silu(self.up(x))))


BODIES = [
    gated,
    with_dropout,
    with_a_scalar_that_changes,
    with_another_way_every_other_step,
    with_a_write_in_place,
    with_views_and_pieces,
    with_a_permutation,
    with_complex_views,
]


def names_of(body: Callable[..., Tensor]) -> list[str]:
    model = nn.Sequential(Block(body), Block(body))
    found = survey(model, lambda: model(torch.randn(4, 8, requires_grad=True)))
    return [operator.name for operator in found.kinds[0].operators]


@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "autocast"])
@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_recomputing_any_one_operator_or_all_is_exact(body: Callable[..., Tensor], autocast: bool) -> None:
    expected, _ = train(body, None, autocast=autocast)
    names = names_of(body)
    for chosen in [*([name] for name in names), names]:
        found, _ = train(body, recompute(*chosen), autocast=autocast)
        assert same(expected, found), chosen


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_recomputing_whole_layers_is_exact(body: Callable[..., Tensor]) -> None:
    if body in (with_a_scalar_that_changes, with_another_way_every_other_step):
        return  # a whole layer runs again as a whole: its own counter would count twice
    expected, _ = train(body, None)
    assert same(expected, train(body, LayerPolicy(Recompute()))[0])
    exclude = LayerPolicy(Recompute(), (Rule(Pattern(names_of(body)[-2]), Keep()),))
    assert same(expected, train(body, exclude)[0])


@settings(max_examples=25)
@given(st.data())
def test_recomputing_any_set_of_operators_is_exact(data: st.DataObject) -> None:
    body = data.draw(st.sampled_from(BODIES))
    names = names_of(body)
    chosen = data.draw(st.lists(st.sampled_from(names), unique=True, min_size=1))
    expected, _ = train(body, None, steps=2)
    assert same(expected, train(body, recompute(*chosen), steps=2)[0])


def test_a_kernel_that_fills_its_output_behind_the_dispatcher_is_repeated_as_a_whole() -> None:
    expected, _ = train(with_an_opaque_kernel, None)
    found, _ = train(with_an_opaque_kernel, LayerPolicy(rules=(Rule(Pattern(".*", "path"), Recompute()),)))
    assert same(expected, found)


def test_an_operator_that_cannot_be_repeated_is_kept_and_named() -> None:
    _, handle = train(with_a_write_in_place, recompute("add", "sin"))
    assert handle.kept == ((0, "add"), (1, "add"), (2, "add"))


def test_a_chain_is_rebuilt_together_and_each_call_once() -> None:
    class Counted(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.sin(x)

    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.sin, self.linear = Counted(), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            first = self.sin(x)
            second = first.exp()
            return self.linear(second * first) * second.tanh()

    model = nn.Sequential(Chain(), Chain())
    handle = apply(model, Policy((recompute("sin", "exp", "mul", "tanh"),) * 2))
    for _ in range(2):
        handle.receipt()
        model(torch.randn(3, 4, requires_grad=True)).sum().backward()
    assert [handle.ledger.line(layer, "sin").recomputes for layer in range(2)] == [1, 1]


def test_backward_twice_through_one_graph_is_exact() -> None:
    def gradients(policy: LayerPolicy | None) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(*(Block(gated) for _ in range(3)))
        if policy is not None:
            apply(model, Policy((policy,) * 3))
            model(torch.randn(4, 8, requires_grad=True)).sum().backward()  # learn
            model.zero_grad()
        torch.manual_seed(5)
        loss = model(torch.randn(4, 8)).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    assert same(gradients(None), gradients(recompute("norm", "up", "silu", "sigmoid", "mul")))


def test_micro_batches_in_flight_do_not_mix() -> None:
    def gradients(policy: LayerPolicy | None) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(*(Block(with_dropout) for _ in range(3)))
        if policy is not None:
            apply(model, Policy((policy,) * 3))
            model(torch.randn(4, 8)).sum().backward()
            model.zero_grad()
        torch.manual_seed(5)
        losses = [model(torch.randn(4, 8)).square().sum() for _ in range(3)]
        with torch.no_grad():
            model(torch.randn(4, 8))
        for loss in (losses[1], losses[0], losses[2]):
            loss.backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    assert same(gradients(None), gradients(recompute("up", "gelu", "dropout")))


def test_evaluation_without_gradients_learns_nothing_and_breaks_nothing() -> None:
    model = nn.Sequential(*(Block(gated) for _ in range(2)))
    handle = apply(model, Policy((recompute("silu"),) * 2))
    with torch.no_grad():
        model(torch.randn(4, 8))
    assert handle.resolution is None
    model(torch.randn(4, 8)).sum().backward()
    assert handle.resolution is not None


def test_an_input_that_is_changed_after_a_step_was_learnt_is_an_error_not_a_wrong_gradient() -> None:
    def body(self: Any, x: Tensor) -> Tensor:
        base = self.up(x).detach()
        used = self.up(x) * base
        if self.step > 1:
            base.add_(1.0)
        return x + self.down(used.sin())

    model = nn.Sequential(*(Block(body) for _ in range(2)))
    apply(model, Policy((recompute("mul"),) * 2))
    model(torch.randn(4, 8)).sum().backward()
    with pytest.raises((RebuildError, RuntimeError), match=r"in place|inplace"):
        model(torch.randn(4, 8)).sum().backward()


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 8)
        self.act, self.then = nn.SiLU(), lambda tensor: tensor

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.then(self.act(self.gate(x)) * self.up(x)))


class GatedLayer(nn.Module):
    """A layer with a gated half; ``then`` is called with the product."""

    def __init__(self, then: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(8), Gated()
        self.mlp.then = then

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


def train_gated(policy: LayerPolicy | None, **options: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(*(GatedLayer(**options) for _ in range(2)))
    handle = apply(model, Policy((policy,) * 2), limits=Limits(minimum_bytes=1)) if policy is not None else None
    for step in range(3):
        torch.manual_seed(step)
        model.zero_grad()
        model(torch.randn(2, 4, 8)).square().sum().backward()
        if handle is not None:
            receipt = handle.receipt()
    gradients = [parameter.grad for parameter in model.parameters()]
    return gradients, (receipt if handle is not None else None)


def test_each_recomputed_operator_is_replayed_once_in_every_layer() -> None:
    expected, _ = train_gated(None)
    found, receipt = train_gated(recompute("mlp.act", "mlp.mul"))
    assert same(expected, found)
    assert (
        sorted((one.operator, one.recomputes) for one in receipt.operators)
        == [("mlp.act", 1)] * 2 + [("mlp.mul", 1)] * 2
    )


def test_what_is_saved_twice_is_rebuilt_once() -> None:
    def body(self: Any, x: Tensor) -> Tensor:
        hidden = functional.silu(self.up(x))
        return x + self.down(hidden) + self.down(hidden.view(2, 2, 16)).view(4, 8)

    expected, _ = train(body, None)
    found, handle = train(body, recompute("silu"))
    assert same(expected, found)
    # Three layers, four steps; the first layer is learnt in the first.
    assert sum(one.recomputes for one in handle.receipt().operators) == 3 * 4 - 1


@pytest.mark.parametrize("decision", [Swap(2), Swap(2, tier="disk"), Recompute()], ids=str)
@pytest.mark.parametrize("name", ["mlp.gate", "mlp.up", "norm"])
def test_inputs_of_recomputed_operators_may_be_swapped_or_recomputed(name: str, decision: Any) -> None:
    rules = (Rule(Pattern(name), decision), *recompute("mlp.act", "mlp.mul").rules)
    expected, _ = train_gated(None)
    found, _ = train_gated(LayerPolicy(rules=rules))
    assert same(expected, found)


def test_a_product_that_is_written_to_later_is_exact() -> None:
    steps: list[int] = []

    def then(tensor: Tensor) -> Tensor:
        steps.append(0)
        return tensor if len(steps) < 3 else tensor.add_(1.0)

    first, steps = train_gated(None, then=then)[0], []
    assert same(first, train_gated(recompute("mlp.act", "mlp.mul"), then=then)[0])


def test_a_module_that_runs_twice_or_in_two_layers_is_exact() -> None:
    class Twice(nn.Module):
        def __init__(self, mlp: Gated) -> None:
            super().__init__()
            self.norm, self.mlp = nn.LayerNorm(8), mlp

        def forward(self, x: Tensor) -> Tensor:
            return x + self.mlp(self.norm(x)) + (self.mlp(x) if self.norm.bias.shape[0] else x)

    def gradients(policy: LayerPolicy | None) -> list[Tensor]:
        torch.manual_seed(0)
        mlp = Gated()
        model = nn.Sequential(Twice(mlp), Twice(mlp))
        if policy is not None:
            apply(model, Policy((policy,) * 2), limits=Limits(minimum_bytes=1))
        for _ in range(3):
            model(torch.ones(2, 8)).sum().backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    for policy in (recompute("mlp.act", "mlp.mul"), LayerPolicy(rules=(Rule(Pattern("mlp.mul"), Swap(2)),))):
        assert same(gradients(None), gradients(policy))


def writes_to_what_it_saved(self: Any, x: Tensor) -> Tensor:
    used = self.up(x).sigmoid().exp()  # exp saves what it gives
    result = x + self.down(used)
    used.mul_(2.0)
    return result


def saves_its_input(self: Any, x: Tensor) -> Tensor:
    return x * self.down(self.up(x).sigmoid())


@pytest.mark.parametrize("decision", [Recompute(), Swap(2)], ids=str)
@pytest.mark.parametrize("body", [writes_to_what_it_saved, saves_its_input], ids=lambda body: body.__name__)
def test_a_kept_tensor_that_is_changed_in_place_is_refused_as_without_lowtide(
    body: Callable[..., Tensor], decision: Any
) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Block(body) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                given, x = x, layer(x)
                if body is saves_its_input:
                    given.add_(1.0)
            return x

    def step() -> None:
        with pytest.raises(RuntimeError, match="inplace operation"):
            model(torch.randn(4, 8, requires_grad=True) * 1).sum().backward()

    model = Model()
    step()
    rule = Rule(Pattern("sigmoid"), decision)
    apply(model, Policy((LayerPolicy(rules=(rule,)),) * 3), limits=Limits(minimum_bytes=0))
    for _ in range(3):
        step()


def snapshot(model: nn.Module) -> Any:
    return [
        (name, sorted(vars(module)), list(module._forward_hooks), list(module._forward_pre_hooks))
        for name, module in model.named_modules()
    ], list(model.state_dict())


@pytest.mark.parametrize("policy", [recompute("silu"), LayerPolicy(Recompute())], ids=["operators", "layers"])
def test_removing_leaves_the_model_as_it_was(policy: LayerPolicy) -> None:
    model = nn.Sequential(*(Block(gated) for _ in range(2)))
    before = snapshot(model)
    handle = apply(model, Policy((policy,) * 2))
    assert snapshot(model) != before
    model(torch.randn(4, 8)).sum().backward()
    handle.remove()
    assert snapshot(model) == before


def test_a_kept_layer_has_no_hook_and_no_wrapper() -> None:
    model = nn.Sequential(*(Block(gated) for _ in range(2)))
    before = snapshot(model)
    apply(model, Policy((LayerPolicy(),) * 2))
    assert snapshot(model) == before


def test_a_pattern_that_matches_nothing_raises_in_the_first_step_with_the_nearest_names() -> None:
    model = nn.Sequential(*(Block(gated) for _ in range(2)))
    apply(model, Policy((recompute("sillu"),) * 2))
    with pytest.raises(UnmatchedError, match="did you mean silu"):
        model(torch.randn(4, 8))


def test_what_cannot_be_done_is_refused_when_applied() -> None:
    model = nn.Sequential(*(Block(gated) for _ in range(2)))
    with pytest.raises(PolicyError, match="decides 3 layers"):
        apply(model, Policy((LayerPolicy(),) * 3))


SMALL: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "use_cache": False, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
MODELS: dict[str, Any] = {
    "llama": lambda: transformers.LlamaConfig(**SMALL),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=64, n_embd=32, n_layer=3, n_head=4, use_cache=False, bos_token_id=1, eos_token_id=2
    ),
    "mixtral": lambda: transformers.MixtralConfig(**SMALL, num_local_experts=4),
}


def run_transformers(name: str, policy: LayerPolicy | None, autocast: bool) -> tuple[list[Tensor], Handle | None]:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(MODELS[name]()).train()
    handle = apply(model, Policy((policy,) * 3)) if policy is not None else None
    record: list[Tensor] = []
    for step in range(2):
        torch.manual_seed(10 + step)
        tokens = torch.randint(3, 64, (2, 8))
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(tokens, labels=tokens).loss
        model.zero_grad()
        loss.backward()
        record += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
    return record, handle


@pytest.mark.parametrize(("name", "autocast"), list(itertools.product(MODELS, [False, True])))
def test_unmodified_transformers_models_are_exact(name: str, autocast: bool) -> None:
    """Every operator at once, whole layers, and each operator alone that holds anything."""
    expected, _ = run_transformers(name, None, autocast)
    everything = LayerPolicy(rules=(Rule(Pattern(".*", "path"), Recompute()),))
    found, handle = run_transformers(name, everything, autocast)
    assert same(expected, found)
    assert same(expected, run_transformers(name, LayerPolicy(Recompute()), autocast)[0])
    assert handle is not None
    (kind,) = handle.profiles.values()
    for operator in kind.operators:
        if operator.owned:
            pattern = operator.name.replace(".", r"\.").replace("[*]", r"\[\*\]")
            assert same(expected, run_transformers(name, recompute(pattern), autocast)[0]), operator.name
