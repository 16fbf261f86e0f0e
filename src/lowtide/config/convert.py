"""Write a file's recompute and swap settings in the other form, and say what that form cannot express."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any, Literal

from lowtide.config.check import Check
from lowtide.config.dialects.form_2026 import Form2026
from lowtide.config.dialects.graph import GraphForm
from lowtide.config.placement import Placement
from lowtide.policy import Pattern, Swap, format_layers

__all__ = ["convert_form", "to_path", "to_segments"]

_PREFETCH = (
    "a prefetch counts operators in the graph form and layers in the 2026 form: {found} is written as {written};"
    " choose the distance again"
)


def convert_form(check: Check, to: Literal["2026", "legacy"]) -> tuple[dict[str, Any], list[str]]:
    """Return the other form's sections, and a line for everything they cannot express."""
    lost: list[str] = []
    if isinstance(check.form, GraphForm) and to == "2026":
        result = _to_2026(check.form, lost)
        kept = {"recompute_config", "swap_config", "model", "model_config", "parallel_config", "parallel", "use_legacy"}
    elif isinstance(check.form, Form2026) and to == "legacy":
        result = _to_graph(check.form, lost)
        kept = {"recompute", "recompute_comm", "swap", "model", "parallelism"}
    else:
        raise ValueError(f"the file is in the {to} form already")
    rest = [key for key in check.document.value if key not in kept]
    if rest:
        lost.append(f"only layers, recompute and swap are converted; carry over by hand: {', '.join(rest)}")
    return result, lost


def to_path(pattern: Pattern) -> str:
    r"""Write a segments pattern as one expression over the whole path.

    >>> to_path(Pattern(r".*\.norm"))
    '[^.]*\\.norm'
    """
    return "\\.".join(_outside_classes(segment, lambda text: text.replace(".", "[^.]")) for segment in pattern.segments)


def to_segments(pattern: str) -> str | None:
    r"""Write an expression over the whole path as a segments pattern, or None if that cannot be done.

    >>> to_segments("self_attention.core_attention")
    'self_attention\\.core_attention'
    >>> to_segments("self_attention.*") is None
    True
    """
    if not re.search(r"[\\^$*+?{}\[\]|()]", pattern):
        return pattern.replace(".", "\\.")
    parts = pattern.split("\\.")
    if any(re.search(r"(?<!\^)\.|\\|\[\^(?!\.\])", part) or "\\" in part for part in parts):
        return None  # it may match a dot, so it may cross levels
    return "\\.".join(part.replace("[^.]", ".") for part in parts)


def _to_2026(form: GraphForm, lost: list[str]) -> dict[str, Any]:
    indices = range(form.placement.num_layers)
    full = [index for index in indices if form.is_on(form.layer_recompute, index)]
    others = [index for index in indices if index not in set(full)]

    def patterns(key: str, among: Iterable[int]) -> dict[str, list[str]]:
        found: dict[str, list[int]] = {}
        for index in among:
            for name in form.names_on(key, index):
                found.setdefault(to_path(Pattern(name)), []).append(index)
        return {name: _specs(layers) for name, layers in found.items()}

    select = patterns("select_recompute", others)
    exclude = {} if form.swap.swap else patterns("select_recompute_exclude", indices)
    recompute: dict[str, Any] = {"mode": "select" if select else "full" if full else "None"}
    if full:
        recompute["full_recompute_layer"] = _specs(full)
    if select:
        recompute["select_module"] = select
    if exclude and recompute["mode"] != "None":
        recompute["exclude_op"] = exclude
    result: dict[str, Any] = {"recompute": recompute}
    comm = patterns("select_comm_recompute", others)
    if comm:
        result["recompute_comm"] = {"enable": True, "select_module": comm}
    if not form.swap.swap and patterns("select_comm_recompute_exclude", indices):
        lost.append("select_comm_recompute_exclude has no counterpart in the 2026 form")
    for name, value in form.switches.items():
        if value != {"mp_comm_recompute": True}.get(name, False):
            lost.append(f"{name} has no counterpart in the 2026 form")
    if form.swap.swap:
        result["swap"] = _swap_2026(form, others, lost)
    result["model"] = {"num_layers": form.placement.num_layers}
    if form.prediction_layers:
        result["model"]["num_nextn_predict_layers"] = form.prediction_layers
    if form.placement.folded:
        lost.append("the schedule zero_bubble_v has no counterpart in the 2026 form")
    elif form.placement.num_stages * form.placement.num_chunks > 1:
        result["parallelism"] = _parallelism(form.placement, lost)
    return result


