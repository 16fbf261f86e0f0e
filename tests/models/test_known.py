"""Models that people know by name are as large as they are known to be."""

from __future__ import annotations

import pytest
import torch

from lowtide.errors import ModelError
from lowtide.models.build import build_model
from lowtide.models.known import SHAPES, find_shape

PARAMETERS = {
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "mixtral-8x7b": 46_702_792_704,
    "qwen3-235b-a22b": 235_093_634_560,
    "deepseek-v3": 671_026_404_352,
}
"""As published; deepseek-v3 without its layer for multi-token prediction, and without the experts' biases, which are
not trained by gradients."""


@pytest.mark.parametrize("name", SHAPES)
def test_a_known_model_has_the_parameters_that_it_is_known_for(name: str) -> None:
    with torch.device("meta"):
        model = build_model(find_shape(name))
    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS[name]


def test_an_unknown_model_names_the_nearest_and_all_others() -> None:
    with pytest.raises(ModelError, match=r"no model 'llama3-7b'.*did you mean llama3-.*mixtral-8x7b.*config\.json"):
        find_shape("llama3-7b")
