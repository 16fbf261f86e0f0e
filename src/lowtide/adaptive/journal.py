"""The journal of an adaptive run: printed as it happens, and saved in the run's directory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from lowtide.adaptive.decide import Decided
from lowtide.adaptive.record import RECORD_FILE, AdaptEvent, AdaptRecord, AdaptStep, Kind, save_record
from lowtide.planner.plan import Plan
from lowtide.planner.plan_file import save_plan
from lowtide.trace.trace import Trace

__all__ = ["Journal"]

SAVE_EVERY = 50
"""The record is saved every so many steps."""


class Journal:
    """The events and steps of a run. Only the first rank prints and writes."""

    def __init__(
        self,
        directory: Path | None,
        say: Callable[[str], None],
        report: Callable[[Plan], None] | None,
        capacity: Callable[[], int | None],
        *,
        verbose: bool,
        first: bool,
    ) -> None:
        self.directory = directory if first else None
        self.say = say if verbose and first else None
        self.report = report if verbose and first else None
        self.capacity = capacity
        self.events: list[AdaptEvent] = []
        self.steps: list[AdaptStep] = []
        self.plan: Plan | None = None
        """The last one."""

    def note(self, step: int, kind: Kind, text: str) -> None:
        """Record and print an event in a step, or after it."""
        self.events.append(AdaptEvent(step, kind, text))
        if self.say is not None:
            self.say(f"step {step}: {text}")

    def ended(self, step: AdaptStep) -> None:
        """Record a step; save the record now and then."""
        self.steps.append(step)
        if step.step % SAVE_EVERY == 0:
            self.save()

    def measured(self, trace: Trace) -> None:
        """Save the Trace of measured steps."""
        if self.directory is not None:
            trace.save(self.directory / "trace.json")

    def planned(self, decided: Decided, *, shown: bool) -> None:
        """Save a plan, and report it if it is to be ``shown``."""
        self.plan = plan = decided.plan
        if self.report is not None and shown:
            self.report(plan)
        if self.directory is None or decided.policy is None:
            return
        save_plan(plan, self.directory / "plan.json")
        (self.directory / "policy.json").write_text(decided.policy.to_json())
        if plan.yaml and decided.policy == plan.policy:
            (self.directory / "policy.yaml").write_text(plan.yaml)
        self.save()

    @property
    def record(self) -> AdaptRecord:
        """The record so far."""
        return AdaptRecord(
            events=tuple(self.events),
            steps=tuple(self.steps),
            plan="plan.json" if self.plan is not None and self.directory is not None else None,
            budget=self.plan.budget if self.plan is not None else None,
            capacity=self.capacity(),
        )

    def save(self) -> None:
        """Save the record, if there is a directory."""
        if self.directory is not None:
            save_record(self.record, self.directory / RECORD_FILE)
