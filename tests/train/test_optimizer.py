"""Which parameters have which learning rate, and which decay."""

from __future__ import annotations

from torch import nn

from lowtide.config.check import check_text
from lowtide.train.optimizer import make_optimizers

TEXT = """
optimizer: {type: AdamW, weight_decay: 0.1}
lr_schedule: {type: ConstantWarmUpLR, learning_rate: 0.5}
grouped_lr_schedule:
  grouped:
    - {type: ConstantWarmUpLR, learning_rate: 0.25, params: ["^1"]}
"""


def test_groups_have_their_own_learning_rate_and_vectors_do_not_decay() -> None:
    settings = check_text(TEXT).settings
    assert settings is not None
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    asked = []

    def names() -> list[str]:
        asked.append(1)
        return [name for name, _ in model.named_parameters()]

    (optimizer,), rates = make_optimizers(settings, [model], names, steps=4, steps_in_epoch=4)
    assert rates.set(0) == 0.5
    found = {
        id(parameter): (group["lr"], group["weight_decay"])
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    assert [found[id(parameter)] for parameter in model.parameters()] == [
        (0.5, 0.1),
        (0.5, 0.0),
        (0.25, 0.1),
        (0.25, 0.0),
    ]
    assert asked == [1]
