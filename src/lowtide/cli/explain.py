"""``lowtide explain``: whether a run fits, why or why not, and the options."""

from __future__ import annotations

from typing import Annotated

import typer

from lowtide.cli.planning import Inputs, plan_inputs, takes_inputs

__all__ = ["explain"]

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@takes_inputs
def explain(inputs: Inputs, as_json: AsJson = False) -> None:
    """Say whether a run fits a budget, where its peak is and what it is made of, and the options.

    The same inputs as [bold]lowtide plan[/bold]. Exit code 0, also where nothing fits; 1 if something is wrong.

    Example: [bold]lowtide explain llama3-70b --budget 60GiB --device h100 --dp 8 --tp 8 --seq 8192[/bold]
    """
    found = plan_inputs(inputs)
    if as_json:
        import json

        from lowtide.report.plan import explanation_as_json

        typer.echo(json.dumps(explanation_as_json(found.plan)))
        return
    from lowtide.cli.console import make_console
    from lowtide.report.plan import print_explanation

    print_explanation(found.plan, make_console())
