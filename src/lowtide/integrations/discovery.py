"""Find what a script trains, without a line in it.

[Note: finding a model]
Optimizers are noted when they are made. From then on every call of a module is looked at, until each optimizer has its
model: the outermost module that is called with gradients enabled and holds parameters of the optimizer. It is attached
to before that call, so that its first step is rescued too. While it runs, and once nothing is left to be found, calls
are not looked at, and cost nothing.

A Trainer of transformers or of Lightning is attached to as by :func:`lowtide.attach`, when its training begins: it has
its steps as functions, which can be retried. Nothing is searched for meanwhile. Its class is changed when its module is
imported; nothing is imported here before the script does.

Nothing here ends a script. What cannot be attached to trains as it would alone, and it is said why.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from lowtide.errors import ModelError, PolicyError
from lowtide.integrations.after_import import AfterImport
from lowtide.integrations.settings import Settings

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from lowtide.integrations.attachment import Attachment
    from lowtide.operators.layers import Layers

__all__ = ["Discovery", "Found"]

UNFOUND = 3
"""Steps of an optimizer after which its model is searched for no longer."""
TRAINED = 2
"""Steps after which a model is released when another one is found: a script may train several, one after another. It is
found again if it is called again."""
OPTIMIZERS = 8
"""The most optimizers of a model; more of them are one for each parameter, and step while backward runs."""

_TRAINERS = {
    "transformers.trainer": "train",
    "lightning.pytorch.trainer.trainer": "fit",
    "pytorch_lightning.trainer.trainer": "fit",
}
"""Modules that have a ``Trainer``, and the method of it that trains."""


@dataclass
class Found:
    """A model that was attached to."""

    model: str
    layers: int
    path: str
    optimizers: tuple[str, ...]
    attachment: Attachment = field(repr=False)
    directory: Path | None = None
    """Where its run is saved."""

    @property
    def text(self) -> str:
        """What was attached to, for a line."""
        stepped = f", stepped by {' and '.join(self.optimizers)}" if self.optimizers else ""
        where = f" at {self.path!r}" if self.path else ""
        return f"{self.model}, {self.layers} layers{where}{stepped}"


class Discovery:
    """Finds the models that a script trains. See [Note: finding a model]."""

    def __init__(self, settings: Settings, say: Callable[[str], None]) -> None:
        self.settings, self.say = settings, say
        self.found: list[Found] = []
        self.refusals: list[str] = []
        self._made: list[str] = []
        """The optimizers that the script has made, by the names of their classes."""
        self._unpaired: WeakValueDictionary[int, Optimizer] = WeakValueDictionary()
        """Those whose model was not found yet, by their ids, in the order in which they were made."""
        self._steps: Counter[int] = Counter()
        """How often each of them has stepped."""
        self._frameworks = 0
        """How many trainings of frameworks run now."""
        self._call: Callable[..., Any] | None = None
        """What modules are called by; None while calls are not looked at."""
        self._active = ExitStack()

    @contextmanager
    def searching(self) -> Iterator[None]:
        """Around the script."""
        wanted = {name: functools.partial(self._watch_trainer, method=method) for name, method in _TRAINERS.items()}
        # Attachments are removed first, with the script's error if there is one; then the classes are restored.
        with ExitStack() as restored, self._active:
            self._restored = restored
            restored.enter_context(AfterImport({**wanted, "torch.optim.optimizer": self._watch_optimizers}))
            restored.callback(self._look_away)
            yield

    def why_nothing(self) -> str:
        """Why nothing was attached to."""
        if self.refusals:
            return "; ".join(self.refusals)
        if not self._made:
            return (
                "no optimizer of torch.optim was made in this process; a script that starts processes of its own is"
                " run by torchrun, with `-m lowtide run` before its name"
            )
        return (
            f"no module that was called with gradients enabled holds the parameters of {', '.join(self._made[:3])};"
            " put lowtide.adapt(model, optimizer) into the script"
        )

    # What an attachment reports.

    def attached(self, attachment: Attachment, model: nn.Module, layers: Layers) -> None:
        """A model was attached to."""
        run = attachment.run
        inner = getattr(model, "module", model)  # as in a wrapper
        optimizers = tuple(type(one).__name__ for one in run.optimizers) if run is not None else ()
        directory = run.journal.directory if run is not None else None
        found = Found(type(inner).__name__, len(layers.modules), layers.path, optimizers, attachment, directory)
        self.found.append(found)
        self.say(f"{'applies the Policy to' if run is None else 'attached to'} {found.text}")

    def refused(self, error: Exception) -> None:
        """A model could not be attached to."""
        text = str(error) or type(error).__name__
        self.refusals.append(text)
        self.say(f"not attached: {text}")

    def _new_attachment(self) -> Attachment:
        from lowtide.integrations.attachment import Attachment

        settings, number = self.settings, len(self.found) + 1
        if settings.directory is not None and number > 1:
            settings = replace(settings, directory=Path(settings.directory) / str(number))
        return Attachment(settings, self)

    # Frameworks.

    def _watch_trainer(self, module: ModuleType, *, method: str) -> None:
        trainer = vars(module).get("Trainer")
        if trainer is None or method not in vars(trainer):
            return
        original = vars(trainer)[method]

        @functools.wraps(original)
        def train(this: Any, *args: Any, **kwargs: Any) -> Any:
            from lowtide.integrations.attach import integration

            if self._frameworks:  # a training inside a training
                return original(this, *args, **kwargs)
            attachment = self._new_attachment()
            self._frameworks += 1
            try:
                try:
                    integration(this)(this, attachment)
                except Exception as error:
                    self.refused(error)
                with attachment:
                    return original(this, *args, **kwargs)
            finally:
                attachment.release()  # the script may train other models afterwards
                self._frameworks -= 1
                self.look_again()

        setattr(trainer, method, train)
        self._restored.callback(setattr, trainer, method, original)

    # Loops of the script's own.

    def _watch_optimizers(self, module: ModuleType) -> None:
        kind = module.Optimizer
        original = kind.__init__

        @functools.wraps(original)
        def made(this: Any, *args: Any, **kwargs: Any) -> None:
            original(this, *args, **kwargs)
            if not self._frameworks:
                self._made.append(type(this).__name__)
                self._unpaired[id(this)] = this
                self._look()

        kind.__init__ = made
        self._restored.callback(setattr, kind, "__init__", original)
        hook = module.register_optimizer_step_post_hook(self._stepped)
        self._restored.callback(hook.remove)

    def _stepped(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """An optimizer has stepped; its model should have been called by now."""
        if id(optimizer) in self._unpaired and not self._frameworks:
            self._steps[id(optimizer)] += 1
            if self._steps[id(optimizer)] >= UNFOUND:
                del self._unpaired[id(optimizer)], self._steps[id(optimizer)]

    def _look(self) -> None:
        """Look at every call of a module."""
        from torch import nn

        if self._call is None:
            self._call = nn.Module.__call__
            nn.Module.__call__ = _observed(self, self._call)  # type: ignore[method-assign]

    def _look_away(self) -> None:
        from torch import nn

        if self._call is not None:
            nn.Module.__call__ = self._call  # type: ignore[method-assign]
            self._call = None

    def called(self, module: nn.Module) -> bool:
        """A module is called; whether nothing is searched for inside it, until :meth:`look_again`."""
        import torch

        if self._frameworks or not self._unpaired:
            self._look_away()
            return False
        if not torch.is_grad_enabled():  # nothing is trained inside
            self._look_away()
            return True
        from lowtide.integrations.deepspeed import is_engine
        from lowtide.integrations.pairs import optimizers_of

        engine = is_engine(module)
        optimizers = [] if engine else optimizers_of(module, list(self._unpaired.values()))
        if not engine and not optimizers:
            return False
        self._look_away()
        attachment = self._new_attachment()
        try:
            self._active.enter_context(attachment.training())
            if engine:
                from lowtide.integrations.deepspeed import attach

                attach(module, attachment)
                self._unpaired.clear()  # they are the engine's
            else:
                for one in optimizers:
                    del self._unpaired[id(one)]
                self._attach(module, optimizers, attachment)
        except Exception as error:
            self.refused(error)
        return True

    def _attach(self, module: nn.Module, optimizers: list[Optimizer], attachment: Attachment) -> None:
        from torch import nn
        from torch.nn.parallel import DistributedDataParallel

        from lowtide.adaptive.session import runs_of
        from lowtide.integrations.pairs import has_layers

        if runs_of(module, *optimizers):
            raise PolicyError(f"{type(module).__name__} is adapted by lowtide.adapt() in the script")
        if isinstance(module, nn.DataParallel):
            raise PolicyError(
                "torch.nn.DataParallel copies the model in every step: use DistributedDataParallel and torchrun"
            )
        if len(optimizers) > OPTIMIZERS:
            raise PolicyError(
                f"{type(module).__name__} has {len(optimizers)} optimizers, of which one may step while backward runs"
            )
        model = module.module if isinstance(module, DistributedDataParallel) else module
        if not has_layers(model, self.settings.layers):
            raise ModelError(
                f"{type(model).__name__} has no layers of one kind, so that there is nothing to decide; if it has,"
                " name the module that holds them with --layers"
            )
        self._release_idle()
        attachment.apply_policy(model)
        attachment.begin(lambda: attachment.adapt(model, optimizers))

    def _release_idle(self) -> None:
        """Release the models that may not be trained any more, so that their memory can be freed."""
        for found in self.found:
            run = found.attachment.run
            if run is not None and run.number >= TRAINED and not run.loop.is_in_step:
                found.attachment.release()
                self._unpaired.update({id(one): one for one in run.optimizers})

    def look_again(self) -> None:
        """The call of a model has ended: search for what is left."""
        if self._unpaired and not self._frameworks:
            self._look()


def _observed(discovery: Discovery, call: Callable[..., Any]) -> Callable[..., Any]:
    """``Module.__call__``, which reports each call, but for those inside a model that was found, and for those that
    torch.compile traces."""
    import torch

    @functools.wraps(call)
    def observed(this: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not discovery.called(this):
            return call(this, *args, **kwargs)
        try:
            return call(this, *args, **kwargs)
        finally:
            discovery.look_again()

    return observed
