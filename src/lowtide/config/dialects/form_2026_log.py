"""The 2026 form in the reference's words: what each pattern means, then what each layer does."""

from __future__ import annotations

from lowtide.config.dialects.form_2026 import Form2026, path_pattern
from lowtide.config.dialects.log import Line, operators_only
from lowtide.policy import Match, NameTree

__all__ = ["form_log_2026"]


def form_log_2026(form: Form2026, tree: NameTree) -> list[Line]:
    """The form in the reference's words: what each pattern means, then what each layer does."""
    lines: list[Line] = []
    if form.mode == "None" and form.exclude:
        lines.append(
            (
                "WARNING",
                "[Recompute Config] exclude_op is configured but recompute mode is 'None';"
                " exclude_op has no effect without recompute.",
            )
        )
    exclude = _by_layer(form, form.exclude if form.mode != "None" else {}, tree, "exclude_op", lines)
    select = _by_layer(form, form.select, tree, "select_module", lines)
    comm = _by_layer(form, form.comm, tree, "select_module", lines)
    swaps = {name: layers for name, (layers, _) in form.op_swap.items()}
    swap = _by_layer(form, swaps, tree, "op_swap", lines)
    for layer in range(form.num_layers):
        if layer in form.full:
            select[layer], comm[layer] = [], []
        if layer in form.layer_swap:
            swap[layer] = []
        comm[layer] = [match for match in comm[layer] if not _is_below(match, select[layer])]
    for title, shown, maps in (
        ("ExcludeOp", form.exclude and form.mode != "None", exclude),
        ("Recompute", form.select, select),
        ("Comm Select Recompute", form.comm, comm),
        ("Swap", form.op_swap, swap),
    ):
        if shown:
            lines.append(("INFO", f"--- Final {title} Configuration Map---"))
            lines += [("INFO", f"layer{layer}: {_names(found)}") for layer, found in enumerate(maps) if found]
            lines.append(("INFO", "-" * 69))
    for layer in range(form.num_layers):
        if exclude[layer]:
            lines.append(("INFO", f"Set exclude recompute at layer {layer}: {_names(exclude[layer])}"))
        if layer in form.full:
            lines.append(("INFO", f"Set full recompute at layer {layer}"))
        if select[layer]:
            lines.append(("INFO", f"Set select recompute at layer {layer}: {_names(select[layer])}"))
        lines += operators_only(comm[layer], "communication recompute", f"Set select comm recompute at layer {layer}: ")
        if layer in form.layer_swap:
            lines.append(("INFO", f"Set layer swap at layer {layer}"))
        if swap[layer]:
            lines.append(("INFO", f"Set select swap at layer {layer}: {_names(swap[layer])}"))
    return lines


def _by_layer(
    form: Form2026, patterns: dict[str, tuple[int, ...]], tree: NameTree, key: str, lines: list[Line]
) -> list[list[Match]]:
    """What the patterns mean in each layer: sorted by name, children of a matched module left out."""
    result: list[list[Match]] = [[] for _ in range(form.num_layers)]
    for name, layers in patterns.items():
        matches = path_pattern(name).matches(tree)
        if not matches:
            text = f"{key} pattern '{name}' did not match any module in the model, please check your recompute config."
            lines.append(("WARNING", text))
        for layer in layers:
            result[layer] += matches
    return [
        sorted({match for match in found if not _is_below(match, found)}, key=lambda match: match.name)
        for found in result
    ]


def _is_below(match: Match, others: list[Match]) -> bool:
    return any(other.is_module and match.name.startswith(f"{other.name}.") for other in others)


def _names(matches: list[Match]) -> str:
    return ", ".join(match.name for match in matches)
