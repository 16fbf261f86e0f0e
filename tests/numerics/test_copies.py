"""A model with a handle can be copied and saved; the copy is a model without one."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import Tensor

from numerics.model import Llama, build, gradients, loss_of, tokens_of, values
from numerics.policies import apply_column, every_policy


def step(model: Llama) -> list[object]:
    model.zero_grad()
    tokens = tokens_of(1)
    loss = loss_of(model(tokens), tokens)
    loss.backward()
    return values("step", [("loss", loss), *gradients(model)])


@every_policy
@pytest.mark.parametrize("steps", [0, 2], ids=["before the first step", "after two steps"])
def test_a_deep_copy_computes_with_its_own_parameters(column: str, steps: int) -> None:
    model = build()
    expected = step(model)
    apply_column(column, model)
    for _ in range(steps):
        step(model)
    model.zero_grad()
    twin = copy.deepcopy(model)
    assert step(twin) == expected
    assert all(parameter.grad is None for parameter in model.parameters())
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert step(model) == expected


@every_policy
def test_a_model_can_be_pickled_and_its_state_is_the_same(column: str) -> None:
    model = build()
    expected = step(model)
    names = list(model.state_dict())
    apply_column(column, model)
    step(model)
    assert step(pickle.loads(pickle.dumps(model))) == expected
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    state: dict[str, Tensor] = torch.load(file)
    assert list(state) == names
    other = build()
    other.load_state_dict(state)
    assert step(other) == expected
