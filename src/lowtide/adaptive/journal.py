"""The journal of an adaptive run: printed as it happens, and saved in the run's directory.

Nothing that is printed or saved may end a training run: what fails is logged, and not tried again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from lowtide.adaptive.decide import Decided
from lowtide.adaptive.record import (
    RECORD_FILE,
    AdaptEvent,
    AdaptRecord,
    AdaptStep,
    Kind,
    save_record,
    shorten_events,
    shorten_steps,
)
from lowtide.planner.plan import Plan
from lowtide.planner.plan_file import save_plan
from lowtide.trace.trace import Trace

__all__ = ["Journal"]

logger = logging.getLogger(__name__)
T = TypeVar("T")

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
        self.saved = False
        """Whether ``plan.json`` is there: the last plan with a Policy; while there is none, one that fits nothing."""

    def note(self, step: int, kind: Kind, text: str) -> None:
        """Record and print an event in a step, or after it."""
        self.events.append(AdaptEvent(step, kind, text))
        shorten_events(self.events)
        if self.say is not None:
            self._print(self.say, f"step {step}: {text}")

    def ended(self, step: AdaptStep) -> None:
        """Record a step; save the record now and then."""
        self.steps.append(step)
        shorten_steps(self.steps)
        if step.step % SAVE_EVERY == 0:
            self.save()

    def measured(self, trace: Trace) -> None:
        """Save the Trace of measured steps."""
        self._write(lambda directory: trace.save(directory / "trace.json"))

    def planned(self, decided: Decided, *, shown: bool) -> None:
        """Save a plan, and report it if it is to be ``shown``."""
        self.plan = plan = decided.plan
        policy = decided.policy
        if self.report is not None and shown:
            self._print(self.report, plan)

        def write(directory: Path) -> None:
            if policy is not None or not self.saved:
                save_plan(plan, directory / "plan.json")
                self.saved = True
            if policy is not None:
                (directory / "policy.json").write_text(policy.to_json())
                if plan.yaml and policy == plan.policy:
                    (directory / "policy.yaml").write_text(plan.yaml)

        self._write(write)
        self.save()

    def save(self) -> None:
        """Save the record, if there is a directory."""
        self._write(lambda directory: save_record(self.record, directory / RECORD_FILE))

    def _print(self, call: Callable[[T], None], what: T) -> None:
        try:
            call(what)
        except Exception:
            self.say = self.report = None
            logger.warning("nothing more of the adaptive run is printed", exc_info=True)

    def _write(self, write: Callable[[Path], None]) -> None:
        if self.directory is None:
            return
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            write(self.directory)
        except Exception:
            logger.warning("nothing more of the adaptive run is saved in %s", self.directory, exc_info=True)
            self.directory = None

    @property
    def record(self) -> AdaptRecord:
        """The record so far."""
        return AdaptRecord(
            events=tuple(self.events),
            steps=tuple(self.steps),
            plan="plan.json" if self.saved else None,
            budget=self.plan.budget if self.plan is not None else None,
            capacity=self.capacity(),
        )
