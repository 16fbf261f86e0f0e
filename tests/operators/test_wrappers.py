"""A wrapper of a module's forward is not visible: not by its signature, not in copies, not once removed."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import torch
from torch import Tensor, nn

from lowtide.operators.wrappers import Function, Wrappers


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Multiply."""
        return x * self.weight


class Stateful(Scaled):
    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "seen": True}


def doubled(forward: Function) -> Function:
    return lambda *args, **kwargs: 2 * forward(*args, **kwargs)


def test_a_wrapped_forward_has_its_name_and_signature() -> None:
    module, wrappers = Scaled(), Wrappers()
    wrappers.wrap(module, doubled)
    wrappers.wrap(module, doubled)
    assert list(inspect.signature(module.forward).parameters) == ["x", "attention_mask"]
    assert (module.forward.__name__, module.forward.__doc__) == ("forward", "Multiply.")


def test_copies_run_on_their_own_parameters_without_the_wrapper() -> None:
    for kind in (Scaled, Stateful):
        module, wrappers = kind(), Wrappers()
        wrappers.wrap(module, doubled)
        wrappers.wrap(module, doubled)
        assert module(torch.ones(4)).sum() == 16
        for other in (copy.copy(module), copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
            other._parameters = {"weight": nn.Parameter(torch.zeros(4))}
            assert other(torch.ones(4)).sum() == 0
            assert vars(other).keys() - {"seen"} == vars(kind()).keys()


def test_a_removed_wrapper_leaves_nothing_though_others_stand_around_it() -> None:
    module, wrappers = Scaled(), Wrappers()
    wrappers.wrap(module, doubled)
    inner = module.forward
    module.forward = lambda *args: inner(*args) + 1
    wrappers.remove()
    assert module(torch.ones(4)).sum() == 8
    assert vars(module).keys() - vars(Scaled()).keys() == {"forward"}
