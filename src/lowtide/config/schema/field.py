"""What a field of a section says about itself: its range, its verdict, and the frozen base of all sections.

Sections are plain classes: a check of a file must be done in a few milliseconds, and building the validators of some
three hundred fields costs more than the rest of the check. Reading a section (:mod:`.reader`) looks only at the fields
that the file sets. The pydantic model of a section (:mod:`.pydantic_model`) is built from the same annotations when
the JSON Schema is asked for; a test holds that both accept the same values.
"""

import sys
import types
from collections.abc import Callable, Iterator
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    NoReturn,
    TypeAlias,
    TypeVar,
    Union,
    dataclass_transform,
    get_args,
    get_origin,
)

__all__ = [
    "Bytes",
    "Count",
    "Degree",
    "Elsewhere",
    "Fraction",
    "Index",
    "NoEffect",
    "NotNegative",
    "Positive",
    "Range",
    "Refused",
    "Section",
    "Seed",
    "Size",
    "Ways",
    "branches",
    "exactly",
    "field_names",
    "replace",
    "ways_of",
]

MAX_COUNT = 10**12
"""No count in a training file is larger; a larger one is a slip of the pen."""


class Range:
    """The numbers a field takes, both ends included unless ``open_low``."""

    __slots__ = ("high", "low", "open_low")

    def __init__(self, low: float | None = None, high: float | None = None, *, open_low: bool = False) -> None:
        self.low, self.high, self.open_low = low, high, open_low


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


class Elsewhere:
    """A value that is handed on as written, because it is read with the layers at hand; ``written`` is its form."""

    __slots__ = ("written",)

    def __init__(self, written: Any = Any) -> None:
        self.written = written


class Size:
    """A size such as ``"58GB"``; the attribute holds the number of bytes."""

    __slots__ = ()


Count = Annotated[int, Range(1, MAX_COUNT)]
"""A whole number from one."""
Index = Annotated[int, Range(0, MAX_COUNT)]
"""A whole number from zero."""
Seed = Annotated[int, Range(0, 2**63 - 1)]
"""A seed of random numbers."""
Degree = Annotated[int, Range(1, 1_000_000)]
"""A degree of parallelism."""
Positive = Annotated[float, Range(0, open_low=True)]
"""A number above zero."""
NotNegative = Annotated[float, Range(0)]
"""A number from zero."""
Fraction = Annotated[float, Range(0, 1)]
"""A number from zero to one."""
Bytes = Annotated[int, Size()]
"""A number of bytes, written as a number or as text with a unit."""


Ways: TypeAlias = tuple[tuple[Any, tuple[Any, ...]], ...]
"""The ways a value may be written: each a plain type with the notes about it."""


@dataclass_transform(frozen_default=True, kw_only_default=True)
class Section:
    """The frozen base of every section: defaults are class attributes, what the file sets is the instance's."""

    unknown: ClassVar[Literal["error", "warn"]] = "warn"
    """What an unknown key is; one that is nearly a known name is always an error."""
    aliases: ClassVar[dict[str, str]] = {}
    """Other names of a field, each with the attribute it sets."""

    def __init__(self, **values: Any) -> None:
        strange = values.keys() - set(field_names(type(self)))
        if strange:
            raise TypeError(f"{type(self).__name__} has no field {', '.join(sorted(strange))}")
        self.__dict__.update(values)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"{type(self).__name__} is frozen; use replace(section, {name}=…)")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"{type(self).__name__} is frozen")

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return all(getattr(self, name) == getattr(other, name) for name in field_names(type(self)))

    def __repr__(self) -> str:
        inside = ", ".join(f"{name}={value!r}" for name, value in self.__dict__.items())
        return f"{type(self).__name__}({inside})"


AnySection = TypeVar("AnySection", bound=Section)


def replace(section: AnySection, **values: Any) -> AnySection:
    """Return ``section`` with some fields changed."""
    return type(section)(**{**section.__dict__, **values})


def ways_of(section: type[Section], name: str) -> Ways:
    """The ways a field may be written; worked out on first use, because most files set few of the fields."""
    written = section.__annotations__[name]
    key = (section.__module__, written)
    if key not in _WAYS:
        _WAYS[key] = branches(eval(written, vars(sys.modules[section.__module__])))
    return _WAYS[key]


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


_WAYS: dict[tuple[str, str], Ways] = {}


def field_names(section: type[Section]) -> Iterator[str]:
    """The attributes of a section that a file can set, in the order they are written."""
    return (name for name in section.__annotations__ if name not in ("aliases", "unknown"))


def exactly(*values: Any) -> Callable[[Any], bool]:
    """A predicate for values of the same type and equal: ``True`` is not ``1``."""
    return lambda value: any(type(value) is type(one) and value == one for one in values)
