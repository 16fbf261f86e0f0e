"""Read a file and say what it means: the work behind ``lowtide check``."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from lowtide.config.dialects.log import LayerNames
from lowtide.config.document import Document, Path
from lowtide.config.parse import load_document, parse_document
from lowtide.config.placement import Placement, even, place
from lowtide.config.problem import Problems
from lowtide.config.swap_limits import SwapLimits, read_limits
from lowtide.policy import Catalogue, Operator, Policy, Recompute, Resolution, resolve
from lowtide.policy.idle import idle_settings
from lowtide.policy.policy import YAML_KEYS

if TYPE_CHECKING:
    from lowtide.config.dialects.form_2026 import Form2026
    from lowtide.config.dialects.graph import GraphForm
    from lowtide.config.schema import Settings

__all__ = ["Check", "OperatorNames", "check_file", "check_text"]

OperatorNames: TypeAlias = Callable[[Literal["legacy", "mcore"]], tuple[Operator, ...]]
"""Gives the operators of one layer of a family, to match patterns against where no model is at hand."""


@dataclass(slots=True, eq=False, repr=False)
class Check:
    """What a file means, or what is wrong with it."""

    document: Document
    """The file as read."""
    problems: Problems
    """Everything wrong with it or worth saying."""
    settings: Settings | None = None
    """Its sections, typed."""
    form: GraphForm | Form2026 | None = None
    """Its recompute and swap settings, normalised."""
    policy: Policy | None = None
    """The Policy it asks for."""
    resolution: Resolution | None = None
    """The Policy applied to the operator names of its model family."""
    log: list[tuple[str, str]] = field(default_factory=list)
    """(level, text) lines in the words of the MindSpore Transformers guide."""
    limits: SwapLimits = field(default_factory=SwapLimits)
    """What swapping may take."""
    model_known: bool = False
    """Whether patterns were matched against the operators of a model, not the names of a dense layer."""

    @property
    def ok(self) -> bool:
        """Whether the file can be used."""
        return not self.problems.errors

    def as_json(self) -> dict[str, Any]:
        """What ``lowtide check --json`` prints."""
        return {
            "file": self.document.name,
            "ok": self.ok,
            "matched_against": "the model" if self.model_known else "the names of a dense layer",
            "normalized": self.form.normalized() if self.form is not None and self.ok else {},
            "log": [list(line) for line in self.log],
            "warnings": [problem.as_json() for problem in self.problems.warnings],
            "errors": [problem.as_json() for problem in self.problems.errors],
        }

    def warn(self, setting: str, message: str, hint: str = "") -> None:
        """Add a warning at the place of a setting: a pattern, or ``the whole layer``."""
        self.problems.warn(_place_of(self, setting), message, hint)

    def raise_errors(self) -> None:
        """Raise ConfigError with every error of the file, if it has any."""
        self.problems.raise_errors()


def check_file(
    file: str | FilePath,
    names: OperatorNames | None = None,
    overrides: Mapping[Path, Any] | None = None,
    *,
    model: Catalogue | None = None,
) -> Check:
    """Read ``file`` and say what it means; ``overrides`` replace or add single values.

    Without ``names`` and ``model`` patterns are not matched: there is no resolution, and the log says
    nothing of single layers. With ``model`` they are matched against its operators, and one that
    matches nothing is an error, as is another number of layers; ``names`` then say what the log calls an operator.
    """
    problems = Problems()
    return _check(load_document(FilePath(file), problems), problems, _Known(names, model), overrides or {})


def check_text(
    text: str,
    names: OperatorNames | None = None,
    overrides: Mapping[Path, Any] | None = None,
    *,
    name: str = "<text>",
    model: Catalogue | None = None,
) -> Check:
    """Like :func:`check_file`, for a text at hand."""
    problems = Problems()
    return _check(parse_document(text, problems, name=name), problems, _Known(names, model), overrides or {})


class _Known(NamedTuple):
    """What patterns are matched against."""

    names: OperatorNames | None
    """The operators of one layer of a family."""
    model: Catalogue | None
    """A model's operators."""


def _check(
    document: Document,
    problems: Problems,
    known: _Known,
    overrides: Mapping[Path, Any],
) -> Check:
    check = Check(document, problems)
    if not check.ok:
        return check
    if document.value is None:
        problems.error((), "the file is empty", "write a recompute_config or a swap_config section")
        return check
    if not isinstance(document.value, dict):
        problems.error((), "the file is not a mapping of sections", "start it with a section: recompute_config:")
        return check
    for path, value in overrides.items():
        _set(document.value, path, value)

    from lowtide.config.schema import read_sections

    check.settings = read_sections(document.value, problems)
    if check.settings.layout == "2026":
        _read_2026(check, check.settings, known)
    else:
        _read_graph(check, check.settings, known)
    check.model_known = known.model is not None
    if check.policy is not None:
        _report_idle(check, check.settings, check.policy)
    if check.resolution is not None:
        _report_unused(check, check.resolution)
    problems.errors.sort(key=lambda problem: (problem.line, problem.column))
    return check