def _swap_2026(form: GraphForm, others: list[int], lost: list[str]) -> dict[str, Any]:
    section: dict[str, Any] = {"enable": True}
    prefetches: set[int] = set()
    layers: dict[str, list[int]] = {}
    operators: dict[tuple[str, str], list[int]] = {}
    for index in others:
        entry = next((entry for entry in form.swap.layer_swap if entry.has(index)), None)
        if entry is not None:
            layers.setdefault(entry.tier, []).append(index)
            prefetches.add(entry.prefetch)
        for name, entries in form.swap.op_swap:
            found = next((item for item in entries if item.has(index)), None)
            if found is not None:
                prefetches.add(found.prefetch)
                if entry is not None:
                    lost.append(
                        f"layer {index} is swapped whole: {name} cannot have an entry of its own in the 2026 form"
                    )
                else:
                    operators.setdefault((to_path(Pattern(name)), found.tier), []).append(index)
    if layers:
        section["layer_swap"] = [_entry({"layers": _specs(found)}, tier) for tier, found in layers.items()]
    if operators:
        section["op_swap"] = [
            _entry({"op_name": name, "layers": _specs(found)}, tier) for (name, tier), found in operators.items()
        ]
    if prefetches:
        lost.append(_PREFETCH.format(found=f"backward_prefetch {_listed(prefetches)}", written="default_prefetch 1"))
    return section


def _to_graph(form: Form2026, lost: list[str]) -> dict[str, Any]:
    placement = form.placement
    num_layers = placement.num_layers if placement else form.num_layers
    beyond = list(range(num_layers, form.num_layers))
    policy = form.policy()
    if any(policy.layers[index] != policy.layers[num_layers - 1] for index in beyond):
        lost.append(f"prediction layers take the decision of layer {num_layers - 1} in the graph form")
    swap = bool(form.layer_swap or form.op_swap)
    exclude = form.exclude if form.mode != "None" else {}
    selections = {
        "select_recompute": _translated(form.select, lost),
        "select_comm_recompute": _translated(form.comm, lost),
        "select_recompute_exclude": _translated(exclude, lost),
    }
    full = [index for index in form.full if index < num_layers]
    for key in ("select_recompute", "select_comm_recompute"):
        for name, layers in selections[key].items():
            # In a fully recomputed layer a selection changes nothing; it may make the first k of a stage whole.
            wider = sorted({*layers, *full})
            if not _is_prefix(layers, placement, num_layers) and _is_prefix(wider, placement, num_layers):
                selections[key][name] = wider
    everything = [full, *(layers for group in selections.values() for layers in group.values())]
    by_index = swap or not all(_is_prefix(layers, placement, num_layers) for layers in everything)
    if by_index and selections["select_recompute_exclude"]:
        lost.append("exclude_op has no effect in the graph form while layers are given one by one")
        selections["select_recompute_exclude"] = {}
    recompute: dict[str, Any] = {"recompute": _chosen(full, placement, num_layers, by_index)}
    for key, group in selections.items():
        chosen = {
            name: _chosen([index for index in layers if index < num_layers], placement, num_layers, by_index)
            for name, layers in group.items()
        }
        if chosen:
            recompute[key] = chosen
    result: dict[str, Any] = {"use_legacy": False, "recompute_config": recompute}
    if by_index:
        result["swap_config"] = _swap_graph(form, num_layers, lost)
    model: dict[str, Any] = {"num_layers": num_layers}
    if beyond:
        model["num_nextn_predict_layers"] = len(beyond)
    if placement is not None and placement.num_stages * placement.num_chunks > 1:
        base = num_layers // (placement.num_stages * placement.num_chunks)
        model["pp_interleave_num"] = placement.num_chunks
        model["offset"] = [[count - base for count in row] for row in placement.layer_list]
        result["parallel_config"] = {"pipeline_stage": placement.num_stages}
    result["model"] = {"model_config": model}
    return result


