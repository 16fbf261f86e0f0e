from __future__ import annotations

import pytest
from torch import nn

from lowtide.errors import ModelError
from lowtide.operators.layers import find_layers


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)


class Other(Block):
    pass


def test_layers_are_the_longest_run_of_one_class() -> None:
    model = nn.ModuleDict(
        {"short": nn.ModuleList(Block() for _ in range(2)), "long": nn.ModuleList(Block() for _ in range(5))}
    )
    layers = find_layers(model)
    assert layers.path == "long"
    assert layers.names == tuple(f"long.{i}" for i in range(5))


def test_another_class_ends_a_run() -> None:
    model = nn.Sequential(Block(), Block(), Other(), Block(), Block(), Block())
    assert find_layers(model).names == ("3", "4", "5")


def test_of_equal_runs_the_heavier_one_is_taken() -> None:
    heavy = nn.ModuleList(nn.Sequential(nn.Linear(64, 64)) for _ in range(2))
    light = nn.ModuleList(nn.Sequential(nn.Linear(2, 2)) for _ in range(2))
    assert find_layers(nn.ModuleDict({"light": light, "heavy": heavy})).path == "heavy"


def test_leaves_are_no_layers() -> None:
    with pytest.raises(ModelError, match="name the module that holds the layers"):
        find_layers(nn.Sequential(*(nn.Linear(2, 2) for _ in range(9))))


def test_layers_can_be_named() -> None:
    model = nn.ModuleDict({"one": nn.ModuleList([Block()]), "many": nn.ModuleList(Block() for _ in range(3))})
    assert find_layers(model, "one").names == ("one.0",)
    with pytest.raises(ModelError, match="no module 'two'"):
        find_layers(model, "two")
    with pytest.raises(ModelError, match="no children"):
        find_layers(model, "one.0.linear")


def test_torchs_own_encoder_is_found() -> None:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2), num_layers=3)
    assert find_layers(encoder).path == "layers"