def _read_graph(check: Check, settings: Settings, known: _Known) -> None:
    from lowtide.config.dialects.graph import read_graph
    from lowtide.config.dialects.graph_log import form_log, layer_log
    from lowtide.config.swap_entries import read_swap

    value, problems = check.document.value, check.problems
    sections = [key for key in ("recompute_config", "swap_config") if value.get(key) is not None]
    num_layers = _num_layers(check, settings, sections, known.model)
    if num_layers is None:
        return
    placement = _graph_placement(check, settings, num_layers)
    if placement is None:  # that is an error already; look for others all the same
        placement = even(
            num_layers,
            settings.model.stage_num or settings.parallel_config.pipeline_stage,
            settings.model.pp_interleave_num,
        )
    swap = read_swap(value.get("swap_config"), num_layers, problems)
    family: Literal["legacy", "mcore"] = "legacy" if settings.top_level.use_legacy else "mcore"
    form = read_graph(
        value.get("recompute_config"),
        swap,
        placement,
        problems,
        use_legacy=settings.top_level.use_legacy,
        prediction_layers=settings.model.num_nextn_predict_layers,
    )
    if not check.ok:
        return
    check.form, check.policy, check.log = form, form.policy(), form_log(form)
    adaptive = "adapt" in settings.present
    check.limits = read_limits(value.get("swap_config"), check.policy, problems, ("swap_config",), adaptive=adaptive)
    catalogue = _catalogue(check, check.policy, known, family)
    if catalogue is not None:
        check.log += layer_log(form, _layer_names(catalogue, known, family))
        check.resolution = resolve(check.policy, catalogue, require_match=False)


def _read_2026(check: Check, settings: Settings, known: _Known) -> None:
    from lowtide.config.dialects.form_2026 import read_2026
    from lowtide.config.dialects.form_2026_log import form_log_2026

    value, problems = check.document.value, check.problems
    sections = [key for key in ("recompute", "recompute_comm", "swap") if value.get(key) is not None]
    num_layers = _num_layers(check, settings, sections, known.model)
    if num_layers is None:
        return
    placement = _placement_2026(check, settings, num_layers)
    total = num_layers + settings.model.num_nextn_predict_layers
    form = read_2026(
        value.get("recompute"), value.get("recompute_comm"), value.get("swap"), total, problems, placement=placement
    )
    if not check.ok:
        return
    check.form, check.policy = form, form.policy()
    adaptive = "adapt" in settings.present
    check.limits = read_limits(value.get("swap"), check.policy, problems, ("swap",), adaptive=adaptive)
    catalogue = _catalogue(check, check.policy, known, "mcore")
    if catalogue is not None:
        check.log = form_log_2026(form, _layer_names(catalogue, known, "mcore"))
        check.resolution = resolve(check.policy, catalogue, require_match=False)


def _catalogue(check: Check, policy: Policy, known: _Known, family: Literal["legacy", "mcore"]) -> Catalogue | None:
    """What patterns are matched against: the model, or as many layers of the family as the file has."""
    names, model = known
    if model is None:
        return Catalogue((names(family),) * len(policy.layers)) if names is not None else None
    if len(model.layers) == len(policy.layers):
        return model
    check.problems.error(
        _model_path(check, "num_layers"),
        f"the file decides {len(policy.layers)} layers, and the model has {len(model.layers)}",
        f"write num_layers: {len(model.layers)}, or say with --layers which module of the model holds the layers",
    )
    return None


def _layer_names(catalogue: Catalogue, known: _Known, family: Literal["legacy", "mcore"]) -> LayerNames:
    """What the log calls operators: those of a model by the names of the file's family, where they have one."""
    guide = known.names(family) if known.names is not None and known.model is not None else ()
    return LayerNames(catalogue, [operator.name for operator in guide])


def _report_unused(check: Check, resolution: Resolution) -> None:
    """Say which settings have no effect. A pattern without a match is an error where the model is known; without
    one, a name that is not in the family's table may still exist."""
    if not check.model_known:
        _say_static(check)
    for unused in resolution.unused:
        path = _place_of(check, unused.setting)
        if check.model_known and unused.kind == "unmatched":
            hint = f"did you mean {' or '.join(unused.nearest)}?" if unused.nearest else "lowtide operators lists them"
            whose = "the default pattern " if unused.builtin else ""
            message = f"{whose}`{unused.setting}` ({unused.action}) matches nothing in the model: {unused.reason}"
            check.problems.error(path, message, hint, key=True)
        elif unused.kind == "unmatched":
            check.problems.warn(path, f"{unused}; only the names of a dense layer are known here", TRACE)
        else:
            check.problems.warn(path, str(unused))
    if not check.ok:
        check.resolution = None  # nothing is decided until the file is right


