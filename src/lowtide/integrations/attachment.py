"""What was attached to a framework's loop: the settings, the run or the Policy at work, and how to remove it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lowtide.errors import PolicyError
from lowtide.integrations.every_rank import wait_for_every_rank

if TYPE_CHECKING:
    from torch import nn
    from torch.amp import GradScaler

    from lowtide.adaptive.session import Adaptive
    from lowtide.planner.plan import Plan
    from lowtide.policy import Policy
    from lowtide.runtime.apply import Handle

__all__ = ["Attachment", "Settings", "innermost"]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What to do: apply a Policy, or adapt."""

    policy: Policy | Plan | str | Path | None = None
    """The Policy to apply; None: adapt. The others but ``layers`` are those of :func:`lowtide.adapt`."""
    budget: int | str = "auto"
    profiling_steps: int | None = None
    rescue: bool = True
    watch: Literal["suspicion", "always"] = "suspicion"
    swap: bool = True
    layers: str | None = None
    directory: str | Path | None = None
    verbose: bool = True

    def check(self) -> None:
        """PolicyError where a fixed Policy is given together with settings of the adaptive mode."""
        if self.policy is None:
            return
        plain = Settings(policy=self.policy, layers=self.layers, verbose=self.verbose)
        given = [one.name for one in fields(self) if getattr(self, one.name) != getattr(plain, one.name)]
        if given:
            raise PolicyError(
                f"attach(policy=…) applies that Policy and measures nothing, so {', '.join(given)} would have no"
                " effect; leave out one or the other"
            )


class Attachment:
    """lowtide inside a framework's loop; :func:`lowtide.attach` makes one."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.runs: list[Adaptive] = []
        """The adaptive runs, one for each model that is trained, from the first step on; they stay here afterwards."""
        self.handle: Handle | None = None
        """The Policy at work, once the framework has a model; it stays here afterwards."""
        self._active = ExitStack()
        """What is on while the framework trains."""
        self._is_training = False
        self._overrides: list[Callable[[], None]] = []

    # What an integration calls.

    def override(self, owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Replace a method of one object, until this is removed; ``make`` is given the original."""
        original = getattr(owner, name)
        present, before = name in vars(owner), vars(owner).get(name)
        setattr(owner, name, functools.wraps(original)(make(original)))

        def restore() -> None:
            if present:
                setattr(owner, name, before)
            else:
                vars(owner).pop(name, None)

        self._overrides.append(restore)

    def apply_policy(self, model: nn.Module) -> None:
        """Apply the Policy, if there is one, to a model that is not sharded or wrapped yet."""
        if self.settings.policy is None or self.handle is not None:
            return
        from lowtide.runtime.apply import apply

        wait_for_every_rank("apply")
        handle = apply(model, self.settings.policy, layers=self.settings.layers, disable_checkpointing=True)
        self.handle = self._active.enter_context(handle)

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
        return run

    @contextmanager
    def training(self) -> Iterator[None]:
        """Around the framework's training: when it ends, the model and its optimizers are restored."""
        self.stop()
        self.runs, self.handle = [], None
        self._is_training = True
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
