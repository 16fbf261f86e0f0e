"""The examples of the MindSpore Transformers guide as written there, with the log lines it shows for them."""

from __future__ import annotations

from typing import NamedTuple

DEEPSEEK = """\
# recompute config
recompute_config:
  recompute: [3, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 3, 2, 0]
  select_recompute: False
  parallel_optimizer_comm_recompute: True
  mp_comm_recompute: True
  recompute_slice_activation: True
"""
FORTY_EIGHT_LAYERS = r"""
# recompute config
recompute_config:
  recompute: [[2,1,0,0,0],[1,0,0,0,0]]
  select_recompute:
    'feed_forward\.w1\.activation\.silu': True
    'feed_forward\.mul': True
    'feed_forward\.w1\.matmul': [[1,0,0,0,0],[2,1,0,0,0]]
    'feed_forward\.w3\.matmul': [2,1,0,0,0]
  select_comm_recompute: ['ffn_norm\.norm','attention_norm\.norm']
"""
_EVERYWHERE = "[[4, 5, 5, 5, 5], [5, 5, 5, 5, 4]]"
FORTY_EIGHT_LINES = [
    "Formative layer_recompute: [[2, 1, 0, 0, 0], [1, 0, 0, 0, 0]]",
    r"Formative select_recompute: {'feed_forward\.w1\.activation\.silu': "
    + _EVERYWHERE
    + r", 'feed_forward\.mul': "
    + _EVERYWHERE
    + r", 'feed_forward\.w1\.matmul': [[1, 0, 0, 0, 0], [2, 1, 0, 0, 0]]"
    + r", 'feed_forward\.w3\.matmul': [[1, 1, 0, 0, 0], [1, 0, 0, 0, 0]]}",
    rf"Formative select_comm_recompute: {{'ffn_norm\.norm': {_EVERYWHERE}, 'attention_norm\.norm': {_EVERYWHERE}}}",
]
"""Its lines, without those of the excludes."""

_SWAP = """\
context:
  memory_optimize_level: "O0"
model:
  model_config:
    num_layers: 4
recompute_config:
  recompute: False
  select_recompute: {select}
  select_comm_recompute: False
swap_config:
  swap: True
"""
_NO_RECOMPUTE = _SWAP.format(select="False")
_BY_OPERATOR = """\
  op_swap:
    - op_name: 'attention'
      backward_prefetch: 20
      layers: [0,1,2]
    - op_name: 'attention'
      backward_prefetch: 10
      layers: [3]
    - op_name: 'feed_forward'
      backward_prefetch: 15
      layers: [1,2]
"""

_BY_OPERATOR_LINES = [
    "Set op_swap at layer 0: .attention, value=20",
    "Set op_swap at layer 1: .attention, value=20, .feed_forward, value=15",
    "Set op_swap at layer 2: .attention, value=20, .feed_forward, value=15",
    "Set op_swap at layer 3: .attention, value=10",
]


class SwapCase(NamedTuple):
    """One of the guide's four cases of swapping."""

    text: str
    """Its YAML."""
    command: str
    """How the guide looks at the log."""
    lines: list[str]
    """What it finds."""


SWAP_CASES = {
    "1: by default": SwapCase(
        _NO_RECOMPUTE + "  default_prefetch: 10\n",
        "cat output/msrun/worker_0.log | grep 'attention.flash_attention'",
        [f"Set op_swap at layer {layer}: attention.flash_attention, value=10" for layer in range(4)],
    ),
    "2: whole layers": SwapCase(
        _NO_RECOMPUTE + "  layer_swap:\n    - backward_prefetch: 20\n      layers: [0,3]\n",
        "cat output/msrun/worker_0.log | grep 'Set layer swap at'",
        [f"Set layer swap at layer {layer} and value is: 20" for layer in (0, 3)],
    ),
    "3: operators of layers": SwapCase(
        _NO_RECOMPUTE + _BY_OPERATOR,
        "cat output/msrun/worker_0.log | grep 'Set op_swap at layer'",
        _BY_OPERATOR_LINES,
    ),
    "4: swap and recompute": SwapCase(
        _SWAP.format(select="\n    'feed_forward': [0,3]") + _BY_OPERATOR,
        "cat output/msrun/worker_0.log | grep 'Set op_swap at layer' -C 1",
        [
            "Set select recompute at layer 0: feed_forward",
            *_BY_OPERATOR_LINES[:3],
            "Set select recompute at layer 3: feed_forward",
            *_BY_OPERATOR_LINES[3:],
        ],
    ),
}
