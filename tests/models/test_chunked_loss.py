"""The chunked cross-entropy is the plain one up to rounding, and holds far less."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from lowtide.errors import ModelError
from lowtide.models.chunked_loss import chunked_cross_entropy
from tide.testing import fresh_tide  # noqa: F401

Reduction = Literal["mean", "sum"]


def tensors(
    tokens: int = 37, width: int = 16, vocabulary: int = 53, dtype: torch.dtype = torch.float32, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(seed)
    hidden = torch.randn(tokens, width, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocabulary, width, dtype=dtype, requires_grad=True)
    targets = torch.randint(vocabulary, (tokens,))
    return hidden, weight, targets.where(torch.rand(tokens) > 0.2, -100)


def plain(hidden: Tensor, weight: Tensor, targets: Tensor, reduction: Reduction = "mean") -> Tensor:
    logits = hidden @ weight.t()
    exact = torch.promote_types(logits.dtype, torch.float32)
    return functional.cross_entropy(logits.to(exact), targets, reduction=reduction)


def with_gradients(loss: Tensor, *leaves: Tensor) -> list[Tensor]:
    return [loss.detach(), *torch.autograd.grad(loss, leaves, torch.full_like(loss, 3.0))]


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@given(tokens=st.integers(1, 40), chunk=st.one_of(st.none(), st.integers(1, 50)), seed=st.integers(0, 5))
def test_loss_and_gradients_are_the_plain_ones_for_every_chunk(
    reduction: Reduction, tokens: int, chunk: int | None, seed: int
) -> None:
    hidden, weight, targets = tensors(tokens, seed=seed, dtype=torch.float64)
    targets[0] = 1  # all ignored is another test
    expected = with_gradients(plain(hidden, weight, targets, reduction), hidden, weight)
    ours = chunked_cross_entropy(hidden, weight, targets, chunk=chunk, reduction=reduction)
    for found, right in zip(with_gradients(ours, hidden, weight), expected, strict=True):
        torch.testing.assert_close(found, right, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_it_is_as_near_to_the_exact_result_as_the_plain_one(dtype: torch.dtype) -> None:
    hidden, weight, targets = tensors(256, 64, 300, dtype)
    doubles = [one.detach().double().requires_grad_() for one in (hidden, weight)]
    exact = with_gradients(plain(*doubles, targets), *doubles)
    errors = []
    for loss in (plain(hidden, weight, targets), chunked_cross_entropy(hidden, weight, targets, chunk=20)):
        assert loss.dtype == torch.float32
        results = with_gradients(loss, hidden, weight)
        errors.append(
            [float((found - right).norm() / right.norm()) for found, right in zip(results, exact, strict=True)]
        )
    for theirs, ours in zip(*errors, strict=True):
        assert ours <= 1.25 * theirs + torch.finfo(torch.float32).eps


def test_a_factor_of_the_loss_that_the_dtype_cannot_hold_is_not_rounded_first() -> None:
    hidden, weight, targets = tensors(1, dtype=torch.bfloat16)
    targets[0], factor = 3, torch.tensor(1.0037)  # bfloat16 has 1 and 1.0078
    once = torch.autograd.grad(chunked_cross_entropy(hidden, weight, targets), hidden)[0]
    scaled = torch.autograd.grad(chunked_cross_entropy(hidden, weight, targets), hidden, factor)[0]
    assert torch.equal(scaled, (once.float() * factor).to(torch.bfloat16))
    assert not torch.equal(scaled, once)


def test_gradients_of_several_backwards_are_equal() -> None:
    hidden, weight, targets = tensors()
    loss = chunked_cross_entropy(hidden, weight, targets, chunk=8)
    first = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    second = torch.autograd.grad(loss, (hidden, weight))
    assert all(torch.equal(*pair) for pair in zip(first, second, strict=True))


def test_dimensions_before_the_width_are_tokens() -> None:
    hidden, weight, targets = tensors(24)
    flat = chunked_cross_entropy(hidden, weight, targets, chunk=5)
    assert torch.equal(chunked_cross_entropy(hidden.view(2, 12, -1), weight, targets.view(2, 12), chunk=5), flat)


def test_another_index_can_be_ignored_and_nothing_counted_is_no_number() -> None:
    hidden, weight, targets = tensors()
    targets = targets.where(targets >= 0, 7)
    expected = functional.cross_entropy(hidden @ weight.t(), targets, ignore_index=7)
    torch.testing.assert_close(chunked_cross_entropy(hidden, weight, targets, ignore_index=7), expected)
    nothing = torch.full_like(targets, -100)
    assert chunked_cross_entropy(hidden, weight, nothing).isnan()
    assert chunked_cross_entropy(hidden, weight, nothing, reduction="sum") == 0


def test_only_what_needs_a_gradient_gets_one() -> None:
    hidden, weight, targets = tensors()
    loss = chunked_cross_entropy(hidden, weight.detach(), targets)
    (found,) = torch.autograd.grad(loss, hidden)
    torch.testing.assert_close(found, torch.autograd.grad(plain(hidden, weight, targets), hidden)[0])
    with torch.no_grad():
        assert not chunked_cross_entropy(hidden, weight, targets).requires_grad


def test_autocast_casts_as_a_linear_layer_does() -> None:
    hidden, weight, targets = tensors(64)
    with torch.autocast("cpu", torch.bfloat16):
        expected = with_gradients(functional.cross_entropy((hidden @ weight.t()).float(), targets), hidden, weight)
        ours = with_gradients(chunked_cross_entropy(hidden, weight, targets, chunk=16), hidden, weight)
    assert [one.dtype for one in ours] == [one.dtype for one in expected]
    for found, right in zip(ours, expected, strict=True):
        torch.testing.assert_close(found, right, rtol=2e-2, atol=2e-2)


def test_the_peak_is_far_lower_on_a_device() -> None:
    def peak(chunked: bool) -> int:
        hidden, weight, targets = (one.to("tide") for one in tensors(512, 32, 4096, torch.bfloat16))
        leaves = [one.detach().requires_grad_() for one in (hidden, weight)]
        torch.accelerator.reset_peak_memory_stats()
        before = torch.accelerator.memory_allocated()
        loss = chunked_cross_entropy(*leaves, targets, chunk=16) if chunked else plain(*leaves, targets)
        loss.backward()
        return torch.accelerator.max_memory_allocated() - before

    assert peak(chunked=True) < peak(chunked=False) / 10


def test_sizes_that_do_not_fit_are_shown() -> None:
    hidden, weight, targets = tensors()
    with pytest.raises(ModelError, match=r"\[37, 16\], weights \[16, 53\] and targets \[37\]"):
        chunked_cross_entropy(hidden, weight.t(), targets)
    with pytest.raises(ModelError, match=r"targets \[36\]"):
        chunked_cross_entropy(hidden, weight, targets[1:])
    with pytest.raises(ModelError, match="at least one token"):
        chunked_cross_entropy(hidden, weight, targets, chunk=0)
