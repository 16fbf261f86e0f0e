"""Rules that join two settings, of one section or of several."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from lowtide.config.problem import Problems
from lowtide.config.schema.wording import found

if TYPE_CHECKING:
    from lowtide.config.schema.settings import Settings

__all__ = ["check_rules"]

DROP_RATE = "MoEDropRateCallback"
RANGES = r"\s*\d{1,6}\s*(-\s*\d{1,6}\s*)?(,\s*\d{1,6}\s*(-\s*\d{1,6}\s*)?)*"


def check_rules(settings: Settings, document: dict[str, Any], problems: Problems) -> Settings:
    """Report settings that contradict each other; return the settings that are in force."""
    sections = settings.present
    _drop_rate(settings, document, problems)
    if "runner_config" in sections and settings.runner_config.gradient_accumulation_steps > 1:
        stages = settings.parallel_config.pipeline_stage if "parallel_config" in sections else 1
        if stages > 1:
            problems.warn(
                ("runner_config", "gradient_accumulation_steps"),
                "`gradient_accumulation_steps` has no effect with pipeline stages and is taken as 1",
                "set the number of micro-batches with `parallel_config.micro_batch_num`",
            )
            settings = settings.with_section(
                "runner_config", settings.runner_config.model_copy(update={"gradient_accumulation_steps": 1})
            )
    if "parallel_config" in sections:
        _parallel_config(settings, problems)
    if "runner_wrapper" in sections:
        _runner_wrapper(settings, problems)
    if "context" in sections:
        _context(settings, document, problems)
    schedule = "lr_schedule" if settings.layout == "graph" else "lr_scheduler"
    if schedule in sections:
        _lr_schedule(settings, schedule, problems)
    if "optimizer" in sections and settings.optimizer.betas is not None and len(settings.optimizer.betas) != 2:
        problems.error(
            ("optimizer", "betas"),
            f"`betas` must be two numbers, found {len(settings.optimizer.betas)}",
            "write [0.9, 0.95]",
        )
    if "parallelism" in sections:
        _layers_per_stage(settings, problems)
    if "adapt" in sections:
        settings = _adapt(settings, document, problems)
    if document.get("do_eval") is True:
        settings = _evaluation(settings, document, problems)
    return settings


def _evaluation(settings: Settings, document: dict[str, Any], problems: Problems) -> Settings:
    """Read the data of an evaluation as training data; a file that does not evaluate may have any there."""
    from lowtide.config.schema.callbacks import EvalCallBack
    from lowtide.config.schema.dataset import TrainDataset
    from lowtide.config.schema.reader import read_section

    top = settings.top_level
    every = [(one.step_interval, one.epoch_interval) for one in settings.callbacks if isinstance(one, EvalCallBack)]
    if max(every[0] if every else (top.eval_step_interval, top.eval_epoch_interval)) < 1:
        problems.error(
            ("do_eval",), "`do_eval` is true, and no interval says when", "write eval_step_interval: 100, or another"
        )
    path: tuple[str, ...] = ("eval_dataset",)
    value = document.get("eval_dataset")
    if value is None and isinstance(task := document.get("eval_dataset_task"), dict):
        path, value = ("eval_dataset_task", "dataset_config"), task.get("dataset_config")
    if value is None:
        problems.error(
            ("do_eval",), "`do_eval` is true, and there is no `eval_dataset`", "add it, as `train_dataset` is"
        )
        return settings
    return settings.with_section("eval_dataset", read_section(TrainDataset, value, path, problems))


def _drop_rate(settings: Settings, document: dict[str, Any], problems: Problems) -> None:
    switch = "moe_config" in settings.present and settings.moe_config.callback_moe_droprate
    if not settings.callbacks:
        if switch and not _has_drop_rate(document):
            problems.error(
                ("moe_config", "callback_moe_droprate"),
                f"`callback_moe_droprate` is true, and there is no callback {DROP_RATE}",
                "add it:\ncallbacks:\n  - type: MoEDropRateCallback\n    expert_num: …\n    capacity_factor: …\n"
                "    num_layers: …\n    mtp_depth: 0",
            )
        return
    name = "callbacks" if document.get("callbacks") is not None else "callback"
    places = [
        index for index, item in enumerate(document[name]) if isinstance(item, dict) and item.get("type") == DROP_RATE
    ]
    for index in places[:20]:
        missing = [
            key
            for key in ("expert_num", "capacity_factor", "num_layers", "mtp_depth")
            if document[name][index].get(key) is None
        ]
        if missing:
            problems.error(
                (name, index),
                f"{DROP_RATE} needs expert_num, capacity_factor, num_layers and mtp_depth; "
                f"missing: {', '.join(missing)}",
                "add them, as the model has them",
            )
        _same_as_model(settings, document, (name, index), problems)
    if switch and not places:
        problems.error(
            ("moe_config", "callback_moe_droprate"),
            f"`callback_moe_droprate` is true, and there is no callback {DROP_RATE}",
            f"add `- type: {DROP_RATE}` to `{name}`",
        )
    if places and not switch:
        problems.error(
            (name, places[0], "type"),
            f"the callback {DROP_RATE} needs `moe_config.callback_moe_droprate: true`",
            "add it:\nmoe_config:\n  callback_moe_droprate: true",
        )


def _same_as_model(settings: Settings, document: dict[str, Any], path: tuple[str, int], problems: Problems) -> None:
    """The callback says what the model says too: where both are written, they must agree."""
    model = settings.model
    section = document.get("moe_config")
    older = section if isinstance(section, dict) else {}
    experts = model.n_routed_experts if model.n_routed_experts is not None else older.get("expert_num")
    has_layers = model.num_layers is not None
    meant: dict[str, tuple[Any, str]] = {
        "expert_num": (experts, "the model's experts"),
        "num_layers": (model.num_layers, "the model's num_layers"),
        "mtp_depth": (model.num_nextn_predict_layers if has_layers else None, "the model's num_nextn_predict_layers"),
        "capacity_factor": (older.get("capacity_factor"), "moe_config.capacity_factor"),
    }
    written = document[path[0]][path[1]]
    for key, (value, whose) in meant.items():
        if value is not None and written.get(key) is not None and written[key] != value:
            problems.error(
                (*path, key),
                f"{DROP_RATE} has `{key}` {found(written[key])}, and {whose} is {found(value)}",
                f"write {key}: {value}; the rates would be those of another model",
            )


def _has_drop_rate(document: dict[str, Any]) -> bool:
    """Whether the file names the callback, even in a list that could not be read."""
    lists = [document.get(name) for name in ("callbacks", "callback")]
    return any(
        isinstance(item, dict) and item.get("type") == DROP_RATE
        for value in lists
        if isinstance(value, (list, tuple))
        for item in value
    )


def _parallel_config(settings: Settings, problems: Problems) -> None:
    config = settings.parallel_config
    if (
        config.pipeline_stage > 1
        and config.micro_batch_num is not None
        and config.micro_batch_num < config.pipeline_stage
    ):
        problems.error(
            ("parallel_config", "micro_batch_num"),
            f"`micro_batch_num` must be at least `pipeline_stage`, found {config.micro_batch_num} "
            f"with {config.pipeline_stage} stages",
            f"write {config.pipeline_stage} or more",
        )
    if config.use_seq_parallel and config.model_parallel == 1:
        problems.warn(
            ("parallel_config", "use_seq_parallel"),
            "`use_seq_parallel` has no effect without tensor parallel: `model_parallel` is 1",
        )
    if config.context_parallel_algo == "hybrid_cp" and config.context_parallel % config.ulysses_degree_in_cp:
        problems.error(
            ("parallel_config", "ulysses_degree_in_cp"),
            f"`ulysses_degree_in_cp` must divide `context_parallel`, found {config.ulysses_degree_in_cp} "
            f"and {config.context_parallel}",
        )


def _runner_wrapper(settings: Settings, problems: Problems) -> None:
    wrapper = settings.runner_wrapper
    if wrapper.use_skip_data_by_global_norm and wrapper.global_norm_spike_threshold is None:
        problems.error(
            ("runner_wrapper", "use_skip_data_by_global_norm"),
            "`use_skip_data_by_global_norm` needs `global_norm_spike_threshold`",
            "add `global_norm_spike_threshold: 1.0`, or what your runs show",
        )


def _context(settings: Settings, document: dict[str, Any], problems: Problems) -> None:
    level = settings.context.memory_optimize_level
    swapping = [
        name
        for name, switch in (("swap_config", "swap"), ("swap", "enable"))
        if isinstance(document.get(name), dict) and document[name].get(switch) is True
    ]
    if level in (None, "O0"):
        return
    path = ("context", "memory_optimize_level")
    if swapping:
        problems.warn(
            path,
            f'`memory_optimize_level` must be "O0" with swap in MindSpore, found {found(level)}; it has no effect here',
            'write memory_optimize_level: "O0" to keep the file usable there',
        )
    else:
        problems.warn(path, "`memory_optimize_level` is accepted and has no effect here: memory is planned by lowtide")


def _lr_schedule(settings: Settings, name: str, problems: Problems) -> None:
    if settings.lr_schedule.warmup_epochs is not None and settings.lr_schedule.warmup_ratio is None:
        problems.error(
            (name, "warmup_epochs"),
            "`warmup_epochs` needs `warmup_ratio` too",
            "use `warmup_steps` or `warmup_ratio` alone",
        )


def _layers_per_stage(settings: Settings, problems: Problems) -> None:
    layers = settings.parallelism.pipeline_parallel_layers_per_stage
    if isinstance(layers, str):
        return
    path = ("parallelism", "pipeline_parallel_layers_per_stage")
    for index, text in enumerate(layers):
        if len(text) > 100_000 or not re.fullmatch(RANGES, text, re.ASCII):
            problems.error(
                (*path, index), f'layers are written like "0-3,8-11", found {found(text)}', "use numbers, `-` and `,`"
            )
            return


def _adapt(settings: Settings, document: dict[str, Any], problems: Problems) -> Settings:
    """The MindSpeed guide's rules as far as the file alone decides them: what makes no sense is its default."""
    adapt, keys = settings.adapt, document["adapt"]
    if not isinstance(keys, dict) or any(problem.path[:1] == ("adapt",) for problem in problems.errors):
        return settings  # what is left of it says little

    def path(name: str) -> tuple[str, str]:
        """Where the file sets ``name``, in whichever spelling."""
        return "adapt", next((key for key in keys if adapt.aliases.get(key, key) == name), name)

    if adapt.budget is not None and adapt.device_size is not None:
        problems.error(
            path("device_size"),
            f"`budget` and `{path('device_size')[1]}` are two ways to say what the plan may fill",
            "keep one of them",
            key=True,
        )
        return settings
    if adapt.profiling_step <= 0:
        problems.warn(
            path("profiling_step"), f"the profiling step must be above 0, found {adapt.profiling_step}; 10 is used"
        )
        adapt = adapt.model_copy(update={"profiling_step": 10})
    if adapt.device_size is not None and adapt.device_size <= 0:
        problems.warn(
            path("device_size"),
            f"the device size must be above 0 MB, found {adapt.device_size}; the device's memory is used",
        )
        adapt = adapt.model_copy(update={"device_size": None})
    if adapt.budget is None and adapt.device_size is None and not adapt.device_swap:
        problems.warn(
            ("adapt",),
            "`adapt` has no effect: nothing in it turns the adaptive mode on",
            "add `budget: auto`, or `device_swap: true`",
            key=True,
        )
    return settings.with_section("adapt", adapt)
