"""Optimizers: of every kind, several at once, none that lowtide is told of, and wrapped by frameworks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from attacks.harness import BOTH, CPU, TIDE, Attack, Side, attack, train
from attacks.parts import WIDTH, Block, Net, without_dropout
from attacks.treatments import ADAPTED

__all__: list[str] = []


class EightBit(Optimizer):
    """Momentum that is held in eight bits: quantized states of mixed types, and a number."""

    def __init__(self, parameters: Iterable[Tensor], lr: float = 1e-3) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["steps"] = 0
                    state["quantized"] = torch.zeros(parameter.numel(), dtype=torch.int8, device=parameter.device)
                    state["scale"] = torch.zeros(1, device=parameter.device)
                momentum = 0.9 * state["quantized"].float() * state["scale"] + 0.1 * parameter.grad.flatten()
                state["scale"].copy_(momentum.abs().max() / 127 + 1e-12)
                state["quantized"].copy_((momentum / state["scale"]).round())
                state["steps"] += 1
                update = (state["quantized"].float() * state["scale"]).view_as(parameter)
                parameter.add_(update, alpha=-group["lr"])


OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "adafactor": torch.optim.Adafactor,
    "sgd_fused": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9, fused=True),
    "sgd_foreach": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9, nesterov=True, foreach=True),
    "adamw_fused": lambda parameters: torch.optim.AdamW(parameters, fused=True),
    "adamw_foreach": lambda parameters: torch.optim.AdamW(parameters, foreach=True, amsgrad=True),
    "adam_tensor_rate": lambda parameters: torch.optim.Adam(parameters, lr=torch.tensor(1e-3)),
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "rprop": torch.optim.Rprop,
    "asgd": torch.optim.ASGD,
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, momentum=0.9),
    "muon": lambda parameters: torch.optim.Muon([one for one in parameters if one.ndim == 2]),
    "eight_bit": EightBit,
}


def with_optimizer(name: str) -> Attack:
    def program(side: Side) -> None:
        model = Net().to(side.device)
        optimizer = OPTIMIZERS[name](list(model.parameters()))
        run = side.start(model, optimizer)
        for step in range(9):

            def one(step: int = step) -> None:
                optimizer.zero_grad()
                loss = model(side.batch(step, 64, 16, WIDTH)).square().mean()
                loss.backward()
                if step in (6, 8):
                    run.fail_allocation(2 + step)  # inside the optimizer's step
                optimizer.step()
                side.record(f"loss {step}", loss)

            run.step(one)

    tries = f"{name}: an allocation fails inside its step"
    return attack(tries, name=f"optimizer_{name}", treatments=("adapt steps",), devices=TIDE)(program)


ALL = tuple(with_optimizer(name) for name in OPTIMIZERS)


def two_optimizers(side: Side, watched: Callable[[Optimizer, Optimizer], list[Optimizer]], fails: int) -> None:
    """Muon for matrices and Adam for the rest, which steps first."""
    model = without_dropout(Net()).to(side.device)
    muon = torch.optim.Muon([one for one in model.parameters() if one.ndim == 2], lr=1e-3)
    adam = torch.optim.Adam([one for one in model.parameters() if one.ndim != 2], lr=1e-3)
    run = side.start(model, muon, adam, watched=watched(muon, adam))
    for step in range(11):

        def one(step: int = step) -> None:
            muon.zero_grad()
            adam.zero_grad()
            loss = model(side.batch(step, 64, 16, WIDTH)).square().mean()
            loss.backward()
            if step == 8:
                run.fail_allocation(fails)
            adam.step()
            run.heal()
            muon.step()
            side.record(f"loss {step}", loss)

        run.step(one)


@attack("a second optimizer beside the adapted one runs out of memory: it counted a step twice", devices=TIDE,
        treatments=ADAPTED)  # fmt: skip
def second_optimizer(side: Side) -> None:
    two_optimizers(side, lambda muon, adam: [muon], 9)


@attack("a second optimizer, and the allocation fails early in its step", devices=TIDE, treatments=ADAPTED)
def second_optimizer_early(side: Side) -> None:
    two_optimizers(side, lambda muon, adam: [muon], 2)


@attack("adapt is given both optimizers", devices=TIDE, treatments=ADAPTED)
def both_optimizers(side: Side) -> None:
    two_optimizers(side, lambda muon, adam: [muon, adam], 9)


@attack("adapt(model) without an optimizer: an allocation that fails in its step repeated the step", devices=TIDE,
        treatments=("adapt steps",))  # fmt: skip
def no_optimizer(side: Side) -> None:
    two_optimizers(side, lambda muon, adam: [], 9)


@attack("adapt(model) without an optimizer, around the loop", devices=BOTH, treatments=("adapt loop",))
def no_optimizer_loop(side: Side) -> None:
    model = Net().to(side.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, foreach=True)
    run = side.start(model, optimizer, watched=())
    for step in range(9):

        def one(step: int = step) -> None:
            optimizer.zero_grad()
            loss = model(side.batch(step, 8, 16, WIDTH)).square().mean()
            loss.backward()
            optimizer.step()
            side.record(f"loss {step}", loss)

        run.step(one)


class Wrapped(Optimizer):
    """As accelerate's AcceleratedOptimizer: an Optimizer that is none, and hands everything on."""

    def __init__(self, inner: Optimizer, scaler: torch.amp.GradScaler | None = None) -> None:
        self.optimizer, self.scaler = inner, scaler
        self._inner_step = inner.step

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.optimizer.state

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.optimizer.param_groups

    @property
    def defaults(self) -> Any:  # type: ignore[override]
        return self.optimizer.defaults

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> Any:
        if self.scaler is None:
            return self.optimizer.step(closure)
        called = [False]
        inner = self._inner_step

        def watched(*args: Any, **kwargs: Any) -> Any:
            called[0] = True
            return inner(*args, **kwargs)

        self.optimizer.step = watched  # type: ignore[method-assign]
        self.scaler.step(self.optimizer, closure)
        self.scaler.update()
        self.optimizer.step = inner  # type: ignore[method-assign]
        return None


