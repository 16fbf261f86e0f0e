"""Fake tensors on the CPU save what an accelerator saves, if asked to."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from lowtide._torch_private.fake import FakeTensorMode
from lowtide.cost.imagined import device_kernels
from lowtide.models.build import build_model
from lowtide.trace.capture import capture
from lowtide.trace.trace import Trace
from models.shapes import LENGTH, deepseek, llama, loss_of
from tide.testing import fresh_tide  # noqa: F401

SHAPES = {
    "llama": llama(num_layers=2),
    "norms of queries and keys": llama(num_layers=2, qk_norm=True),
    "dropout": llama(num_layers=2, hidden_dropout=0.1),
    "latent": replace(deepseek(num_layers=2), experts=None),
}


def held(trace: Trace) -> list[list[tuple[str, int]]]:
    return [[(one.name, one.owned) for one in part.operators] for part in (*trace.parts, trace.after)]


def traced(shape: Any, device: str) -> Trace:
    with torch.device(device):
        model, given = build_model(shape), torch.zeros(2, LENGTH, dtype=torch.long)
    return capture(model, lambda: loss_of(model(given), given))


@pytest.mark.parametrize("name", SHAPES)
def test_every_operator_holds_what_it_holds_on_a_device(name: str) -> None:
    with device_kernels("other"), FakeTensorMode(allow_non_fake_inputs=True):
        imagined = traced(SHAPES[name], "cpu")
    assert held(imagined) == held(traced(SHAPES[name], "tide"))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in ("llama", "latent") else [pytest.mark.slow]) for name in SHAPES]
)
def test_on_a_cpu_more_is_held(name: str) -> None:
    with device_kernels("cpu"), FakeTensorMode(allow_non_fake_inputs=True):
        plain = traced(SHAPES[name], "cpu")
    with device_kernels("cuda"), FakeTensorMode(allow_non_fake_inputs=True):
        imagined = traced(SHAPES[name], "cpu")
    assert sum(size for part in held(imagined) for _, size in part) < sum(
        size for part in held(plain) for _, size in part
    )


def test_afterwards_everything_is_as_before() -> None:
    def results() -> list[Tensor]:
        torch.manual_seed(0)
        given = torch.randn(4, 8, requires_grad=True)
        normed, dropped = functional.rms_norm(given, (8,), torch.ones(8)), functional.dropout(given, 0.5)
        return [normed, dropped, *torch.autograd.grad((normed * dropped).sum(), given)]

    before = results()
    with device_kernels("cuda"), FakeTensorMode():
        functional.rms_norm(torch.randn(4, 8, requires_grad=True), (8,)).sum().backward()
    assert all(torch.equal(*pair) for pair in zip(before, results(), strict=True))
    assert [type(one.grad_fn) for one in before] == [type(one.grad_fn) for one in results()]
