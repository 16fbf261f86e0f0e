"""``lowtide run``: a training script as it is, adapted to its device."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from lowtide.integrations.script import Outcome
    from lowtide.integrations.settings import Settings

__all__ = ["run"]

Script = Annotated[str, typer.Argument(metavar="SCRIPT", help="The script, or a module with -m.", show_default=False)]
Arguments = Annotated[
    list[str] | None, typer.Argument(metavar="[ARGUMENT]...", help="The script's own.", show_default=False)
]
Module = Annotated[bool, typer.Option("-m", "--module", help="SCRIPT names a module, as for python -m.")]
Budget = Annotated[
    str,
    typer.Option("--budget", metavar="SIZE", help="What the plan may fill, such as 22GiB; all that the device has."),
]
PolicyFile = Annotated[
    Path | None,
    typer.Option(
        "--policy",
        metavar="FILE",
        help="Apply this Policy, or the plan of this file; nothing is measured then.",
        show_default=False,
    ),
]
Report = Annotated[
    Path | None,
    typer.Option(
        "--report",
        metavar="DIR",
        help="Save what was measured and planned there, and a page, report.html.",
        show_default=False,
    ),
]
LayersPath = Annotated[
    str | None,
    typer.Option("--layers", metavar="PATH", help="The module that holds the model's layers.", show_default=False),
]
Swap = Annotated[bool, typer.Option("--swap/--no-swap", help="Whether the plan may swap to host memory.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Print only what was attached to.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object at the end: what was attached to.")]


def run(
    script: Script,
    arguments: Arguments = None,
    module: Module = False,
    budget: Budget = "auto",
    policy: PolicyFile = None,
    report: Report = None,
    layers: LayersPath = None,
    swap: Swap = True,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Run a training script that knows nothing of lowtide, and make it fit its device.

    The model and its optimizers are found when they are used, and [bold]lowtide.adapt[/bold] begins before the first
    step; a Trainer of transformers, TRL or Lightning is attached to as by [bold]lowtide.attach[/bold]. Results are
    bitwise those of the script alone. A line on standard error says what was attached to, or why nothing was.

    Options of lowtide come before SCRIPT, the script's own after it. Under torchrun each rank is given the same:
    [bold]torchrun --nproc-per-node 2 -m lowtide run train.py[/bold]. The exit code is the script's.

    Example: [bold]lowtide run --budget 22GiB train.py --batch-size 8[/bold]
    """
    import gc

    gc.enable()  # the entry point turned it off for commands that end at once
    if not module and not Path(script).is_file():
        raise typer.BadParameter(
            f"there is no script {script}; a module is run with -m, as in `lowtide run -m {script}`"
        )
    settings = _settings(budget, policy, report, layers, swap=swap, verbose=not quiet)
    from lowtide.integrations.script import is_first_rank, run_script

    outcome = run_script(script, arguments or [], settings, module=module)
    if as_json and is_first_rank():
        import json

        typer.echo(json.dumps(outcome.as_json()))
    _end_as_python(outcome)


def _settings(
    budget: str, policy: Path | None, report: Path | None, layers: str | None, *, swap: bool, verbose: bool
) -> Settings:
    """What is wrong with them is said before the script begins."""
    from lowtide.config.load import load_policy
    from lowtide.errors import LowtideError
    from lowtide.integrations.settings import Settings
    from lowtide.units import parse_budget

    adaptive = {"--budget": budget != "auto", "--report": report is not None, "--no-swap": not swap}
    if policy is not None:
        given = [name for name, is_given in adaptive.items() if is_given]
        if given:
            raise typer.BadParameter(f"--policy applies a Policy and measures nothing: leave out {', '.join(given)}")
    try:
        if budget != "auto":
            parse_budget(budget)
        found = load_policy(policy) if policy is not None else None
    except (LowtideError, ValueError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None
    except OSError as error:
        typer.echo(f"error: {error.filename}: {error.strerror}", err=True)
        raise typer.Exit(1) from None
    return Settings(policy=found, budget=budget, layers=layers, directory=report, swap=swap, verbose=verbose)


def _end_as_python(outcome: Outcome) -> None:
    """End the program as the script alone would have ended it."""
    import os
    import signal
    import sys

    error = outcome.error
    if error is None:
        return
    if isinstance(error, SystemExit):
        sys.exit(error.code)
    sys.excepthook(type(error), error, error.__traceback__)
    if isinstance(error, KeyboardInterrupt):
        sys.stdout.flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    sys.exit(1)
