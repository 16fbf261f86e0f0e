"""Under every distributed layout, losses and gradients are bitwise those of the same layout without lowtide."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lowtide.errors import PolicyError
from numerics import experts, layouts
from numerics.policies import LAYERS, every_policy
from support.ranks import Ranks

ROWS: dict[str, Callable[..., Any]] = {
    "DDP": layouts.ddp,
    "DDP, compiled layers": layouts.ddp_compiled_layers,
    "FSDP2": layouts.fsdp2,
    "FSDP2, compiled layers": layouts.fsdp2_compiled_layers,
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
    ("FSDP2, compiled layers", "cpu"),
    ("FSDP2, bf16, parameters kept gathered", "cpu"),
    ("tensor and sequence parallel", "cpu"),
    ("expert parallel", "cpu"),
    ("1F1B", "cpu"),
    ("zero bubble V", "cpu"),
]
CASES = [
    pytest.param(row, device, id=f"{row} on {device}", marks=[] if (row, device) in FAST else pytest.mark.slow)
    for row, device in [*((row, "cpu") for row in ROWS), *((row, "tide") for row in ON_TIDE)]
]


@pytest.mark.composes
@every_policy
@pytest.mark.parametrize(("row", "device"), CASES)
def test_is_exact(row: str, device: str, column: str, ranks: Ranks, expected: Callable[..., Any]) -> None:
    wanted = expected(ROWS[row], device)
    found = ranks.run(ROWS[row], column, device)
    for one, other in zip(wanted, found, strict=True):
        assert one == other


COMPILED = "tensor parallel, compiled layers"
SWAPPED = ["swap", "swap to disk"]
DISTRIBUTED_TENSORS_ARE_RECOMPUTED = torch.__version__ >= "2.14"


@pytest.mark.slow
@pytest.mark.composes
@pytest.mark.parametrize("row", [COMPILED])
@pytest.mark.parametrize("column", SWAPPED)
def test_compiled_layers_in_tensor_parallel_are_exact(
    row: str, column: str, ranks: Ranks, expected: Callable[..., Any]
) -> None:
    found = ranks.run(layouts.tensor_parallel_compiled_layers, column)
    assert found == expected(layouts.tensor_parallel_compiled_layers, "cpu")


@pytest.mark.slow
@pytest.mark.composes(refused=PolicyError)
@pytest.mark.parametrize("row", [COMPILED])
@pytest.mark.parametrize("column", [column for column in LAYERS if column not in SWAPPED])
def test_what_torch_2_13_cannot_recompute_is_refused(
    row: str, column: str, ranks: Ranks, expected: Callable[..., Any]
) -> None:
    if DISTRIBUTED_TENSORS_ARE_RECOMPUTED:
        found = ranks.run(layouts.tensor_parallel_compiled_layers, column)
        assert found == expected(layouts.tensor_parallel_compiled_layers, "cpu")
        return
    with pytest.raises(AssertionError, match=r"PolicyError: torch 2\.13.* cannot recompute"):
        ranks.run(layouts.tensor_parallel_compiled_layers, column)


@pytest.mark.slow
@pytest.mark.composes
@pytest.mark.parametrize("row", ["DDP, compiled around it"])
@pytest.mark.parametrize("column", ["recompute operators", "recompute layers"])
def test_a_compiled_model_in_ddp_is_exact(row: str, column: str, ranks: Ranks, expected: Callable[..., Any]) -> None:
    found = ranks.run(layouts.ddp_compiled_model, column)
    assert found == expected(layouts.ddp_compiled_model, "cpu")


def test_ranks_whose_control_flow_differs_re_issue_the_same_collectives(ranks: Ranks) -> None:
    first, second = ranks.run(experts.diverged, "recompute operators")
    assert any(first), "no expert was without tokens: the case tries nothing"
    assert first != second
