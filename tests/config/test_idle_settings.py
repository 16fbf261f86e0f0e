"""Settings about communication that have no effect with what else the file says."""

from __future__ import annotations

import pytest

from lowtide.config.check import check_text
from lowtide.operators.names import layer_operators

FILE = """
model: {model_config: {num_layers: 2}}
parallel: {enable_parallel_optimizer: %s}
parallel_config: {data_parallel: 2, model_parallel: %d, use_seq_parallel: %s}
recompute_config: {%s}
"""


def warned(sharded: bool, tensor: int, sequence: bool, recompute: str) -> list[str]:
    text = FILE % (str(sharded).lower(), tensor, str(sequence).lower(), recompute)
    return [one.message for one in check_text(text, layer_operators).problems.warnings]


@pytest.mark.parametrize(
    ("recompute", "sharded", "tensor", "sequence", "said"),
    [
        (
            "recompute: true, mp_comm_recompute: false",
            False,
            1,
            False,
            "`mp_comm_recompute` has no effect: there",
        ),
        ("recompute: true, mp_comm_recompute: false", False, 2, False, None),
        ("mp_comm_recompute: false", False, 2, False, "(mp_comm_recompute) has no effect: no layer is recomputed"),
        ("recompute: true, recompute_slice_activation: true", False, 1, False, "`recompute_slice_activation` has no"),
        ("recompute: true, recompute_slice_activation: true", False, 2, True, "with use_seq_parallel each rank holds"),
        ("recompute: true, recompute_slice_activation: true", False, 2, False, None),
        ("parallel_optimizer_comm_recompute: true", False, 1, False, "parameters are not sharded"),
        ("parallel_optimizer_comm_recompute: true", True, 1, False, None),
        ("select_comm_recompute: true", False, 1, False, "`select_comm_recompute` has no effect: layers have no"),
        ("select_comm_recompute: true", False, 2, True, None),
    ],
)
def test_a_switch_without_effect_is_said(
    recompute: str, sharded: bool, tensor: int, sequence: bool, said: str | None
) -> None:
    found = [one for one in warned(sharded, tensor, sequence, recompute) if "use_seq_parallel` has no" not in one]
    if said is None:
        assert not found
    else:
        assert len(found) == 1
        assert said in found[0]
