"""``torch.compile``: which modules are compiled, and whether Dynamo is looking."""

from __future__ import annotations

import sys

import torch
from torch import compiler
from torch.compiler import is_dynamo_compiling

from lowtide._torch_private.needed import needed_for

with needed_for("telling compiled modules from eager ones"):
    from torch._C._dynamo.eval_frame import get_eval_frame_callback
    from torch._C._dynamo.guards import dict_version

__all__ = [
    "compiled_call",
    "dict_version",
    "is_compiled",
    "is_dynamo_compiling",
    "under_compilation",
]


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether ``torch.compile`` was asked for this very module, from outside or in place."""
    return _from_outside(module) or module._compiled_call_impl is not None


def compiled_call(module: torch.nn.Module) -> str:
    """The attribute that holds what runs outside the compiled function of a module."""
    in_place = not _from_outside(module) and module._compiled_call_impl is not None
    return "_compiled_call_impl" if in_place else "forward"


def _from_outside(module: torch.nn.Module) -> bool:
    dynamo = sys.modules.get("torch._dynamo.eval_frame")  # not imported before something is compiled; it takes long
    return dynamo is not None and isinstance(module, dynamo.OptimizedModule)


def under_compilation() -> bool:
    """Whether this is being traced by ``torch.compile``, or runs where it would have been."""
    # What `torch.compiler.is_compiling` asks in addition is for TorchScript, and takes microseconds of every layer.
    return is_dynamo_compiling() or compiler._is_compiling_flag or get_eval_frame_callback() is not None
