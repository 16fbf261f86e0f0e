"""What a plan predicted, compared with what a run measured."""

from __future__ import annotations

from typing import NamedTuple

from lowtide.errors import ReportError
from lowtide.planner.plan import Plan
from lowtide.report.run import Run
from lowtide.report.words import fullest

__all__ = ["Prediction", "measured_stage", "predictions"]


class Prediction(NamedTuple):
    """One number."""

    what: str
    """``peak`` in bytes, ``step`` in seconds."""
    predicted: float
    measured: float | None
    """None where it was not measured."""

    @property
    def error(self) -> float | None:
        """How much too high the prediction was, as a share of what was measured."""
        return self.predicted / self.measured - 1 if self.measured else None


def predictions(plan: Plan, run: Run) -> tuple[Prediction, Prediction]:
    """The peak of the stage that was measured, and the step."""
    place = measured_stage(plan, run)
    peak = next(stage.peak for stage in plan.simulation.stages if stage.stage == place)
    return Prediction("peak", peak, run.peak), Prediction("step", plan.simulation.seconds, run.seconds)


def measured_stage(plan: Plan, run: Run | None) -> int:
    """The stage that was measured: the fullest unless the run says."""
    if run is None or run.stage is None:
        return fullest(plan).stage
    known = {stage.stage for stage in plan.simulation.stages}
    if run.stage not in known:
        raise ReportError(f"the plan has the stages 0 to {max(known)}; stage {run.stage} was measured")
    return run.stage
