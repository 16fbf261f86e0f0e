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

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_post_hook

from lowtide._torch_private.backward import in_forward_mode
from lowtide.operators.calls import tensors_of
from lowtide.operators.layers import find_layers
from lowtide.operators.wrappers import Hook, take_back

if TYPE_CHECKING:
    from lowtide.adaptive.session import Adaptive

__all__ = ["UserLoop", "check_optimizers", "unwrapped"]

UNCALLED = 3
"""Steps in a row without a call of the model before a warning."""


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
        self._uncalled = 0
        self._stepped: set[int] = set()
        """The optimizers that have stepped since all of them had."""
        self._updated = self._said = False
        """Whether parameters were updated since a step ended, before the first has; and whether that was said."""
        self._hooks: list[Any] = [
            part.register_forward_pre_hook(Hook(self._model_begins), prepend=True, with_kwargs=True)
            for part in run.model.modules
        ]
        for optimizer in run.optimizers:
            self._hooks.append(optimizer.register_step_pre_hook(self._optimizer_begins))
            self._hooks.append(optimizer.register_step_post_hook(self._optimizer_ends))
        self._hooks.append(register_optimizer_step_post_hook(partial(_any_optimizer_ends, ref(self))))

    @property
    def is_in_step(self) -> bool:
        """Whether a step of the user's loop runs."""
        return self._running is not None

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
        self._updated = False
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
        if self._updated and not self.run.number and not self._in_whole_step:
            self._say_unended()

    def _say_unended(self) -> None:
        """Say that steps do not end, so that nothing is ever measured."""
        self._updated, self._said = False, True
        if not self.run.optimizers:
            remedy = "pass the optimizer, adapt(model, optimizer), and put `with` around the loop"
        elif self.ended_by_optimizers:
            remedy = "the optimizers that adapt() was given have not all stepped; pass those of the loop"
        else:
            remedy = "put `with run:` around the loop, or give each step to run.step(...)"
        self.run.say("warned", f"the model is trained and no step of the run ends, so nothing is measured: {remedy}")

    def any_optimizer_ends(self, optimizer: Optimizer) -> None:
        """An optimizer has stepped, which may not have been given to the run."""
        if self.run.number or self._in_whole_step or self._said:
            return
        own = {id(parameter) for part in self.run.model.modules for parameter in part.parameters()}
        self._updated |= any(id(one) in own for group in optimizer.param_groups for one in group["params"])

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


def _any_optimizer_ends(loop: ref[UserLoop], optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Torch's hook on all optimizers; it must not keep a run alive, and its model, that is never removed."""
    if (found := loop()) is not None:
        found.any_optimizer_ends(optimizer)


def unwrapped(optimizer: Any) -> Optimizer:
    """The optimizer itself, where a framework has wrapped it in another one, as accelerate and Lightning do."""
    if isinstance(optimizer, LRScheduler):
        raise TypeError(f"adapt() takes the optimizer and not its {type(optimizer).__name__}: pass scheduler.optimizer")
    while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = inner
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"adapt() takes optimizers of torch.optim, or wrappers of such; found {type(optimizer).__name__}"
        )
    return optimizer


def check_optimizers(optimizers: Iterable[Optimizer], modules: Iterable[nn.Module]) -> None:
    """ValueError if an optimizer is another model's. Flat copies of parameters, as DeepSpeed makes them, may be any."""
    own = {id(parameter) for module in modules for parameter in module.parameters()}
    for optimizer in optimizers:
        given = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if given and not any(id(one) in own or not isinstance(one, nn.Parameter) for one in given):
            raise ValueError(
                f"none of the {len(given)} parameters of the {type(optimizer).__name__} are the model's: pass the"
                " model's own optimizer, made after the model was moved, sharded or wrapped"
            )
