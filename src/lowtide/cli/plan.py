"""``lowtide plan``: the fastest policy that fits a budget, before there is a device."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from lowtide.cli.planning import Inputs, Planned, given_text, plan_inputs, takes_inputs

__all__ = ["plan"]

WRITE = "What to write"


def _file(*names: str, text: str) -> Any:
    return typer.Option(*names, metavar="FILE", help=text, show_default=False, rich_help_panel=WRITE)


Output = Annotated[Path | None, _file("--output", "-o", text="The Policy, as JSON, or as YAML by its suffix.")]
Yaml = Annotated[Path | None, _file("--yaml", text="The Policy, as MindSpore YAML.")]
Html = Annotated[Path | None, _file("--html", text="A report: one page; needs the extra lowtide\\[report].")]
Perfetto = Annotated[Path | None, _file("--perfetto", text="The simulated step, for ui.perfetto.dev.")]
TraceOut = Annotated[Path | None, _file("--trace-out", text="The Trace, to plan from again.")]
Save = Annotated[Path | None, _file("--save", text="The whole plan, as `lowtide report` reads it.")]
Swept = Annotated[
    str | None,
    typer.Option(
        "--sweep",
        metavar="OPTION=FROM..TO",
        help="Plan for several values of budget, seq or devices, and compare them: budget=40GiB..80GiB is five of them,"
        " budget=40GiB..80GiB:9 is nine; seq and devices double.",
        show_default=False,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the plan as one JSON object.", rich_help_panel=WRITE)]


@takes_inputs
def plan(
    inputs: Inputs,
    output: Output = None,
    yaml: Yaml = None,
    html: Html = None,
    perfetto: Perfetto = None,
    trace_out: TraceOut = None,
    save: Save = None,
    as_json: AsJson = False,
    sweep: Swept = None,
) -> None:
    """Find the fastest Policy that fits a budget of device memory; no device is needed.

    The model is traced with fake tensors, the Policy is solved for and its step is simulated. Prints whether it fits,
    by how much it does not, and what the plan does. Exit code 0; 1 if nothing fits or something is wrong.

    With --devices and --global-batch, and no layout, the fastest layout is searched for too; that takes minutes.

    Example: [bold]lowtide plan llama3-8b --budget 60GiB --device h100 --dp 8 --seq 8192 -o policy.json[/bold]

    With --sweep there is a table of several plans, and a page of it with --html.

    Example: [bold]lowtide plan llama3-70b --devices 64 --global-batch 512 --seq 8192 --device h100[/bold]

    Example: [bold]lowtide plan llama3-8b --dp 8 --seq 8192 --sweep budget=24GiB..72GiB --html sweep.html[/bold]
    """
    if sweep is not None:
        from lowtide.cli.sweep import sweep_inputs

        others = {"--output": output, "--yaml": yaml, "--perfetto": perfetto, "--trace-out": trace_out, "--save": save}
        sweep_inputs(inputs, sweep, page=html, as_json=as_json, others=others)
        return
    files = {"policy": output, "yaml": yaml, "page": html, "perfetto": perfetto, "trace": trace_out, "plan": save}
    found = plan_inputs(inputs, tuple(files.values()), page=html)
    # Before anything is printed: a reader of the output that stops early, such as `head`, does not cost the files.
    written = [_write(what, file, found, inputs.source) for what, file in files.items() if file is not None]
    if as_json:
        import json

        from lowtide.cli.searched import search_as_json
        from lowtide.planner.plan_file import plan_as_json

        value = plan_as_json(found.plan)
        if found.searched is not None:
            value["search"] = search_as_json(found.searched)
        typer.echo(json.dumps(value))
    else:
        from lowtide.cli.console import make_console
        from lowtide.report.plan import print_plan

        console = make_console()
        if found.searched is not None:
            from lowtide.cli.searched import print_search

            print_search(found.searched, console)
        print_plan(found.plan, console)
    for line in filter(None, written):
        typer.echo(line, err=as_json)
    if not found.plan.feasible or not all(written):
        raise typer.Exit(1)


def _write(what: str, file: Path, found: Planned, source: str) -> str | None:
    """Write one of the files and return the line that says so; prints the error if that fails, and returns None, so
    that the others are written all the same."""
    from lowtide.cli.searched import layouts_of
    from lowtide.errors import LowtideError, PlanError
    from lowtide.planner.plan_file import save_plan
    from lowtide.report.page import write_page
    from lowtide.report.perfetto import write_perfetto

    result = found.plan
    try:
        if what == "policy":
            result.policy.save(file)
        elif what == "yaml":
            if not result.yaml:
                raise PlanError("MindSpore YAML cannot say this Policy; -o writes it as JSON")
            file.write_text(result.yaml, encoding="utf-8")
        elif what == "page":
            write_page(file, result, given=given_text(source), layouts=layouts_of(found.searched))
        elif what == "perfetto":
            write_perfetto(result.simulation, file)
        elif what == "trace":
            found.traced.trace.save(file)
        else:
            save_plan(result, file)
    except LowtideError as error:
        typer.echo(f"error: {error}", err=True)
        return None
    except OSError as error:
        typer.echo(f"error: {file}: {error.strerror}", err=True)
        return None
    return f"{what}: written to {file}"
