"""lowtide decides which activations of a training run to keep, recompute or swap to host memory.

Importing it is light: each name is loaded when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lowtide.config.check import load_policy
    from lowtide.errors import ConfigError, LowtideError, PatternError, PolicyError, UnitError, UnmatchedError
    from lowtide.policy import (
        Catalogue,
        CommRule,
        Decision,
        Keep,
        LayerPolicy,
        Operator,
        Pattern,
        Policy,
        Recompute,
        Resolution,
        Rule,
        Swap,
        resolve,
    )

__version__ = "0.1.0.dev0"

__all__ = [
    "Catalogue",
    "CommRule",
    "ConfigError",
    "Decision",
    "Keep",
    "LayerPolicy",
    "LowtideError",
    "Operator",
    "Pattern",
    "PatternError",
    "Policy",
    "PolicyError",
    "Recompute",
    "Resolution",
    "Rule",
    "Swap",
    "UnitError",
    "UnmatchedError",
    "load_policy",
    "resolve",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'lowtide' has no attribute {name!r}")
    if name == "load_policy":
        module = "lowtide.config.check"
    else:
        module = "lowtide.errors" if name.endswith("Error") else "lowtide.policy"
    return getattr(import_module(module), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
