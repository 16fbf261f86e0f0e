"""A Policy as YAML in the graph form of the MindSpore Transformers guide, and what that form cannot express.

Where nothing is swapped and every setting is on in the first layers of each mini-stage, layers are counted, as people
write it by hand: ``recompute: [[2, 1], [0, 0]]``. Otherwise they are listed one by one, which the grammar has while
swap is on. What was written is read again and resolved, and every operator whose decision is another is reported: the
form has no setting for the input of a layer, and does not swap what directly feeds a recomputed operator.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from lowtide.config.check import check_text
from lowtide.config.parse import write_document
from lowtide.planner.expand import exact_text
from lowtide.planner.pipeline import Pipeline
from lowtide.planner.schedule import is_folded
from lowtide.policy import Catalogue, Decision, Policy, Recompute, Resolution, Swap, format_layers, resolve

__all__ = ["YamlForm", "yaml_form"]


class YamlForm(NamedTuple):
    """A Policy as YAML."""

    text: str
    lost: tuple[str, ...]
    """What the text does not say; empty if it means exactly the same."""


def yaml_form(policy: Policy, catalogue: Catalogue, pipeline: Pipeline) -> YamlForm:
    """Write ``policy`` in the graph form, for a model with these operators in these pipeline stages."""
    resolution = resolve(policy, catalogue, require_match=False)
    whole = [index for index, layer in enumerate(policy.layers) if isinstance(layer.default, Recompute)]
    recomputed: dict[str, list[int]] = {}
    swapped: dict[tuple[str, Swap], list[int]] = {}
    for index, layer in enumerate(resolution.layers):
        for name, decision in layer.decisions.items() if index not in set(whole) else ():
            if isinstance(decision, Recompute):
                recomputed.setdefault(name, []).append(index)
            elif isinstance(decision, Swap):
                swapped.setdefault((name, decision), []).append(index)
    # In a layer that is recomputed as a whole a selection changes nothing; it may complete the first of a mini-stage.
    wider = {name: sorted({*layers, *whole}) for name, layers in recomputed.items()}
    counted = not swapped and all(_is_first(layers, pipeline) for layers in (whole, *wider.values()))
    layers_of = wider if counted else recomputed
    total = len(policy.layers)

    def chosen(layers: list[int]) -> Any:
        if len(layers) in (0, total):
            return bool(layers)
        return _counts(layers, pipeline) if counted else layers

    section: dict[str, Any] = {"recompute": chosen(whole)}
    if layers_of:
        section["select_recompute"] = {exact_text(name): chosen(layers) for name, layers in layers_of.items()}
    value: dict[str, Any] = {"recompute_config": section}
    if not counted:
        value["swap_config"] = {"swap": True, "layer_swap": [], **_swap_entries(swapped, total)}
    value |= _model(total, pipeline, counted)
    text = write_document(value)
    return YamlForm(text, _lost(text, resolution, catalogue))


def _swap_entries(swapped: Mapping[tuple[str, Swap], list[int]], total: int) -> dict[str, Any]:
    """One entry for the operators that the same layers swap with the same prefetch."""
    alike: dict[tuple[tuple[int, ...], Swap], list[str]] = {}
    for (name, swap), layers in swapped.items():
        alike.setdefault((tuple(layers), swap), []).append(exact_text(name))
    entries = []
    for (indices, swap), names in alike.items():
        entry: dict[str, Any] = {
            "op_name": names if len(names) > 1 else names[0],
            "backward_prefetch": swap.prefetch,
            "layers": True if len(indices) == total else list(indices),
        }
        entries.append(entry if swap.tier == "host" else {**entry, "tier": swap.tier})
    return {"op_swap": entries} if entries else {}


def _lost(text: str, resolution: Resolution, catalogue: Catalogue) -> tuple[str, ...]:
    check = check_text(text)
    if check.policy is None or not check.ok:
        return tuple(problem.message for problem in check.problems.errors) or ("the form cannot be read again",)
    again = resolve(check.policy, catalogue, require_match=False)
    lost: dict[tuple[str, Decision, Decision], list[int]] = {}
    for index, (meant, said) in enumerate(zip(resolution.layers, again.layers, strict=True)):
        if meant.boundary != said.boundary:
            lost.setdefault(("the layer's input", meant.boundary, said.boundary), []).append(index)
        for name, decision in meant.decisions.items():
            if said.decisions[name] != decision:
                lost.setdefault((name, decision, said.decisions[name]), []).append(index)
    return tuple(
        f"{name} is {said} instead of {meant} in layers {format_layers(layers)}"
        for (name, meant, said), layers in lost.items()
    )


def _is_first(layers: Iterable[int], pipeline: Pipeline) -> bool:
    """Whether these are the first layers of every mini-stage."""
    chosen = set(layers)
    if is_folded(pipeline):
        return not chosen  # rows of every second chunk are read backwards there: list layers one by one
    return all(set(chunk[: len(chosen & set(chunk))]) <= chosen for stage in pipeline.placement for chunk in stage)


def _counts(layers: Iterable[int], pipeline: Pipeline) -> list[list[int]]:
    chosen = set(layers)
    return [[len(chosen & set(stage[chunk])) for stage in pipeline.placement] for chunk in range(pipeline.chunks)]


def _model(total: int, pipeline: Pipeline, counted: bool) -> dict[str, Any]:
    """What the counts refer to: layers, stages and chunks."""
    model: dict[str, Any] = {"num_layers": total}
    value: dict[str, Any] = {"model": {"model_config": model}}
    if counted and pipeline.stages * pipeline.chunks > 1:
        base = total // (pipeline.stages * pipeline.chunks)
        model["pp_interleave_num"] = pipeline.chunks
        model["offset"] = [
            [len(stage[chunk]) - base for stage in pipeline.placement] for chunk in range(pipeline.chunks)
        ]
        value["parallel_config"] = {"pipeline_stage": pipeline.stages}
    return value
