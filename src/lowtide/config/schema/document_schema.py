"""The JSON Schema of a training file, made from the same sections that read it."""

from typing import Any, Literal

from pydantic.json_schema import GenerateJsonSchema, models_json_schema

from lowtide.config.schema.callbacks import CALLBACKS, IGNORED
from lowtide.config.schema.catalogue import SECTIONS, TELLS_2026, TELLS_GRAPH, section_class
from lowtide.config.schema.docstrings import descriptions
from lowtide.config.schema.field import NoEffect, Refused, Section, ways_of
from lowtide.config.schema.top_level import TopLevel

__all__ = ["document_schema"]


def document_schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of a file in either layout."""
    used = {section_class(name) for name in SECTIONS} | {TopLevel} | set(CALLBACKS.values())
    models: list[tuple[type[Section], Literal["validation"]]] = [
        (section, "validation") for section in sorted(used, key=lambda one: one.__name__)
    ]
    _, schemas = models_json_schema(models, schema_generator=_Untitled)
    definitions: dict[str, Any] = schemas["$defs"]
    for section in Section.__subclasses__():
        if section.__name__ in definitions:
            _complete(section, definitions[section.__name__])
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


_CALLBACKS = "What happens around a step: a list of callbacks, each with its `type`."


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


def _complete(section: type[Section], definition: dict[str, Any]) -> None:
    """Add what the reader does beyond types: null for a default, other names, unknown keys, refused values."""
    definition["type"] = ["object", "null"]
    definition["additionalProperties"] = section.unknown != "error"
    properties = definition["properties"]
    texts = descriptions(section)
    for attribute, field in section.model_fields.items():
        name = field.alias or attribute
        notes = [note for _, notes in ways_of(section, name) for note in notes]
        refusals = [note for note in notes if isinstance(note, Refused)]
        known = properties[name]
        default = {"default": known.pop("default", None)}
        options = [better for option in known.get("anyOf", [known]) for better in _honoured(option, refusals)]
        if {"type": "null"} not in options:
            options.append({"type": "null"})
        reasons = [f" Accepted, no effect here: {note.reason}." for note in notes if isinstance(note, NoEffect)]
        properties[name] = {"anyOf": options, **default, "description": "".join([texts[attribute], *reasons[:1]])}
    for alias, name in section.aliases.items():
        text = f"Another name of `{name}`. {properties[name]['description']}"
        properties[alias] = {**properties[name], "description": text}


def _honoured(option: dict[str, Any], refusals: list[Refused]) -> list[dict[str, Any]]:
    """One way of writing a value without the choices that are refused; nothing where all are."""
    choices = option.get("enum", [False, True] if option.get("type") == "boolean" else [])
    good = [one for one in choices if not any(refusal.when(one) for refusal in refusals)]
    if good == choices:
        return [option]
    return [{**option, "enum": good}] if good else []


class _Untitled(GenerateJsonSchema):
    """Without titles: pydantic makes them from names, and they say nothing more."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False
