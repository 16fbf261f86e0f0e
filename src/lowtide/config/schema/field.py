"""The base of every section, a strict and frozen pydantic model, and what a field says about itself.

Building the validators of some three hundred fields takes longer than the rest of a check. A section is therefore
built when it is first read (``defer_build``), in a module that is imported when a file has the section.

A value that needs the model's layers to be understood is annotated with pydantic's ``SkipValidation``: it is handed on
as written, null too, and only the JSON Schema describes it.
"""

import types
from collections.abc import Callable
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, TypeAlias, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SkipValidation, TypeAdapter, WithJsonSchema
from pydantic.fields import FieldInfo

from lowtide.units import parse_bytes

__all__ = [
    "EXACT",
    "MAX_COUNT",
    "SIZE",
    "Bytes",
    "Count",
    "Degree",
    "Fraction",
    "Free",
    "Index",
    "ListOf",
    "NoEffect",
    "NotNegative",
    "Positive",
    "Refused",
    "Section",
    "Seed",
    "Ways",
    "branches",
    "exactly",
    "fields_of",
    "handed_on",
    "known_names",
    "validator",
    "ways_of",
]

MAX_COUNT = 10**12
"""No count in a training file is larger; a larger one is a slip of the pen."""


class Section(BaseModel):
    """The base of every section; a field that the file does not set is its default."""

    model_config = ConfigDict(
        strict=True,
        frozen=True,
        extra="forbid",  # the reader reports unknown keys itself; this is for code that makes a section
        allow_inf_nan=False,
        defer_build=True,
        protected_namespaces=(),
    )

    unknown: ClassVar[Literal["error", "warn"]] = "warn"
    """What an unknown key is; one that is nearly a known name is always an error."""
    aliases: ClassVar[dict[str, str]] = {}
    """Other names of a field, each with the field's own."""


class NoEffect:
    """A key that is accepted, and says so in a warning, because nothing here depends on it."""

    __slots__ = ("harmless", "reason", "when")

    def __init__(
        self, reason: str, *, harmless: tuple[Any, ...] = (), when: Callable[[Any], bool] | None = None
    ) -> None:
        self.reason, self.harmless, self.when = reason, harmless, when


class Refused:
    """A key that cannot be honoured when ``when`` holds for its value; ``instead`` says what to do."""

    __slots__ = ("instead", "reason", "when")

    def __init__(self, reason: str, instead: str, *, when: Callable[[Any], bool] = bool) -> None:
        self.reason, self.instead, self.when = reason, instead, when


def _read_size(value: object) -> int:
    if type(value) is int:
        return value
    if not isinstance(value, str) or len(value) > 40:
        raise ValueError("not a size")
    return parse_bytes(value)


def _refuse_lookalikes(value: object) -> object:
    if isinstance(value, (bool, float)):
        raise ValueError("equal to a choice at most")
    return value


SIZE = BeforeValidator(_read_size)
"""Reads a size such as ``"58GB"``; the attribute holds the number of bytes."""
EXACT = BeforeValidator(_refuse_lookalikes)
"""For choices that are whole numbers: ``true`` and ``1.0`` equal 1, and are no ``1``."""

Count = Annotated[int, Field(ge=1, le=MAX_COUNT)]
"""A whole number from one."""
Index = Annotated[int, Field(ge=0, le=MAX_COUNT)]
"""A whole number from zero."""
Seed = Annotated[int, Field(ge=0, le=2**63 - 1)]
"""A seed of random numbers."""
Degree = Annotated[int, Field(ge=1, le=1_000_000)]
"""A degree of parallelism."""
Positive = Annotated[float, Field(gt=0)]
"""A number above zero."""
NotNegative = Annotated[float, Field(ge=0)]
"""A number from zero."""
Fraction = Annotated[float, Field(ge=0, le=1)]
"""A number from zero to one."""
Bytes = Annotated[
    int,
    SIZE,
    Field(gt=0, le=2**63 - 1),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "integer", "minimum": 1},
                {"type": "string", "pattern": r"^\s*(\d+(\.\d*)?|\.\d+)\s*([KMGT]?i?[Bb])?\s*$"},
            ]
        }
    ),
]
"""A number of bytes, written as a number or as text with a unit."""
Free: TypeAlias = dict[Any, Any]
"""A mapping that is taken as written."""

Item = TypeVar("Item")
ListOf = Annotated[list[Item], Field(fail_fast=True)]
"""A list that is read up to its first wrong element: one error says enough, and a long list would give thousands."""

Ways: TypeAlias = tuple[tuple[Any, tuple[Any, ...]], ...]
"""The ways a value may be written: each a plain type with the notes about it."""


@cache
@cache
def fields_of(section: type[Section]) -> dict[str, FieldInfo]:
    """The fields of a section by the name that a file uses, in the order they are written."""
    return {field.alias or name: field for name, field in section.model_fields.items()}


@cache
def validator(section: type[Section], name: str) -> TypeAdapter[Any]:
    """What pydantic validates one field with, as strictly as the section itself."""
    field = fields_of(section)[name]
    written: Any = field.annotation
    for note in field.metadata:
        written = Annotated[written, note]
    if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
        return TypeAdapter(written)  # it has a configuration of its own
    return TypeAdapter(written, config=ConfigDict(strict=True, allow_inf_nan=False))


def known_names(section: type[Section]) -> list[str]:
    """Every name a section takes, aliases too."""
    return [*fields_of(section), *section.aliases]


@cache
def ways_of(section: type[Section], name: str) -> Ways:
    """The ways a field may be written; worked out on first use, because most files set few of the fields."""
    field = fields_of(section)[name]
    return tuple((base, (*field.metadata, *notes)) for base, notes in branches(field.annotation))


def branches(annotation: Any) -> Ways:
    """The ways a value may be written, each with its notes; null is none of them."""
    notes: tuple[Any, ...] = ()
    while get_origin(annotation) is Annotated:
        annotation, *more = get_args(annotation)
        notes += tuple(more)
    if get_origin(annotation) not in (Union, types.UnionType):
        return ((annotation, notes),)
    parts = [branches(one) for one in get_args(annotation) if one is not type(None)]
    return tuple((base, notes + more) for part in parts for base, more in part)


def handed_on(ways: Ways) -> bool:
    """Whether a value is taken as written, to be read with the layers at hand."""
    skip: Any = SkipValidation  # to type checkers an alias, not a class
    return any(isinstance(note, skip) for _, notes in ways for note in notes)


def exactly(*values: Any) -> Callable[[Any], bool]:
    """A predicate for values of the same type and equal: ``True`` is not ``1``."""
    return lambda value: any(type(value) is type(one) and value == one for one in values)
