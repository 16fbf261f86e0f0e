"""Calls that are refused: whatever raises has changed nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import lowtide
from attacks.harness import BOTH, Found, Side, attack, train
from attacks.parts import WIDTH, Block, Net
from attacks.surroundings import Surroundings
from lowtide.errors import LowtideError
from lowtide.policy import Communication, LayerPolicy, Pattern, Policy, Recompute, Rule, Swap

__all__: list[str] = []

ONE = ("swap",)
WHOLE, SWAPPED = LayerPolicy(Recompute()), LayerPolicy(Swap(2), boundary=Swap(2))


def everything_of(*things: Any) -> dict[str, Any]:
    """Every attribute of modules and optimizers, by identity; what dicts of them hold too."""
    found: dict[str, Any] = {}
    for number, thing in enumerate(things):
        named = thing.named_modules() if isinstance(thing, nn.Module) else [("", thing)]
        for name, one in named:
            found[f"{number} {name} class"] = type(one)
            for key, value in vars(one).items():
                held = {place: id(held) for place, held in value.items()} if isinstance(value, dict) else None
                found[f"{number} {name}.{key}"] = (id(value), held)
    return found


def refused(side: Side, call: Callable[[], Any], *things: Any, kinds: tuple[type[Exception], ...] = ()) -> None:
    """The call raises a typed error, and everything is as it was."""
    if not side.treated:
        return
    before, around = everything_of(*things), Surroundings.now()
    try:
        call()
    except (LowtideError, *kinds):
        pass
    except Exception as error:
        raise Found("crashed", f"{type(error).__name__}: {error}") from error
    else:
        raise Found("crashed", "it was not refused")
    after = everything_of(*things)
    changed = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    left = [*changed[:3], *around.changed(Surroundings.now())]
    if left:
        raise Found("left_behind", f"after the error {', '.join(left)} ({len(changed)})")


def model_and_optimizer(side: Side, layer: Callable[[], nn.Module] = Block) -> tuple[Net, torch.optim.Optimizer]:
    model = Net(layer).to(side.device)
    return model, torch.optim.SGD(model.parameters(), lr=0.05)


@attack("apply with a Policy for another number of layers", treatments=ONE, devices=BOTH)
def apply_other_count(side: Side) -> None:
    model, _ = model_and_optimizer(side)
    refused(side, lambda: lowtide.apply(model, Policy((WHOLE,) * 5)), model)
    train(side, model)


@attack("apply with layers that do not exist", treatments=ONE)
def apply_unknown_layers(side: Side) -> None:
    model, _ = model_and_optimizer(side)
    refused(side, lambda: lowtide.apply(model, Policy((WHOLE,) * 3), layers="blocks"), model)
    train(side, model)


@attack("apply on a model without layers", treatments=("swap",))
def apply_without_layers(side: Side) -> None:
    model = nn.Linear(WIDTH, WIDTH)
    refused(side, lambda: lowtide.apply(model, Policy((WHOLE,))), model)
    side.record("output", model(side.batch(0, 2, WIDTH)))


class NoAttributes(Block):
    """Lets nobody set its forward, as some wrappers do."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "forward" and getattr(self, "sealed", False):
            raise RuntimeError("this module's forward cannot be replaced")
        super().__setattr__(name, value)


