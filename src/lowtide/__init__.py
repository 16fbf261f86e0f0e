"""lowtide decides which activations of a training run to keep, recompute or swap to host memory.

These are the verbs, the Policy and its parts, and the errors that the verbs raise; the rest is imported from its
package, such as ``from lowtide.models import chunked_cross_entropy``. Importing lowtide is light: each name is loaded
when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lowtide.api import adapt, plan
    from lowtide.config.load import load_policy
    from lowtide.errors import (
        ConfigError,
        InfeasibleError,
        LowtideError,
        ModelError,
        PatternError,
        PlanError,
        PolicyError,
        RebuildError,
        RescueError,
        SwapError,
        TraceError,
        UnitError,
        UnmatchedError,
        VerificationError,
    )
    from lowtide.integrations.attach import attach
    from lowtide.planner.plan import Plan
    from lowtide.policy import (
        CollectiveRule,
        Communication,
        Decision,
        Keep,
        LayerPolicy,
        Pattern,
        Policy,
        Recompute,
        Rule,
        Swap,
    )
    from lowtide.runtime.apply import Handle, apply
    from lowtide.runtime.limits import Limits
    from lowtide.runtime.verify import verify

__version__ = "0.1.0"

__all__ = [
    "CollectiveRule",
    "Communication",
    "ConfigError",
    "Decision",
    "Handle",
    "InfeasibleError",
    "Keep",
    "LayerPolicy",
    "Limits",
    "LowtideError",
    "ModelError",
    "Pattern",
    "PatternError",
    "Plan",
    "PlanError",
    "Policy",
    "PolicyError",
    "RebuildError",
    "Recompute",
    "RescueError",
    "Rule",
    "Swap",
    "SwapError",
    "TraceError",
    "UnitError",
    "UnmatchedError",
    "VerificationError",
    "adapt",
    "apply",
    "attach",
    "load_policy",
    "plan",
    "verify",
]


_MODULES = {
    "Handle": "lowtide.runtime.apply",
    "Limits": "lowtide.runtime.limits",
    "Plan": "lowtide.planner.plan",
    "adapt": "lowtide.api",
    "apply": "lowtide.runtime.apply",
    "attach": "lowtide.integrations.attach",
    "load_policy": "lowtide.config.load",
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
