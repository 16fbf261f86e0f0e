"""A model that is built without memory and filled later has, bit by bit, the weights of one that was built whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from lowtide.errors import ModelError
from lowtide.models.deferred import build_deferred
from lowtide.models.hugging_face import HuggingFaceDecoder, build_hugging_face
from support.ranks import Ranks

transformers = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "max_position_embeddings": 64,
}  # fmt: skip
CONFIGS: dict[str, Any] = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "tied, bfloat16": lambda: transformers.LlamaConfig(**SIZES, tie_word_embeddings=True, dtype="bfloat16"),
    "gpt2": lambda: transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64),
    "mixtral": lambda: transformers.MixtralConfig(**SIZES, num_local_experts=4),
    "gemma3": lambda: transformers.Gemma3TextConfig(**SIZES, head_dim=8),  # has constants and tied weights
}
SEED = 3


@pytest.fixture(params=CONFIGS)
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    CONFIGS[request.param]().save_pretrained(tmp_path)
    return tmp_path


def built_whole(directory: Path) -> HuggingFaceDecoder:
    torch.manual_seed(SEED)
    return HuggingFaceDecoder(directory).eval()


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_and_buffers_are_those_of_a_model_built_whole(directory: Path, dtype: torch.dtype) -> None:
    wanted = tensors_of(built_whole(directory).to(dtype))
    torch.manual_seed(11)
    before = torch.get_rng_state()
    model, deferred = build_hugging_face(directory, seed=SEED)
    assert deferred is not None
    assert {one.device.type for one in tensors_of(model).values()} == {"meta"}
    model = model.to(dtype)
    deferred.fill(model, torch.device("cpu"))
    assert torch.equal(torch.get_rng_state(), before)
    found = tensors_of(model)
    assert found.keys() == wanted.keys()
    for name, value in found.items():
        assert value.dtype == wanted[name].dtype
        assert torch.equal(value, wanted[name]), name
    assert len(list(model.parameters())) == len(list(built_whole(directory).parameters()))  # tied ones are one
    logits = model.eval()(torch.arange(8).view(1, 8))
    assert torch.equal(logits, built_whole(directory).to(dtype)(torch.arange(8).view(1, 8)))


def shards(directory: Path) -> list[str]:
    """The weights of a sharded model that are not the whole one's, if any; and its logits."""
    model, deferred = build_hugging_face(directory, seed=SEED)
    assert deferred is not None
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in next(one for one in model.modules() if isinstance(one, nn.ModuleList)):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    deferred.fill(model, torch.device("cpu"))
    whole = built_whole(directory)
    wrong = []
    for (name, found), (_, wanted) in zip(model.named_parameters(), whole.named_parameters(), strict=True):
        assert isinstance(found, DTensor), name
        if not torch.equal(found.full_tensor(), wanted):
            wrong.append(name)
    tokens = torch.arange(8).view(1, 8)
    return wrong if torch.equal(model.eval()(tokens), whole(tokens)) else [*wrong, "logits"]


def test_a_sharded_model_gets_its_shards(directory: Path, ranks: Ranks) -> None:
    assert ranks.run(shards, directory) == [[], []]


def test_a_model_whose_constructor_reads_values_is_built_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    CONFIGS["llama"]().save_pretrained(tmp_path)
    constructor = transformers.AutoModelForCausalLM.from_config

    def reads_values(config: Any) -> Any:
        model = constructor(config)
        assert float(next(model.parameters()).detach().sum()) != 0
        return model

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_config", reads_values)
    model, deferred = build_hugging_face(tmp_path, seed=SEED)
    assert deferred is None
    assert "is built whole on the host of every rank" in caplog.text
    wanted = tensors_of(built_whole(tmp_path))
    assert all(torch.equal(value, wanted[name]) for name, value in tensors_of(model).items())


def test_a_directory_without_a_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no config\.json"):
        build_hugging_face(tmp_path, seed=SEED)


def test_attributes_that_are_tensors_are_filled_too() -> None:
    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.rand(3))
            self.table = torch.rand(2)

    model, deferred = build_deferred(Module, seed=SEED)
    deferred.fill(model, torch.device("cpu"))
    torch.manual_seed(SEED)
    wanted = Module()
    assert torch.equal(model.weight, wanted.weight)
    assert torch.equal(model.table, wanted.table)