class NoHooks(Block):
    """Takes no hooks, as a ScriptModule does of some kinds."""

    def register_forward_pre_hook(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("this module takes no hooks")

    def register_forward_hook(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("this module takes no hooks")


def sealed_last(side: Side) -> tuple[Net, torch.optim.Optimizer]:
    """A model of whose layers the last lets nobody set its forward, when others are done."""
    model, optimizer = model_and_optimizer(side, NoAttributes)
    model.layers[-1].sealed = True
    return model, optimizer


def policies() -> dict[str, Policy]:
    each = LayerPolicy(rules=(Rule(Pattern(".*", "path"), Recompute()),))
    return {
        "layers": Policy((WHOLE,) * 3),
        "swap": Policy((SWAPPED,) * 3),
        "operators": Policy((each,) * 3),
        "gathers": Policy((WHOLE,) * 3, communication=Communication(reshard_after_forward=True)),
    }


def tolerant(side: Side, model: Net, call: Callable[[], Any], *things: Any) -> None:
    """The call is refused and changes nothing, or does not need what the model refuses and can be undone."""
    if not side.treated:
        return
    before = everything_of(model, *things)
    try:
        made = call()
    except Exception:
        pass
    else:
        made.remove()
    after = everything_of(model, *things)
    changed = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    if changed:
        raise Found("left_behind", f"{', '.join(changed[:3])} ({len(changed)})")


@attack(
    "apply breaks off at the last layer, whose forward cannot be replaced: the others stayed wrapped", treatments=ONE
)
def apply_sealed_layer(side: Side) -> None:
    for policy in policies().values():
        model, _ = sealed_last(side)
        tolerant(side, model, lambda model=model, policy=policy: lowtide.apply(model, policy))  # type: ignore[misc]
        model.layers[-1].sealed = False
        train(side, model, steps=2)
        for handle in side.handles:
            handle.remove()


@attack("apply breaks off at a layer that takes no hooks", treatments=ONE)
def apply_layer_without_hooks(side: Side) -> None:
    for policy in policies().values():
        model, _ = model_and_optimizer(side)
        model.layers[-1] = NoHooks()
        model.to(side.device)
        tolerant(side, model, lambda model=model, policy=policy: lowtide.apply(model, policy))  # type: ignore[misc]
    side.record("done", 1)


@attack("a pattern that matches nothing is refused in the first step, and remove() leaves nothing", treatments=ONE,
        devices=BOTH)  # fmt: skip
def unmatched_pattern(side: Side) -> None:
    model, _ = model_and_optimizer(side)
    if side.treated:
        before = everything_of(model)
        rules = (Rule(Pattern("attention.wq"), Recompute()), Rule(Pattern("up"), Swap(2)))
        handle = lowtide.apply(model, Policy((LayerPolicy(rules=rules),) * 3))
        try:
            model(side.batch(0, 8, WIDTH)).sum().backward()
        except LowtideError:
            handle.remove()
        else:
            raise Found("silently_wrong", "a pattern that matches nothing was not refused")
        model.zero_grad()
        if everything_of(model) != before:
            raise Found("left_behind", "the model is not as it was")
    torch.manual_seed(5)
    train(side, model)


@attack("adapt on a model without layers", treatments=ONE, devices=BOTH)
def adapt_without_layers(side: Side) -> None:
    model = nn.Linear(WIDTH, WIDTH).to(side.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    refused(side, lambda: lowtide.adapt(model, optimizer, verbose=False), model, optimizer)
    side.record("output", model(side.batch(0, 2, WIDTH)))


@attack("adapt with layers that do not exist", treatments=ONE, devices=BOTH)
def adapt_unknown_layers(side: Side) -> None:
    model, optimizer = model_and_optimizer(side)
    refused(side, lambda: lowtide.adapt(model, optimizer, layers="blocks", verbose=False), model, optimizer)
    train(side, model)


@attack("adapt with a budget that cannot be read", treatments=ONE, devices=BOTH)
def adapt_unreadable_budget(side: Side) -> None:
    model, optimizer = model_and_optimizer(side)
    refused(side, lambda: lowtide.adapt(model, optimizer, budget="24 parsecs", verbose=False), model, optimizer)
    train(side, model)


@attack("adapt with fixed decisions for another number of layers", treatments=ONE, devices=BOTH)
def adapt_other_policy(side: Side) -> None:
    model, optimizer = model_and_optimizer(side)

    def call() -> Any:
        run = lowtide.adapt(model, optimizer, policy=Policy((WHOLE,) * 7), verbose=False)
        run.step(lambda: model(side.batch(0, 8, WIDTH)).sum().backward())

    refused(side, call, model, optimizer)
    model.zero_grad()
    torch.manual_seed(5)
    train(side, model)


@attack("adapt in a pipeline that places other layers here", treatments=ONE, devices=BOTH)
def adapt_other_pipeline(side: Side) -> None:
    from lowtide.planner.pipeline import even_pipeline

    model, optimizer = model_and_optimizer(side)
    refused(
        side,
        lambda: lowtide.adapt(model, optimizer, pipeline=even_pipeline(8), verbose=False),
        model,
        optimizer,
    )
    train(side, model)


@attack("adapt is given something that is no optimizer", treatments=ONE, devices=BOTH)
def adapt_no_optimizer(side: Side) -> None:
    model, _ = model_and_optimizer(side)
    other: Any = object()
    refused(
        side, lambda: lowtide.adapt(model, other, verbose=False), model, kinds=(TypeError,)
    )  # fmt: skip
    train(side, model)


@attack("adapt breaks off at the last layer, whose forward cannot be replaced", treatments=ONE, devices=BOTH)
def adapt_sealed_layer(side: Side) -> None:
    model, optimizer = sealed_last(side)
    tolerant(side, model, lambda: lowtide.adapt(model, optimizer, verbose=False), optimizer)
    model.layers[-1].sealed = False
    train(side, model)


@attack("adapt breaks off at a layer that takes no hooks", treatments=ONE, devices=BOTH)
def adapt_layer_without_hooks(side: Side) -> None:
    model, _ = model_and_optimizer(side)
    model.layers[-1] = NoHooks()
    model.to(side.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    tolerant(side, model, lambda: lowtide.adapt(model, optimizer, verbose=False), optimizer)
    side.record("done", 1)


@attack("remove() twice, and in another order than applied", treatments=ONE, devices=BOTH)
def removed_twice(side: Side) -> None:
    model, optimizer = model_and_optimizer(side)
    if side.treated:
        before = everything_of(model, optimizer)
        first = lowtide.apply(model, Policy((SWAPPED,) * 3))
        run = lowtide.adapt(model, optimizer, verbose=False)
        for thing in (first, run, first, run):
            thing.remove()
        if everything_of(model, optimizer) != before:
            raise Found("left_behind", "the model is not as it was")
    train(side, model)
