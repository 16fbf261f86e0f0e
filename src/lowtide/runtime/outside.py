"""What the code of a module names outside of it: global variables, and variables of the functions around it.

A counter or a generator there is state as an attribute is. Found are the names in the code of the class's methods and
of the functions that these call by such a name. Code of torch and of other large libraries is not looked at.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

from torch import nn

__all__ = ["Outside", "Variable"]

_LIBRARIES = frozenset({"torch", "torchvision", "transformers", "numpy", "lowtide", "builtins", "functools", "math"})
_LIMIT = 200
"""No more functions than this are followed."""


class Variable(NamedTuple):
    """A variable outside of a module."""

    name: str
    holder: dict[str, Any] | CellType

    @property
    def value(self) -> Any:
        """What it is now; ``...`` if it is not there."""
        if isinstance(self.holder, dict):
            return self.holder.get(self.name, ...)
        try:
            return self.holder.cell_contents
        except ValueError:
            return ...

    def set(self, value: Any) -> None:
        """Assign it."""
        if isinstance(self.holder, CellType):
            self.holder.cell_contents = value
        else:
            self.holder[self.name] = value


class Outside:
    """Knows the variables that code names, once it was asked. It lives with what it was asked for: it holds them."""

    def __init__(self) -> None:
        self._known: dict[Any, tuple[Variable, ...]] = {}

    def named_by(self, code: type[nn.Module] | FunctionType) -> tuple[Variable, ...]:
        """The variables that a class's own code, or a function's, names."""
        known = self._known.get(code)
        if known is None:
            known = self._known[code] = _named_by(_methods(code) if isinstance(code, type) else _own([code]))
        return known


def _methods(kind: type[nn.Module]) -> list[FunctionType]:
    functions = [value for one in kind.__mro__ for value in vars(one).values() if isinstance(value, FunctionType)]
    return [function for function in _own(functions) if function.__name__ != "__init__"]


def _own(functions: list[FunctionType]) -> list[FunctionType]:
    return [function for function in functions if not _is_library(function.__module__)]


def _named_by(functions: list[FunctionType]) -> tuple[Variable, ...]:
    found: dict[tuple[int, str], Variable] = {}
    for function in functions:  # which grows
        for variable in _variables(function):
            value = variable.value
            if isinstance(value, FunctionType):
                if value not in functions and len(functions) < _LIMIT:
                    functions += _own([value])
            elif value is ... or not isinstance(value, type | ModuleType | BuiltinFunctionType | nn.Module):
                found[id(variable.holder), variable.name] = variable
    return tuple(found.values())


def _variables(function: FunctionType) -> Iterator[Variable]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        if name not in ("self", "__class__"):
            yield Variable(name, cell)
    for name in _names(function.__code__):
        if name in function.__globals__ and not name.startswith("__"):
            yield Variable(name, function.__globals__)


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):  # a function inside
            yield from _names(constant)


def _is_library(module: str | None) -> bool:
    return (module or "builtins").partition(".")[0] in _LIBRARIES
