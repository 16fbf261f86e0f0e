"""Verification finds what is different, and leaves everything as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.errors import VerificationError
from lowtide.policy import LayerPolicy, Pattern, Policy, Recompute, Rule, Swap
from lowtide.runtime.limits import Limits
from lowtide.runtime.swapped import Swapped


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(8, 16), nn.Linear(16, 8), nn.BatchNorm1d(8)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(torch.nn.functional.silu(self.up(self.norm(x)))))


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(3)))


MIXED = LayerPolicy(rules=(Rule(Pattern("up"), Recompute()), Rule(Pattern("silu"), Swap(2))))
NOTHING_IS_TOO_SMALL = Limits(minimum_bytes=0)


@pytest.mark.parametrize("policy", [MIXED, LayerPolicy(Swap(3), boundary=Swap(2)), LayerPolicy(Swap(3, "disk"))])
def test_a_policy_is_proved_on_a_model(policy: LayerPolicy) -> None:
    result = lowtide.verify(model(), Policy((policy,) * 3), torch.randn(4, 8), limits=NOTHING_IS_TOO_SMALL)
    assert result.compared == 2 * 3 * (1 + len(list(model().parameters())))
    assert sum(setting.moved_bytes for setting in result.receipt.settings) > 0


def test_the_model_is_left_as_it_was() -> None:
    network = model()
    network(torch.randn(4, 8)).sum().backward()
    gradients = [parameter.grad.clone() for parameter in network.parameters() if parameter.grad is not None]
    state = {name: value.clone() for name, value in network.state_dict().items()}
    random = torch.get_rng_state()
    lowtide.verify(network, Policy((MIXED,) * 3), (torch.randn(4, 8),), loss=lambda output: output.square().mean())
    torch.set_rng_state(random)
    assert all(torch.equal(state[name], value) for name, value in network.state_dict().items())
    assert all(
        torch.equal(a, b.grad) for a, b in zip(gradients, network.parameters(), strict=True) if b.grad is not None
    )
    assert not any("forward" in vars(module) for module in network.modules())


def test_a_tensor_that_comes_back_changed_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Swapped.tensor

    def wrong(self: Any) -> Tensor:
        tensor = original(self).clone()
        tensor.view(-1)[0] += 1
        return tensor

    monkeypatch.setattr(Swapped, "tensor", wrong)
    with pytest.raises(VerificationError, match=r"tensor \d+ of layer 2"):
        lowtide.verify(model(), Policy((MIXED,) * 3), torch.randn(4, 8), limits=NOTHING_IS_TOO_SMALL)


def test_a_gradient_that_differs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowtide.runtime.checked.checksum", lambda tensor: 0)  # single tensors are not compared
    original = Swapped.tensor
    monkeypatch.setattr(Swapped, "tensor", lambda self: original(self) * 1.5)
    with pytest.raises(VerificationError, match=r"0\.down\.weight"):
        lowtide.verify(model(), Policy((MIXED,) * 3), torch.randn(4, 8), limits=NOTHING_IS_TOO_SMALL)
