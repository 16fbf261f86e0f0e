"""Torch's checkpoint: a module around another, hooks on a module, and calls in a model's own code."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from torch import nn
from torch.utils import checkpoint

from lowtide._torch_private.needed import needed_for

with needed_for("telling which modules are checkpointed"):
    from torch.distributed._composable.contract import _get_registry

__all__ = ["CHECKPOINT_FUNCTION", "composable_state", "is_checkpoint_wrapper", "runs_in_checkpoint"]

CHECKPOINT_FUNCTION = "checkpoint_fn"
"""The attribute of a ``checkpoint_wrapper`` that runs the wrapped module."""


def is_checkpoint_wrapper(module: nn.Module) -> bool:
    """Whether ``checkpoint_wrapper`` has made this module around another."""
    made_by = sys.modules.get("torch.distributed.algorithms._checkpoint.checkpoint_wrapper")
    return made_by is not None and isinstance(module, made_by.CheckpointWrapper)


def composable_state(module: nn.Module) -> Any:
    """What ``torch.distributed._composable.checkpoint`` has noted of a module; None if it was not called for it.

    Its ``enable_hook`` says whether the module is checkpointed.
    """
    called = sys.modules.get("torch.distributed._composable.checkpoint_activation")
    if called is None or "checkpoint" not in (_get_registry(module) or ()):
        return None
    return called.checkpoint.state(module)


def runs_in_checkpoint() -> bool:
    """Whether ``torch.utils.checkpoint`` has called what runs now, however. Slow: it walks the stack."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_filename != checkpoint.__file__:
        frame = frame.f_back
    return frame is not None
