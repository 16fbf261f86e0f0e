"""What an adaptive run did, step by step: plain data and its file, ``adaptive.json``. No torch here."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from lowtide.errors import ReportError

__all__ = [
    "RECORD_FILE",
    "AdaptEvent",
    "AdaptRecord",
    "AdaptStep",
    "Kind",
    "Phase",
    "load_record",
    "save_record",
    "shorten_events",
    "shorten_steps",
]

FORMAT = 1
RECORD_FILE = "adaptive.json"
"""Its name in a run directory."""

MOST = 4096
"""The most steps, and events, of a record: it is in memory, and is written every fifty steps."""

Phase = Literal["measuring", "planned"]
"""Whether a step ran before the plan, under the safe Policy or profiled, or under the plan's Policy."""
Kind = Literal["measured", "planned", "switched", "rescued", "retried", "replanned", "warned"]
"""What an event is: steps were measured; a plan was made; its Policy was applied; an allocation failed and the step
survived; a step was retried; the run was re-planned, with the reason; a warning."""


class AdaptEvent(NamedTuple):
    """Something that happened or was decided."""

    step: int
    """The step in which, or after which, it happened; from 1."""
    kind: Kind
    text: str
    """One sentence, with the reason."""


class AdaptStep(NamedTuple):
    """The measurements of one step."""

    step: int
    """Its number, from 1."""
    seconds: float
    """From its beginning to its end, failed attempts included."""
    peak_reserved: int
    """The most bytes that the device's allocator reserved; 0 where it does not say."""
    phase: Phase
    rescued: int = 0
    """Failed allocations that it survived, by offloading tensors or by a retry of the step."""
    peak_allocated: int = 0
    """The most bytes that were in use; what is reserved beyond them was not."""


def shorten_steps(steps: list[AdaptStep]) -> None:
    """In a list that has grown long, make one row of two planned steps of the older half.

    It has the later one's number, their mean time, the higher peaks, and the failed allocations of both.
    """
    if len(steps) <= MOST:
        return
    shorter: list[AdaptStep] = []
    single = False
    for step in steps[: MOST // 2]:
        if single and shorter[-1].phase == step.phase == "planned":
            shorter[-1], single = _both(shorter[-1], step), False
        else:
            shorter.append(step)
            single = True
    steps[: MOST // 2] = shorter


def _both(one: AdaptStep, other: AdaptStep) -> AdaptStep:
    return AdaptStep(
        step=other.step,
        seconds=(one.seconds + other.seconds) / 2,
        peak_reserved=max(one.peak_reserved, other.peak_reserved),
        phase=other.phase,
        rescued=one.rescued + other.rescued,
        peak_allocated=max(one.peak_allocated, other.peak_allocated),
    )


def shorten_events(events: list[AdaptEvent]) -> None:
    """In a list that has grown long, leave out every second rescue of the older half."""
    if len(events) <= MOST:
        return
    older = events[: MOST // 2]
    dropped = {id(event) for event in [event for event in older if event.kind in ("rescued", "retried")][::2]}
    events[: MOST // 2] = [event for event in older if id(event) not in dropped]


@dataclass(frozen=True, kw_only=True)
class AdaptRecord:
    """An adaptive run from its first step on."""

    events: tuple[AdaptEvent, ...] = ()
    steps: tuple[AdaptStep, ...] = ()
    plan: str | None = None
    """The file of the plan, next to the record; None before there is one."""
    budget: int | None = None
    """Bytes that the last plan may fill; None before there is one."""
    capacity: int | None = None
    """Bytes of the device that this process could have; None where the device does not say."""

    def as_json(self) -> dict[str, Any]:
        """The record as plain JSON values. Steps are rows: a run has many."""
        return {
            "lowtide_adaptive": FORMAT,
            "plan": self.plan,
            "budget": self.budget,
            "capacity": self.capacity,
            "events": [event._asdict() for event in self.events],
            "steps": {"columns": list(AdaptStep._fields), "rows": [list(step) for step in self.steps]},
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> AdaptRecord:
        """The reverse of :meth:`as_json`; ReportError where it is something else."""
        if not isinstance(value, Mapping) or value.get("lowtide_adaptive") != FORMAT:
            raise ReportError(
                f'not the record of an adaptive run: expected an object with "lowtide_adaptive": {FORMAT}'
            )
        try:
            columns = value["steps"]["columns"]
            return cls(
                events=tuple(_event(event) for event in value["events"]),
                steps=tuple(_step(dict(zip(columns, row, strict=True))) for row in value["steps"]["rows"]),
                plan=None if value["plan"] is None else str(value["plan"]),
                budget=None if value["budget"] is None else int(value["budget"]),
                capacity=None if value["capacity"] is None else int(value["capacity"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ReportError(f"not the record of an adaptive run: {type(error).__name__}: {error}") from None


def save_record(record: AdaptRecord, file: str | Path) -> None:
    """Write the record into a file, all of it or nothing: a reader, or a kill, never finds half of one."""
    temporary = Path(file).with_name(f".{Path(file).name}.{os.getpid()}")
    temporary.write_text(json.dumps(record.as_json(), separators=(",", ":")) + "\n", encoding="utf-8")
    temporary.replace(file)


def load_record(file: str | Path) -> AdaptRecord:
    """Read what :func:`save_record` wrote."""
    try:
        value = json.loads(Path(file).read_text(encoding="utf-8"))
        return AdaptRecord.from_json(value)
    except OSError as error:
        raise ReportError(f"{file}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ReportError(f"{file} is not the record of an adaptive run: {error}") from None
    except ReportError as error:
        raise ReportError(f"{file}: {error}") from None


def _event(value: Mapping[str, Any]) -> AdaptEvent:
    if value["kind"] not in get_args(Kind):
        raise ValueError(f"an event is one of {', '.join(get_args(Kind))}; found {value['kind']!r}")
    return AdaptEvent(int(value["step"]), value["kind"], str(value["text"]))


def _step(value: Mapping[str, Any]) -> AdaptStep:
    if value["phase"] not in get_args(Phase):
        raise ValueError(f"a step's phase is one of {', '.join(get_args(Phase))}; found {value['phase']!r}")
    return AdaptStep(
        int(value["step"]),
        float(value["seconds"]),
        int(value["peak_reserved"]),
        value["phase"],
        int(value["rescued"]),
        int(value.get("peak_allocated", 0)),
    )
