"""Steps of the user's own training loop: where they begin and end, and what is on while one runs.

[Note: steps of the user's loop]
A step begins when a part of the model is called with gradients enabled. It ends when every optimizer has stepped, or
when one of them steps for the second time, in a loop that does not step all of them. The modes and hooks of a step are
on from its beginning to its end, and off while the loop loads data, evaluates or saves.

The hooks on the optimizers stay until the run is removed. Replacing an optimizer's ``step`` instead would hide it from
learning-rate schedulers, and frameworks restore the original. A step ends inside an optimizer's hook, while the
optimizer iterates over all of them, so what is on during a step must not have optimizer hooks of its own: it is
notified from here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from lowtide._torch_private.backward import in_forward_mode
from lowtide.operators.calls import tensors_of
from lowtide.operators.layers import find_layers
from lowtide.operators.wrappers import Hook, take_back

if TYPE_CHECKING:
    from lowtide.adaptive.session import Adaptive

__all__ = ["UserLoop", "unwrapped"]

UNCALLED = 3
"""Steps in a row without a call of the model before a warning."""
UNENDED = 100
"""Calls of the model before the end of the first step before a warning."""


class _Aborted(Exception):  # noqa: N818  not an error: it closes the contexts of a step
    """A step does not reach its end."""


class UserLoop:
    """Begins and ends the steps that the user's loop makes. See [Note: steps of the user's loop].

    A step that is passed to ``run.step(...)`` as a function is not one of these: see :meth:`whole_step`.
    """

    def __init__(self, run: Adaptive) -> None:
        self.run = run
        self.ended_by_optimizers = False
        """Whether the optimizers' steps end a step: inside ``with``."""
        self.called = False
        """Whether the model was called since :meth:`whole_step` began."""
        self._prepared = ExitStack()
        """The contexts of the next step, or of the running one, that change only the model."""
        self._recorders: list[Callable[[], AbstractContextManager[None]]] = []
        """Make the contexts that are entered when the step begins."""
        self._running: ExitStack | None = None
        """These contexts; None while no step runs."""
        self._in_whole_step = False
        self._calls = self._uncalled = 0
        self._stepped: set[int] = set()
        """The optimizers that have stepped since all of them had."""
        self._hooks: list[Any] = [
            part.register_forward_pre_hook(Hook(self._model_begins), prepend=True, with_kwargs=True)
            for part in run.model.modules
        ]
        for optimizer in run.optimizers:
            self._hooks.append(optimizer.register_step_pre_hook(self._optimizer_begins))
            self._hooks.append(optimizer.register_step_post_hook(self._optimizer_ends))

    @contextmanager
    def whole_step(self) -> Iterator[None]:
        """Around a step that is passed to the run as a function: calls and optimizers neither begin nor end it."""
        self._in_whole_step, self.called = True, False
        try:
            yield
        finally:
            self._in_whole_step = False

    def prepare(self) -> None:
        """Prepare the model for the next step."""
        self._recorders = self.run.prepare_step(self._prepared)

    def prepare_again(self) -> None:
        """Prepare the model for the step that was aborted, which is retried."""
        self._recorders = self.run.prepare_contexts(self._prepared)

    def end(self) -> None:
        """End the running step; if none runs, the step did not call the model."""
        running, self._running = self._running, None
        self.note_calls(running is not None)
        if running is None:
            if self.run.ranks.all.alone:
                return
            running = ExitStack()  # other ranks decide something together in their step, with this one
            self.run.pass_door()
            self.run.begin_step(running)
        try:
            running.close()
            self._prepared.close()
        except BaseException:
            self.abort()
            raise
        self.run.end_step()
        self.prepare()

    def abort(self) -> None:
        """End a step that does not reach its end, so that the ranks do not agree on it."""
        running, self._running = self._running, None
        for stack in (running, self._prepared):
            if stack is not None:
                stack.__exit__(_Aborted, _Aborted(), None)
        self._recorders = []
        self.run.take_off()

    def note_calls(self, called: bool) -> None:
        """Warn if several steps in a row do not call the model that the run was given."""
        self._uncalled = 0 if called else self._uncalled + 1
        if self._uncalled == UNCALLED:
            model = self.run.model.modules[0]
            path = find_layers(model, self.run.model.layers).path.split(".")
            inner = f", such as its {path[0]!r}" if path[0] else ""
            self.run.say(
                "warned",
                f"the loop has not called the {type(model).__name__} that adapt() was given in {UNCALLED} steps, so"
                f" nothing is measured or planned: pass the module that it calls{inner}",
            )

    def remove(self) -> None:
        """Remove the hooks."""
        take_back(hook.remove for hook in self._hooks)

    def _model_begins(self, part: nn.Module, args: Any, kwargs: Any) -> None:
        # Under a dispatch mode forward-mode gradients use other formulas, and no loop trains with them.
        if not torch.is_grad_enabled() or in_forward_mode():
            return
        self.called = True
        inputs = tensors_of((args, kwargs))
        self.run.pass_door(inputs)
        self.run.compact_if_due()
        if self._running is None and not self._in_whole_step:
            self._begin()
        self.run.model_begins(inputs)
        if self._in_whole_step:
            return
        self._calls += 1
        if self._calls == UNENDED and not self.run.number:
            self.run.say(
                "warned",
                f"the model was called {UNENDED} times and no step has ended: pass every optimizer of the loop to"
                " adapt(), or call run.step() after each step",
            )

    def _begin(self) -> None:
        running = self._running = ExitStack()
        try:
            for record in self._recorders:
                running.enter_context(record())
            self.run.begin_step(running)
        except RuntimeError:  # a transform of torch.func allows no hooks: the step runs unwatched
            self.abort()
            self._running = ExitStack()
        except BaseException:
            self.abort()
            raise

    def _optimizer_begins(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.run.profiling.optimizer_begins()

    def _optimizer_ends(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.run.profiling.optimizer_ends()
        again = id(optimizer) in self._stepped
        self._stepped.add(id(optimizer))
        if again or len(self._stepped) == len(self.run.optimizers):
            self._stepped = set()
            if self.ended_by_optimizers and not self._in_whole_step:
                self.end()


def unwrapped(optimizer: Any) -> Optimizer:
    """The optimizer itself, where a framework has wrapped it in another one, as accelerate and Lightning do."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = inner
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"adapt() takes optimizers of torch.optim, or wrappers of such; found {optimizer!r}")
    return optimizer
