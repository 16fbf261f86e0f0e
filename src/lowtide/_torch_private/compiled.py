"""``torch.compile``: which modules are compiled, and whether Dynamo is looking."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import count
from types import FrameType
from typing import Any, ClassVar

import torch
from torch import compiler
from torch.compiler import is_dynamo_compiling

from lowtide._torch_private.needed import needed_for

with needed_for("telling compiled modules from eager ones"):
    from torch._C._dynamo.eval_frame import get_eval_frame_callback, set_eval_frame
    from torch._C._dynamo.guards import dict_version as _counted_version

__all__ = [
    "ATTRIBUTES_ARE_COUNTED",
    "NothingCompiled",
    "between_graphs",
    "compiled_call",
    "default_stance",
    "dict_version",
    "is_compiled",
    "is_dynamo_compiling",
    "runs_compiled",
    "uncompiled",
    "under_compilation",
]


def _attributes_are_counted() -> bool:
    class Probe:
        pass

    probe = Probe()
    versions = {_counted_version(vars(probe))}
    for value in range(2):
        probe.attribute = value  # type: ignore[attr-defined]
        versions.add(_counted_version(vars(probe)))
    return len(versions) == 3


ATTRIBUTES_ARE_COUNTED = _attributes_are_counted()
"""Whether the version of an object's attributes changes with them. In Python 3.13 only that of other mappings does."""
_numbers = count(-1, -1)


def _another(mapping: dict[Any, Any]) -> int:
    return next(_numbers)


dict_version: Callable[[dict[Any, Any]], int] = _counted_version if ATTRIBUTES_ARE_COUNTED else _another
"""A number that is another one after each change of a mapping, which may be the attributes of an object.

If it is the same as before, nothing has changed. Where attributes are not counted it is never the same twice: who asks
compares what is in them.
"""


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether ``torch.compile`` was asked for this very module, from outside or in place."""
    return _from_outside(module) or module._compiled_call_impl is not None


def uncompiled(module: torch.nn.Module) -> torch.nn.Module:
    """The module itself, where ``torch.compile`` has put another around it."""
    while _from_outside(module):
        module = module._orig_mod  # type: ignore[assignment]
    return module


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


def runs_compiled() -> bool:
    """Whether ``torch.compile`` has called what runs now, compiled or not. Slow: it walks the stack."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    frame: FrameType | None = sys._getframe() if dynamo is not None else None
    while frame is not None:
        code = frame.f_code  # what is excluded from compilation is called from the same file, by other functions
        if code.co_filename == dynamo.__file__ and code.co_name == "compile_wrapper":  # type: ignore[union-attr]
            return True
        frame = frame.f_back
    return False


class NothingCompiled:
    """What is compiled runs in eager mode between ``on`` and ``off``, as a context too; no-op before torch compiles."""

    _all: ClassVar[set[NothingCompiled]] = set()
    """Those that are on, in any order: torch restores what was set before, which may have been one of these."""
    _stance: ClassVar[Any] = None

    def on(self) -> None:
        """Let nothing be compiled from now on."""
        if "torch._dynamo" in sys.modules:
            if not self._all:
                NothingCompiled._stance = torch.compiler.set_stance("force_eager")
            self._all.add(self)

    def off(self) -> None:
        """As before, if no other is on; no-op if it is off."""
        if self in self._all:
            self._all.remove(self)
            if not self._all:
                NothingCompiled._stance.__exit__(None, None, None)

    def __enter__(self) -> None:
        self.on()

    def __exit__(self, *_: object) -> None:
        self.off()


def default_stance() -> AbstractContextManager[Any]:
    """Inside, what is compiled is compiled, whatever was set around it."""
    stance: AbstractContextManager[Any] = torch.compiler.set_stance("default")
    return stance


def between_graphs(
    forward: Callable[..., Any], make: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Callable[..., Any]:
    """What ``make`` makes of ``forward``, for where Dynamo breaks its graph: only ``forward`` itself is compiled."""
    compiler: Any = None

    def compiled(*args: Any, **kwargs: Any) -> Any:
        before = set_eval_frame(compiler)
        try:
            return forward(*args, **kwargs)
        finally:
            set_eval_frame(before)

    made = make(compiled)

    def not_compiled(*args: Any, **kwargs: Any) -> Any:
        nonlocal compiler
        compiler = set_eval_frame(None)
        try:
            return made(*args, **kwargs)
        finally:
            set_eval_frame(compiler)

    return torch.compiler.disable(not_compiled, recursive=False)  # type: ignore[no-any-return]
