from __future__ import annotations

from typing import Literal

import pytest

from lowtide.operators.names import layer_operators
from lowtide.policy import NameTree


@pytest.mark.parametrize("family", ["legacy", "mcore"])
def test_consumers_exist_and_no_operator_reads_itself(family: Literal["legacy", "mcore"]) -> None:
    operators = layer_operators(family)
    names = [operator.name for operator in operators]
    assert len(set(names)) == len(names)
    for operator in operators:
        assert set(operator.consumers) <= set(names)
        assert operator.name not in operator.consumers


def test_modules_come_in_the_order_the_guides_log_shows() -> None:
    assert list(NameTree.of(o.name for o in layer_operators("legacy")).modules) == [
        "ffn_norm",
        "attention_norm",
        "attention",
        "feed_forward",
    ]
