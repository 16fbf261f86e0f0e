"""The recorded vectors of a step: clipping, the loss scale, the drop rate."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lowtide.config.schema.callbacks import MoEDropRateCallback
from lowtide.errors import ConfigError
from lowtide.train.clip import clip, global_norm
from lowtide.train.drop_rate import drop_rate, line
from lowtide.train.loss_scale import Scale

_spec = importlib.util.spec_from_file_location("vectors", Path(__file__).with_name("vectors.py"))
assert _spec is not None
assert _spec.loader is not None
golden = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(golden)


def vectors(kind: str) -> list[Any]:
    found = [vector for vector in golden.vectors("golden_extra") if vector["kind"] == kind]
    return [pytest.param(vector, id=str(vector["id"])) for vector in found]


SUMMED = 11
"""The reference adds up the rates of data-parallel ranks, so that its rate can pass 1; ours is their mean."""


@pytest.mark.parametrize("vector", vectors("clip"))
def test_gradients_are_clipped_as_the_reference_does(vector: dict[str, Any]) -> None:
    parameters = []
    for values in vector["grads"]:
        gradient = torch.tensor(values)
        parameters.append(nn.Parameter(torch.zeros_like(gradient)))
        parameters[-1].grad = gradient
    norm = global_norm(parameters)
    clip(parameters, norm, vector["max_norm"])
    assert norm.item() == pytest.approx(vector["global_norm"], rel=2e-6)
    for parameter, clipped in zip(parameters, vector["clipped"], strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, torch.tensor(clipped), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("vector", vectors("clip_init"))
def test_what_the_reference_refuses_to_clip_to_is_refused(vector: dict[str, Any]) -> None:
    assert vector["error"]
    with pytest.raises(ConfigError, match="`max_grad_norm`"):
        clip([], torch.tensor(1.0), vector["max_norm"])


@pytest.mark.parametrize("vector", vectors("dynamic_loss_scale"))
def test_the_loss_scale_follows_overflows_as_the_reference_does(vector: dict[str, Any]) -> None:
    scale = Scale(value=vector["initial"], factor=vector["scale_factor"], window=vector["scale_window"])
    for overflow, expected in vector["seq_overflow_then_scale"]:
        scale = scale.after(overflow=bool(overflow))
        assert scale.value == expected


@pytest.mark.parametrize("vector", vectors("droprate"))
def test_drop_rates_are_the_references(vector: dict[str, Any]) -> None:
    names = ("expert_num", "capacity_factor", "num_layers", "mtp_depth")
    settings = MoEDropRateCallback(**{name: vector[name] for name in names})
    assert settings.capacity_factor is not None
    rates = [None if rows is None else drop_rate(rows, settings.capacity_factor) for rows in vector["fi"]]
    if vector["id"] == SUMMED:
        (rows,) = vector["fi"]
        assert len(rows) == 2
        rates = [None if rate is None else rate * len(rows) for rate in rates]
    assert [line(layer, rate) for layer, rate in enumerate(rates) if rate is not None] == vector["log"]


def test_every_vector_is_there() -> None:
    counts = {kind: len(vectors(kind)) for kind in ("clip", "clip_init", "droprate", "dynamic_loss_scale")}
    assert counts == {"clip": 6, "clip_init": 3, "droprate": 3, "dynamic_loss_scale": 1}