def _swap_graph(form: Form2026, num_layers: int, lost: list[str]) -> dict[str, Any]:
    section: dict[str, Any] = {"swap": True, "layer_swap": []}  # an empty list: nothing is swapped by default
    used: set[int] = set()
    layers: dict[Swap, list[int]] = {}
    for index, decision in sorted(form.layer_swap.items()):
        if index in form.full:
            lost.append(f"layer {index} is recomputed: the graph form cannot swap its input")
        elif index < num_layers:
            layers.setdefault(decision, []).append(index)
            used.add(decision.prefetch)
    for decision, found in layers.items():
        section["layer_swap"].append(_entry({"backward_prefetch": 1, "layers": found}, decision.tier))
    operators = []
    for name, (indices, decision) in form.op_swap.items():
        translated = to_segments(name)
        found = [index for index in indices if index not in form.layer_swap and index < num_layers]
        if translated is None:
            lost.append(f"the pattern {name} may cross levels; the graph form matches level by level")
        elif found:
            used.add(decision.prefetch)
            operators.append(_entry({"op_name": translated, "backward_prefetch": 1, "layers": found}, decision.tier))
    if operators:
        section["op_swap"] = operators
    if used:
        lost.append(_PREFETCH.format(found=f"default_prefetch {_listed(used)}", written="backward_prefetch 1"))
    return section


def _translated(patterns: dict[str, tuple[int, ...]], lost: list[str]) -> dict[str, list[int]]:
    result: dict[str, list[int]] = {}
    for name, layers in patterns.items():
        translated = to_segments(name)
        if translated is None:
            lost.append(f"the pattern {name} may cross levels; the graph form matches level by level")
        elif layers:
            result[translated] = list(layers)
    return result


def _is_prefix(layers: Iterable[int], placement: Placement | None, num_layers: int) -> bool:
    chosen = set(layers)
    if placement is None:
        return chosen == set(range(len(chosen)))
    counts = _counts(chosen, placement)
    return chosen == {index for index in range(num_layers) if placement.within(counts, index)}


def _counts(layers: set[int], placement: Placement) -> list[list[int]]:
    counts = [[0] * placement.num_stages for _ in range(placement.num_chunks)]
    for layer in layers:
        if layer < placement.num_layers:
            counts[placement.chunks[layer]][placement.columns[layer]] += 1
    return counts


def _chosen(layers: list[int], placement: Placement | None, num_layers: int, by_index: bool) -> Any:
    if len(layers) == num_layers:
        return True
    if not layers:
        return False
    if by_index:
        return layers
    return _counts(set(layers), placement) if placement is not None else [[len(layers)]]


def _parallelism(placement: Placement, lost: list[str]) -> dict[str, Any]:
    shares: list[list[str]] = [[""] * placement.num_chunks for _ in range(placement.num_stages)]
    for layer, (column, chunk) in enumerate(zip(placement.columns, placement.chunks, strict=True)):
        first = shares[column][chunk].partition("-")[0] or str(layer)
        shares[column][chunk] = first if first == str(layer) else f"{first}-{layer}"
    section: dict[str, Any] = {"pipeline_parallel": placement.num_stages}
    if placement.num_chunks > 1:
        section["pipeline_parallel_interleave_num"] = placement.num_chunks
    if any(not share for row in shares for share in row):
        lost.append("a mini-stage without layers has no counterpart in the 2026 form")
    elif len({count for row in placement.layer_list for count in row}) > 1:
        section["pipeline_parallel_layers_per_stage"] = [",".join(row) for row in shares]
    return section


def _specs(layers: list[int]) -> list[str]:
    return format_layers(layers).split(",") if layers else []


def _entry(entry: dict[str, Any], tier: str) -> dict[str, Any]:
    return entry if tier == "host" else {**entry, "tier": tier}


def _listed(numbers: set[int]) -> str:
    return ", ".join(map(str, sorted(numbers)))


def _outside_classes(expression: str, change: Callable[[str], str]) -> str:
    """Apply ``change`` outside of escapes and [...] classes."""
    return "".join(
        part if part.startswith(("\\", "[")) else change(part)
        for part in re.findall(r"\\.|\[\^?\]?[^\]]*\]|[^\\\[]+|.", expression, re.DOTALL)
    )
