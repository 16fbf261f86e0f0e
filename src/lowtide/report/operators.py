"""What ``lowtide operators`` shows: the operators of each kind of layer, and their bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from lowtide.policy import format_layers
from lowtide.units import format_bytes

if TYPE_CHECKING:
    from lowtide.operators.survey import Survey

__all__ = ["print_survey", "survey_as_json"]


def print_survey(found: Survey, console: Console) -> None:
    """Print a table for each kind of layer; operators that hold nothing are counted, not listed."""
    for place, kind in enumerate(found.kinds):
        layers = [index for index, which in enumerate(found.kind_of) if which == place]
        where = found.layers.path or "the model"
        console.print(f"{kind.name} ({kind.digest}): layers {format_layers(layers)} of {where}")
        table = Table(box=None, pad_edge=False, padding=(0, 2), header_style="bold")
        table.add_column("operator")
        table.add_column("owned", justify="right")
        table.add_column("net", justify="right")
        table.add_column("read by")
        holding = [operator for operator in kind.operators if operator.owned]
        for operator in holding:
            net = format_bytes(operator.net) if operator.net > 0 else "no gain"
            table.add_row(operator.name, format_bytes(operator.owned), net, ", ".join(operator.consumers))
        console.print(table)
        owned = sum(operator.owned for operator in holding)
        console.print(
            f"  {format_bytes(owned)} in {len(holding)} operators;"
            f" {len(kind.operators) - len(holding)} more hold nothing;"
            f" input {format_bytes(kind.boundary)}, from outside {format_bytes(kind.root)},"
            f" always kept {format_bytes(kind.kept)}, weights {format_bytes(kind.static)}",
            soft_wrap=True,
        )
        console.print()


def survey_as_json(found: Survey) -> dict[str, Any]:
    """The same as plain JSON values."""
    return {
        "path": found.layers.path,
        "layers": len(found.kind_of),
        "kind_of": list(found.kind_of),
        "kinds": [
            {
                "class": kind.name,
                "digest": kind.digest,
                "boundary": kind.boundary,
                "root": kind.root,
                "static": kind.static,
                "kept": kind.kept,
                "operators": [
                    {**operator._asdict(), "consumers": list(operator.consumers)} for operator in kind.operators
                ],
            }
            for kind in found.kinds
        ],
    }
