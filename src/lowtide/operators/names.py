"""The operator names that users of the MindSpore guides know, before any model is at hand.

``lowtide check`` matches patterns against these trees: one layer of the legacy model classes and
one of the mcore classes, each operator with those that directly read its output in a
Llama-like layer.
"""

from __future__ import annotations

from functools import cache
from typing import Literal

from lowtide.policy import Operator

__all__ = ["layer_operators"]

_LINEAR = "cast matmul reshape shape"

# One line a module: its path, then its operators, in the order of the reference.
_LEGACY = f"""
: add cast shape reshape
ffn_norm: cast norm rcast
attention_norm: cast norm rcast
attention: add batch_matmul batch_matmul_q_k cast cast_attn merger_head_transpose mul reshape shape softmax tile_kv \
transpose
attention.wq: {_LINEAR}
attention.wk: {_LINEAR}
attention.wv: {_LINEAR}
attention.wo: {_LINEAR}
attention.apply_rotary_emb: add mul neg
attention.flash_attention: flash_attention
feed_forward: cast mul reshape w13_concat
feed_forward.w1: {_LINEAR}
feed_forward.w1.activation: silu
feed_forward.w2: {_LINEAR}
feed_forward.w3: {_LINEAR}
"""
_LEGACY_FLOW = """
attention_norm.norm > attention.wq.matmul attention.wk.matmul attention.wv.matmul
attention.wq.matmul > attention.apply_rotary_emb.mul attention.apply_rotary_emb.neg
attention.wk.matmul > attention.apply_rotary_emb.mul attention.apply_rotary_emb.neg
attention.apply_rotary_emb.neg > attention.apply_rotary_emb.mul
attention.apply_rotary_emb.mul > attention.apply_rotary_emb.add
attention.apply_rotary_emb.add > attention.flash_attention.flash_attention
attention.wv.matmul > attention.flash_attention.flash_attention
attention.flash_attention.flash_attention > attention.wo.matmul
attention.wo.matmul > add
add > ffn_norm.norm
ffn_norm.norm > feed_forward.w1.matmul feed_forward.w3.matmul
feed_forward.w1.matmul > feed_forward.w1.activation.silu
feed_forward.w1.activation.silu > feed_forward.mul
feed_forward.w3.matmul > feed_forward.mul
feed_forward.mul > feed_forward.w2.matmul
feed_forward.w2.matmul > add
"""
_MCORE = """
: add
input_layernorm: norm cast
pre_mlp_layernorm: norm cast
self_attention: cast reshape
self_attention.linear_qkv: matmul
self_attention.linear_proj: matmul
self_attention.core_attention: bmm
self_attention.flash_attention: flash_attention
mlp: mul reshape
mlp.linear_fc1: matmul
mlp.linear_fc2: matmul
mlp.activation_func: silu
mlp.shared_experts: mul
mlp.shared_experts.activation_func: silu
"""
_MCORE_FLOW = """
input_layernorm.norm > self_attention.linear_qkv.matmul
self_attention.linear_qkv.matmul > self_attention.flash_attention.flash_attention self_attention.core_attention.bmm
self_attention.flash_attention.flash_attention > self_attention.linear_proj.matmul
self_attention.core_attention.bmm > self_attention.linear_proj.matmul
self_attention.linear_proj.matmul > add
add > pre_mlp_layernorm.norm
pre_mlp_layernorm.norm > mlp.linear_fc1.matmul
mlp.linear_fc1.matmul > mlp.activation_func.silu mlp.mul
mlp.activation_func.silu > mlp.mul
mlp.mul > mlp.linear_fc2.matmul
mlp.shared_experts.activation_func.silu > mlp.shared_experts.mul
mlp.linear_fc2.matmul > add
"""


@cache
def layer_operators(family: Literal["legacy", "mcore"]) -> tuple[Operator, ...]:
    """The operators of one layer of ``family``, with the direct consumers of each.

    >>> [operator.name for operator in layer_operators("mcore")][:3]
    ['add', 'input_layernorm.norm', 'input_layernorm.cast']
    """
    table, flow = (_LEGACY, _LEGACY_FLOW) if family == "legacy" else (_MCORE, _MCORE_FLOW)
    consumers = {}
    for line in flow.strip().splitlines():
        source, _, targets = line.partition(" > ")
        consumers[source] = tuple(targets.split())
    operators = []
    for line in table.strip().splitlines():
        module, _, names = line.partition(":")
        for name in names.split():
            path = f"{module}.{name}" if module else name
            operators.append(Operator(path, consumers.get(path, ())))
    return tuple(operators)
