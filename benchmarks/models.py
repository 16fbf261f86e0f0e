"""The models, the machine and one measured training step, shared by the benchmarks of the runtime.

The model is Mistral 7B's, which is Llama's architecture, at an eighth: width 512, feed-forward 1792, 4 heads with one
key and value head, vocabulary 4000, sequence 256 for 2048; 32 layers as the real one. The machine is
``tide.scaled("h100", 1/8)``, on which that model takes the times of the full one. Its links are scaled with everything
else (55 GB/s times f²), so the time a tensor spends on the link, as a share of its layer's time, is that of the full
model on a full H100. The link of the *unscaled* machine would be 64 times too fast for these tensors. The quick model
is a sixteenth on a machine of a sixteenth: the same times, for an eighth of the work.

Numbers are float32, since bfloat16 products take many CPUs ten times as long. They represent bfloat16: the machine
computes float32 at its bfloat16 rate, and its capacity and bandwidths are doubled as the bytes are, which leaves
every duration as it would be.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import transformers
from torch import Tensor, nn

import tide
from lowtide import Handle

__all__ = [
    "EIGHTH",
    "QUICK",
    "TINY",
    "WIDE",
    "Attach",
    "Attached",
    "LlamaLayers",
    "Shape",
    "StepFigures",
    "TinyGated",
    "Trainer",
    "use_machine",
]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """How large a model and its batch are."""

    layers: int
    sequence: int
    hidden: int
    intermediate: int
    heads: int
    vocabulary: int
    factor: float = 1.0
    """Of the full model, and of the machine to run it on."""


EIGHTH = Shape(layers=32, sequence=256, hidden=512, intermediate=1792, heads=4, vocabulary=4000, factor=1 / 8)
QUICK = Shape(layers=24, sequence=128, hidden=256, intermediate=896, heads=2, vocabulary=2000, factor=1 / 16)
WIDE = Shape(layers=2, sequence=64, hidden=1024, intermediate=2816, heads=8, vocabulary=32)
TINY = Shape(layers=2, sequence=8, hidden=16, intermediate=32, heads=2, vocabulary=32)


def use_machine(factor: float) -> None:
    """Make tide the machine that this module describes."""
    tide.reset()
    machine = tide.scaled("h100", factor)
    tide.configure(
        preset=machine,
        capacity=2 * machine.capacity,
        flops_fp32=machine.flops_half,
        memory_bandwidth=2 * machine.memory_bandwidth,
        host_to_device_bandwidth=2 * machine.host_to_device_bandwidth,
        device_to_host_bandwidth=2 * machine.device_to_host_bandwidth,
    )


def llama(shape: Shape) -> nn.Module:
    """The model, the same every time."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=1,
        use_cache=False,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    return transformers.AutoModelForCausalLM.from_config(config).train()


@dataclass(frozen=True)
class Attached:
    """What a configuration has put on a model."""

    handle: Handle | None = None
    """lowtide's, if it is lowtide's configuration."""
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    """What a whole step runs in."""


Attach: TypeAlias = Callable[[nn.Module], AbstractContextManager[Attached]]
"""Puts a configuration on a model, and takes it off again."""


@dataclass(frozen=True)
class StepFigures:
    """What one training step took."""

    nanoseconds: int
    """On the virtual clock, forward and backward."""
    peak: int
    """Most device bytes allocated during the step, above what was there before: parameters and gradients."""
    held: int
    """Device bytes allocated between forward and backward."""
    requested: int
    """The same as the tensors' own bytes, without what the allocator adds to a block that it does not split."""
    moved_out: int
    """Bytes over the link to the host."""
    moved_in: int
    """Bytes over the link from the host."""
    link_nanoseconds: int
    """How long the busier direction of the link was in use."""
    races: int
    """What tide's detector reported."""
    different: int
    """How many of the loss and the gradients are not bitwise those of the first configuration that ran."""


