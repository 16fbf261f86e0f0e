"""Fused kernels: the numbers of the eager functions, chosen openly, and recomputed exactly."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from lowtide import LayerPolicy, Limits, Pattern, Policy, Recompute, Rule, Swap, verify
from lowtide.models import kernels
from lowtide.models.kernels import choose, eager_rope, eager_swiglu
from lowtide.operators.survey import survey
from lowtide.policy import resolve
from models.shapes import built, llama, loss_of, tokens

CPU = torch.device("cpu")


def gradients(function: Any, inputs: list[Tensor], constants: tuple[Tensor, ...] = ()) -> list[Tensor]:
    """The outputs of a function, and the gradients of its inputs for some gradient of the outputs."""
    leaves = [one.clone().requires_grad_() for one in inputs]
    outputs = function(*leaves, *constants)
    outputs = list(outputs) if isinstance(outputs, tuple) else [outputs]
    towards = [torch.linspace(-1, 1, one.numel()).view(one.shape).to(one.dtype) for one in outputs]
    return [*(one.detach() for one in outputs), *torch.autograd.grad(outputs, leaves, towards)]


def close(found: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        exact = {"rtol": 1e-5, "atol": 1e-6} if one.dtype == torch.float32 else {"rtol": 2e-2, "atol": 1e-2}
        torch.testing.assert_close(one, other, **exact)


@pytest.fixture(autouse=True)
def _choose_again() -> Iterator[None]:
    kernels._choose.cache_clear()
    yield
    kernels._choose.cache_clear()


@pytest.fixture
def _no_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As on a machine where nothing compiles."""

    def nothing_compiles(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("no C++ compiler")

    kernels._compiled.cache_clear()
    monkeypatch.setattr(torch, "compile", nothing_compiles)
    yield
    kernels._compiled.cache_clear()


@pytest.mark.parametrize("name", ["rope", "swiglu"])
@pytest.mark.usefixtures("_no_compiler")
def test_a_fusion_that_is_not_active_is_a_warning_that_says_why(name: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "lowtide"):
        assert choose(name, True, CPU).implementation == "eager"
        choose(name, True, CPU)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "liger: it has no kernels for cpu" in record.getMessage()
    assert "no C++ compiler" in record.getMessage()


def test_what_was_not_asked_for_is_eager_and_nothing_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "lowtide"):
        assert choose("rope", False, CPU) == ("rope", "eager", eager_rope)
        assert choose("swiglu", False, CPU).function is eager_swiglu
    assert caplog.records == []


@pytest.mark.usefixtures("_no_compiler")
def test_the_model_runs_eager_where_nothing_compiles() -> None:
    fused, plain = built(llama(fused_rope=True, fused_swiglu=True)), built(llama())
    torch.testing.assert_close(fused(tokens()), plain(tokens()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_formulas_behind_the_kernels_are_those_of_the_eager_functions(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    gate, up, towards = (torch.randn(3, 5, 8, dtype=dtype) for _ in range(3))
    towards = torch.linspace(-1, 1, gate.numel()).view(gate.shape).to(dtype)
    found = [kernels._swiglu_forward(gate, up), *kernels._swiglu_backward(towards, gate, up)]
    close(found, gradients(eager_swiglu, [gate, up]))
    heads, cosine, sine = torch.randn(2, 5, 3, 8, dtype=dtype), torch.randn(5, 1, 8), torch.randn(5, 1, 8)
    towards = torch.linspace(-1, 1, heads.numel()).view(heads.shape).to(dtype)
    found = [kernels._halves(heads, cosine, sine), kernels._halves_backward(towards, cosine, sine)]
    close(found, gradients(kernels._turned, [heads], (cosine, sine)))


@pytest.mark.slow  # compiling takes a minute
class TestCompiled:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_the_kernels_are_the_eager_functions(self, dtype: torch.dtype, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.INFO, "lowtide"):
            swiglu, rope = choose("swiglu", True, CPU), choose("rope", True, CPU)
        assert (swiglu.implementation, rope.implementation) == ("compiled", "compiled")
        assert [record.getMessage() for record in caplog.records] == [
            "fused swiglu on cpu: compiled",
            "fused rope on cpu: compiled",
        ]
        for size in ((2, 3, 16), (0, 16), (1, 1), (1, 5, 8)):
            pair = [torch.randn(size, dtype=dtype), torch.randn(size, dtype=dtype)]
            close(gradients(swiglu.function, pair), gradients(eager_swiglu, pair))
        for batch, heads in ((2, 4), (1, 1)):
            pair = [torch.randn(batch, 6, heads, 8, dtype=dtype), torch.randn(batch, 6, 2, 8, dtype=dtype)]
            for table in ((torch.randn(6, 1, 8), torch.randn(6, 1, 8)), (torch.randn(batch, 6, 1, 8),) * 2):
                close(gradients(rope.function, pair, table), gradients(eager_rope, pair, table))

    def test_patterns_of_the_parts_name_the_fused_operator_and_every_decision_is_exact(self) -> None:
        model, batch = built(llama(fused_rope=True, fused_swiglu=True)), tokens()
        names = [
            r"feed_forward\.mul",
            r"feed_forward\.w1\.activation\.silu",
            r"mlp\.mul",
            r"mlp\.activation_func\.silu",
        ]
        found = survey(model, lambda: model(batch))
        for name in names:
            policy = Policy((LayerPolicy(rules=(Rule(Pattern(name), Recompute()),)),) * 3)
            decisions = resolve(policy, found.catalogue).layers[0].decisions
            assert [one for one, decision in decisions.items() if decision == Recompute()] == ["feed_forward.swiglu"]

        def loss(logits: Tensor) -> Tensor:
            return loss_of(logits, batch)

        everything = Pattern(".*", "path")
        for one in (
            LayerPolicy(rules=(Rule(everything, Recompute()),)),
            LayerPolicy(Swap(3)),
            LayerPolicy(Recompute()),
            LayerPolicy(rules=(Rule(Pattern(names[0]), Recompute()),)),
        ):
            verify(model, Policy((one,) * 3, origin="solver"), batch, loss=loss, limits=Limits(minimum_bytes=1))
