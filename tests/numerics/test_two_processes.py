"""Under every distributed layout, losses and gradients are bitwise those of the same layout without lowtide."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from numerics import experts, layouts
from numerics.policies import every_policy
from support.ranks import Ranks

ROWS: dict[str, Callable[..., Any]] = {
    "DDP": layouts.ddp,
    "FSDP2": layouts.fsdp2,
    "FSDP2, parameters kept gathered": layouts.fsdp2_kept_gathered,
    "FSDP2, bf16": layouts.fsdp2_bf16,
    "FSDP2, bf16, parameters kept gathered": layouts.fsdp2_bf16_kept_gathered,
    "FSDP2 of all layers but one, sharded before apply": layouts.fsdp2_before_apply,
    "tensor parallel": layouts.tensor_parallel,
    "tensor and sequence parallel": layouts.sequence_parallel,
    "tensor and sequence parallel, made after apply": layouts.sequence_parallel_after_apply,
    "tensor parallel in FSDP2": layouts.tensor_parallel_and_fsdp2,
    "expert parallel": experts.expert_parallel,
    "expert parallel in FSDP2": experts.expert_parallel_and_fsdp2,
    "1F1B": layouts.one_f_one_b,
    "GPipe": layouts.gpipe,
    "interleaved 1F1B": layouts.interleaved,
    "interleaved zero bubble": layouts.interleaved_zero_bubble,
    "zero bubble V": layouts.zero_bubble_v,
}
ON_TIDE = ["DDP", "FSDP2", "FSDP2, bf16", "tensor parallel", "tensor and sequence parallel", "1F1B"]
FAST = [
    ("DDP", "cpu"),
    ("FSDP2", "tide"),
    ("FSDP2, bf16, parameters kept gathered", "cpu"),
    ("tensor and sequence parallel", "cpu"),
    ("tensor and sequence parallel", "tide"),
    ("expert parallel", "cpu"),
    ("1F1B", "cpu"),
    ("zero bubble V", "cpu"),
]
CASES = [
    pytest.param(row, device, id=f"{row} on {device}", marks=[] if (row, device) in FAST else pytest.mark.slow)
    for row, device in [*((row, "cpu") for row in ROWS), *((row, "tide") for row in ON_TIDE)]
]


@pytest.mark.xdist_group("ranks")
@pytest.mark.composes
@every_policy
@pytest.mark.parametrize(("row", "device"), CASES)
def test_is_exact(row: str, device: str, column: str, ranks: Ranks, expected: Callable[..., Any]) -> None:
    wanted = expected(ROWS[row], device)
    found = ranks.run(ROWS[row], column, device)
    for one, other in zip(wanted, found, strict=True):
        assert one == other


@pytest.mark.xdist_group("ranks")
def test_ranks_whose_control_flow_differs_re_issue_the_same_collectives(ranks: Ranks) -> None:
    first, second = ranks.run(experts.diverged, "recompute operators")
    assert any(first), "no expert was without tokens: the case tries nothing"
    assert first != second
