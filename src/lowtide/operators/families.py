"""Name tables of model families: what users of the MindSpore guides call the operators of a model.

A layer is recognised by its structure, part by part, so that a family is a choice of parts: Llama, Qwen and Mistral are
the attention and the gated feed-forward below; Mixtral has the same attention and experts instead of the latter.
To add a family, add a :class:`Part` to ``PARTS``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

__all__ = ["PARTS", "Part", "aliases_of"]


class Part(NamedTuple):
    """A part of a layer, known by some of its operators."""

    marks: tuple[str, ...]
    """The operators by which it is recognised: all of them are there."""
    table: str
    """One line: operators of the layer | legacy names | mcore names. Names that end in a dot mean a module:
    such a line renames the operators below it that have no line of their own, so that a pattern may name the module."""


def _shared_experts(module: str) -> Part:
    """A gated feed-forward that all tokens go through, next to the experts that they are routed to."""
    return Part(
        (f"{module}.act_fn", f"{module}.mul"),
        f"""
{module}.          | feed_forward.shared_experts.                   | mlp.shared_experts.
{module}.gate_proj | feed_forward.shared_experts.w1.matmul          | mlp.shared_experts.linear_fc1.matmul
{module}.up_proj   | feed_forward.shared_experts.w3.matmul          | mlp.shared_experts.linear_fc1.matmul
{module}.act_fn    | feed_forward.shared_experts.w1.activation.silu | mlp.shared_experts.activation_func.silu
{module}.mul       | feed_forward.shared_experts.mul                | mlp.shared_experts.mul
{module}.down_proj | feed_forward.shared_experts.w2.matmul          | mlp.shared_experts.linear_fc2.matmul
""",
    )


def _gated(module: str) -> Part:
    """Our own gated feed-forward: of a dense layer, of shared experts, or of all routed ones at once."""
    mcore = module.replace("feed_forward", "mlp")
    return Part(
        (f"{module}.w1", f"{module}.w3", f"{module}.w2"),
        f"""
{module}.       | {module}.                   | {mcore}.
{module}.w1     | {module}.w1.matmul          | {mcore}.linear_fc1.matmul
{module}.w3     | {module}.w3.matmul          | {mcore}.linear_fc1.matmul
{module}.silu   | {module}.w1.activation.silu | {mcore}.activation_func.silu
{module}.mul    | {module}.mul                | {mcore}.mul
{module}.swiglu | {module}.w1.activation.silu {module}.mul | {mcore}.activation_func.silu {mcore}.mul
{module}.w2     | {module}.w2.matmul          | {mcore}.linear_fc2.matmul
""",
    )


# The guides know one activation, silu, and the name means the activation of a gated feed-forward whichever it is. They
# know one matmul for query, key and value in mcore, and transformers calls three.
PARTS = (
    Part(
        ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
        """
self_attn.       | attention.                    | self_attention.
self_attn.q_proj | attention.wq.matmul           | self_attention.linear_qkv.matmul
self_attn.k_proj | attention.wk.matmul           | self_attention.linear_qkv.matmul
self_attn.v_proj | attention.wv.matmul           | self_attention.linear_qkv.matmul
self_attn.o_proj | attention.wo.matmul           | self_attention.linear_proj.matmul
self_attn.q_norm | attention.q_norm.norm         | self_attention.q_layernorm.norm
self_attn.k_norm | attention.k_norm.norm         | self_attention.k_layernorm.norm
self_attn.mul self_attn.mul_1 self_attn.mul_2 self_attn.mul_3 \
                 | attention.apply_rotary_emb.mul | self_attention.apply_rotary_pos_emb.mul
self_attn.neg self_attn.neg_1 \
                 | attention.apply_rotary_emb.neg | self_attention.apply_rotary_pos_emb.neg
self_attn.cat self_attn.cat_1 \
                 | attention.apply_rotary_emb.cat | self_attention.apply_rotary_pos_emb.cat
self_attn.add self_attn.add_1 \
                 | attention.apply_rotary_emb.add | self_attention.apply_rotary_pos_emb.add
