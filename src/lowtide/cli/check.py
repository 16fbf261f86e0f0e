"""``lowtide check``: what a file means, layer by layer, or what is wrong with it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lowtide.cli.model import Autocast, Batch, LayersAt, Precision, Sequence, survey_model

if TYPE_CHECKING:
    from lowtide.config.check import Check
    from lowtide.operators.effect import Effect
    from lowtide.operators.survey import Survey

__all__ = ["check", "parse_overrides"]

Files = Annotated[list[Path], typer.Argument(metavar="FILE", help="YAML files to check.", show_default=False)]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object a file, one a line.")]
NoColor = Annotated[bool, typer.Option("--no-color", help="Print without colours, as on anything but a terminal.")]
Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="MODEL",
        help="Match against a model: a directory with config.json, or module:function.",
        show_default=False,
    ),
]
Traced = Annotated[
    bool,
    typer.Option(
        "--trace",
        help="Match against the model that the file itself describes; imports torch the first time.",
    ),
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Add or replace a value, such as model.model_config.num_layers=48."
    ),
]


def check(
    context: typer.Context,
    files: Files,
    as_json: AsJson = False,
    no_color: NoColor = False,
    overrides: Set = None,
    model: Model = None,
    trace: Traced = False,
    batch: Batch = 1,
    sequence: Sequence = 2048,
    autocast: Autocast = Precision.none,
    layers: LayersAt = None,
) -> None:
    """Say what the recompute and swap settings of FILE mean, or what is wrong with them.

    Prints how every setting was understood, a table of what becomes of each layer, and warnings. With
    [bold]--model[/bold] the settings are matched against a model, and the bytes that each frees are counted; a pattern
    that matches nothing is then an error. So it is with [bold]--trace[/bold], for the model that FILE itself describes;
    without either, only the names of a dense layer are known. Exits with 1 and all errors at once if a file cannot be
    used.

    Example: [bold]lowtide check pretrain_llama.yaml --model ./llama-8b --sequence 4096[/bold]
    """
    from lowtide.config.check import check_file
    from lowtide.operators.names import layer_operators

    values = parse_overrides(overrides or [])
    if trace and model is not None:
        raise typer.BadParameter("--trace takes the model that the file describes, and --model another; give one")
    _refuse_without_model(context, model)
    found = survey_model(model, batch, sequence, autocast, layers) if model is not None else None
    catalogue = found.catalogue if found is not None else None
    failed = False
    for file in files:
        result = _traced(file, values) if trace else check_file(file, layer_operators, values, model=catalogue)
        effect = _effect(result, found)
        failed |= not result.ok
        if as_json:
            import json

            value = result.as_json()
            if found is not None:
                from lowtide.report.effect import effect_as_json

                value["model"] = effect_as_json(effect) if effect is not None else None
            typer.echo(json.dumps(value))
            continue
        from lowtide.cli.console import make_console
        from lowtide.report.terminal import print_check, print_problems

        if len(files) > 1:
            typer.echo(f"{file}:")
        console = make_console(no_color=no_color)
        print_check(result, console)
        if found is not None and effect is not None:
            from lowtide.report.effect import print_effect

            size = f"{batch} x {sequence} tokens" + (f", {autocast.value}" if autocast != Precision.none else "")
            print_effect(effect, found, f"{found.root.name} ({model}), {size}", console)
        print_problems(result, make_console(stderr=True, no_color=no_color))
    if failed:
        raise typer.Exit(1)


def _traced(file: Path, values: dict[tuple[str | int, ...], Any]) -> Check:
    """The file, matched against the model that it describes; prints the error and exits with 1 if that fails."""
    import gc

    from lowtide.errors import LowtideError
    from lowtide.train.described import check_described

    gc.enable()  # the entry point turned it off for commands that end at once
    try:
        return check_described(file, values, must=True)
    except LowtideError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None


def _effect(result: Check, found: Survey | None) -> Effect | None:
    """The bytes that a file's settings free on a model; what is odd about them becomes a warning."""
    if found is None or result.resolution is None:
        return None
    from lowtide.operators.effect import effect_of
    from lowtide.report.effect import remarks

    effect = effect_of(result.resolution, found)
    for one in effect.settings:
        for remark in remarks(one):
            result.warn(one.setting.setting, remark, "leave it out; `lowtide operators` shows what each operator saves")
    return effect


def _refuse_without_model(context: typer.Context, model: str | None) -> None:
    """An option that has an effect on a model only must not be ignored in silence."""
    for name in ("batch", "sequence", "autocast", "layers") if model is None else ():
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise typer.BadParameter(f"--{name} says how to run a model; name one with --model")


def parse_overrides(texts: list[str]) -> dict[tuple[str | int, ...], Any]:
    """Read ``KEY=VALUE`` texts; the value is YAML, the key a dotted path."""
    from lowtide.config.parse import parse_value

    result: dict[tuple[str | int, ...], Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        parts = tuple(key.split("."))
        if not equals or not all(parts):
            raise typer.BadParameter(f"expected KEY=VALUE, such as model.model_config.num_layers=48; found {text!r}")
        try:
            result[parts] = parse_value(value)
        except ValueError as error:
            raise typer.BadParameter(f"the value of {key} is not YAML: {error}") from None
    return result
