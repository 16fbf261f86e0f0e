"""Weights from safetensors and from checkpoints, strict about names."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from lowtide.errors import CheckpointError
from lowtide.train.checkpoint import Checkpoints
from lowtide.train.weights import load_weights
from train import checkpoint_programs as programs


def small(seed: int) -> nn.ModuleDict:
    torch.manual_seed(seed)
    return nn.ModuleDict({"first": nn.Linear(2, 3), "second": nn.Linear(3, 2)})


def written(directory: Path, model: nn.Module, prefix: str = "") -> Path:
    """The weights in two files, as Hugging Face writes large models."""
    directory.mkdir()
    tensors = [(prefix + name, one.contiguous()) for name, one in model.state_dict().items()]
    save_file(dict(tensors[::2]), str(directory / "model-00001-of-00002.safetensors"))
    save_file(dict(tensors[1::2]), str(directory / "model-00002-of-00002.safetensors"))
    return directory


def equal(first: nn.Module, second: nn.Module) -> bool:
    return all(torch.equal(one, second.state_dict()[name]) for name, one in first.state_dict().items())


def test_safetensors_are_loaded_by_name_or_renamed(tmp_path: Path) -> None:
    source, plain, renamed = small(0), small(1), small(2)
    load_weights(plain, written(tmp_path / "plain", source))
    load_weights(renamed, written(tmp_path / "renamed", source, "model."), rename=lambda name: f"model.{name}")
    assert equal(source, plain)
    assert equal(source, renamed)


def test_a_checkpoint_gives_its_weights_and_a_directory_its_newest(tmp_path: Path) -> None:
    state = programs.build("one", seed=0)
    with Checkpoints(tmp_path) as checkpoints:
        for step in (1, 2):
            programs.train(state, 1)
            checkpoints.save(step, state)
    newest, first = programs.build("one", seed=1).parts[0], programs.build("one", seed=1).parts[0]
    load_weights(newest, tmp_path)
    load_weights([first], tmp_path / "step_00000001")
    assert equal(newest, state.parts[0])
    assert not equal(first, newest)


def test_a_tied_weight_need_not_be_there_twice(tmp_path: Path) -> None:
    def tied(seed: int) -> nn.ModuleDict:
        torch.manual_seed(seed)
        model = nn.ModuleDict({"embedding": nn.Embedding(4, 3), "head": nn.Linear(3, 4, bias=False)})
        model["head"].weight = model["embedding"].weight
        return model

    source, target = tied(0), tied(1)
    save_file({"embedding.weight": source["embedding"].weight}, str(tmp_path / "model.safetensors"))
    load_weights(target, tmp_path)
    assert equal(source, target)
    assert target["head"].weight is target["embedding"].weight


def test_missing_and_unexpected_names_are_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "weights", small(0))
    other = nn.ModuleDict({"frist": nn.Linear(2, 3), "second": nn.Linear(3, 2)})
    with pytest.raises(CheckpointError, match=r"frist\.weight is not in it \(the nearest names are first\.weight"):
        load_weights(other, path)
    with pytest.raises(CheckpointError, match=r"holds 2 weights that the model does not have, such as second\.bias"):
        load_weights(nn.ModuleDict({"first": nn.Linear(2, 3)}), path)
    with pytest.raises(CheckpointError, match=r"second\.weight has the shape \[2, 3\] in it and \[4, 3\] in the model"):
        load_weights(nn.ModuleDict({"first": nn.Linear(2, 3), "second": nn.Linear(3, 4)}), path)


def test_what_is_no_directory_of_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"holds neither \.safetensors files nor a committed checkpoint"):
        load_weights(small(0), tmp_path)
    with pytest.raises(CheckpointError, match="is not a directory"):
        load_weights(small(0), tmp_path / "nowhere")
    (tmp_path / "model.safetensors").write_bytes(b"no such thing")
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_weights(small(0), tmp_path)


def test_a_damaged_checkpoint_is_refused(tmp_path: Path) -> None:
    state = programs.build("one", seed=0)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state)
    part = tmp_path / "step_00000001" / "__0_0.distcp"
    part.write_bytes(part.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"is damaged: __0_0\.distcp has .* bytes, .* were written"):
        load_weights(state.parts, tmp_path)


def test_the_missing_package_is_named_with_what_installs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path / "weights", small(0))
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(CheckpointError, match=r"pip install 'lowtide\[transformers\]'"):
        load_weights(small(0), path)
