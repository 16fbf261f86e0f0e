"""The pydantic model of a section, built on demand from the section's own annotations.

The JSON Schema comes from these models. Reading a file does not: building them takes some 0.2 ms a field.
"""

from functools import cache, reduce
from operator import or_
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, create_model

from lowtide.config.schema.docstrings import descriptions
from lowtide.config.schema.field import (
    Elsewhere,
    NoEffect,
    Range,
    Refused,
    Section,
    Size,
    Ways,
    branches,
    field_names,
    ways_of,
)
from lowtide.config.schema.wording import supported

__all__ = ["pydantic_model"]

SIZE = r"^\s*(\d+(\.\d*)?|\.\d+)\s*([KMGT]?i?[Bb])?\s*$"


def pydantic_model(section: type[Section]) -> type[BaseModel]:
    """The strict and frozen pydantic model of ``section``; null stands for a field's default."""
    key: Any = section
    return _build(key)


@cache
def _build(section: Any) -> type[BaseModel]:
    texts = descriptions(section)
    fields: dict[str, Any] = {}
    for name in field_names(section):
        ways = ways_of(section, name)
        default = getattr(section, name)
        described = Field(
            default=None if isinstance(default, Section) else default,
            description=_description(texts.get(name, ""), ways),
            alias=name,
        )
        # The attribute is renamed because `model_config` means something else to pydantic; the alias is what counts.
        fields[f"{name}_field"] = (_union(ways, null=True), described)
    config = ConfigDict(
        strict=True,
        frozen=True,
        extra="forbid" if section.unknown == "error" else "allow",
        protected_namespaces=(),
    )
    text = " ".join((section.__doc__ or "").split())
    return create_model(section.__name__, __config__=config, __doc__=text, **fields)


def _description(text: str, ways: Ways) -> str:
    reasons = [note.reason for _, notes in ways for note in notes if isinstance(note, NoEffect)]
    return f"{text} Accepted, no effect here: {reasons[0]}." if reasons else text


def _union(ways: Ways, *, null: bool = False) -> Any:
    types = [_type(base, notes) for base, notes in ways]
    return reduce(or_, [*types, None] if null else types)


def _type(base: Any, notes: tuple[Any, ...]) -> Any:
    for note in notes:
        if isinstance(note, Size):
            return Annotated[int, Field(ge=1)] | Annotated[str, Field(pattern=SIZE)]
        if isinstance(note, Elsewhere) and note.written is not Any:
            return _union(branches(note.written))
    origin = get_origin(base)
    if origin is Literal:
        return Literal[tuple(supported(base, notes))]
    if origin is list:
        return list[_union(branches(get_args(base)[0]))]  # type: ignore[misc]
    if origin is dict:
        return dict[str, _union(branches(get_args(base)[1]))]  # type: ignore[misc]
    if isinstance(base, type) and issubclass(base, Section):
        return pydantic_model(base)
    if base is bool and any(isinstance(note, Refused) for note in notes):
        return Literal[False]
    for note in notes:
        if isinstance(note, Range):
            low, above = (None, note.low) if note.open_low else (note.low, None)
            return Annotated[base, Field(ge=low, gt=above, le=note.high)]
    return base
