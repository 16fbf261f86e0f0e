"""A module's own dictionaries: what it has registered, without its children's."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter

from torch import Tensor, nn

__all__ = ["buffers_of", "parameters_of", "submodules_of"]


submodules_of: Callable[[nn.Module], dict[str, nn.Module | None]] = attrgetter("_modules")
"""The modules that a module holds itself, by name; the dictionary that it looks them up in."""
buffers_of: Callable[[nn.Module], dict[str, Tensor | None]] = attrgetter("_buffers")
"""The buffers that a module holds itself; the dictionary that it looks them up in."""
parameters_of: Callable[[nn.Module], dict[str, nn.Parameter | None]] = attrgetter("_parameters")
"""The parameters that a module holds itself; the dictionary that it looks them up in."""
