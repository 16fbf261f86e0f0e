"""What predictions are compared with: models on tide, on the CPU and in pipeline stages, and how a step is measured.

The models are the same everywhere: width 256, four layers, 512 tokens. Tensors are then large enough that what counts
is what they are and not how an allocator rounds them, and a step takes a second on a CPU that computes for tide.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn import functional

import tide
from lowtide.models.build import build_model
from lowtide.models.experts_shape import ExpertsShape
from lowtide.models.initialise import initialise
from lowtide.models.shape import DecoderShape, LatentShape
from lowtide.policy import Decision, Keep, LayerPolicy, Policy, Recompute, Rule, Swap
from lowtide.runtime.apply import apply
from lowtide.trace.capture import capture
from lowtide.trace.trace import Trace
from support.parity_cases import random_policy

__all__ = [
    "LAYERS",
    "MODELS",
    "Measured",
    "Subject",
    "measure_on_cpu",
    "measure_stage",
    "policies_for",
    "use_machine",
]

Setting: TypeAlias = Literal["fp32", "bf16"]
LAYERS, WIDTH, HEADS, VOCABULARY, BATCH, LENGTH = 4, 256, 4, 1000, 4, 128
HIDDEN_SEED = 7
"""Tide's efficiencies follow from this; nothing but a calibration may know it."""


def use_machine(*, hidden: bool = True, devices_per_node: int = 0) -> None:
    """An eighth of an H100, whose kernels and links reach efficiencies that the predictor is not given."""
    tide.reset()
    machine = tide.scaled("h100", 1 / 8)
    tide.configure(
        preset=machine,
        capacity=8 << 30,
        flops_fp32=machine.flops_half,
        efficiency_seed=HIDDEN_SEED if hidden else 0,
        devices_per_node=devices_per_node,
        races=False,
        poison=False,
    )


def llama_shape(**changes: Any) -> DecoderShape:
    """Our own Llama."""
    return DecoderShape(
        **{
            "vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_layers": LAYERS, "num_attention_heads": HEADS,
            "num_key_value_heads": HEADS // 2, "head_dim": WIDTH // HEADS, "intermediate_size": 2 * WIDTH,
            "max_position_embeddings": LENGTH, **changes,
        }
    )  # fmt: skip


def deepseek_shape() -> DecoderShape:
    """Our own DeepSeek: latent attention, one dense layer, then experts."""
    latent = LatentShape(q_lora_rank=64, kv_lora_rank=48, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32)
    experts = ExpertsShape(
        count=8, chosen=2, intermediate_size=WIDTH // 2, shared=1, first_dense=1, scoring="sigmoid", groups=4,
        chosen_groups=2, normalised=True, scaling=1.5, auxiliary=0.01, balancing="seq_aux_loss", bias=True,
        bias_rate=0.01,
    )  # fmt: skip
    return llama_shape(num_key_value_heads=HEADS, latent=latent, experts=experts)


def reference(shape: DecoderShape) -> nn.Module:
    """A model of ours, whose forward gives logits."""
    model = build_model(shape)
    initialise(model, seed=0)
    return model.train()


class Logits(nn.Module):
    """A model of transformers, whose forward gives logits here too."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = transformers.AutoModelForCausalLM.from_config(config).train()

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.model(tokens).logits
        return logits


def transformers_llama() -> nn.Module:
    """Llama of transformers."""
    return Logits(
        transformers.LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_hidden_layers=LAYERS,
            num_attention_heads=HEADS, num_key_value_heads=HEADS // 2, use_cache=False, bos_token_id=1,
            eos_token_id=2, pad_token_id=0,
        )
    )  # fmt: skip


MODELS: dict[str, Callable[[], nn.Module]] = {
    "transformers llama": transformers_llama,
    "llama": lambda: reference(llama_shape()),
    "deepseek": lambda: reference(deepseek_shape()),
}


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    """The next token's cross-entropy."""
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


@dataclass(frozen=True)
class Measured:
    """What a step took."""

    peak: int
    """The most bytes that were allocated."""
    reserved: int
    seconds: float


class Subject:
    """A model in one setting on one device, and its Trace."""

    def __init__(self, name: str, setting: Setting, device: str, rounds: int = 1) -> None:
        self.name, self.setting, self.device = name, setting, device
        self.model = MODELS[name]().to(device)
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(3, VOCABULARY, (BATCH, LENGTH), generator=generator).to(device)
        self.trace = capture(self.model, self.loss, rounds=rounds)

    def loss(self) -> Tensor:
        """One forward."""
        with torch.autocast(self.device, torch.bfloat16, enabled=self.setting == "bf16"):
            logits = self.model(self.tokens)
        return loss_of(logits, self.tokens)

    @property
    def given(self) -> int:
        """The bytes of a micro-batch."""
        return (self.tokens.nbytes + 511) // 512 * 512

    def step(self, micro_batches: int) -> None:
        """A training step, the optimizer's aside."""
        self.model.zero_grad(set_to_none=True)
        for _ in range(micro_batches):
            self.loss().backward()

    def measure(self, policy: Policy, micro_batches: int) -> Measured:
        """A warm step on tide: the runtime profiles the layers in the first one."""
        with applied(self.model, policy):
            self.step(micro_batches)
            return _measured(partial(self.step, micro_batches), self.model)


