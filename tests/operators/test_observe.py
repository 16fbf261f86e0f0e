"""Who owns a tensor saved for backward: the last writer, through views and casts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from lowtide.operators.observation import Observation
from lowtide.operators.observe import observe


class Layer(nn.Module):
    """A layer whose forward is the given function; it has a child, so that it is no leaf."""

    def __init__(self, body: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.table = nn.Buffer(torch.ones(8))
        self.body = body

    def forward(self, x: Tensor, *rest: Any) -> Tensor:
        return self.body(self, x, *rest)  # type: ignore[call-arg]


def seen(body: Callable[..., Tensor], *rest: Any, autocast: bool = False) -> Observation:
    layer = Layer(body)
    x = torch.randn(2, 4, 8, requires_grad=True)
    with observe(layer) as result, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        layer(x, *rest)
    return result()


def owners(body: Callable[..., Tensor], *rest: Any, autocast: bool = False) -> list[tuple[str, str]]:
    """(operator running, owner or source) of each saved tensor."""
    return [(pack.operator, pack.owner or pack.source) for pack in seen(body, *rest, autocast=autocast).packs]


def test_a_functions_output_belongs_to_the_function() -> None:
    assert owners(lambda self, x: functional.silu(torch.sin(x))) == [("sin", "boundary"), ("silu", "sin")]


def test_a_leaf_module_is_one_operator_with_its_internals() -> None:
    found = owners(lambda self, x: self.norm(x) * 2.0 + torch.exp(self.norm(x)))
    assert ("norm", "norm") in found
    assert ("norm_1", "norm_1") in found
    assert ("exp", "exp") in found


def test_a_view_belongs_to_who_wrote_its_storage() -> None:
    found = owners(lambda self, x: self.linear(torch.sin(x).view(8, 8).transpose(0, 1)))
    assert ("linear", "sin") in found


def test_a_cast_belongs_to_who_wrote_what_was_cast() -> None:
    found = owners(lambda self, x: torch.sin(torch.cos(x).to(torch.bfloat16)))
    assert ("sin", "cos") in found


def test_autocasts_hidden_casts_are_looked_through_and_cast_weights_are_static() -> None:
    found = owners(lambda self, x: self.linear(torch.sin(x)), autocast=True)
    assert ("linear", "sin") in found
    assert ("linear", "static") in found
    assert ("linear", "linear") not in found


def test_an_in_place_write_makes_the_writer_the_owner() -> None:
    found = owners(lambda self, x: torch.exp(x).mul_(2.0).sin())
    assert found[-1] == ("sin", "mul")


def test_a_call_that_writes_into_its_input_or_whose_input_is_written_to_cannot_be_replayed() -> None:
    calls = {call.name: call.repeatable for call in seen(lambda self, x: torch.exp(torch.cos(x)).mul_(2.0).sin()).calls}
    assert calls == {"cos": True, "exp": True, "mul": False, "sin": True}

    def later(self: Any, x: Tensor) -> Tensor:
        base = torch.exp(x).detach()
        used = x * base
        base.add_(1.0)
        return used

    calls = {call.name: call.repeatable for call in seen(later).calls}
    assert calls["mul"] is False
    assert calls["exp"] is True


def test_dropouts_mask_and_output_belong_to_dropout() -> None:
    """Dropout is empty_like, bernoulli_, div_: the factory owns nothing."""
    observation = seen(lambda self, x: functional.dropout(torch.sin(x), 0.5, training=True).cos())
    found = [(pack.operator, pack.owner) for pack in observation.packs]
    assert ("dropout", "dropout") in found
    assert ("cos", "dropout") in found
    assert next(call for call in observation.calls if call.name == "dropout").random


def test_a_permutation_through_an_empty_buffer_belongs_to_who_filled_it() -> None:
    def body(self: Any, x: Tensor) -> Tensor:
        flat = torch.sin(x).reshape(8, 8)
        order = torch.arange(7, -1, -1)
        filled = torch.empty_like(flat)
        filled = filled.index_put((order,), flat)
        return filled.exp().cos()

    found = owners(body)
    assert ("cos", "exp") in found
    assert not any(owner == "empty_like" for _, owner in found)


def test_what_comes_from_outside_belongs_to_the_root() -> None:
    table = torch.randn(2, 4, 8)
    assert ("mul", "root") in owners(lambda self, x, table: torch.sin(x) * table, table)


def test_buffers_parameters_and_what_is_made_of_them_are_static() -> None:
    found = owners(lambda self, x: x * (self.table * self.norm.weight).view(1, 1, 8))
    assert ("mul_1", "static") in found
    assert ("mul_1", "boundary") in found


def test_integers_are_never_movable() -> None:
    observation = seen(lambda self, x: x.reshape(8, 8)[torch.arange(4)])
    kinds = {pack.dtype: pack.movable for pack in observation.packs}
    assert kinds == {torch.int64: False}


def test_second_calls_are_numbered_and_loops_over_experts_are_not() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for expert in self.experts:
                x = expert(x) * 2.0
            return x

    layer = Experts()
    with observe(layer) as result:
        layer(torch.randn(2, 8, requires_grad=True))
    assert [call.name for call in result().calls] == ["experts[*]", "mul", "experts[*]", "mul_1", "experts[*]", "mul_2"]


def test_readers_are_known_through_views() -> None:
    calls = {call.name: call for call in seen(lambda self, x: self.linear(torch.sin(x).view(8, 8)).cos()).calls}
    assert calls["linear"].reads == ("sin",)
    assert calls["cos"].reads == ("linear",)
    assert not calls["view"].writes


def test_a_custom_function_owns_what_it_made() -> None:
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            result = x * x
            ctx.save_for_backward(x, result)
            return result

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
            return grad * 2 * ctx.saved_tensors[0]

    class Squared(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return Square.apply(x)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.square = Squared()

        def forward(self, x: Tensor) -> Tensor:
            return self.square(torch.sin(x)).exp()

    layer = Outer()
    with observe(layer) as result:
        layer(torch.randn(3, requires_grad=True))
    found = [(pack.operator, pack.owner or pack.source) for pack in result().packs]
    assert found == [("sin", "boundary"), ("square", "sin"), ("square", "square"), ("exp", "exp")]


def test_the_layer_is_restored_even_after_an_error() -> None:
    layer = Layer(lambda self, x: torch.sin(x) + missing)  # type: ignore[name-defined]  # noqa: F821
    before = {name: (dict(m._forward_hooks), dict(m._forward_pre_hooks)) for name, m in layer.named_modules()}
    with pytest.raises(NameError), observe(layer):
        layer(torch.randn(2, 8, requires_grad=True))
    after = {name: (dict(m._forward_hooks), dict(m._forward_pre_hooks)) for name, m in layer.named_modules()}
    assert before == after
    assert torch.sin(torch.ones(1, requires_grad=True)).grad_fn is not None
    with torch.no_grad():
        torch.ones(2).add(1)  # no mode is left on the stack
    assert torch.overrides._get_current_function_mode_stack() == []


def test_observing_changes_no_value() -> None:
    torch.manual_seed(0)
    layer = Layer(lambda self, x: functional.dropout(self.linear(self.norm(x)), 0.5))
    x = torch.randn(2, 8, requires_grad=True)
    results = []
    for watched in (False, True):
        torch.manual_seed(1)
        if watched:
            with observe(layer):
                results.append(layer(x))
        else:
            results.append(layer(x))
    assert torch.equal(*results)
