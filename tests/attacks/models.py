"""Models of transformers and of torch as they come: caches on, layers of several kinds, stacks side by side."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from attacks.harness import BOTH, CPU, TIDE, Attack, Found, Side, attack, train
from attacks.parts import WIDTH
from attacks.treatments import ADAPTED, EVERY
from support.parity_models import (
    EIGHTS,
    GROUPED,
    HEADS,
    MODELS,
    SMALL,
    SPECIAL,
    VOCABULARY,
    build,
    of_text,
    stacks_of,
    waves,
)

__all__ = ["CLASSES"]

CLASSES = (
    "AlbertForMaskedLM", "AutoModelForCausalLM", "BartForConditionalGeneration", "BertForMaskedLM",
    "BigBirdForMaskedLM", "BloomForCausalLM", "CLIPModel", "ConvNextForImageClassification",
    "DebertaV2ForMaskedLM", "DeepseekV3ForCausalLM",
    "FalconForCausalLM", "FunnelForMaskedLM", "GPT2LMHeadModel", "Gemma3ForCausalLM", "GptOssForCausalLM",
    "LlamaForCausalLM", "Mamba2ForCausalLM", "MambaForCausalLM", "MixtralForCausalLM", "Phi3ForCausalLM",
    "Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "Qwen3NextForCausalLM", "ResNetForImageClassification",
    "RwkvForCausalLM", "SwinForImageClassification", "T5ForConditionalGeneration", "ViTForImageClassification",
    "Wav2Vec2ForCTC", "WhisperForConditionalGeneration", "XLNetLMHeadModel",
)  # fmt: skip
"""Imported before the attacks are forked."""

FORMS = ("adapt steps", "layers", "operators", "swap", "boundary")


def tokens(side: Side) -> Callable[[int], Tensor]:
    return lambda step: side.tokens(step, (2, 8), VOCABULARY)


def whole_loss(model: nn.Module, batch: Tensor) -> Tensor:
    loss: Tensor = model(batch)
    return loss


def family(name: str) -> Attack:
    def program(side: Side) -> None:
        model = build(name, dropout=True)
        if name in ("llama", "gpt2", "mixtral"):  # the other families are built with it
            model.model.config.use_cache = True  # type: ignore[union-attr]
        stacks = tuple(path for path in stacks_of(name) if path is not None)
        train(side, model, batch=tokens(side), loss=whole_loss, layers=stacks or None)

    return attack(
        f"{name} with its defaults: whole layers grew its cache again in backward", name=f"model_{name}",
        treatments=FORMS, devices=CPU,
    )(program)  # fmt: skip


FAMILIES = tuple(family(name) for name in MODELS if not name.startswith("reference"))

SMALL_ENCODER: dict[str, Any] = {"attention_probs_dropout_prob": 0.1, "hidden_dropout_prob": 0.1, **SMALL}


def causal(config: Any) -> nn.Module:
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    return model


def of_tokens(batch: Tensor) -> dict[str, Any]:
    return {"input_ids": batch, "labels": batch}


def of_pixels(batch: Tensor) -> dict[str, Any]:
    return {"pixel_values": waves(batch, 3, 32, 32), "labels": batch[:, 0] % 2}


def of_speech(batch: Tensor) -> dict[str, Any]:
    return {"input_values": waves(batch, 800), "labels": batch[:, :4]}


def of_pairs(batch: Tensor) -> dict[str, Any]:
    return {"input_ids": batch, "pixel_values": waves(batch, 3, 32, 32), "return_loss": True}


Build = Callable[[], nn.Module]
OTHERS: dict[str, tuple[Build, Callable[[Tensor], dict[str, Any]], tuple[str, ...] | None]] = {
    "llama_eager": (
        lambda: causal(transformers.LlamaConfig(**GROUPED, attention_dropout=0.1, attn_implementation="eager")),
        of_tokens, None,
    ),
    "qwen3": (lambda: causal(transformers.Qwen3Config(**EIGHTS)), of_tokens, None),
    "phi3": (lambda: causal(transformers.Phi3Config(**GROUPED)), of_tokens, None),
    "bloom": (
        lambda: causal(transformers.BloomConfig(vocab_size=VOCABULARY, hidden_size=WIDTH, n_layer=2, n_head=HEADS)),
        of_tokens, None,
    ),
    "falcon": (
        lambda: causal(
            transformers.FalconConfig(
                vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=HEADS
            )
        ),
        of_tokens, None,
    ),
    "mamba2": (
        lambda: causal(
            transformers.Mamba2Config(
                vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=2, state_size=8, expand=2, head_dim=8,
                num_heads=8, n_groups=2, chunk_size=4, **SPECIAL,
            )
        ),
        of_tokens, None,
    ),
    "qwen3_next": (
        lambda: causal(
            transformers.Qwen3NextConfig(
                **EIGHTS, linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=8,
                linear_value_head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
                shared_expert_intermediate_size=16, layer_types=["linear_attention", "full_attention"],
            )
        ),
        of_tokens, None,
    ),
    "mixtral_jitter": (
        lambda: causal(
            transformers.MixtralConfig(
                **GROUPED, num_local_experts=4, output_router_logits=True, router_jitter_noise=0.1
            )
        ),
        of_tokens, None,
    ),
    "albert": (
        lambda: transformers.AlbertForMaskedLM(
            transformers.AlbertConfig(**{**SMALL_ENCODER, "num_hidden_layers": 3}, embedding_size=16)
        ),
        of_text, ("albert.encoder.albert_layer_groups.0.albert_layers",),
    ),
    "deberta": (
        lambda: transformers.DebertaV2ForMaskedLM(
            transformers.DebertaV2Config(
                **SMALL_ENCODER, relative_attention=True, pos_att_type=["p2c", "c2p"], conv_kernel_size=3
            )
        ),
        of_text, None,
    ),
    "big_bird": (
        lambda: transformers.BigBirdForMaskedLM(
            transformers.BigBirdConfig(
                **SMALL_ENCODER, block_size=4, num_random_blocks=1, max_position_embeddings=64
            )
        ),
        lambda batch: of_tokens(batch.repeat(1, 6)), None,
    ),
    "xlnet": (
        lambda: transformers.XLNetLMHeadModel(
            transformers.XLNetConfig(vocab_size=VOCABULARY, d_model=WIDTH, n_layer=2, n_head=HEADS, d_inner=48)
        ),
        lambda batch: {**of_tokens(batch), "use_mems": False}, ("transformer.layer",),
    ),
    "bart_layerdrop": (
        lambda: transformers.BartForConditionalGeneration(
            transformers.BartConfig(
                vocab_size=VOCABULARY, d_model=WIDTH, encoder_layers=3, decoder_layers=3, encoder_ffn_dim=48,
                decoder_ffn_dim=48, encoder_attention_heads=HEADS, decoder_attention_heads=HEADS, encoder_layerdrop=0.3,
                decoder_layerdrop=0.3, decoder_start_token_id=2, forced_eos_token_id=None, **SPECIAL,
            )
        ),
        of_text, ("model.encoder.layers", "model.decoder.layers"),
    ),
    "swin": (
        lambda: transformers.SwinForImageClassification(
            transformers.SwinConfig(
                image_size=32, patch_size=2, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4,
                drop_path_rate=0.2,
            )
        ),
        of_pixels, ("swin.encoder.layers.0.blocks",),
    ),
    "resnet": (
        lambda: transformers.ResNetForImageClassification(
            transformers.ResNetConfig(embedding_size=16, hidden_sizes=[16, 32], depths=[2, 2], num_labels=2)
        ),
        of_pixels, ("resnet.encoder.stages.0.layers",),
    ),
    "wav2vec2": (
        lambda: transformers.Wav2Vec2ForCTC(
            transformers.Wav2Vec2Config(
                vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=3, num_attention_heads=HEADS,
                intermediate_size=48, conv_dim=(16, 16), conv_stride=(4, 4), conv_kernel=(8, 4),
                num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=4, mask_time_prob=0.3, mask_time_length=2,
                layerdrop=0.2, ctc_loss_reduction="mean",
            )
        ),
        of_speech, ("wav2vec2.encoder.layers",),
    ),
    "clip": (
        lambda: transformers.CLIPModel(
            transformers.CLIPConfig(
                text_config={**SMALL, "max_position_embeddings": 20},
                vision_config={
                    "hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 2,
                    "num_attention_heads": HEADS, "image_size": 32, "patch_size": 8,
                },
                projection_dim=16,
            )
        ),
        of_pairs, ("text_model.encoder.layers", "vision_model.encoder.layers"),
    ),
}  # fmt: skip


def other(name: str) -> Attack:
    make, inputs, stacks = OTHERS[name]

    def program(side: Side) -> None:
        def loss(model: nn.Module, batch: Tensor) -> Tensor:
            value: Tensor = model(**inputs(batch)).loss
            return value

        train(side, make().train(), batch=tokens(side), loss=loss, layers=stacks)

    return attack(
        f"{name} of transformers with its defaults", name=f"model_{name}", treatments=FORMS, devices=CPU
    )(program)  # fmt: skip


ALL_OTHERS = tuple(other(name) for name in OTHERS)


# What trainers do with such models.


def small_llama(**settings: Any) -> nn.Module:
    return causal(transformers.LlamaConfig(**GROUPED, **settings)).train()


def labelled(model: nn.Module, batch: Tensor) -> Tensor:
    loss: Tensor = model(input_ids=batch, labels=batch).loss
    return loss


def checkpointed(reentrant: bool) -> Attack:
    def program(side: Side) -> None:
        model: Any = small_llama(use_cache=False, attention_dropout=0.1, attn_implementation="eager")
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
        train(side, model, batch=tokens(side), loss=labelled)

    name = "reentrant" if reentrant else "not_reentrant"
    return attack(
        f"gradient_checkpointing_enable, {name.replace('_', ' ')}, together with lowtide",
        name=f"gradient_checkpointing_{name}", treatments=(*FORMS, "boundary", "disk"), devices=BOTH,
    )(program)  # fmt: skip


CHECKPOINTED = tuple(checkpointed(reentrant) for reentrant in (False, True))


@attack("padded batches and the default cache", treatments=FORMS, devices=BOTH)
def padded_batches(side: Side) -> None:
    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        mask = torch.ones_like(batch)
        mask[0, :3] = 0
        value: Tensor = model(batch, attention_mask=mask, labels=batch).loss
        return value

    train(side, small_llama(), batch=tokens(side), loss=loss)


@attack("output_hidden_states and output_attentions, the latter in every other step", treatments=FORMS)
def hidden_states(side: Side) -> None:
    steps = [0]

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        steps[0] += 1
        attentions = steps[0] % 2 == 0
        output = model(batch, labels=batch, output_hidden_states=True, output_attentions=attentions)
        total: Tensor = output.loss + sum(state.square().mean() for state in output.hidden_states)
        return total + sum(one.square().mean() for one in output.attentions) if attentions else total

    model = small_llama(use_cache=False, attention_dropout=0.1, attn_implementation="eager")
    train(side, model, batch=tokens(side), loss=loss)


@attack("generate() before the first step and between steps", treatments=EVERY)
def generate(side: Side) -> None:
    model: Any = small_llama()
    model.config.eos_token_id = model.generation_config.eos_token_id = None

    def look(_: nn.Module, step: int) -> None:
        if step not in (0, 2, 6):
            return
        prompt = side.tokens(9, (2, 5), VOCABULARY)
        mask = torch.ones_like(prompt)
        mask[0, :3] = 0
        model.eval()
        made = model.generate(prompt, attention_mask=mask, max_new_tokens=6, do_sample=False)
        model.train()
        side.record(f"generated {step}", made)

    train(side, model, batch=tokens(side), loss=labelled, before=look)


class LowRank(nn.Module):
    """As peft's LoRA: a frozen linear, two small ones beside it, and merging."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.dropout = base, nn.Dropout(0.1)
        self.down, self.up = nn.Linear(base.in_features, 4, bias=False), nn.Linear(4, base.out_features, bias=False)
        self.merged = False

    def merge(self, merged: bool) -> None:
        if merged != self.merged:
            self.base.weight.data += (self.up.weight @ self.down.weight).data * (1 if merged else -1)
            self.merged = merged

    def forward(self, x: Tensor) -> Tensor:
        y = self.base(x)
        return y if self.merged else y + self.up(self.down(self.dropout(x)))