@contextmanager
def applied(model: nn.Module, policy: Policy, *, allow_unmatched: bool = False) -> Iterator[None]:
    """A Policy at work."""
    handle = apply(model, policy, allow_unmatched=allow_unmatched)
    try:
        yield
    finally:
        handle.remove()
        model.zero_grad(set_to_none=True)
        del handle
        gc.collect()


def _measured(step: Callable[[], None], model: nn.Module) -> Measured:
    for warm in (False, True):
        model.zero_grad(set_to_none=True)
        gc.collect()
        torch.accelerator.synchronize()
        if not warm:
            torch.accelerator.empty_cache()
        torch.accelerator.reset_peak_memory_stats()
        if dist.is_initialized():
            dist.barrier()
        begin = tide.now()
        step()
        torch.accelerator.synchronize()
    seconds = (tide.now() - begin) / 1e9
    return Measured(torch.accelerator.max_memory_allocated(), torch.accelerator.max_memory_reserved(), seconds)


SCHEDULES: dict[str, Any] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


def measure_stage(name: str, schedule: str, micro_batches: int, policies: list[str]) -> list[Measured]:
    """On each of two ranks: a warm step of its pipeline stage, for each Policy."""
    use_machine()
    rank, size = dist.get_rank(), dist.get_world_size()
    shape = deepseek_shape() if name == "deepseek" else llama_shape()
    count = LAYERS // size
    mine = range(rank * count, (rank + 1) * count)
    model = build_model(shape, layers=mine, first=rank == 0, last=rank == size - 1)
    initialise(model, seed=0)
    model = model.train().to("tide")
    tokens = torch.randint(3, VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0)).to("tide")
    hidden = torch.empty(BATCH, LENGTH, WIDTH, device="meta", requires_grad=True)
    logits = torch.empty(BATCH, LENGTH, VOCABULARY, device="meta", requires_grad=True)
    found = []
    for text in policies:
        whole = Policy.from_json(text)
        policy = replace(whole, layers=tuple(whole.layers[layer] for layer in mine))
        stage = PipelineStage(
            model,
            rank,
            size,
            torch.device("tide"),
            input_args=(torch.empty(BATCH, LENGTH, dtype=torch.int64, device="meta") if rank == 0 else hidden,),
            output_args=(hidden if rank < size - 1 else logits,),
        )
        runner = SCHEDULES[schedule](stage, n_microbatches=micro_batches, loss_fn=loss_of, scale_grads=False)
        batch = tokens.repeat(micro_batches, 1)

        def step(runner: Any = runner, batch: Tensor = batch) -> None:
            if rank == 0:
                runner.step(batch)
            else:
                runner.step(target=batch, losses=[], return_outputs=False)

        with applied(model, policy, allow_unmatched=True):
            step()
            found.append(_measured(step, model))
        del stage, runner, step
        gc.collect()
    return found


def policies_for(trace: Trace, seed: int, count: int, *, swap: bool = True) -> dict[str, Policy]:
    """Nothing, everything, and Policies by chance; the disk is left out, whose time depends on this machine."""
    layers = len(trace.layers)
    names = tuple(tuple(operator.name for operator in trace.parts[place].operators) for place in trace.layers)
    found = {
        "keep": Policy((LayerPolicy(),) * layers),
        "recompute": Policy((LayerPolicy(default=Recompute()),) * layers),
    }
    if swap:
        found["swap"] = Policy((LayerPolicy(default=Swap(8)),) * layers)
        found["recompute, swap inputs"] = Policy((LayerPolicy(default=Recompute(), boundary=Swap(4)),) * layers)
    draw = random.Random(seed)
    number = 0
    while len(found) < count:
        found[f"by chance {number}"] = _changed(random_policy(draw, names), swap=swap)
        number += 1
    return dict(list(found.items())[:count])


def _changed(policy: Policy, *, swap: bool) -> Policy:
    def decision(given: Decision) -> Decision:
        if not isinstance(given, Swap):
            return given
        return replace(given, tier="host") if swap else Keep()

    def layer(given: LayerPolicy) -> LayerPolicy:
        boundary = decision(given.boundary)
        assert not isinstance(boundary, Recompute)
        rules = tuple(Rule(rule.pattern, decision(rule.decision)) for rule in given.rules)
        return replace(given, default=decision(given.default), rules=rules, boundary=boundary)

    return replace(policy, layers=tuple(map(layer, policy.layers)))


def measure_on_cpu(subject: Subject, policies: dict[str, Policy], rounds: int) -> dict[str, tuple[int, float]]:
    """For each Policy the most bytes of tensors above what is there before the step, and the least seconds of a step.

    Bytes are those of the profiler's memory events. Times are of the processor, in rounds in which all take turns.
    """
    peaks: dict[str, int] = {}
    least = dict.fromkeys(policies, float("inf"))
    for turn in range(rounds):
        for name, policy in policies.items():
            with applied(subject.model, policy):
                subject.step(1)
                subject.model.zero_grad(set_to_none=True)
                if not turn:
                    peaks[name] = _profiled_peak(subject)
                begin = time.process_time()
                subject.step(1)
                least[name] = min(least[name], time.process_time() - begin)
    return {name: (peaks[name], least[name]) for name in policies}


def _profiled_peak(subject: Subject) -> int:
    gc.collect()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        subject.step(1)
    events: Any = profiler.profiler
    now = peak = 0
    for event in sorted(events.kineto_results.events(), key=lambda one: one.start_ns()):
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    subject.model.zero_grad(set_to_none=True)
    return peak
