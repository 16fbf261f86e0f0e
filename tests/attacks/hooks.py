"""Hooks of the user: on modules, tensors and parameters, and saved-tensor hooks around a loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from attacks.harness import BOTH, Found, Side, attack, train
from attacks.parts import WIDTH, Block, Net, stack
from attacks.treatments import ADAPTED, APPLIED, EVERY
from lowtide._torch_private.saved_tensor_hooks import top_saved_tensors_hooks

__all__: list[str] = []


def sentences(side: Side) -> Callable[[int], Tensor]:
    return lambda step: side.batch(step, 8, 16, WIDTH)


@attack("full backward hooks, their pre-hooks, retain_grad and tensor hooks in every layer", treatments=EVERY)
def backward_hooks(side: Side) -> None:
    model = stack().to(side.device)
    seen: list[str] = []
    activations: list[Tensor] = []

    def noting(label: str) -> Callable[..., None]:
        def note(*args: Any) -> None:
            gradient = args[-1][0] if isinstance(args[-1], tuple) else args[-1]
            side.record(f"hook {len(seen)} {label}", gradient)
            seen.append(label)

        return note

    def keep(module: nn.Module, args: Any, output: Tensor) -> None:
        output.retain_grad()
        output.register_hook(lambda gradient: gradient * 1.5)
        activations.append(output)

    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | Block):
            module.register_full_backward_hook(noting(f"after {name}"))
            module.register_full_backward_pre_hook(noting(f"before {name}"))
        if isinstance(module, nn.LayerNorm):
            module.register_forward_hook(keep)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    run = side.start(model, optimizer)
    for step in range(8):

        def one(step: int = step) -> None:
            activations.clear()
            optimizer.zero_grad()
            loss = model(side.batch(step, 8, 16, WIDTH)).square().mean()
            loss.backward()
            side.record(f"loss {step}", loss)
            side.record_gradients(step, model)
            for place, activation in enumerate(activations[:3]):  # a layer that is recomputed calls its hooks again
                side.record(f"activation {step} {place}", activation.grad)
            optimizer.step()

        run.step(one)
    activations.clear()


def optimizer_in_backward(side: Side, model: nn.Module) -> None:
    """The optimizer's step in a hook of each parameter, as torchtune and torchtitan offer."""
    model.to(side.device)
    optimizers = {parameter: torch.optim.SGD([parameter], lr=0.05, momentum=0.9) for parameter in model.parameters()}

    def update(parameter: Tensor) -> None:
        optimizers[parameter].step()  # type: ignore[index]
        optimizers[parameter].zero_grad()  # type: ignore[index]

    handles = [parameter.register_post_accumulate_grad_hook(update) for parameter in model.parameters()]
    run = side.start(model, *optimizers.values())
    for step in range(5):

        def one(step: int = step) -> None:
            loss = model(side.batch(step, 8, 16, WIDTH)).square().mean()
            loss.backward()
            side.record(f"loss {step}", loss)
            for name, parameter in model.named_parameters():
                side.record(f"parameter {step} {name}", parameter)

        run.step(one)
    for handle in handles:
        handle.remove()


@attack("the optimizer steps inside backward: a layer that is replayed later must not see the new weights",
        treatments=APPLIED, devices=BOTH)  # fmt: skip
def optimizer_hook(side: Side) -> None:
    optimizer_in_backward(side, stack())


