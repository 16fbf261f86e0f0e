"""Routed experts under tensor parallel: each rank has a part of every expert, and computes a part of every slot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from lowtide.errors import ModelError, PlanError
from lowtide.models.experts_shape import ExpertsShape
from lowtide.models.moe import MixtureOfExperts
from lowtide.models.shape import DecoderShape
from lowtide.train.degrees import check_degrees
from lowtide.train.run import Degrees
from lowtide.train.traced import TracedRank, trace_rank
from support.expert_work import GroupedWork
from support.layout_cases import SHARD, TENSOR, close, data
from support.ranks import Ranks
from train import runs

SEQUENCE = {"parallel_config.use_seq_parallel": True}
EXPERTS = {**data(2, 2), **SHARD, "parallel_config.expert_parallel": 2}
TOKENS, WIDTH = 64, 32


def work(settings: dict[str, Any]) -> int:
    """FLOPs of experts in one step on this rank."""
    with GroupedWork() as counted:
        runs.train("deepseek", settings, steps=1)
    return counted.flops


def test_each_rank_computes_its_share_and_no_more(one: Ranks, ranks: Ranks) -> None:
    (whole,) = one.run(work, data(1, 4))
    assert whole > 0
    for part in ranks.run(work, {**data(1, 4), **TENSOR}):
        assert part / (whole / 2) <= 1.05


@pytest.mark.parametrize("layout", ["tp2", pytest.param("tp2 + sequence", marks=pytest.mark.slow)])
def test_a_checkpoint_is_read_in_other_layouts(layout: str, one: Ranks, ranks: Ranks, tmp_path: Path) -> None:
    expected = one.run(runs.train, "deepseek", data(1, 4), 4)[0][2:]
    settings = {**data(1, 4), **TENSOR, **(SEQUENCE if "sequence" in layout else {})}
    ranks.run(runs.saved, "deepseek", settings, tmp_path)
    for found in ranks.run(runs.resumed, "deepseek", EXPERTS, tmp_path):
        close(found, expected)
    close(one.run(runs.resumed, "deepseek", data(1, 4), tmp_path)[0], expected)


@pytest.mark.slow
def test_experts_of_expert_parallel_ranks_are_read_by_tensor_parallel_ones(
    one: Ranks, ranks: Ranks, tmp_path: Path
) -> None:
    expected = one.run(runs.train, "deepseek", data(1, 4), 4)[0][2:]
    ranks.run(runs.saved, "deepseek", EXPERTS, tmp_path)
    for found in ranks.run(runs.resumed, "deepseek", {**data(1, 4), **TENSOR}, tmp_path):
        close(found, expected)


def shape(inner: int = 16) -> DecoderShape:
    return DecoderShape(
        vocab_size=128, hidden_size=WIDTH, num_layers=2, num_attention_heads=2, num_key_value_heads=2, head_dim=16,
        intermediate_size=64, experts=ExpertsShape(count=8, chosen=2, intermediate_size=inner, shared=1),
    )  # fmt: skip


def test_a_trace_has_half_of_the_experts_work() -> None:
    flops = []
    for tensor in (1, 2):
        trace = trace_rank(TracedRank(shape=shape(), degrees=Degrees(tensor=tensor), sequence=TOKENS))
        kernels = [kernel for part in trace.parts for kernel in part.kernels if "grouped_mm" in kernel.kind]
        assert kernels
        flops.append(sum(kernel.flops for kernel in kernels))
    assert flops[1] * 2 == flops[0]


def placements() -> list[Any]:
    """How the weights of experts are placed on two tensor-parallel ranks."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",))
    experts = shape().experts
    assert experts is not None
    with torch.device("meta"):
        block = MixtureOfExperts(experts, WIDTH)
    block.distribute(mesh)
    return [getattr(block.experts, name).weight.placements for name in ("w1", "w3", "w2")]


def test_an_experts_inner_width_is_sharded(ranks: Ranks) -> None:
    for found in ranks.run(placements):
        assert found == [(Shard(1),), (Shard(1),), (Shard(2),)]


def uneven() -> str:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",))
    block = MixtureOfExperts(ExpertsShape(count=8, chosen=2, intermediate_size=15), WIDTH)
    with pytest.raises(ModelError) as error:
        block.distribute(mesh)
    return str(error.value)


def test_a_width_that_does_not_divide_is_said(ranks: Ranks) -> None:
    for said in ranks.run(uneven):
        assert "inner width of 15 (moe_intermediate_size) cannot be sharded over 2 tensor-parallel ranks" in said
    with pytest.raises(PlanError, match="--tp 2: experts of tiny have an inner width of 15"):
        check_degrees("tiny", shape(inner=15), Degrees(tensor=2), TOKENS)