self_attn.scaled_dot_product_attention \
                 | attention.flash_attention.flash_attention \
                 | self_attention.core_attention.flash_attention self_attention.core_attention.bmm \
                   self_attention.flash_attention.flash_attention
self_attn.softmax | attention.softmax            | self_attention.core_attention.softmax
""",
    ),
    Part(
        ("input_layernorm", "post_attention_layernorm"),
        """
input_layernorm          | attention_norm.norm | input_layernorm.norm
post_attention_layernorm | ffn_norm.norm       | pre_mlp_layernorm.norm
""",
    ),
    Part(
        ("mlp.gate_proj", "mlp.up_proj", "mlp.act_fn", "mlp.mul", "mlp.down_proj"),
        """
mlp.          | feed_forward.                   | mlp.
mlp.gate_proj | feed_forward.w1.matmul          | mlp.linear_fc1.matmul
mlp.up_proj   | feed_forward.w3.matmul          | mlp.linear_fc1.matmul
mlp.act_fn    | feed_forward.w1.activation.silu | mlp.activation_func.silu
mlp.mul       | feed_forward.mul                | mlp.mul
mlp.down_proj | feed_forward.w2.matmul          | mlp.linear_fc2.matmul
""",
    ),
    Part(  # Mixtral, Qwen3-MoE: the experts are one grouped call, which the guides cannot name in parts
        ("mlp.gate", "mlp.experts.act_fn"),
        """
mlp.               | feed_forward.        | mlp.
mlp.gate           | feed_forward.router  | mlp.router
mlp.experts.       | feed_forward.experts. | mlp.experts.
mlp.experts.act_fn | feed_forward.experts.activation.silu | mlp.experts.activation_func.silu
""",
    ),
    _shared_experts("mlp.shared_expert"),  # Qwen2-MoE
    _shared_experts("mlp.shared_experts"),  # DeepSeek
    Part(  # our own layers, whichever attention and feed-forward block they have
        ("attention_norm", "ffn_norm"),
        """
attention_norm | attention_norm.norm | input_layernorm.norm
ffn_norm       | ffn_norm.norm       | pre_mlp_layernorm.norm
""",
    ),
    Part(  # our own attention
        ("attention.wq", "attention.wk", "attention.wv", "attention.wo"),
        """
attention.       | attention.            | self_attention.
attention.wq     | attention.wq.matmul   | self_attention.linear_qkv.matmul
attention.wk     | attention.wk.matmul   | self_attention.linear_qkv.matmul
attention.wv     | attention.wv.matmul   | self_attention.linear_qkv.matmul
attention.wo     | attention.wo.matmul   | self_attention.linear_proj.matmul
attention.q_norm | attention.q_norm.norm | self_attention.q_layernorm.norm
attention.k_norm | attention.k_norm.norm | self_attention.k_layernorm.norm
""",
    ),
    Part(
        ("attention.scaled_dot_product_attention",),
        """
attention.scaled_dot_product_attention \
    | attention.flash_attention.flash_attention \
    | self_attention.core_attention.flash_attention self_attention.core_attention.bmm \
      self_attention.flash_attention.flash_attention
""",
    ),
    Part(
        ("attention.apply_rotary_emb",),
        """
attention.apply_rotary_emb \
    | attention.apply_rotary_emb.add attention.apply_rotary_emb.mul attention.apply_rotary_emb.neg \
    | self_attention.apply_rotary_pos_emb.add self_attention.apply_rotary_pos_emb.mul \
      self_attention.apply_rotary_pos_emb.neg
""",
    ),
    Part(  # our attention without the fused call
        ("attention.matmul", "attention.softmax", "attention.matmul_1"),
        """
attention.matmul   | attention.batch_matmul_q_k | self_attention.core_attention.bmm
attention.softmax  | attention.softmax          | self_attention.core_attention.softmax
attention.matmul_1 | attention.batch_matmul     | self_attention.core_attention.bmm
""",
    ),
    Part(  # our own latent attention
        ("attention.linear_q_up_proj", "attention.linear_kv_down_proj", "attention.linear_kv_up_proj"),
        """
