"""Reads every section that a file has, in either layout."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lowtide.config.problem import Problems, nearest
from lowtide.config.schema.catalogue import (
    AS_WRITTEN,
    ONLY_2026,
    ONLY_GRAPH,
    SECTIONS,
    TELLS_2026,
    TELLS_GRAPH,
    Layout,
    section_class,
)
from lowtide.config.schema.field import Section, known_names
from lowtide.config.schema.reader import mapping_error, read_section, report_unknown, slip
from lowtide.config.schema.settings import Settings
from lowtide.config.schema.wording import found, label, shown

if TYPE_CHECKING:
    from lowtide.config.schema.callbacks import Callback

__all__ = ["read_sections"]

SWITCHES = {"recompute": "recompute_config", "swap": "swap_config"}
"""Sections of the 2026 layout that share their name with a key of the graph layout."""
MOST_LOOSE = 40
"""Unknown keys outside sections whose owner is looked for."""


def read_sections(value: Any, problems: Problems) -> Settings:
    """Read every section of a file; whatever is wrong is reported in ``problems``, never raised.

    ``value`` is the document's plain mapping.
    """
    if value is not None and not isinstance(value, dict):
        problems.error((), f"the file must hold sections, found {found(value)}", "write `section:` and keys below it")
    document: dict[str, Any] = value if isinstance(value, dict) else {}
    layout, mixed = _layout(document, problems)
    sections: dict[str, Section] = {}
    loose: dict[str, Any] = {}
    unknown: list[Any] = []
    callbacks: tuple[Callback, ...] = ()
    written: dict[str, dict[str, Any]] = {}
    done: set[str] = set()  # sections with two names are read at the first
    from lowtide.config.schema.top_level import TopLevel

    free = set(known_names(TopLevel))
    for key, item in document.items():
        if key in ("model", "model_config"):
            if "model" not in done:
                _read_model(document, layout, sections, problems)
            done.add("model")
            continue
        if key in ("callback", "callbacks"):
            if "callbacks" not in done:
                callbacks = _read_callbacks(document, problems)
            done.add("callbacks")
            continue
        if key not in SECTIONS:
            if key in free:
                loose[key] = item
            else:
                unknown.append(key)
        elif item is None:
            continue
        elif key in SWITCHES and not isinstance(item, dict):
            _switch(key, item, problems)
        elif not mixed and _misplaced(key, layout, problems):
            continue
        elif key in AS_WRITTEN and isinstance(item, dict):
            known = AS_WRITTEN[key]
            unknown_keys = [name for name in item if name not in known]
            if unknown_keys:
                report_unknown(unknown_keys, list(known), (key,), problems, strict=True)
            written[key] = {name: value for name, value in item.items() if name in known}
        else:
            sections[key] = read_section(section_class(key), _without_alias(key, item, document), (key,), problems)
    if loose:
        sections["top_level"] = read_section(TopLevel, loose, (), problems)
    if unknown:
        _unknown_top_level(unknown, document, problems)
    from lowtide.config.schema.rules import check_rules

    settings = Settings(layout, sections, callbacks, written)
    return check_rules(settings, document, problems)


def _without_alias(key: str, item: Any, document: dict[str, Any]) -> Any:
    """A task without its data set where that is an alias of ``train_dataset``, so that each finding is reported
    once."""
    if key != "train_dataset_task" or not isinstance(item, dict) or "dataset_config" not in item:
        return item
    if item["dataset_config"] != document.get("train_dataset"):
        return item
    return {name: value for name, value in item.items() if name != "dataset_config"}


def _switch(key: str, item: object, problems: Problems) -> None:
    """Report a switch of the graph layout that is outside its section."""
    value = "true" if item is True else "false" if item is False else "…"
    problems.error(
        (key,),
        f"{shown(key)} must be a mapping, found {found(item)}",
        f"as a switch it belongs below `{SWITCHES[key]}:`\n{SWITCHES[key]}:\n  {key}: {value}",
    )


def _layout(document: dict[str, Any], problems: Problems) -> tuple[Layout, bool]:
    graph = [key for key in document if key in TELLS_GRAPH and document[key] is not None]
    newer = [key for key in document if key in TELLS_2026 and document[key] is not None]
    newer = [key for key in newer if key not in SWITCHES or isinstance(document[key], dict)]
    if not (graph and newer):
        return ("2026" if newer else "graph"), False
    first, second = sorted((graph[0], newer[0]), key=list(document).index)
    problems.error(
        (second,),
        f"{shown(first)} and {shown(second)} belong to two different layouts of a file",
        f"keep one layout: {shown(graph[0])} is of the graph layout, {shown(newer[0])} of the 2026 layout",
        key=True,
    )
    return ("graph" if first == graph[0] else "2026"), True


def _misplaced(key: str, layout: Layout, problems: Problems) -> bool:
    """Whether a section belongs to the other layout only; reported if so."""
    instead = (ONLY_2026 if layout == "graph" else ONLY_GRAPH).get(key)
    if not instead:
        return False
    other = "2026" if layout == "graph" else "graph"
    problems.error(
        (key,),
        f"{shown(key)} belongs to the {other} layout of a file; this one is in the {layout} layout",
        f"use {instead}",
        key=True,
    )
    return True


def _read_model(document: dict[str, Any], layout: Layout, sections: dict[str, Section], problems: Problems) -> None:
    model, config = document.get("model"), document.get("model_config")
    if model is None and config is None:
        return
    from lowtide.config.schema.model import ModelConfig, ModelSection

    if model is not None and not isinstance(model, dict):
        mapping_error(model, ("model",), problems)
        model = None
    if layout == "2026":
        flat = dict(model or {})
        if config is not None or "model_config" in flat:
            where: tuple[str, ...] = ("model_config",) if config is not None else ("model", "model_config")
            problems.error(
                where,
                "`model_config` belongs to the graph layout of a file; this one is in the 2026 layout",
                "write its keys directly under `model`",
                key=True,
            )
            flat.pop("model_config", None)
        sections["model"] = read_section(ModelConfig, flat, ("model",), problems)
        return
    if isinstance(model, dict):
        inner = model.get("model_config")
        names = set(known_names(ModelConfig))
        outer = {key: item for key, item in model.items() if key not in names}
        for key in [key for key in model if key in names]:
            problems.error(
                ("model", key), f"{shown(key)} is a key of `model.model_config`", _below("model_config", key), key=True
            )
        if inner is not None and not isinstance(inner, dict):
            mapping_error(inner, ("model", "model_config"), problems)
            del outer["model_config"]
        section = read_section(ModelSection, outer, ("model",), problems)
        sections["model_section"] = section
        if inner is not None:
            sections["model"] = section.config
    if config is not None and "model" in sections:
        problems.error(
            ("model_config",),
            "`model_config` and `model.model_config` are two places for one section",
            "keep one of them",
            key=True,
        )
    elif config is not None:
        sections["model"] = read_section(ModelConfig, config, ("model_config",), problems)


def _read_callbacks(document: dict[str, Any], problems: Problems) -> tuple[Callback, ...]:
    names = [key for key in ("callbacks", "callback") if document.get(key) is not None]
    if not names:
        return ()
    if len(names) == 2:
        problems.error(
            ("callback",),
            "`callback` and `callbacks` are two names of one section",
            "join the two lists under `callbacks`",
            key=True,
        )
    name = names[0]
    value = document[name]
    if not isinstance(value, (list, tuple)):
        problems.error(
            (name,), f"{shown(name)} must be a list, found {found(value)}", f"write `- type: …` lines below `{name}:`"
        )
        return ()
    from lowtide.config.schema.callbacks import CALLBACKS, IGNORED, OtherCallback

    result: list[Any] = []
    wrong = 0
    for index, item in enumerate(value):
        path = (name, index)
        if wrong >= 20:  # a long list of anything else is reported well enough by now
            break
        if item is None:
            continue
        if not isinstance(item, dict):
            mapping_error(item, path, problems)
            wrong += 1
            continue
        kind = item.get("type")
        if isinstance(kind, str) and kind in CALLBACKS:
            result.append(read_section(CALLBACKS[kind], item, path, problems))
        elif isinstance(kind, str) and kind in IGNORED:
            problems.warn((*path, "type"), f"{shown(kind)} is accepted and has no effect here: {IGNORED[kind]}")
            settings = {key: one for key, one in item.items() if key != "type"}
            result.append(OtherCallback(type=kind, settings=settings))
        elif isinstance(kind, str):
            wrong += 1
            known = [*CALLBACKS, *IGNORED]
            close = nearest(kind, known)
            hint = f"the nearest names are {', '.join(close)}" if close else f"known are {', '.join(CALLBACKS)}"
            problems.error((*path, "type"), f"the callback {shown(kind)} is not known", hint)
        else:
            wrong += 1
            where = (*path, "type") if "type" in item else path
            problems.error(
                where,
                f"{label((*path, 'type'))} must be a callback's name, found {found(kind)}",
                "write `type: MFLossMonitor`",
            )
    return tuple(result)


def _unknown_top_level(unknown: list[Any], document: dict[str, Any], problems: Problems) -> None:
    """Report keys outside every section: typing errors, and keys that a section owns."""
    from lowtide.config.schema.top_level import TopLevel

    names = [*SECTIONS, "callbacks", "callback", *known_names(TopLevel)]
    rest = []
    for key in unknown[:MOST_LOOSE]:
        owners = [] if not isinstance(key, str) or slip(key, names) else _owners(key, document)
        if not owners:
            rest.append(key)
            continue
        problems.error(
            (key,),
            f"{shown(key)} is a key of `{owners[0]}`, and is outside every section here",
            _below(owners[0], key),
            key=True,
        )
    report_unknown(rest + unknown[MOST_LOOSE:], names, (), problems, strict=False)


def _owners(key: str, document: dict[str, Any]) -> list[str]:
    """The sections that have such a key; first those that the file opens and leaves empty."""
    owners = [
        name for name in SECTIONS if name not in ("model", "lr_scheduler") and key in known_names(section_class(name))
    ]
    empty = [name for name in owners if name in document and document[name] is None]
    present = [name for name in owners if name in document]
    return empty or present or (owners if len(owners) == 1 else [])


def _below(section: str, key: str) -> str:
    return f"indent it below `{section}:`\n{section}:\n  {key if key.isprintable() else '…'}: …"