@attack("LoRA whose adapters are merged for an evaluation and unmerged again", treatments=FORMS)
def low_rank(side: Side) -> None:
    model: Any = small_llama(use_cache=False)
    model.requires_grad_(False)
    adapters = []
    for layer in model.model.layers:
        layer.self_attn.q_proj = LowRank(layer.self_attn.q_proj)
        layer.mlp.up_proj = LowRank(layer.mlp.up_proj)
        adapters += [layer.self_attn.q_proj, layer.mlp.up_proj]

    def merge(_: nn.Module, step: int) -> None:
        if step == 4:
            for adapter in adapters:
                adapter.merge(True)
            side.record("merged", labelled(model, side.tokens(3, (2, 8), VOCABULARY)))
            for adapter in adapters:
                adapter.merge(False)

    train(side, model, batch=tokens(side), loss=labelled, before=merge)


# torch's own.


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 4, dropout=0.1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        padding = torch.zeros(x.shape[:2], dtype=torch.bool, device=x.device)
        y, weights = self.attention(normed, normed, normed, key_padding_mask=padding, need_weights=True)
        return x + y + weights.mean()


@attack("nn.MultiheadAttention with weights, dropout and a padding mask", treatments=EVERY, devices=BOTH)
def multihead_attention(side: Side) -> None:
    made = nn.Sequential(nn.Linear(WIDTH, WIDTH), *(Attending() for _ in range(3)), nn.Linear(WIDTH, 1))
    train(side, made, batch=lambda step: side.batch(step, 4, 6, WIDTH))


