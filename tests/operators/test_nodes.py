"""What a node tells of its call: the function and all that it was given, or nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional

from lowtide.operators.kept import Kept
from lowtide.operators.nodes import read_node

LEAF = nn.Parameter(torch.randn(4, 4))


def run(body: Callable[[Tensor, Tensor], Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn(4, 4, requires_grad=True)
    first, second = x.sin(), x.cos()
    with saved_tensors_hooks(Kept, Kept.tensor):
        return body(first, second), first, second


@pytest.mark.parametrize(
    "body",
    [
        lambda a, b: a * b,
        lambda a, b: a * b[:1],
        lambda a, b: functional.silu(a),
        lambda a, b: functional.gelu(a),
        lambda a, b: functional.gelu(a, approximate="tanh"),
        lambda a, b: functional.silu(a) * b,
    ],
)
def test_a_call_can_be_repeated_from_its_node(body: Callable[..., Tensor]) -> None:
    result, *_ = run(body)
    call = read_node(result, Kept.tensor)
    assert call is not None
    function, operands, options = call
    assert torch.equal(function(*(operand.tensor() for operand in operands), **options), result)


def in_place(a: Tensor, b: Tensor) -> Tensor:
    return (a + 1).mul_(b)


def written_afterwards(a: Tensor, b: Tensor) -> Tensor:
    result = a * b
    with torch.no_grad():
        return result.add_(1)


def given_what_is_written_afterwards(a: Tensor, b: Tensor) -> Tensor:
    result = a * b
    with torch.no_grad():
        b.add_(1)
    return result


def through_other_hooks(a: Tensor, b: Tensor) -> Tensor:
    with saved_tensors_hooks(lambda tensor: tensor * 2, lambda tensor: tensor / 2):
        return a * b


@pytest.mark.parametrize(
    "body",
    [
        lambda a, b: a * 2.0,  # needs the first factor for nothing
        lambda a, b: a * b.detach(),
        lambda a, b: a * LEAF,  # an optimizer writes to it
        lambda a, b: a + b,
        lambda a, b: (a * b).detach(),
        lambda a, b: (a * b).t(),
        in_place,
        written_afterwards,
        given_what_is_written_afterwards,
        through_other_hooks,
    ],
)
def test_a_node_that_does_not_have_the_whole_call_tells_nothing(body: Callable[..., Tensor]) -> None:
    assert read_node(run(body)[0], Kept.tensor) is None


def test_a_node_that_has_run_tells_nothing() -> None:
    result, *_ = run(lambda a, b: a * b)
    torch.autograd.grad(result.sum(), LEAF, allow_unused=True)
    result.sum().backward()
    assert read_node(result, Kept.tensor) is None


def test_what_is_no_tensor_is_of_this_very_call() -> None:
    found: list[Any] = []
    for approximate in ("none", "tanh"):
        call = read_node(run(lambda a, b, way=approximate: functional.gelu(a, approximate=way))[0], Kept.tensor)
        assert call is not None
        found.append(call[2])
    assert found == [{"approximate": "none"}, {"approximate": "tanh"}]
