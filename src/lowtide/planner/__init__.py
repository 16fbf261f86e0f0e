"""The fastest Policy for a budget: schedule, problem, solve, simulate. :func:`lowtide.plan` is its one call."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lowtide.planner.pipeline import Pipeline, even_pipeline
    from lowtide.planner.plan import Plan
    from lowtide.planner.plan_file import load_plan, save_plan

__all__ = ["Pipeline", "Plan", "even_pipeline", "load_plan", "save_plan"]

_MODULES = {
    "Pipeline": "pipeline",
    "even_pipeline": "pipeline",
    "Plan": "plan",
    "load_plan": "plan_file",
    "save_plan": "plan_file",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