@attack("a pre-norm nn.TransformerEncoder: RebuildError, since `q is k is v` was lost", treatments=EVERY, devices=BOTH)
def transformer_encoder(side: Side) -> None:
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 64, batch_first=True, norm_first=True)
    encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    train(side, encoder, batch=lambda step: side.batch(step, 4, 6, WIDTH))


@attack("nn.TransformerEncoder's nested fast path in evaluation, while a layer is profiled", treatments=EVERY)
def encoder_fast_path(side: Side) -> None:
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 4, 64, batch_first=True), 3)
    padding = torch.zeros(4, 6, dtype=torch.bool)
    padding[0, 4:] = True

    def evaluate(_: nn.Module, step: int) -> None:
        model.eval()
        with torch.no_grad():
            side.record(f"evaluated {step}", model(side.batch(step, 4, 6, WIDTH), src_key_padding_mask=padding))
        model.train()

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        value: Tensor = model(x, src_key_padding_mask=padding).square().mean()
        return value

    train(side, model, batch=lambda step: side.batch(step, 4, 6, WIDTH), loss=loss, before=evaluate)


@attack("experts whose routing and batch change from step to step, on the device", devices=TIDE,
        treatments=("swap", "disk", "adapt steps", "operators", "layers"))  # fmt: skip
def changing_experts(side: Side) -> None:
    model = build("gpt_oss", dropout=True)
    shapes = ((1, 6), (2, 9), (3, 6))
    train(
        side, model, batch=lambda step: side.tokens(step, shapes[step % 3], VOCABULARY), loss=whole_loss,
        steps=9,
    )  # fmt: skip


@attack("an encoder and a decoder, of which an adaptive run decides the encoder only", treatments=ADAPTED, devices=BOTH)
def one_of_two_stacks(side: Side) -> None:
    run = train(side, build("t5", dropout=True), batch=tokens(side), loss=whole_loss, layers=stacks_of("t5")[:1])  # type: ignore[arg-type]
    if run.adaptive is not None and len(run.adaptive.policy.layers) != 2:
        raise Found("crashed", f"{len(run.adaptive.policy.layers)} layers were decided")
