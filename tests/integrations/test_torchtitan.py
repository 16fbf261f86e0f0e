"""A Policy in torchtitan: named on its command line, applied by its own parallelisation, on two virtual devices."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from lowtide import LowtideError, Policy, PolicyError, Recompute, Swap
from support.ranks import Ranks

pytest.importorskip("torchtitan")
pytest.importorskip("triton")  # torchtitan imports it

WHOLE = Policy.uniform(default=Recompute())
MIXED = Policy.uniform({"feed_forward.*": Recompute()}, default=Swap(1))
LINE = "lowtide.integrations.torchtitan.policy={}"


def configured(file: Path | str) -> Any:
    """What torchtitan makes of its command line, where full activation checkpointing was configured."""
    from torchtitan.config import apply_overrides
    from torchtitan.config.configurable import Configurable
    from torchtitan.config.override import OverrideConfig, parse_cli_imports
    from torchtitan.distributed.activation_checkpoint import FullAC

    class Run(Configurable):
        @dataclass(kw_only=True, slots=True)
        class Config(Configurable.Config):
            activation_checkpoint: Any = field(default_factory=FullAC.Config)

    root = Run.Config()
    line = LINE.format(json.dumps({"file": str(file)}))
    apply_overrides(OverrideConfig(imports=parse_cli_imports([line])), root)
    return root.activation_checkpoint


def train(file: str, tensor_parallel: int) -> tuple[list[float], dict[str, torch.Tensor], int]:
    """Four steps of torchtitan's Llama, as its trainer would build it; losses, weights and peak."""
    from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
    from torchtitan.distributed import ParallelDims
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3 import model_registry

    sizes = {"dp_replicate": 1, "cp": 1, "pp": 1, "ep": 1, "spmd_backend": "partial_dtensor"}
    shards = dist.get_world_size() // tensor_parallel
    dimensions = ParallelDims(dp_shard=shards, tp=tensor_parallel, world_size=dist.get_world_size(), **sizes)
    dimensions.build_mesh()
    spec = model_registry("debugmodel")
    for layer in spec.model.layers:  # flex attention is a compiled function, and there is no compiler for this device
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    torch.manual_seed(0)
    model: Any = spec.model.build()
    with torch.no_grad():
        model.init_states(buffer_device=None)
    model = spec.parallelize_fn(
        model.to("tide"),
        parallel_dims=dimensions,
        training=TrainingConfig(mixed_precision_param="float32"),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor", tensor_parallel_degree=tensor_parallel),
        compile_config=CompileConfig(enable=False),
        ac_config=configured(file) if file else None,
        dump_folder="",
    )
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo does not scale
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-3)
    torch.manual_seed(dist.get_rank() if tensor_parallel == 1 else 0)
    positions, losses = torch.arange(128, device="tide").expand(2, 128), []
    torch.accelerator.reset_peak_memory_stats()
    for _ in range(4):
        tokens = torch.randint(0, 2048, (2, 128)).to("tide")
        logits = full(model(tokens, positions=positions))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    weights = {name: full(one).detach().cpu() for name, one in model.named_parameters()}
    return losses, weights, torch.accelerator.max_memory_allocated()


def full(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.parametrize("tensor_parallel", [1, 2], ids=["FSDP", "tensor parallel"])
def test_its_llama_trains_bitwise(tensor_parallel: int, tmp_path: Path) -> None:
    ranks = Ranks(2)
    try:
        plain = ranks.run(train, "", tensor_parallel)
        for number, policy in enumerate((WHOLE, MIXED)):
            policy.save(tmp_path / f"{number}.json")
            found = ranks.run(train, str(tmp_path / f"{number}.json"), tensor_parallel)
            for mine, theirs in zip(found, plain, strict=True):
                assert mine[0] == theirs[0]
                assert mine[1].keys() == theirs[1].keys()
                assert all(torch.equal(value, theirs[1][name]) for name, value in mine[1].items())
                assert tensor_parallel > 1 or mine[2] < theirs[2]
    finally:
        ranks.stop()


def test_the_command_line_replaces_its_activation_checkpointing(tmp_path: Path) -> None:
    from lowtide.integrations.torchtitan import PolicyCheckpointing

    WHOLE.save(tmp_path / "policy.json")
    config = configured(tmp_path / "policy.json")
    assert isinstance(config.build(), PolicyCheckpointing)


def test_what_is_wrong_is_said_before_a_model_is_built(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match="which Policy"):
        configured("")
    with pytest.raises(LowtideError, match="absent"):
        configured(tmp_path / "absent.json")


def test_a_pipeline_stage_has_its_own_layers() -> None:
    from lowtide.integrations.torchtitan import part_of

    whole = WHOLE.for_layers(2)
    layers = (*whole.layers, *Policy.uniform().for_layers(2).layers)
    four = Policy(layers)
    assert part_of(four, ["1", "2"]) == Policy(layers[1:3])
    assert part_of(WHOLE, ["4", "5"]) is WHOLE
