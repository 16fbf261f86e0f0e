"""Programs that train the small Llama in one process, each in a situation that a training run can be in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from numerics.model import Block, Llama, Value, build, gradients, loss_of, tokens_of, values
from numerics.policies import apply_column
from support.garbage import collect_garbage

STEPS = 3
Situation = Callable[[Llama, str, Callable[..., None]], None]
"""Trains a model on a device; what is to be compared is given to ``record(step, loss)``."""


def run(situation: Situation, column: str | None, device: str, *, prepare: Callable[..., Any] | None = None) -> Any:
    """The values of a run, the handle, and the bytes that it left on the device."""
    collect_garbage()
    before = torch.accelerator.memory_allocated() if device != "cpu" else 0
    model = build(dropout=0.1)
    if prepare is not None:
        model = prepare(model)
    model = model.to(device)
    handle = apply_column(column, model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3, foreach=False)
    found: list[Value] = []

    def record(step: Any, loss: Tensor | None = None) -> None:
        found.extend(values(step, [("loss", loss), *gradients(model)]))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    situation(model, device, record)
    collect_garbage()
    held = torch.accelerator.memory_allocated() - before if device != "cpu" else 0
    return found, handle, held


def seeded(step: int, device: str) -> Tensor:
    torch.manual_seed(100 + step)
    return tokens_of(step).to(device)


def plain_steps(model: Llama, device: str, record: Callable[..., None]) -> None:
    for step in range(STEPS):
        tokens = seeded(step, device)
        loss = loss_of(model(tokens), tokens)
        loss.backward()
        record(step, loss)


def accumulated(model: Llama, device: str, record: Callable[..., None]) -> None:
    """Several backwards before a step, and several forwards before their backwards."""
    for step in range(STEPS):
        for micro in range(2):
            tokens = seeded(10 * step + micro, device)
            loss_of(model(tokens), tokens).backward()
        batches = [seeded(10 * step + 5 + micro, device) for micro in range(3)]
        losses = [loss_of(model(tokens), tokens) for tokens in batches]
        for loss in (losses[1], losses[0], losses[2]):
            loss.backward()
        record(step, losses[0])


def evaluated_between(model: Llama, device: str, record: Callable[..., None]) -> None:
    """The very first forward is without gradients, and others come in between."""
    for step in range(STEPS):
        tokens = seeded(step, device)
        with torch.no_grad():
            model(tokens)
        model.eval()
        with torch.inference_mode():
            model(tokens)
        model.train()
        tokens = seeded(step, device)
        logits = model(tokens)
        with torch.no_grad():
            model(tokens)
        loss = loss_of(logits, tokens)
        loss.backward()
        record(step, loss)


def in_evaluation_mode(model: Llama, device: str, record: Callable[..., None]) -> None:
    """Training goes on in ``eval`` and comes back: dropout is not there, then there again."""
    for step in range(4):
        model.train(step % 2 == 0)
        tokens = seeded(step, device)
        loss = loss_of(model(tokens), tokens)
        loss.backward()
        record(step, loss)


def backward_twice(model: Llama, device: str, record: Callable[..., None]) -> None:
    for step in range(STEPS):
        tokens = seeded(step, device)
        loss = loss_of(model(tokens), tokens)
        loss.backward(retain_graph=True)
        loss.backward()
        record(step, loss)


def asked_for_gradients(model: Llama, device: str, record: Callable[..., None]) -> None:
    """``torch.autograd.grad``, of some parameters and then of all, and a second order."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for step in range(STEPS):
        tokens = seeded(step, device)
        loss = loss_of(model(tokens), tokens)
        some = torch.autograd.grad(loss, parameters[-3:], retain_graph=True)
        found = torch.autograd.grad(loss, parameters)
        for parameter, gradient in zip(parameters, found, strict=True):
            parameter.grad = gradient
        parameters[-1].grad = found[-1] + some[-1]
        record(step, loss)


def graphs_dropped(model: Llama, device: str, record: Callable[..., None]) -> None:
    """Forwards whose graph is never run backward."""
    for step in range(STEPS):
        tokens = seeded(step, device)
        kept = model(tokens)
        del kept
        tokens = seeded(step, device)
        loss = loss_of(model(tokens), tokens)
        loss.backward()
        record(step, loss)


class StoppedError(Exception):
    """Raised on purpose."""


