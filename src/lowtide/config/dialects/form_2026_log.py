"""The 2026 form in the reference's words: what each pattern means, then what each layer does."""

from __future__ import annotations

from lowtide.config.dialects.form_2026 import Form2026, path_pattern
from lowtide.config.dialects.log import LayerNames, Line, operators_only
from lowtide.policy import Match

__all__ = ["form_log_2026"]


def form_log_2026(form: Form2026, known: LayerNames) -> list[Line]:
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
    exclude = _by_layer(form, form.exclude if form.mode != "None" else {}, known, "exclude_op", lines)
    select = _by_layer(form, form.select, known, "select_module", lines)
    comm = _by_layer(form, form.comm, known, "select_module", lines)
    swaps = {name: layers for name, (layers, _) in form.op_swap.items()}
    swap = _by_layer(form, swaps, known, "op_swap", lines)
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
    form: Form2026, patterns: dict[str, tuple[int, ...]], known: LayerNames, key: str, lines: list[Line]
) -> list[list[Match]]:
    """What the patterns mean in each layer: sorted by name, children of a matched module left out."""
    result: list[list[Match]] = [[] for _ in range(form.num_layers)]
    for name, layers in patterns.items():
        pattern = path_pattern(name)
        for layer in layers:
            result[layer] += known.matches(pattern, layer)
        if not any(known.matches(pattern, layer) for layer in range(form.num_layers)):
            text = f"{key} pattern '{name}' did not match any module in the model, please check your recompute config."
            lines.append(("WARNING", text))
    return [
        sorted({match for match in found if not _is_below(match, found)}, key=lambda match: match.name)
        for found in result
    ]


def _is_below(match: Match, others: list[Match]) -> bool:
    return any(other.is_module and match.name.startswith(f"{other.name}.") for other in others)


def _names(matches: list[Match]) -> str:
    return ", ".join(match.name for match in matches)
