"""The ``Trainer`` of transformers, and those that are derived from it, such as TRL's.

[Note: inside a Trainer]
A Trainer's callbacks are never given the trainer, and none is called between gradient checkpointing, which is turned on
when training begins, and sharding. So three of its methods are replaced, on the one object:

- ``_inner_training_loop``: all of a training, from the first step to the last; with ``auto_find_batch_size``, one
  attempt at it. Around it everything is on, and at its end everything is restored.
- ``_wrap_model``, before the model is sharded, wrapped or compiled: a fixed Policy is applied here.
- ``training_step``, forward and backward of a micro-batch: a part of a step, which can be retried. At the first one the
  model, the optimizer and the scaler are final: an adaptive run begins here.

The optimizer's step ends a step. See [Note: parts of a step].
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from torch import nn

from lowtide.errors import ModelError, PolicyError, RescueError
from lowtide.integrations.attachment import Attachment
from lowtide.integrations.deepspeed import adapt_engine, is_engine
from lowtide.integrations.plain_state import PlainState

__all__ = ["attach"]

_CHUNKED = (
    "lowtide: TRL computes the logits of up to 4,096 tokens and 32,768 words at a time, in one buffer that no Policy"
    " makes smaller; if it is what does not fit, make the micro-batch smaller and accumulate more of them"
)


def attach(trainer: Any, attachment: Attachment) -> Attachment:
    """Attach to a Trainer that is not training yet. See [Note: inside a Trainer]."""
    _refuse(trainer)

    def around_training(train: Callable[..., Any]) -> Callable[..., Any]:
        def inner_training_loop(*args: Any, **kwargs: Any) -> Any:
            try:
                with attachment.training():
                    return train(*args, **kwargs)
            except RescueError as error:
                if type(trainer.args).__module__.startswith("trl."):
                    error.add_note(_CHUNKED)
                if not trainer.args.auto_find_batch_size:
                    raise
                # By these words accelerate knows that a smaller batch may help.
                raise RuntimeError(f"lowtide: out of memory. {error}") from error

        return inner_training_loop

    def before_wrapping(wrap: Callable[..., Any]) -> Callable[..., Any]:
        def wrap_model(model: nn.Module, training: bool = True, dataloader: Any = None) -> Any:
            if training:
                attachment.apply_policy(trainer.accelerator.unwrap_model(model))
            return wrap(model, training, dataloader)

        return wrap_model

    def as_a_part(step: Callable[..., Any]) -> Callable[..., Any]:
        def training_step(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
            attachment.check_order("trainer.train()")
            run = attachment.begin(lambda: _begin(trainer, model, attachment))
            if run is None:
                return step(model, *args, **kwargs)
            part = _Part(trainer, model, lambda: step(model, *args, **kwargs))
            return run.part(part, last=trainer.accelerator.sync_gradients)

        return training_step

    for name, make in (
        ("_inner_training_loop", around_training),
        ("_wrap_model", before_wrapping),
        ("training_step", as_a_part),
    ):
        attachment.override(trainer, name, make)
    return attachment


def _begin(trainer: Any, model: nn.Module, attachment: Attachment) -> None:
    accelerator = trainer.accelerator
    if is_engine(model):
        adapt_engine(model, attachment)
    else:
        attachment.adapt(accelerator.unwrap_model(model), [trainer.optimizer], accelerator.scaler)


class _Part:
    """A micro-batch that can be retried."""

    def __init__(self, trainer: Any, model: nn.Module, step: Callable[[], Any]) -> None:
        self.trainer, self.model, self.step = trainer, model, step
        self.counted = PlainState(trainer)
        self.synchronises = bool(trainer.accelerator.sync_gradients)
        self.begun = False

    def __call__(self) -> Any:
        if not self.begun:
            self.begun = True
            return self.step()
        self.counted.restore()
        # One that accumulates may be retried while the step's last one runs, in which gradients are reduced.
        without = not self.synchronises and self.trainer.accelerator.sync_gradients
        with self.trainer.accelerator.no_sync(self.model) if without else nullcontext():
            return self.step()


def _refuse(trainer: Any) -> None:
    """Raise where attaching could have no effect, or would be wrong."""
    args = trainer.args
    missing = [name for name in ("_inner_training_loop", "_wrap_model", "training_step") if not hasattr(trainer, name)]
    if missing:
        raise ModelError(f"{type(trainer).__name__} has no {', '.join(missing)}: this needs transformers 5")
    if getattr(args, "activation_offloading", False):
        raise PolicyError(
            f"{type(args).__name__}(activation_offloading=True) offloads activations by itself, and what runs inside it"
            " is out of reach: set activation_offloading=False and let lowtide decide what to offload, or do not attach"
        )
    if args.n_gpu > 1:
        raise PolicyError(
            f"the trainer would use torch.nn.DataParallel on {args.n_gpu} devices, which copies the model in every"
            " step: start it with torchrun or accelerate launch, one process for each device"
        )