def raised_in_forward(model: Llama, device: str, record: Callable[..., None]) -> None:
    """In the middle of a layer, in the first step too."""

    def fail(*_: Any) -> None:
        raise StoppedError

    for step in range(STEPS):
        for layer in (0, 1):
            hook = model.layers[layer].feed_forward.w2.register_forward_pre_hook(fail)
            try:
                model(seeded(step, device))
                raise AssertionError("the hook did not run")
            except StoppedError:
                pass
            hook.remove()
        tokens = seeded(step, device)
        loss = loss_of(model(tokens), tokens)
        loss.backward()
        record(step, loss)


def raised_in_backward(model: Llama, device: str, record: Callable[..., None]) -> None:
    def fail(_: Tensor) -> None:
        raise StoppedError

    for step in range(STEPS):
        tokens = seeded(step, device)
        hidden: list[Tensor] = []
        hook = model.layers[1].register_forward_hook(lambda _m, _a, out, seen=hidden: seen.append(out))
        loss = loss_of(model(tokens), tokens)
        hook.remove()
        hidden.pop().register_hook(fail)
        try:
            loss.backward()
            raise AssertionError("the hook did not run")
        except StoppedError:
            pass
        del loss
        model.zero_grad(set_to_none=True)
        tokens = seeded(step, device)
        loss = loss_of(model(tokens), tokens)
        loss.backward()
        record(step, loss)


def autocast(model: Llama, device: str, record: Callable[..., None]) -> None:
    for step in range(STEPS):
        tokens = seeded(step, device)
        with torch.autocast(device, torch.bfloat16):
            loss = loss_of(model(tokens), tokens)
        loss.backward()
        record(step, loss)


# What is done to the model before it is trained.


def used_twice(model: Llama) -> Llama:
    """Every layer runs twice in one forward."""

    class Twice(Llama):
        def forward(self, x: Tensor) -> Tensor:
            x = self.embedding(x)  # type: ignore[misc]
            for _ in range(2):
                for layer in self.layers:
                    x = layer(x)
            return self.head(self.norm(x))  # type: ignore[misc]

    model.__class__ = Twice
    return model


class Adapted(nn.Module):
    """A frozen linear layer with a trained one of low rank beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = nn.Linear(base.in_features, 2, bias=False), nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.base.weight) + self.up(self.down(x))


def with_adapters(model: Llama) -> Llama:
    """As LoRA has it: everything is frozen but small additions."""
    torch.manual_seed(1)
    model.requires_grad_(False)
    for layer in model.layers:
        for name in ("wq", "wv"):
            setattr(layer.attention, name, Adapted(getattr(layer.attention, name)))
    return model


def with_a_frozen_first_layer(model: Llama) -> Llama:
    model.embedding.requires_grad_(False)  # type: ignore[union-attr]
    model.layers[0].requires_grad_(False)
    return model


def with_an_input_without_gradient(model: Llama) -> Llama:
    model.embedding.requires_grad_(False)  # type: ignore[union-attr]
    return model


def second_order(model: Llama, device: str, record: Callable[..., None]) -> None:
    """The gradient of a gradient's norm."""
    for step in range(STEPS):
        tokens = seeded(step, device)
        with sdpa_kernel(SDPBackend.MATH):  # the others have no second order
            loss = loss_of(model(tokens), tokens)
            (gradient,) = torch.autograd.grad(loss, [model.head.weight], create_graph=True)  # type: ignore[union-attr]
            (loss + gradient.square().sum()).backward()
        record(step, loss)


class OnHost(Block):
    """A layer that runs on the host, between layers that may not."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to("cpu")).to(x.device)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> OnHost:
        return self  # it stays where it is


def with_a_layer_on_the_host(model: Llama) -> Llama:
    model.layers[1].__class__ = OnHost
    return model


SITUATIONS: dict[str, tuple[Situation, Callable[[Llama], Llama] | None]] = {
    "one process": (plain_steps, None),
    "bf16 autocast": (autocast, None),
    "gradient accumulation": (accumulated, None),
    "evaluation in between": (evaluated_between, None),
    "training in eval mode": (in_evaluation_mode, None),
    "backward twice (retain_graph)": (backward_twice, None),
    "torch.autograd.grad": (asked_for_gradients, None),
    "graphs that are dropped": (graphs_dropped, None),
    "a second derivative": (second_order, None),
    "an exception in forward": (raised_in_forward, None),
    "an exception in backward": (raised_in_backward, None),
    "a layer used twice in a forward": (plain_steps, used_twice),
    "adapters on frozen weights (LoRA)": (plain_steps, with_adapters),
    "frozen first layers": (plain_steps, with_a_frozen_first_layer),
    "layers on two devices": (plain_steps, with_a_layer_on_the_host),
    "an input that needs no gradient": (plain_steps, with_an_input_without_gradient),
}