attention.                     | attention.                            | self_attention.
attention.linear_q_down_proj   | attention.linear_q_down_proj.matmul   | self_attention.linear_q_down_proj.matmul
attention.q_layernorm          | attention.q_layernorm.norm            | self_attention.q_layernorm.norm
attention.linear_q_up_proj     | attention.linear_q_up_proj.matmul     | self_attention.linear_q_up_proj.matmul
attention.linear_kv_down_proj  | attention.linear_kv_down_proj.matmul  | self_attention.linear_kv_down_proj.matmul
attention.kv_layernorm         | attention.kv_layernorm.norm           | self_attention.kv_layernorm.norm
attention.linear_kv_up_proj    | attention.linear_kv_up_proj.matmul    | self_attention.linear_kv_up_proj.matmul
attention.linear_proj          | attention.wo.matmul                   | self_attention.linear_proj.matmul
""",
    ),
    Part(  # our own experts; what they compute is below
        ("feed_forward.router", "feed_forward.dispatch", "feed_forward.combine"),
        """
feed_forward.           | feed_forward.          | mlp.
feed_forward.experts.   | feed_forward.experts.  | mlp.experts.
feed_forward.dispatch   | feed_forward.dispatch  | mlp.token_dispatcher.permute
feed_forward.combine    | feed_forward.combine   | mlp.token_dispatcher.unpermute
feed_forward.exchange feed_forward.exchange_1 | feed_forward.exchange | mlp.token_dispatcher.all_to_all
feed_forward.arrange feed_forward.arrange_1   | feed_forward.arrange  | mlp.token_dispatcher.sort
""",
    ),
    *(_gated(inside) for inside in ("feed_forward", "feed_forward.shared_experts", "feed_forward.experts")),
    Part(  # GPT-2
        ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.act", "mlp.c_proj"),
        """
ln_1          | attention_norm.norm             | input_layernorm.norm
attn.         | attention.                      | self_attention.
attn.c_attn   | attention.w_qkv.matmul          | self_attention.linear_qkv.matmul
attn.scaled_dot_product_attention \
              | attention.flash_attention.flash_attention \
              | self_attention.core_attention.flash_attention self_attention.core_attention.bmm \
                self_attention.flash_attention.flash_attention
attn.c_proj   | attention.wo.matmul             | self_attention.linear_proj.matmul
ln_2          | ffn_norm.norm                   | pre_mlp_layernorm.norm
mlp.          | feed_forward.                   | mlp.
mlp.c_fc      | feed_forward.w1.matmul          | mlp.linear_fc1.matmul
mlp.act       | feed_forward.w1.activation.gelu | mlp.activation_func.gelu
mlp.c_proj    | feed_forward.w2.matmul          | mlp.linear_fc2.matmul
""",
    ),
)


def aliases_of(names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """The other names of a layer's operators, by their own; empty for layers of no known family.

    >>> gated = ("mlp.gate_proj", "mlp.up_proj", "mlp.act_fn", "mlp.mul", "mlp.down_proj")
    >>> aliases_of(gated)["mlp.act_fn"]
    ('feed_forward.w1.activation.silu', 'mlp.activation_func.silu')
    """
    own = list(names)
    found: dict[str, dict[str, None]] = {name: {} for name in own}
    for part in PARTS:
        if not set(part.marks) <= set(own):
            continue
        lines, modules = _read(part.table)
        for name in own:
            if name in lines:
                found[name].update(dict.fromkeys(lines[name]))
            elif above := max((module for module in modules if name.startswith(module)), key=len, default=""):
                found[name].update((other + name.removeprefix(above), None) for other in modules[above])
    return {name: tuple(alias for alias in aliases if alias != name) for name, aliases in found.items()}


def _read(table: str) -> tuple[dict[str, tuple[str, ...]], dict[str, tuple[str, ...]]]:
    """The lines of a table: those of operators, and those of modules."""
    lines: dict[str, tuple[str, ...]] = {}
    modules: dict[str, tuple[str, ...]] = {}
    for line in table.strip().splitlines():
        own, *others = (column.split() for column in line.split("|"))
        for name in own:
            (modules if name.endswith(".") else lines)[name] = tuple(other for column in others for other in column)
    return lines, modules