class Tied(nn.Module):
    """Weights and submodules that layers share, and layers that run twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.layers[2].up.weight = self.layers[0].up.weight  # type: ignore[union-attr]
        self.layers[1].down = self.layers[0].down  # type: ignore[union-attr]

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for place in (0, 1, 2, 1, 0):
            x = self.layers[place](x)
        return self.last(x)


@attack("tied weights, a shared submodule and layers that run twice (ALBERT)", treatments=EVERY, devices=BOTH)
def tied_layers(side: Side) -> None:
    train(side, Tied(), batch=sentences(side))


@attack("the optimizer steps inside backward, with tied weights: torch's own error at most", treatments=APPLIED,
        documented=("modified by an inplace operation",))  # fmt: skip
def optimizer_hook_tied(side: Side) -> None:
    try:
        optimizer_in_backward(side, Tied())
    except RuntimeError as error:
        if side.treated or "inplace" not in str(error):
            raise
        side.record("raised", 1)


@attack("forward hooks that change what a layer and its operators give", treatments=EVERY)
def changing_forward_hooks(side: Side) -> None:
    model = stack()
    for module in model.modules():
        if isinstance(module, Block | nn.LayerNorm):
            module.register_forward_hook(lambda module, args, output: output * 1.01)
            module.register_forward_pre_hook(lambda module, args: (args[0] * 0.99,))
    train(side, model, batch=sentences(side))


@attack("a hook is added and removed between steps", treatments=EVERY)
def passing_hooks(side: Side) -> None:
    handles: list[Any] = []

    def change(model: nn.Module, step: int) -> None:
        while handles:
            handles.pop().remove()
        if step % 2:
            for module in model.modules():
                if isinstance(module, nn.LayerNorm):
                    handles.append(module.register_forward_hook(lambda module, args, output: output * 1.1))

    train(side, stack(), before=change, batch=sentences(side))
    while handles:
        handles.pop().remove()


@attack("a global forward hook for all modules", treatments=EVERY)
def global_module_hook(side: Side) -> None:
    calls = [0]

    def count(module: nn.Module, args: Any, output: Any) -> None:
        calls[0] += isinstance(module, nn.Linear)

    handle = nn.modules.module.register_module_forward_hook(count)
    try:
        train(side, stack(), batch=sentences(side))
    finally:
        handle.remove()


class Counting(saved_tensors_hooks):
    """Counts what is saved, and changes nothing."""

    def __init__(self) -> None:
        self.packed = 0
        super().__init__(self._pack, lambda tensor: tensor)

    def _pack(self, tensor: Tensor) -> Tensor:
        self.packed += 1
        return tensor


@attack("saved-tensor hooks around the whole loop, inside `with adapt`: popped at the first optimizer step",
        treatments=ADAPTED, devices=BOTH)  # fmt: skip
def hooks_inside_loop(side: Side) -> None:
    model = Net().to(side.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    run = side.start(model, optimizer)
    counting = Counting()
    with counting:
        for step in range(10):

            def one(step: int = step) -> None:
                optimizer.zero_grad()
                loss = model(side.batch(step, 8, 16, WIDTH)).square().mean()
                loss.backward()
                optimizer.step()
                side.record(f"loss {step}", loss)

            run.step(one)
            if top_saved_tensors_hooks(False) is None:
                raise Found("left_behind", f"the user's hooks are gone after step {step}")


@attack("saved-tensor hooks around `with adapt` and the loop in it", treatments=EVERY, devices=BOTH)
def hooks_around_loop(side: Side) -> None:
    with Counting():
        train(side, Net(), batch=sentences(side))
        if top_saved_tensors_hooks(False) is None:
            raise Found("left_behind", "the user's hooks are gone")


@attack("post-accumulate hooks that scale gradients, and gradient hooks on parameters", treatments=EVERY)
def parameter_hooks(side: Side) -> None:
    model = stack()

    def halve(parameter: Tensor) -> None:
        if parameter.grad is not None:
            parameter.grad.mul_(0.5)

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(halve)
        parameter.register_hook(lambda gradient: gradient * 1.25)
    train(side, model, batch=sentences(side))


@attack("hooks on the optimizer: step pre-hooks and post-hooks run once a step", treatments=ADAPTED, devices=BOTH)
def optimizer_step_hooks(side: Side) -> None:
    model = Net().to(side.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    before, after = [0], [0]
    optimizer.register_step_pre_hook(lambda *_: before.__setitem__(0, before[0] + 1))
    optimizer.register_step_post_hook(lambda *_: after.__setitem__(0, after[0] + 1))
    run = side.start(model, optimizer)
    for step in range(8):

        def one(step: int = step) -> None:
            optimizer.zero_grad()
            model(side.batch(step, 8, 16, WIDTH)).square().mean().backward()
            optimizer.step()

        run.step(one)
    side.record("pre-hooks", before[0])
    side.record("post-hooks", after[0])
