"""Find the phases of a training step that the user's code runs, so that its first micro-batch can be recorded.

[Note: whose step it is]
The user's loop does not say when forward begins and backward ends; there may be several micro-batches, one after the
other or, in a pipeline, interleaved. What is recorded:

- forward: from the first call of the model, until backward begins or the model is called again; of a model that does
  not compute the loss, until the call ends.
- backward: the one that comes to a gradient or a saved tensor of that forward. There may be two: some schedules compute
  gradients of parameters apart. It lasts until the engine has run what was to be run at the end; sharded parameters
  have something there. Callbacks run in the order they were asked for: we ask at every layer, and the last one counts.
- the optimizers' steps, and what runs between the last backward and them, such as clipping. That it was the last one
  shows only afterwards: what was recorded after an earlier one is discarded.

In between the recorder is paused: what is saved for backward is still held its way, and nothing is written down.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lowtide._torch_private.backward import at_end_of_backward, current_backward, current_node
from lowtide._torch_private.storages import storage_key
from lowtide.operators.calls import tensors_of
from lowtide.operators.wrappers import Hook, take_back
from lowtide.trace.recorder import Mark, Occasion, Place, Recorder

__all__ = ["Phases"]


class Phases:
    """The phases of one step. See [Note: whose step it is]."""

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer], recorder: Recorder, *, last: bool) -> None:
        self.model, self.optimizers, self.recorder, self.last = model, optimizers, recorder, last
        self.now: Literal["before", "forward", "between", "backward", "optimizer"] = "before"
        self.given: tuple[int, ...] = ()
        """The shape of the first tensor that the model was given."""
        self.backward: Place = ("backward", recorder.last)
        """Where backward is, or goes on."""
        self.asked = 0
        """How many callbacks for the end of backward were queued and have not run yet."""
        self.backward_ran = False
        """Whether a backward of any kind ran since the model did, or an optimizer."""
        self.optimizing: Mark | None = None
        """Where what may be the optimizer's began; None if nothing has, or if it has proved to be."""
        self.intercepted = True
        """Whether our hooks saw what the model saved; not if the user's own were on top."""
        self.whole = False
        """Whether a forward and its backward were seen."""
        recorder.attend = self._attend
        recorder.paused = True

    @contextmanager
    def following(self) -> Iterator[None]:
        """Follow the step that runs inside this context. Enter it after other hooks of the model are there.

        The caller has hooks on the optimizers and reports their steps: see :meth:`optimizer_begins`.
        """
        hooks: list[Any] = []
        begins, ends = Hook(self._model_begins), Hook(self._model_ends)
        try:
            hooks.append(self.model.register_forward_pre_hook(begins, prepend=True, with_kwargs=True))
            hooks.append(self.model.register_forward_hook(ends))
            yield
        finally:
            take_back(hook.remove for hook in hooks)
            self._not_optimizing()
            self._pause()

    def _pause(self) -> None:
        self.recorder.paused, self.now = True, "between"

    # Forward.

    def _model_begins(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        self._not_optimizing()
        self.backward_ran = False
        if self.now == "forward":
            self._pause()  # another micro-batch
        if self.now != "before" or not torch.is_grad_enabled():
            return
        recorder = self.recorder
        states = [dict(state) for optimizer in self.optimizers for state in optimizer.state.values()]
        known = [*model.parameters(), *model.buffers(), *tensors_of(states)]
        recorder.static = {storage_key(tensor) for tensor in known}
        recorder.paused, self.now = False, "forward"
        recorder.move("forward", -1)
        for gradient in self._gradients():
            recorder.see(gradient)  # of the step before: it may go before backward, or stay
        given = tensors_of((args, kwargs))
        self.given = tuple(given[0].shape) if given else ()
        for tensor in given:
            if tensor.requires_grad:
                recorder.see(tensor)  # a pipeline stage's input: what runs before this stage has made it

    def _model_ends(self, model: nn.Module, args: Any, output: Any) -> None:
        self.intercepted &= self.now != "forward" or self.recorder.is_intercepting
        if self.now == "forward" and not self.last:
            self._pause()

    # Backward.

    def _attend(self, occasion: Occasion) -> None:
        if occasion == "kernel":
            self._kernel(in_backward=current_backward() != -1)
            return
        self._not_optimizing()
        if self.now in ("forward", "between"):
            self._backward_begins()
        elif occasion == "gradient":
            self._ask_for_end()

    def _kernel(self, *, in_backward: bool) -> None:
        if in_backward:
            self._not_optimizing()
            self.backward_ran = True
            if self.now == "forward":
                self._backward_begins()
        elif self.now == "between" and self.whole and self.backward_ran:
            self.optimizing = self.recorder.mark()
            self._optimize()

    def _backward_begins(self) -> None:
        recorder = self.recorder
        for gradient in self._gradients() if not self.whole else ():
            recorder.forget(gradient)  # it stays: what is computed is added to it
        first = recorder.take_seed() if self.now == "forward" else ()
        recorder.paused, self.now = False, "backward"
        recorder.move(*self.backward)
        recorder.events += first
        recorder.follow(current_node())
        self._ask_for_end()

    def _ask_for_end(self) -> None:
        self.asked += 1
        at_end_of_backward(self._backward_may_end)

    def _backward_may_end(self) -> None:
        self.asked -= 1
        if self.asked or self.now != "backward":
            return
        recorder = self.recorder
        recorder.gradients |= {recorder.number(gradient) for gradient in self._gradients()} - {-1}
        self.backward, self.whole = recorder.place, True
        self._pause()

    def _gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]

    # The optimizers' steps.

    def _optimize(self) -> None:
        self.recorder.paused, self.now = False, "optimizer"
        self.recorder.move("optimizer", 0)

    def _not_optimizing(self) -> None:
        """What was taken to be before an optimizer's step was before something else."""
        if self.optimizing is not None:
            self.recorder.take_back(self.optimizing)
            self.optimizing = None
            self._pause()

    def optimizer_begins(self) -> None:
        """An optimizer's step begins; with a closure, forward and backward are still to come."""
        self.optimizing = None
        if self.now == "between" and self.whole:
            self._optimize()

    def optimizer_ends(self) -> None:
        """An optimizer's step has ended."""
        if self.now == "optimizer":
            self.optimizing = None  # what ran since backward was the optimizer's: it was given a closure
            self.backward_ran = False
            self._pause()
