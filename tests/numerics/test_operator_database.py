"""Every operator of torch's database is bitwise the same under every decision, in the profiled step too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from torch import Tensor, nn

from lowtide.policy import Keep, LayerPolicy, Pattern, Policy, Recompute, Rule, Swap
from lowtide.runtime.apply import apply
from lowtide.runtime.limits import Limits
from support.operator_cases import LAYERS, Around, Case, Step, cases, different, reference

EVERY = Pattern(".*", "path")
DECISIONS = {
    "keep": LayerPolicy(rules=(Rule(EVERY, Keep()),)),
    "recompute operators": LayerPolicy(rules=(Rule(EVERY, Recompute()),)),
    "recompute layers": LayerPolicy(Recompute()),
    "swap": LayerPolicy(Swap(1), boundary=Swap(1)),
}
USUAL = (
    "nn.functional.rrelu", "prod", "masked_fill", "median", "nanmedian", "min.reduction_no_dim",
    "nn.functional.batch_norm", "nn.functional.dropout", "nn.functional.scaled_dot_product_attention",
    "nn.functional.layer_norm", "cat", "sort",
    "nn.functional.multi_head_attention_forward", "split", "linalg.qr", "index_put", "cumprod", "nn.functional.gelu",
    "nn.functional.embedding", "fft.rfft", "to_sparse",
)  # fmt: skip


def applied(decision: str) -> Around:
    """The same decision for every layer."""

    @contextmanager
    def around(model: nn.Module) -> Iterator[Callable[[Step], Tensor]]:
        policy = Policy((DECISIONS[decision],) * LAYERS, origin="solver")
        handle = apply(model, policy, layers="layers", limits=Limits(minimum_bytes=1))
        try:
            yield lambda step: step()
            handle.receipt()
        finally:
            handle.remove()

    return around


def check(case: Case) -> list[str]:
    """What differs under any decision."""
    expected = reference(case)
    if expected is None:
        return []
    found: list[str] = []
    for decision in DECISIONS:
        try:
            found += [f"{case}, {decision}: {name}" for name in different(expected, case, applied(decision))[:1]]
        except Exception as error:
            found.append(f"{case}, {decision}: {type(error).__name__}: {str(error)[:200]}")
    return found


@pytest.mark.parametrize("name", USUAL)
def test_operator_is_bitwise_the_same_under_every_decision(name: str) -> None:
    assert [line for case in cases(names=(name,), samples=3) for line in check(case)] == []


@pytest.mark.slow
def test_every_operator_is_bitwise_the_same_under_every_decision() -> None:
    assert [line for case in cases() for line in check(case)] == []