def _report_idle(check: Check, settings: Settings, policy: Policy) -> None:
    """Say which settings about communication can have no effect: on any model, or with the file's degrees."""
    here: Path = ("recompute_config",)
    for text in idle_settings(policy):
        key = next((key for key in YAML_KEYS.values() if key in text), "")
        check.problems.warn((*here, key) if (*here, key) in check.document.keys else here, text)
    if settings.layout == "2026" or "parallel_config" not in settings.present:
        return
    parallel, sharded = settings.parallel_config, settings.parallel.enable_parallel_optimizer
    whole = any(layer.default == Recompute() for layer in policy.layers)
    tensor, alone = parallel.model_parallel > 1, "there is no tensor parallel: model_parallel is 1"
    idle: list[tuple[str, bool, str]] = [
        ("mp_comm_recompute", whole and not policy.communication.reissue_collectives and not tensor, alone),
        ("recompute_slice_activation", whole and policy.communication.slice_inputs and not tensor, alone),
        (
            "recompute_slice_activation",
            whole and policy.communication.slice_inputs and tensor and parallel.use_seq_parallel,
            "with use_seq_parallel each rank holds only its slice of a layer's input anyway",
        ),
        (
            "parallel_optimizer_comm_recompute",
            policy.communication.reshard_after_forward and not (sharded and parallel.data_parallel > 1),
            "parameters are not sharded: that takes parallel.enable_parallel_optimizer and data_parallel above 1",
        ),
        (
            "select_comm_recompute",
            any(rule.reissue for layer in policy.layers for rule in layer.collectives)
            and not tensor
            and parallel.expert_parallel == 1,
            "layers have no collectives: model_parallel and expert_parallel are 1",
        ),
    ]
    for key, is_idle, reason in idle:
        if is_idle:
            check.problems.warn((*here, key), f"`{key}` has no effect: {reason}", "leave it out")


def _say_static(check: Check) -> None:
    """Say that patterns were matched against another model than the file describes, where that is known."""
    settings, policy = check.settings, check.policy
    if settings is None or policy is None or not any(layer.rules or layer.collectives for layer in policy.layers):
        return
    model = settings.model
    if settings.top_level.pretrained_model_dir:
        what = f"the model is that of {settings.top_level.pretrained_model_dir}"
    elif model.n_routed_experts is not None or settings.moe_config.expert_num > 1:
        what = "the model has experts"
    elif model.kv_lora_rank is not None:
        what = "the model has latent attention"
    else:
        return
    sections = ("recompute_config", "swap_config", "recompute", "recompute_comm", "swap")
    path = next(((name,) for name in sections if (name,) in check.document.keys), ())
    check.problems.warn(path, f"{what}, and patterns were matched against the names of a dense layer", TRACE, key=True)


TRACE = "`lowtide check --trace` matches them against the model that the file describes, as `lowtide train` does"


def _num_layers(check: Check, settings: Settings, sections: list[str], model: Catalogue | None) -> int | None:
    """The number of layers, from the file, from its Hugging Face configuration or from the model at hand."""
    if settings.model.num_layers is not None:
        return settings.model.num_layers
    directory = settings.top_level.pretrained_model_dir
    if directory:
        found = _num_layers_of(FilePath(directory) / "config.json")
        if found is not None:
            return found
    if model is not None and len(model.layers) > settings.model.num_nextn_predict_layers:
        return len(model.layers) - settings.model.num_nextn_predict_layers
    wrong = any(problem.path[-1:] in (("num_layers",), ("num_hidden_layers",)) for problem in check.problems.errors)
    if sections and not wrong:
        key = "model.num_layers" if settings.layout == "2026" else "model.model_config.num_layers"
        where = f"; {directory}/config.json does not give it either" if directory else ""
        check.problems.error(
            (sections[0],),
            f"`{sections[0]}` is about layers, and the file does not say how many there are{where}",
            f"write {key}, or pass --set {key}=48",
            key=True,
        )
    return None


def _num_layers_of(file: FilePath) -> int | None:
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    for key in ("num_hidden_layers", "num_layers", "n_layer"):
        number = config.get(key) if isinstance(config, dict) else None
        if isinstance(number, int) and not isinstance(number, bool) and 0 < number <= MAX_LAYERS:
            return number
    return None


MAX_LAYERS = 10_000


