"""What ``lowtide plan --devices`` shows of a search for a layout."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lowtide.report.layouts import LayoutRow, LayoutsFound, layouts_as_json, print_layouts
from lowtide.train.exports import megatron, run_yaml, torchtitan

if TYPE_CHECKING:
    from rich.console import Console

    from lowtide.train.search import Found, Searched

__all__ = ["layouts_of", "print_search", "search_as_json"]


def layouts_of(searched: Searched | None) -> LayoutsFound | None:
    """What was found, for a report."""
    if searched is None:
        return None
    return LayoutsFound(
        rows=[_row(one, searched) for one in searched.found],
        reasons=searched.reasons,
        traced=searched.traced,
        looked_at=len(searched.found) + len(searched.left_out),
        seconds=searched.seconds,
        proved=searched.proved,
    )


def _row(one: Found, searched: Searched) -> LayoutRow:
    simulation = one.plan.simulation
    asked = searched.asked
    return LayoutRow(
        layout=str(one.candidate),
        seconds=simulation.seconds,
        tokens_per_second=asked.global_batch * asked.sequence / simulation.seconds,
        mfu=one.plan.mfu,
        reserved=simulation.reserved,
        recompute=max(stage.recompute for stage in simulation.stages) / simulation.seconds,
        bubble=simulation.bubble,
    )


def search_as_json(searched: Searched) -> dict[str, Any]:
    """What was found, and the best of it in the words of other trainers, as plain JSON values."""
    found = layouts_of(searched)
    assert found is not None
    return {**layouts_as_json(found), "exports": _exports(searched)}


def _exports(searched: Searched) -> dict[str, Any]:
    asked, best = searched.asked, searched.found[0]
    titan = torchtitan(best.candidate, best.plan.policy, asked.global_batch, asked.sequence)
    other = megatron(best.candidate, best.plan.policy, asked.global_batch, asked.sequence, asked.shape.num_layers)
    return {
        "lowtide": run_yaml(best.candidate, asked.sequence),
        "torchtitan": titan._asdict(),
        "megatron": other._asdict(),
    }


def print_search(searched: Searched, console: Console) -> None:
    """The table, and the flags of the fastest."""
    found = layouts_of(searched)
    assert found is not None
    print_layouts(found, console)
    for name, value in _exports(searched).items():
        if name == "lowtide":
            console.print(f"the fastest, for lowtide train:\n{value}", end="")
            continue
        console.print(f"for {name}: {' '.join(value['flags'])}")
        for one in value["missing"]:
            console.print(f"  not said there: {one}")
    console.print()
