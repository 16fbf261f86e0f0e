"""A Plan as a file: everything that a report shows, so that it can be drawn later and elsewhere."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar

from lowtide.errors import PlanError, PolicyError
from lowtide.planner.pipeline import Pipeline
from lowtide.planner.plan import Option, Plan, PlannedOperator
from lowtide.planner.simulation import Moment, Share, Simulation, Span, StageSimulation
from lowtide.planner.workload import Workload
from lowtide.policy import Policy
from lowtide.policy.decision import decision_as_json, decision_from_json

__all__ = ["load_plan", "plan_as_json", "plan_from_json", "save_plan"]

FORMAT = 1
_Row = TypeVar("_Row")


def plan_as_json(plan: Plan) -> dict[str, Any]:
    """The Plan as plain JSON values. Of the other options only the sums are kept: their timelines are shown nowhere."""
    return {
        "lowtide_plan": FORMAT,
        "model": plan.model,
        "device": plan.device,
        "budget": plan.budget,
        "feasible": plan.feasible,
        "least": plan.least,
        "bound": plan.bound,
        "gap": plan.gap,
        "solve_seconds": plan.solve_seconds,
        "pipeline": plan.pipeline.as_json(),
        "workload": plan.workload.as_json(),
        "tokens_per_second": plan.tokens_per_second,
        "mfu": plan.mfu,
        "policy": plan.policy.as_json(),
        "simulation": _simulation_as_json(plan.simulation),
        "options": [
            {
                "name": option.name,
                "fits": option.fits,
                "how": option.how,
                "policy": option.policy.as_json(),
                "simulation": _simulation_as_json(_sums(option.simulation)),
            }
            for option in plan.options
        ],
        "curve": [list(point) for point in plan.curve],
        "yaml": plan.yaml,
        "notes": list(plan.notes),
        **_operators_as_json(plan.operators),
    }


def plan_from_json(value: Mapping[str, Any]) -> Plan:
    """The reverse of :func:`plan_as_json`; PlanError where it is something else."""
    if not isinstance(value, Mapping) or value.get("lowtide_plan") != FORMAT:
        raise PlanError(
            f'not a plan: expected an object with "lowtide_plan": {FORMAT}; `lowtide plan --save` writes one'
        )
    try:
        return Plan(
            model=value["model"],
            device=value["device"],
            budget=value["budget"],
            feasible=value["feasible"],
            least=value["least"],
            bound=value["bound"],
            solve_seconds=value["solve_seconds"],
            pipeline=Pipeline.from_json(value["pipeline"]),
            workload=Workload.from_json(value.get("workload", {})),
            policy=Policy.from_json(value["policy"]),
            simulation=_simulation(value["simulation"]),
            options=tuple(
                Option(
                    name=option["name"],
                    fits=option["fits"],
                    how=option["how"],
                    policy=Policy.from_json(option["policy"]),
                    simulation=_simulation(option["simulation"]),
                )
                for option in value["options"]
            ),
            curve=tuple((size, seconds) for size, seconds in value["curve"]),
            yaml=value["yaml"],
            notes=tuple(value["notes"]),
            operators=_operators(value),
        )
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, PolicyError) as error:
        raise PlanError(f"not a plan: {type(error).__name__}: {error}") from None


def save_plan(plan: Plan, file: str | Path) -> None:
    """Write the Plan into a file, compressed if its name ends with ``.gz``: timelines of many stages are long."""
    text = json.dumps(plan_as_json(plan), separators=(",", ":")) + "\n"
    packed = Path(file).suffix == ".gz"
    Path(file).write_bytes(gzip.compress(text.encode(), 6, mtime=0) if packed else text.encode())


def load_plan(file: str | Path) -> Plan:
    """Read what :func:`save_plan` wrote."""
    try:
        data = Path(file).read_bytes()
        value = json.loads(gzip.decompress(data) if Path(file).suffix == ".gz" else data)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise PlanError(f"{file} is not a plan: {error}") from None
    except OSError as error:
        raise PlanError(f"{file}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise PlanError(f"{file} is not a plan: {error}") from None
    try:
        return plan_from_json(value)
    except PlanError as error:
        raise PlanError(f"{file}: {error}") from None


def _sums(simulation: Simulation) -> Simulation:
    return replace(simulation, stages=tuple(replace(stage, memory=(), spans=()) for stage in simulation.stages))


_ROWS: dict[str, Callable[..., Any]] = {"memory": Moment, "spans": Span, "shares": Share}
"""The fields of a stage that are tables."""


def _simulation_as_json(simulation: Simulation) -> dict[str, Any]:
    return {
        "seconds": simulation.seconds,
        "bubble": simulation.bubble,
        "notes": list(simulation.notes),
        "stages": [
            {
                one.name: [list(row) for row in value] if one.name in _ROWS else value
                for one in fields(stage)
                for value in (getattr(stage, one.name),)
            }
            for stage in simulation.stages
        ],
    }


def _simulation(value: Mapping[str, Any]) -> Simulation:
    return Simulation(
        seconds=value["seconds"],
        bubble=value["bubble"],
        notes=tuple(value["notes"]),
        stages=tuple(map(_stage, value["stages"])),
    )


def _stage(value: Mapping[str, Any]) -> StageSimulation:
    given = dict(value)
    for name, row in _ROWS.items():
        given[name] = _table(row, value[name])
    peak_at = value["peak_at"]
    return StageSimulation(**{**given, "peak_at": None if peak_at is None else Moment(*peak_at)})


def _table(row: Callable[..., _Row], values: Sequence[Sequence[Any]]) -> tuple[_Row, ...]:
    return tuple(row(*one) for one in values)


def _operators_as_json(layers: Sequence[tuple[PlannedOperator, ...]]) -> dict[str, Any]:
    """Equal layers share one entry."""
    kinds: dict[tuple[PlannedOperator, ...], int] = {}
    places = [kinds.setdefault(layer, len(kinds)) for layer in layers]
    rows = [[[one.name, one.bytes, decision_as_json(one.decision)] for one in kind] for kind in kinds]
    return {"operators": rows, "operators_of_layer": places}


def _operators(value: Mapping[str, Any]) -> tuple[tuple[PlannedOperator, ...], ...]:
    kinds = [
        tuple(PlannedOperator(name, size, decision_from_json(decision)) for name, size, decision in kind)
        for kind in value["operators"]
    ]
    return tuple(kinds[place] for place in value["operators_of_layer"])
