"""``lowtide plan --sweep``: plans for several budgets, sequence lengths or numbers of devices, side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple, get_args

import typer

from lowtide.cli.planning import Inputs, Prepared, planning, prepare_inputs, prepare_search, search_layouts, searches
from lowtide.errors import LowtideError, PlanError
from lowtide.report.sweep import Axis, Sweep, SweepRow, value_text
from lowtide.units import parse_budget

__all__ = ["Range", "parse_range", "sweep_inputs"]

COUNT = 5
"""Budgets of a range that does not say how many."""
EXPECTED = (
    "expected budget=40GiB..80GiB, seq=4096..32768 or devices=8..64, with :N for N values; or values with commas,"
    " budget=40GiB,64GiB"
)


class Range(NamedTuple):
    """The values of one option."""

    axis: Axis
    values: tuple[int, ...]


def parse_range(text: str) -> Range:
    """Read what ``--sweep`` was given.

    >>> parse_range("seq=4096..32768").values
    (4096, 8192, 16384, 32768)
    >>> parse_range("devices=8..64:3").values
    (8, 36, 64)
    """
    name, equals, given = text.partition("=")
    axis = next((one for one in get_args(Axis) if one == name.strip()), None)
    if axis is None or not equals:
        raise PlanError(f"--sweep {text}: {EXPECTED}")
    ends, colon, count = given.partition(":")
    if ".." not in ends:
        if colon:
            raise PlanError(f"--sweep {text}: a count goes with a range, FROM..TO:N; {EXPECTED}")
        values = [_number(axis, one, text) for one in ends.split(",")]
        return Range(axis, tuple(dict.fromkeys(values)))
    first, last = (_number(axis, one, text) for one in ends.split("..", 1))
    if first >= last:
        raise PlanError(f"--sweep {text}: the first value must be less than the last")
    if colon or axis == "budget":
        number = _whole(count, text) if colon else COUNT
        if number < 2:
            raise PlanError(f"--sweep {text}: a range has two values at least; found {number}")
        return Range(axis, tuple(sorted({first + (last - first) * one // (number - 1) for one in range(number)})))
    doubled = [first]
    while doubled[-1] * 2 < last:
        doubled.append(doubled[-1] * 2)
    return Range(axis, (*doubled, last))


def _number(axis: Axis, text: str, given: str) -> int:
    return parse_budget(text.strip()) if axis == "budget" else _whole(text, given)


def _whole(text: str, given: str) -> int:
    digits = text.strip()
    if not digits.isascii() or not digits.isdigit() or not int(digits):
        raise PlanError(f"--sweep {given}: {text!r} is not a whole number above zero; {EXPECTED}")
    return int(digits)


def sweep_inputs(
    inputs: Inputs, text: str, *, page: Path | None, as_json: bool, others: Mapping[str, Path | None]
) -> None:
    """Plan for each value, print the table and write the page; exits with 1 if no value fits or something is wrong."""
    from lowtide.cli.console import make_console
    from lowtide.report.sweep import print_sweep, sweep_as_json

    with planning(page=page):
        asked = parse_range(text)
        given = [name for name, file in others.items() if file is not None]
        if given:
            raise PlanError(f"--sweep makes several plans, and {', '.join(given)} one file of one: leave out either")
        with make_console(stderr=True).status("sweeping") as status:  # shown on a terminal only
            rows = _rows(inputs, asked, status.update)
        plan = next((row.plan for row in rows if row.plan is not None), None)
        model, device = (plan.model, plan.device) if plan is not None else (inputs.source, inputs.device)
        result = Sweep(model=model, device=device, axis=asked.axis, rows=tuple(rows))
        if page is not None:
            from lowtide.report.sweep_page import write_sweep_page

            try:
                write_sweep_page(page, result)
            except OSError as error:
                raise PlanError(f"{page}: {error.strerror}") from None
    if as_json:
        import json

        typer.echo(json.dumps(sweep_as_json(result)))
    else:
        print_sweep(result, make_console())
    if page is not None:
        typer.echo(f"page: written to {page}", err=as_json)
    if not any(row.fits for row in result.rows):
        raise typer.Exit(1)


def _rows(inputs: Inputs, asked: Range, progress: Callable[[str], None]) -> list[SweepRow]:
    """A row for each value. What is wrong with every value is wrong with the command, and is raised."""
    option = {"budget": inputs.budget, "seq": inputs.sequence, "devices": inputs.devices}[asked.axis]
    if option is not None:
        raise PlanError(f"--sweep {asked.axis} and --{asked.axis} {option} say the same: leave out either")
    if asked.axis == "budget" and inputs.reserve is not None:
        raise PlanError("--sweep budget gives the budgets, and --reserve what is left for them: leave out either")
    if asked.axis == "devices" and inputs.global_batch is None and inputs.data is not None:
        raise PlanError("--sweep devices chooses the data-parallel ranks of each value: leave out --dp")
    if asked.axis == "budget" and not searches(inputs):
        return _budgets(prepare_inputs(inputs), asked, progress)
    each: list[tuple[int, Inputs | LowtideError]] = [
        (value, _checked(inputs, asked.axis, value)) for value in asked.values
    ]
    errors = [one for _, one in each if isinstance(one, LowtideError)]
    if len(errors) == len(each):
        raise errors[0]
    return [_row(value, one, _part(asked, value, progress)) for value, one in each]


def _part(asked: Range, value: int, progress: Callable[[str], None]) -> Callable[[str], None]:
    """Progress that says which value it is of."""
    where = f"{value_text(asked.axis, value)} ({asked.values.index(value) + 1} of {len(asked.values)})"
    return lambda text: progress(f"{where}: {text}")


def _budgets(prepared: Prepared, asked: Range, progress: Callable[[str], None]) -> list[SweepRow]:
    """One Trace, and a plan of it for each budget."""
    traced, device = prepared.trace(progress)
    return [
        SweepRow(value=value, plan=prepared.plan(traced, device, _part(asked, value, progress), budget=value))
        for value in asked.values
    ]


def _checked(inputs: Inputs, axis: Axis, value: int) -> Inputs | LowtideError:
    """The inputs with one value, checked before torch is imported; or what is wrong with it."""
    try:
        one = _with_value(inputs, axis, value)
        if searches(one):
            prepare_search(one)
        else:
            prepare_inputs(one)
    except LowtideError as error:
        return error
    return one


def _with_value(inputs: Inputs, axis: Axis, value: int) -> Inputs:
    if axis == "budget":
        return inputs._replace(budget=str(value))
    if axis == "seq":
        return inputs._replace(sequence=value)
    if inputs.global_batch is not None:
        return inputs._replace(devices=value)
    others = (inputs.tensor or 1) * (inputs.pipeline or 1)
    ranks, left = divmod(value, others)
    if left or not ranks:
        raise PlanError(f"{value} devices are no multiple of --tp and --pp, {others}")
    return inputs._replace(data=ranks)


def _row(value: int, inputs: Inputs | LowtideError, progress: Callable[[str], None]) -> SweepRow:
    if isinstance(inputs, LowtideError):
        return SweepRow(value=value, error=str(inputs))
    try:
        if searches(inputs):
            found = search_layouts(inputs, progress)
            assert found.searched is not None
            return SweepRow(value=value, plan=found.plan, layout=str(found.searched.found[0].candidate))
        prepared = prepare_inputs(inputs)
        traced, device = prepared.trace(progress)
        return SweepRow(value=value, plan=prepared.plan(traced, device, progress))
    except LowtideError as error:
        return SweepRow(value=value, error=str(error))
