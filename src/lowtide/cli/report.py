"""``lowtide report``: one page from a plan, a run, or both."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["report"]

PlanFile = Annotated[
    Path | None,
    typer.Argument(
        metavar="PLAN|RUN",
        help="What `lowtide plan --save` wrote, or the directory of a run.",
        show_default=False,
    ),
]
Output = Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="The page to write.")]
Receipts = Annotated[
    list[Path] | None,
    typer.Option(
        "--receipt",
        metavar="FILE",
        help="Receipts of a run: receipts.jsonl; may be given several times.",
        show_default=False,
    ),
]
Metrics = Annotated[
    Path | None,
    typer.Option("--metrics", metavar="FILE", help="The steps of a run: metrics.jsonl.", show_default=False),
]
Memory = Annotated[
    Path | None,
    typer.Option(
        "--memory",
        metavar="FILE",
        help="Measured memory over a step: a JSON list of pairs, seconds and bytes.",
        show_default=False,
    ),
]
Stage = Annotated[
    int | None,
    typer.Option("--stage", min=0, help="The stage that was measured; the fullest unless given.", show_default=False),
]
Given = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", help="Show the YAML's difference to this file.", show_default=False),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object: the page, and each prediction's error.")]


def report(
    plan: PlanFile = None,
    output: Output = Path("lowtide-report.html"),
    receipts: Receipts = None,
    metrics: Metrics = None,
    memory: Memory = None,
    stage: Stage = None,
    config: Given = None,
    as_json: AsJson = False,
) -> None:
    """Draw one HTML page from a plan, from a run's files, or from both, which compares predicted with measured.

    Of a run's directory everything that is in it is shown: its plan and its steps where it adapted itself, its
    receipts, its metrics.

    The page needs no network. Drawing it needs plotly: pip install 'lowtide\\[report]'.

    Example: [bold]lowtide report output[/bold], or
    [bold]lowtide report plan.json --receipt output/receipts.jsonl --metrics output/metrics.jsonl[/bold]
    """
    from lowtide.errors import LowtideError
    from lowtide.planner.plan_file import load_plan
    from lowtide.report.page import write_page
    from lowtide.report.run import read_directory, read_run

    measured = bool(receipts or metrics or memory)
    directory = plan is not None and plan.is_dir()
    if directory and measured:
        raise typer.BadParameter(f"{plan} is a run's directory: its receipts and metrics are taken from there")
    if plan is None and not measured:
        raise typer.BadParameter("a page of what? Give a plan's file, or --receipt, --metrics or --memory of a run")
    try:
        found, run = None, None
        if plan is not None and directory:
            found, run = read_directory(plan)
        elif plan is not None:
            found = load_plan(plan)
        if measured:
            run = read_run(receipts or (), metrics, memory, stage)
        given = config.read_text(encoding="utf-8") if config is not None else None
        write_page(output, found, run, given)
    except LowtideError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None
    except OSError as error:
        typer.echo(f"error: {error.filename}: {error.strerror}", err=True)
        raise typer.Exit(1) from None
    if not as_json:
        typer.echo(f"page: written to {output}")
        return
    import json

    from lowtide.report.prediction import predictions

    both = predictions(found, run) if found is not None and run is not None else ()
    errors = [{**one._asdict(), "error": one.error} for one in both]
    typer.echo(json.dumps({"page": str(output), "predictions": errors}))
