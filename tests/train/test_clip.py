"""One norm over all ranks, equal to that of one process; clipping as torch does it."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn

from lowtide.errors import ConfigError, ModelError
from lowtide.train.clip import clip, global_norm, scale_gradients
from train import gradients


def whole() -> list[nn.Parameter]:
    return [gradients.parameter(one) for one in gradients.gradients()]


def test_every_layout_has_the_norm_of_one_process(tmp_path: Path) -> None:
    """All layouts in one test: four processes take long to start."""
    measured = gradients.measured(tmp_path)
    expected = torch.nn.utils.get_total_norm([one.grad for one in whole() if one.grad is not None]).item()
    assert global_norm(whole()).item() == pytest.approx(expected, rel=1e-6)
    for layout in gradients.LAYOUTS:
        for before, after in measured[layout]:
            assert before == pytest.approx(expected, rel=1e-6), layout
            assert after == pytest.approx(1.0, rel=1e-5), layout
        assert len(set(measured[layout])) == 1, f"{layout}: not bitwise the same on every rank"
    # A model after a real backward: a weight is sharded twice in its first dimension, and norms once.
    expected = global_norm(gradients.trained(sharded=False).parameters()).item()
    for before, after in measured["a model"]:
        assert before == pytest.approx(expected, rel=1e-5)
        assert after == pytest.approx(min(1.0, expected), rel=1e-5)


def test_clipping_is_torchs() -> None:
    ours, theirs = whole(), whole()
    norm = global_norm(ours)
    clip(ours, norm, 0.5)
    torch.nn.utils.clip_grad_norm_(theirs, 0.5)
    for one, other in zip(ours, theirs, strict=True):
        assert one.grad is not None
        assert other.grad is not None
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-6, atol=0)


def test_half_precision_is_added_up_in_float32() -> None:
    one = gradients.parameter(torch.full((10_000,), 3.0, dtype=torch.bfloat16))
    other = gradients.parameter(torch.full((10,), 100.0, dtype=torch.float16))
    norm = global_norm([one, other])
    assert norm.dtype == torch.float32
    assert norm.item() == pytest.approx(math.sqrt(9 * 10_000 + 10_000 * 10), rel=1e-6)
    clip([one, other], norm, 1.0)
    assert one.grad is not None
    assert one.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("wrong", [math.inf, math.nan])
def test_a_gradient_that_is_no_number_shows_in_the_norm(wrong: float) -> None:
    assert not torch.isfinite(global_norm([*whole(), gradients.parameter(torch.tensor([wrong]))]))


def test_parameters_without_gradient_are_passed_over() -> None:
    without = nn.Parameter(torch.zeros(3))
    assert global_norm([without]).item() == 0.0
    clip([without], torch.tensor(0.0), 1.0)
    scale_gradients([without], torch.tensor(2.0))
    assert without.grad is None


@pytest.mark.parametrize("wrong", [0, -1.0, math.inf, math.nan, True, "a"])
def test_a_norm_to_clip_to_must_be_above_zero(wrong: float) -> None:
    with pytest.raises(ConfigError, match="`max_grad_norm` must be a number above 0, found"):
        clip(whole(), torch.tensor(1.0), wrong)


def test_parts_that_no_layout_has_are_an_error() -> None:
    mine = whole()
    with pytest.raises(ModelError, match="sharded into 2 parts, on 1 ranks"):
        global_norm(mine, expert_parameters=mine, expert_ranks=2)
