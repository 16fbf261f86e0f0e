"""lowtide decides which activations of a training run to keep, recompute or swap to host memory.

Importing it is light: each name is loaded when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lowtide.adaptive.session import Adaptive
    from lowtide.api import adapt, plan
    from lowtide.config.check import load_policy
    from lowtide.errors import (
        CheckpointError,
        ConfigError,
        DataError,
        LaunchError,
        LowtideError,
        ModelError,
        PatternError,
        PlanError,
        PolicyError,
        RebuildError,
        RescueError,
        RunDirectoryError,
        SwapError,
        TraceError,
        UnitError,
        UnmatchedError,
        VerificationError,
    )
    from lowtide.models.chunked_loss import chunked_cross_entropy
    from lowtide.planner.plan import Plan
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
    from lowtide.runtime.apply import Handle, apply
    from lowtide.runtime.limits import Limits
    from lowtide.runtime.receipt import Receipt
    from lowtide.runtime.verify import Verification, verify
    from lowtide.trace.trace import Trace

__version__ = "0.1.0.dev0"

__all__ = [
    "Adaptive",
    "Catalogue",
    "CheckpointError",
    "CommRule",
    "ConfigError",
    "DataError",
    "Decision",
    "Handle",
    "Keep",
    "LaunchError",
    "LayerPolicy",
    "Limits",
    "LowtideError",
    "ModelError",
    "Operator",
    "Pattern",
    "PatternError",
    "Plan",
    "PlanError",
    "Policy",
    "PolicyError",
    "RebuildError",
    "Receipt",
    "Recompute",
    "RescueError",
    "Resolution",
    "Rule",
    "RunDirectoryError",
    "Swap",
    "SwapError",
    "Trace",
    "TraceError",
    "UnitError",
    "UnmatchedError",
    "Verification",
    "VerificationError",
    "adapt",
    "apply",
    "chunked_cross_entropy",
    "load_policy",
    "plan",
    "resolve",
    "verify",
]


_MODULES = {
    "Adaptive": "lowtide.adaptive.session",
    "Handle": "lowtide.runtime.apply",
    "Limits": "lowtide.runtime.limits",
    "Plan": "lowtide.planner.plan",
    "Receipt": "lowtide.runtime.receipt",
    "Trace": "lowtide.trace.trace",
    "Verification": "lowtide.runtime.verify",
    "adapt": "lowtide.api",
    "apply": "lowtide.runtime.apply",
    "chunked_cross_entropy": "lowtide.models.chunked_loss",
    "load_policy": "lowtide.config.check",
    "plan": "lowtide.api",
    "verify": "lowtide.runtime.verify",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'lowtide' has no attribute {name!r}")
    default = "lowtide.errors" if name.endswith("Error") else "lowtide.policy"
    return getattr(import_module(_MODULES.get(name, default)), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