@attack("adapt is given an optimizer that accelerate wrapped", treatments=ADAPTED, devices=BOTH)
def wrapped_optimizer(side: Side) -> None:
    model = Net().to(side.device)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
    optimizer = Wrapped(inner)
    run = side.start(model, inner, watched=[optimizer])
    for step in range(9):

        def one(step: int = step) -> None:
            optimizer.zero_grad()
            loss = model(side.batch(step, 8, 16, WIDTH)).square().mean()
            loss.backward()
            optimizer.step()
            side.record(f"loss {step}", loss)

        run.step(one)


@attack("accelerate with a scaler sets optimizer.step back: adapt stopped counting after the first step",
        treatments=ADAPTED, devices=CPU)  # fmt: skip
def displaced_step(side: Side) -> None:
    model = Net().to(side.device)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
    optimizer = Wrapped(inner, torch.amp.GradScaler(side.device.type, init_scale=256.0))
    run = side.start(model, inner)
    for step in range(9):

        def one(step: int = step) -> None:
            assert optimizer.scaler is not None
            optimizer.zero_grad()
            loss = model(side.batch(step, 8, 16, WIDTH)).square().mean()
            optimizer.scaler.scale(loss).backward()
            optimizer.step()
            side.record(f"loss {step}", loss)

        run.step(one)
    if run.adaptive is not None:
        counted = run.adaptive.number
        side.record("steps", min(counted, 8))  # the last one may end with the loop
    else:
        side.record("steps", 8)
    vars(inner).pop("step", None)  # as the program alone leaves it


@attack("parameters on two devices: the first is on the host, so that no rescue was made", devices=TIDE,
        treatments=("adapt steps",))  # fmt: skip
def embedding_on_host(side: Side) -> None:
    class Embedded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.net = nn.Embedding(50, WIDTH), Net(lambda: Block())

        def forward(self, rows: Tensor) -> Tensor:
            return self.net(self.embedding(rows).to(self.net.first.weight.device))

    model = Embedded()
    model.net.to(side.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run = side.start(model, optimizer, layers="net.layers")
    for step in range(9):

        def one(step: int = step) -> None:
            optimizer.zero_grad()
            if step == 7:
                run.fail_allocation(15)
            loss = model(side.tokens(step, (64, 16), 50).cpu()).square().mean()
            loss.backward()
            run.heal()
            optimizer.step()
            side.record(f"loss {step}", loss)

        run.step(one)


@attack("adapt before model.to(device): no rescue, and nothing said so", devices=TIDE, treatments=("adapt steps",))
def moved_later(side: Side) -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run = side.start(model, optimizer)
    model.to(side.device)
    for step in range(9):

        def one(step: int = step) -> None:
            optimizer.zero_grad()
            if step == 7:
                run.fail_allocation(15)
            loss = model(side.batch(step, 64, 16, WIDTH)).square().mean()
            loss.backward()
            run.heal()
            optimizer.step()
            side.record(f"loss {step}", loss)

        run.step(one)


@attack("an exponential moving average of the weights that is updated after each step", treatments=ADAPTED)
def weight_average(side: Side) -> None:
    average: list[Tensor] = []

    def update(model: nn.Module, step: int) -> None:
        with torch.no_grad():
            if not average:
                average.extend(parameter.detach().clone() for parameter in model.parameters())
            for mean, parameter in zip(average, model.parameters(), strict=True):
                mean.lerp_(parameter, 0.1)

    train(side, Net(), before=update)
    for place, mean in enumerate(average):
        side.record(f"average {place}", mean)
