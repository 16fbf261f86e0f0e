"""The JSON Schema of a training file, made from the same sections that read it."""

from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, models_json_schema

from lowtide.config.schema.callbacks import CALLBACKS, IGNORED
from lowtide.config.schema.catalogue import SECTIONS, TELLS_2026, TELLS_GRAPH, section_class
from lowtide.config.schema.field import Section, Ways, branches, field_names, ways_of
from lowtide.config.schema.pydantic_model import pydantic_model
from lowtide.config.schema.top_level import TopLevel

__all__ = ["document_schema"]


def document_schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of a file in either layout."""
    used = {section_class(name) for name in SECTIONS} | {TopLevel} | set(CALLBACKS.values())
    models: list[tuple[type[BaseModel], Literal["validation"]]] = [
        (pydantic_model(section), "validation") for section in sorted(used, key=lambda one: one.__name__)
    ]
    _, schemas = models_json_schema(models, schema_generator=_Untitled)
    definitions: dict[str, Any] = schemas["$defs"]
    for section in sorted(used | _nested(used), key=lambda one: one.__name__):
        definition = definitions[section.__name__]
        definition["type"] = ["object", "null"]
        for alias, name in section.aliases.items():
            known = definition["properties"][name]
            definition["properties"][alias] = {
                **known,
                "description": f"Another name of `{name}`. {known['description']}",
            }
    properties: dict[str, Any] = dict(definitions.pop("TopLevel")["properties"])
    for name in SECTIONS:
        section = section_class(name)
        text = " ".join((section.__doc__ or "").split())
        properties[name] = {"description": text, "$ref": f"#/$defs/{section.__name__}"}
    # What `model` holds depends on the layout; see the conditions below.
    properties["model"] = {"type": ["object", "null"], "description": "The model."}
    for name in ("callbacks", "callback"):
        properties[name] = {"type": ["array", "null"], "description": _CALLBACKS, "items": _callback()}
    newer = {"anyOf": [_has(name) for name in TELLS_2026]}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A training file as lowtide reads it",
        "description": "The YAML of MindSpore Transformers, in its graph layout or its layout of 2026.",
        "type": "object",
        "properties": properties,
        "if": newer,
        "then": {"properties": {"model": {"$ref": "#/$defs/ModelConfig"}}},
        "else": {"properties": {"model": {"$ref": "#/$defs/ModelSection"}}},
        "not": {
            "anyOf": [
                {"allOf": [{"anyOf": [_has(name) for name in TELLS_GRAPH]}, newer]},
                {"required": ["callback", "callbacks"]},
            ]
        },
        "$defs": definitions,
    }


_CALLBACKS = "What happens beside a step: a list of callbacks, each with its `type`."


def _has(name: str) -> dict[str, Any]:
    """The file has a section, and it is not empty."""
    return {"required": [name], "properties": {name: {"not": {"type": "null"}}}}


def _callback() -> dict[str, Any]:
    return {
        "type": ["object", "null"],
        "required": ["type"],
        "properties": {"type": {"enum": [*CALLBACKS, *IGNORED], "description": "The callback's name."}},
        "allOf": [
            {
                "if": {"type": "object", "properties": {"type": {"const": name}}, "required": ["type"]},
                "then": {"$ref": f"#/$defs/{section.__name__}"},
            }
            for name, section in CALLBACKS.items()
        ],
    }


def _nested(sections: set[type[Section]]) -> set[type[Section]]:
    """The sections inside ``sections``, at any depth."""
    found: set[type[Section]] = set()
    waiting = list(sections)
    while waiting:
        section = waiting.pop()
        for name in field_names(section):
            for base in _bases(ways_of(section, name)):
                if base not in found:
                    found.add(base)
                    waiting.append(base)
    return found


def _bases(ways: Ways) -> list[type[Section]]:
    result: list[type[Section]] = []
    for base, _ in ways:
        origin: Any = get_origin(base)
        if origin is list:
            result += _bases(branches(get_args(base)[0]))
        elif isinstance(base, type) and issubclass(base, Section):
            result.append(base)
    return result


class _Untitled(GenerateJsonSchema):
    """Without titles: pydantic makes them from names, and they say nothing more."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False
