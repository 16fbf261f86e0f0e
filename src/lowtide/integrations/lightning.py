"""The ``Trainer`` of Lightning.

[Note: inside Lightning]
A LightningModule's ``training_step`` is called, not its ``forward``, and the loss is made inside it. With automatic
optimisation the call is put into a module of ours, which is what an adaptive run knows as the model: so a step begins
there, and the loss is a part of what is measured. Forward and backward of a micro-batch are Lightning's *closure*, and
the optimizer calls that of a step's last one: a part of a step, which can be retried. See [Note: parts of a step].

With manual optimisation ``training_step`` steps the optimizers by itself. Then the model is the child of the
LightningModule that holds the layers, and a call of ``training_step`` can be retried up to the first optimizer's step.

A fixed Policy is applied before the strategy moves, wraps or shards the model.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from typing import Any

from torch import nn

from lowtide.adaptive.session import Adaptive
from lowtide.errors import PolicyError
from lowtide.integrations.attachment import Attachment
from lowtide.operators.layers import find_layers

__all__ = ["attach"]


class _TrainingStep(nn.Module):
    """Calls ``training_step`` as Lightning's strategy does."""

    def __init__(self, module: nn.Module, call: Callable[..., Any]) -> None:
        super().__init__()
        self.module, self.call = module, call

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(*args, **kwargs)


def attach(trainer: Any, attachment: Attachment) -> Attachment:
    """Attach to a Trainer that is not fitting yet. See [Note: inside Lightning]."""
    strategy, loop = trainer.strategy, trainer.fit_loop.epoch_loop
    if getattr(strategy.launcher, "_start_method", "fork") == "spawn":
        raise PolicyError(
            f"{type(strategy).__name__} starts processes that are given a copy of the trainer, without what is attached"
            " to it: use strategy='ddp', or start the processes with torchrun"
        )
    called: list[_TrainingStep] = []

    def adapt() -> None:
        """Begin an adaptive run; the strategy has the final model and optimizers now."""
        module, layers = trainer.lightning_module, attachment.settings.layers
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        if module.automatic_optimization:
            path = f"module.{find_layers(module, layers).path}".rstrip(".")
            step = _TrainingStep(module, training_step)
            attachment.adapt(step, trainer.optimizers, scaler, layers=path)
            called[:] = [step]
        else:
            path, *inner = find_layers(module, layers).path.split(".")
            model = module.get_submodule(path) if inner else module
            attachment.adapt(model, trainer.optimizers, scaler, layers=".".join(inner) or layers)

    def begin() -> Adaptive | None:
        attachment.check_order("trainer.fit(...)")
        return attachment.begin(adapt)

    def around_fit(run: Callable[..., Any]) -> Callable[..., Any]:
        def run_all(*args: Any, **kwargs: Any) -> Any:
            if trainer.state.fn != "fit":
                return run(*args, **kwargs)
            called.clear()
            with attachment.training():
                return run(*args, **kwargs)

        return run_all

    def before_setup(setup: Callable[..., Any]) -> Callable[..., Any]:
        def set_up(*args: Any, **kwargs: Any) -> Any:
            if trainer.state.fn == "fit":
                attachment.apply_policy(trainer.lightning_module)
            return setup(*args, **kwargs)

        return set_up

    training_step = strategy.training_step

    def through_module(step: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: (called[0] if called else step)(*args, **kwargs)

    def closure_as_a_part(make: Callable[..., Any]) -> Callable[..., Any]:
        def make_closure(*args: Any, **kwargs: Any) -> Any:
            run = begin()
            closure = make(*args, **kwargs)
            if run is not None:
                last = not trainer.fit_loop._should_accumulate()
                part = _Part(trainer, closure.closure, accumulates=not last)
                closure.closure = lambda: run.part(part, last=last)
            return closure

        return make_closure

    def step_as_a_part(advance: Callable[..., Any]) -> Callable[..., Any]:
        def advance_one(kwargs: Any) -> Any:
            if (run := begin()) is None:
                return advance(kwargs)
            return run.part(_Part(trainer, lambda: advance(kwargs)))

        return advance_one

    attachment.override(trainer, "_run", around_fit)
    attachment.override(strategy, "setup", before_setup)
    attachment.override(strategy, "training_step", through_module)
    attachment.override(loop.automatic_optimization, "_make_closure", closure_as_a_part)
    attachment.override(loop.manual_optimization, "advance", step_as_a_part)
    return attachment


class _Part:
    """A micro-batch that can be retried; what Lightning counts and logs in it is restored before."""

    def __init__(self, trainer: Any, call: Callable[[], Any], *, accumulates: bool = False) -> None:
        self.trainer, self.call, self.accumulates = trainer, call, accumulates
        loop = trainer.fit_loop.epoch_loop
        self.progress = [loop.automatic_optimization.optim_progress, loop.manual_optimization.optim_step_progress]
        self.counted = [deepcopy(one.state_dict()) for one in self.progress]
        results = loop._results
        self.logged = {key: (metric, dict(vars(metric))) for key, metric in results.items()}
        self.begun = False

    def __call__(self) -> Any:
        if not self.begun:
            self.begun = True
            return self.call()
        for progress, state in zip(self.progress, self.counted, strict=True):
            progress.load_state_dict(deepcopy(state))
        results = self.trainer.fit_loop.epoch_loop._results
        for key in set(results) - set(self.logged):
            del results[key]
        for metric, values in self.logged.values():
            vars(metric).clear()
            vars(metric).update(values)
        if not self.accumulates:
            return self.call()
        # One that accumulates may be retried while the step's last one runs, in which gradients are reduced.
        with getattr(self.trainer.strategy, "block_backward_sync", nullcontext)():
            return self.call()
