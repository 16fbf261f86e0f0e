"""What was attached to a framework's loop: the run or the Policy at work, and how to remove it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from lowtide.errors import PolicyError
from lowtide.integrations.every_rank import wait_for_every_rank
from lowtide.integrations.settings import Settings
from lowtide.operators.layers import Layers, find_layers
from lowtide.runtime.compiled import compiled_in_place

if TYPE_CHECKING:
    from torch import nn
    from torch.amp import GradScaler

    from lowtide.adaptive.session import Adaptive
    from lowtide.runtime.apply import Handle

__all__ = ["Attachment", "Observer", "innermost"]


_MARK = "_replaced_by_lowtide"


class Observer(Protocol):
    """Notified of what came of an attachment; with one, nothing that cannot be attached to ends the training."""

    def attached(self, attachment: Attachment, model: nn.Module, layers: Layers) -> None:
        """Its run has begun, or its Policy was applied."""

    def refused(self, error: Exception) -> None:
        """The training goes on without lowtide."""


class Attachment:
    """lowtide inside a framework's loop; :func:`lowtide.attach` makes one."""

    def __init__(self, settings: Settings, observer: Observer | None = None) -> None:
        self.settings = settings
        self.observer = observer
        self.runs: list[Adaptive] = []
        """The adaptive runs, one for each model that is trained, from the first step on; they stay here afterwards."""
        self.handle: Handle | None = None
        """The Policy at work, once the framework has a model; it stays here afterwards."""
        self._active = ExitStack()
        """What is on while the framework trains."""
        self._is_training = self._refused = False
        self._overrides: list[Callable[[], None]] = []

    # What an integration calls.

    def override(self, owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Replace a method of one object, until this is removed; ``make`` is given the original."""
        original = getattr(owner, name)
        present, before = name in vars(owner), vars(owner).get(name)
        if _MARK in getattr(before, "__dict__", {}):
            raise PolicyError(f"lowtide is attached to this {type(owner).__name__} already; call remove() of it first")
        replacement = functools.wraps(original)(make(original))
        vars(replacement)[_MARK] = True
        setattr(owner, name, replacement)

        def restore() -> None:
            if present:
                setattr(owner, name, before)
            else:
                vars(owner).pop(name, None)

        self._overrides.append(restore)

    def apply_policy(self, model: nn.Module) -> None:
        """Apply the Policy, if there is one, to a model that is not sharded or wrapped yet."""
        policy = self.settings.policy
        if policy is None or self.handle is not None or self._refused:
            return
        from lowtide.runtime.apply import apply

        def begin() -> None:
            wait_for_every_rank("apply")
            handle = apply(model, policy, layers=self.settings.layers, disable_checkpointing=True)
            self.handle = self._active.enter_context(handle)
            if self.observer is not None:
                self.observer.attached(self, model, handle.layers)

        self._attempt(begin)

    def begin(self, adapt: Callable[[], object]) -> Adaptive | None:
        """The run, which ``adapt`` begins at the first call; None with a Policy, or where it was refused."""
        if self.settings.policy is None and not self.runs and not self._refused:
            self._attempt(adapt)
        return self.run

    def _attempt(self, begin: Callable[[], object]) -> None:
        try:
            begin()
        except Exception as error:
            if self.observer is None:
                raise
            self._refused = True
            self.observer.refused(error)

    def adapt(
        self,
        model: nn.Module,
        optimizers: Sequence[Any],
        scaler: GradScaler | None = None,
        *,
        layers: str | None = None,
        ended_by_optimizers: bool = True,
    ) -> Adaptive | None:
        """Begin an adaptive run, unless there is a Policy.

        A step ends when all optimizers have stepped, or where ``run.step()`` is called if it is not
        ``ended_by_optimizers``. ``layers`` names the layers where the settings' name is not that of ``model``.
        """
        settings = self.settings
        if settings.policy is not None:
            return None
        from lowtide.api import adapt

        if self.observer is not None and not compiled_in_place(model, layers or settings.layers):
            raise PolicyError(  # now: what its backend cannot do would end the script in a step
                f"{type(model).__name__} is compiled as a whole, or a part of its layers is; compile its layers in"
                " place, as by layer.compile(), run it with a Policy, or put lowtide.adapt() into the script"
            )
        wait_for_every_rank("adapt")
        run = adapt(
            model,
            [innermost(one) for one in optimizers],
            budget=settings.budget,
            profiling_steps=settings.profiling_steps,
            rescue=settings.rescue,
            watch=settings.watch,
            swap=settings.swap,
            scaler=scaler,
            layers=layers or settings.layers,
            directory=settings.directory,
            verbose=settings.verbose,
        )
        if ended_by_optimizers:
            self._active.enter_context(run)
        else:
            self._active.callback(run.remove)
        self.runs.append(run)
        if self.observer is not None:
            self.observer.attached(self, model, find_layers(model, run.model.layers))
        return run

    @contextmanager
    def training(self) -> Iterator[None]:
        """Around the framework's training: when it ends, the model and its optimizers are restored."""
        self.release()
        self._is_training, self._refused = True, False
        try:
            with self._active:
                yield
        finally:
            self._is_training = False

    def check_order(self, training: str) -> None:
        """PolicyError in a step of a training that had begun before lowtide was attached."""
        if not self._is_training:
            raise PolicyError(f"lowtide was attached while the training was running: attach before {training}")

    # What a user calls.

    @property
    def run(self) -> Adaptive | None:
        """The last adaptive run; None before the first step, and with a fixed Policy."""
        return self.runs[-1] if self.runs else None

    def stop(self) -> None:
        """Restore the model and its optimizers; the next training begins again."""
        active, self._active = self._active, ExitStack()
        active.close()

    def release(self) -> None:
        """Restore the model and its optimizers, and hold neither any longer."""
        self.stop()
        self.runs, self.handle = [], None

    def remove(self) -> None:
        """Restore everything: the model, its optimizers and the framework's object."""
        self.stop()
        while self._overrides:
            self._overrides.pop()()

    def __enter__(self) -> Attachment:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def innermost(optimizer: Any) -> Any:
    """The optimizer that steps, where frameworks have wrapped it, perhaps several times."""
    while (inner := getattr(optimizer, "optimizer", None)) is not None:
        optimizer = inner
    return optimizer