def _graph_placement(check: Check, settings: Settings, num_layers: int) -> Placement | None:
    model, problems = settings.model, check.problems
    pipeline = settings.parallel.pipeline_config
    chunks = model.pp_interleave_num
    if chunks > 1 and pipeline.pipeline_interleave is False:
        problems.warn(
            ("parallel", "pipeline_config", "pipeline_interleave"),
            f"pipeline_interleave is false: pp_interleave_num {chunks} is taken as 1",
            "write pipeline_interleave: true, or pp_interleave_num: 1",
        )
        chunks = 1
    folded = pipeline.pipeline_scheduler == "zero_bubble_v"
    if folded and chunks != 2:
        problems.error(
            ("parallel", "pipeline_config", "pipeline_scheduler"),
            f"zero_bubble_v needs pp_interleave_num 2; found {chunks}",
            "write pp_interleave_num: 2, or another pipeline_scheduler",
        )
        return None
    if model.start_stage and not model.stage_num:
        problems.warn(_model_path(check, "start_stage"), "start_stage has no effect without stage_num", "set stage_num")
    return place(
        num_layers,
        model.stage_num or settings.parallel_config.pipeline_stage,
        chunks,
        model.offset,
        problems,
        offset_path=_model_path(check, "offset"),
        layers_path=_model_path(check, "num_layers"),
        start_stage=model.start_stage if model.stage_num else 0,
        folded=folded,
    )


def _placement_2026(check: Check, settings: Settings, num_layers: int) -> Placement | None:
    """``pipeline_parallel_layers_per_stage``: even shares, or the ranges each stage names."""
    parallelism, problems = settings.parallelism, check.problems
    stages, chunks = parallelism.pipeline_parallel, parallelism.pipeline_parallel_interleave_num
    shares = parallelism.pipeline_parallel_layers_per_stage
    path: Path = ("parallelism", "pipeline_parallel_layers_per_stage")
    if shares == "auto":
        if num_layers % (stages * chunks):
            problems.error(
                path,
                f"{num_layers} layers cannot be shared evenly by {stages} stages x {chunks} chunks",
                "list the layers of each stage: pipeline_parallel_layers_per_stage: ['0-3', '4-8']",
            )
            return None
        return place(num_layers, stages, chunks, 0, problems)
    return _listed(shares, num_layers, stages, chunks, problems, path)


def _listed(
    shares: list[str], num_layers: int, stages: int, chunks: int, problems: Problems, path: Path
) -> Placement | None:
    from lowtide.config.dialects.form_2026 import layer_specs

    hint = f"write {stages} texts, one a stage, each with {chunks} ranges separated by commas, such as '0-3,8-11'"
    if len(shares) != stages:
        problems.error(path, f"{len(shares)} texts for {stages} stages", hint)
        return None
    where: dict[int, tuple[int, int]] = {}
    table = [[0] * stages for _ in range(chunks)]
    for stage, text in enumerate(shares):
        ranges = text.split(",")
        if len(ranges) != chunks:
            problems.error((*path, stage), f"{len(ranges)} ranges for {chunks} chunks", hint)
            return None
        for chunk, span in enumerate(ranges):
            layers = layer_specs([span], num_layers, problems, (*path, stage))
            if layers is None:
                return None
            where.update((layer, (stage, chunk)) for layer in layers)
            table[chunk][stage] = len(layers)
    order = [where.get(layer) for layer in range(num_layers)]
    expected = [
        (stage, chunk) for chunk, row in enumerate(table) for stage, count in enumerate(row) for _ in range(count)
    ]
    if order != expected:
        problems.error(path, "the ranges must name every layer once, chunk by chunk over the stages", hint)
        return None
    base = num_layers // (stages * chunks)
    return place(
        num_layers, stages, chunks, [[count - base for count in row] for row in table], problems, offset_path=path
    )


def _model_path(check: Check, key: str) -> Path:
    """Where the file writes a key of the model: in model.model_config, or in a section of its own."""
    for prefix in (("model", "model_config"), ("model_config",), ("model",)):
        if (*prefix, key) in check.document.keys:
            return (*prefix, key)
    return ("model", "model_config", key)


def _place_of(check: Check, setting: str) -> Path:
    """The place of a setting in the file: the first key or value that is this pattern."""
    for path in check.document.keys:
        if path[-1] == setting:
            return path
    for path in check.document.values:
        if _get(check.document.value, path) == setting:
            return path
    for section in ("swap_config", "recompute_config", "swap", "recompute"):
        if (section,) in check.document.keys:
            return (section,)
    return ()


def _get(value: Any, path: Path) -> Any:
    try:
        for part in path:
            value = value[part]
    except (KeyError, IndexError, TypeError):  # an override replaced it
        return None
    return value


def _set(value: dict[str, Any], path: Path, new: Any) -> None:
    for part in path[:-1]:
        inner = value.get(str(part))
        if not isinstance(inner, dict):
            inner = value[str(part)] = {}
        value = inner
    value[str(path[-1])] = new