class Trainer:
    """One model on tide, trained from the same start in every configuration."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        use_machine(shape.factor)
        model = llama(shape)
        self.start = [parameter.detach().clone() for parameter in model.parameters()]
        self.model = model.to("tide")
        self.tokens = torch.randint(3, shape.vocabulary, (1, shape.sequence)).to("tide")
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)  # there from the start, so no part of a step's peak
        self.reference: list[Tensor] = []

    def run(self, attach: Attach, steps: int = 2) -> tuple[StepFigures, Handle | None]:
        """The figures of the last of ``steps`` steps; lowtide profiles layers in the first."""
        with torch.no_grad():
            for parameter, start in zip(self.model.parameters(), self.start, strict=True):
                parameter.copy_(start)
        gc.collect()
        tide.clear_races()
        with attach(self.model) as attached:
            for _ in range(steps - 1):
                self._step(attached, False)
                with torch.no_grad():
                    for parameter in self.model.parameters():
                        parameter.sub_(parameter.grad, alpha=0.01)
            figures = self._step(attached, True)
        return figures, attached.handle

    def _step(self, attached: Attached, last: bool) -> StepFigures:
        self.model.zero_grad(set_to_none=False)
        gc.collect()
        torch.accelerator.synchronize()
        torch.accelerator.reset_peak_memory_stats()
        before, requested = torch.accelerator.memory_allocated(), -_requested()
        with tide.record() as timeline:
            start = tide.now()
            with attached.around():
                loss = self.model(self.tokens, labels=self.tokens).loss
                held = torch.accelerator.memory_allocated() - before
                requested += _requested()
                loss.backward()
            torch.accelerator.synchronize()
            nanoseconds = tide.now() - start
        peak = torch.accelerator.max_memory_allocated() - before
        moved = {
            lane: sum(span["bytes"] for span in timeline.spans if span["lane"] == lane)
            for lane in ("link out", "link in")
        }
        return StepFigures(
            nanoseconds=nanoseconds,
            peak=peak,
            held=held,
            requested=requested,
            moved_out=moved["link out"],
            moved_in=moved["link in"],
            link_nanoseconds=max(timeline.busy("link out"), timeline.busy("link in")),
            races=len(tide.races()),
            different=self._compare(loss) if last else 0,
        )

    def _compare(self, loss: Tensor) -> int:
        values = [loss, *(parameter.grad for parameter in self.model.parameters())]
        if not self.reference:
            self.reference = [value.detach().cpu() for value in values]
        pairs = zip(values, self.reference, strict=True)
        return sum(not torch.equal(value.detach().cpu(), reference) for value, reference in pairs)


def _requested() -> int:
    return int(torch.accelerator.memory_stats()["requested_bytes.all.current"])


class LlamaLayers(nn.Module):
    """Llama's own layers, nothing before or after them; the tiny ones are all Python and dispatch."""

    def __init__(self, shape: Shape = TINY, device: str = "cpu") -> None:
        super().__init__()
        model = llama(shape).to(device)
        self.layers = model.model.layers
        self.x = torch.randn(1, shape.sequence, shape.hidden).to(device).requires_grad_()
        self.positions = model.model.rotary_emb(self.x, torch.arange(shape.sequence, device=device)[None])

    def forward(self) -> Tensor:
        x = self.x
        for layer in self.layers:
            x = layer(x, position_embeddings=self.positions)
        return x.sum()


class TinyGated(nn.Module):
    """Only the gated half of such layers, with operators of the same names: less work to find a microsecond in."""

    def __init__(self, rows: int = TINY.sequence) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(_GatedLayer(TINY.hidden) for _ in range(TINY.layers))
        self.x = torch.randn(rows, TINY.hidden, requires_grad=True)

    def forward(self) -> Tensor:
        x = self.x
        for layer in self.layers:
            x = layer(x)
        return x.sum()


class _GatedLayer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(width), _GatedFeedForward(width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class _GatedFeedForward(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(width, 2 * width), nn.Linear(width, 2 * width)
        self.down_proj, self.act_fn = nn.Linear(2 * width, width), nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
