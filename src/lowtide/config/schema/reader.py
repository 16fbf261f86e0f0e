"""Reads one section: checks each value against its field and reports what is wrong in plain words."""

import difflib
import math
from collections.abc import Iterable
from typing import Any, Final, Literal, TypeVar, get_args, get_origin

from lowtide.config.problem import Problems, nearest
from lowtide.config.schema.catalogue import SECTIONS
from lowtide.config.schema.field import (
    Elsewhere,
    NoEffect,
    Range,
    Refused,
    Section,
    Size,
    Ways,
    branches,
    exactly,
    field_names,
    ways_of,
)
from lowtide.config.schema.wording import expected, found, label, number, shown, spelling, supported
from lowtide.units import parse_bytes

__all__ = ["known_names", "mapping_error", "read_section", "report_unknown", "slip"]

Path = tuple[str | int, ...]
AnySection = TypeVar("AnySection", bound=Section)

BROKEN: Final = object()
"""Stands for a value that was reported and is not to be used."""
MOST_UNKNOWN = 20
"""Unknown keys of one section that are reported one by one; comparing names is slow."""
CLOSE = 0.85
"""How alike two names must be for one to be a slip of the pen for the other."""


def read_section(section: type[AnySection], value: object, path: Path, problems: Problems) -> AnySection:
    """Read ``value`` as a ``section``; whatever is wrong is reported, and its default used instead."""
    if value is None:
        return section()
    if not isinstance(value, dict):
        mapping_error(value, path, problems)
        return section()
    fields = set(field_names(section))
    values: dict[str, Any] = {}
    given: dict[str, str] = {}
    unknown: list[Any] = []
    for key, item in value.items():
        name = section.aliases.get(key, key) if isinstance(key, str) else key
        if name not in fields:
            unknown.append(key)
            continue
        if name in given:
            _same_setting(value, given[name], key, path, problems)
            continue
        given[name] = key
        result = _field(ways_of(section, name), getattr(section, name), item, (*path, key), problems)
        if result is not BROKEN:
            values[name] = result
    if unknown:
        report_unknown(unknown, known_names(section), path, problems, strict=section.unknown == "error")
    return section(**values)


def known_names(section: type[Section]) -> list[str]:
    """Every name a section takes, aliases too."""
    return [*field_names(section), *section.aliases]


def _field(ways: Ways, default: object, value: object, path: Path, problems: Problems) -> Any:
    notes = {id(note): note for _, more in ways for note in more}.values()
    if any(isinstance(note, Elsewhere) for note in notes):
        return value
    if value is None:  # `key:` with nothing after it leaves the default
        return BROKEN
    result = _value(ways, value, path, problems)
    if result is BROKEN:
        return BROKEN
    for note in notes:
        if isinstance(note, Refused) and note.when(value):
            problems.error(path, f"{label(path)} is {found(value)}: {note.reason}", note.instead)
            return BROKEN
        if isinstance(note, NoEffect) and _matters(note, default, value):
            problems.warn(path, f"{label(path)} is accepted and has no effect here: {note.reason}")
    return result


def _matters(note: NoEffect, default: object, value: object) -> bool:
    if note.when is not None:
        return note.when(value)
    usual = note.harmless or (() if default is None else (default,))
    return not exactly(*usual)(value)


def _value(ways: Ways, value: object, path: Path, problems: Problems) -> Any:
    """Check one value, elements of lists and mappings included; at most one error comes of a plain value."""
    for base, notes in ways:
        if _fits(base, notes, value):
            return _branch(base, notes, value, path, problems)
    choices = [str(one) for base, notes in ways for one in supported(base, notes)]
    hint = spelling(ways, value)
    if not hint and choices and isinstance(value, str):
        close = nearest(value, choices, count=1)
        hint = f"did you mean {close[0]}?" if close else ""
    problems.error(path, f"{label(path)} must be {expected(ways)}, found {found(value)}", hint)
    return BROKEN


def _fits(base: Any, notes: tuple[Any, ...], value: object) -> bool:
    if any(isinstance(note, Size) for note in notes):
        return type(value) in (int, str)
    if base is Any:
        return True
    origin = get_origin(base)
    if origin is Literal:
        return exactly(*get_args(base))(value)
    if origin is list:
        return isinstance(value, (list, tuple))
    if origin is dict or issubclass(base, Section):
        return isinstance(value, dict)
    return type(value) is base or (base is float and type(value) is int)


def _branch(base: Any, notes: tuple[Any, ...], value: Any, path: Path, problems: Problems) -> Any:
    for note in notes:
        if isinstance(note, Size):
            return _size(value, path, problems)
    if base is Any or base is bool or base is str:
        return value
    origin = get_origin(base)
    if origin is Literal:
        return value
    if origin is list:
        return _list(branches(get_args(base)[0]), value, path, problems)
    if origin is dict:
        return value
    if issubclass(base, Section):
        return read_section(base, value, path, problems)
    return _number(base, notes, value, path, problems)


def _list(ways: Ways, value: Iterable[object], path: Path, problems: Problems) -> Any:
    result = []
    for index, item in enumerate(value):
        read = _value(ways, item, (*path, index), problems)
        if read is BROKEN:  # one error says enough, and a long list would give thousands
            return BROKEN
        result.append(read)
    return result


def _number(base: type, notes: tuple[Any, ...], value: float, path: Path, problems: Problems) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        problems.error(path, f"{label(path)} must be a finite number, found {number(value)}", "write a plain number")
        return BROKEN
    for note in notes:
        if not isinstance(note, Range):
            continue
        low, high = note.low, note.high
        wrong = ""
        if low is not None and (value <= low if note.open_low else value < low):
            wrong = f"above {low:g}" if note.open_low else f"at least {low}"
        elif high is not None and value > high:
            wrong = f"at most {high:,}" if isinstance(high, int) else f"at most {high:g}"
        if wrong:
            problems.error(path, f"{label(path)} must be {wrong}, found {number(value)}")
            return BROKEN
    try:
        return base(value)
    except OverflowError:
        problems.error(path, f"{label(path)} is too large: {number(value)}", "write a smaller number")
        return BROKEN


def _size(value: str | int, path: Path, problems: Problems) -> Any:
    try:
        if isinstance(value, str) and len(value) > 40:
            raise ValueError("it is too long")
        size = parse_bytes(value)
    except (ValueError, OverflowError):
        problems.error(
            path, f'{label(path)} must be a size such as "58GB", found {found(value)}', 'write "58GB" or "24GiB"'
        )
        return BROKEN
    if not 0 < size < 2**63:
        problems.error(path, f"{label(path)} must be above 0 and below 2^63 bytes, found {found(value)}")
        return BROKEN
    return size


def _same_setting(value: dict[str, Any], first: str, second: str, path: Path, problems: Problems) -> None:
    one, other = value[first], value[second]
    if type(one) is type(other) and one == other:
        return
    where = ""
    if problems.document is not None:
        lines = [problems.document.mark((*path, key), key=True).line for key in (first, second)]
        where = f" (lines {lines[0]} and {lines[1]})"
    problems.error(
        (*path, second),
        f"{shown(first)} and {shown(second)} are two names of one setting and differ{where}: "
        f"{found(one)} and {found(other)}",
        f"keep one of them: remove {shown(first)} or {shown(second)}",
        key=True,
    )


def mapping_error(value: object, path: Path, problems: Problems) -> None:
    """Say that a section is not a mapping, and how it is written."""
    hint = ""
    name = path[-1] if path else ""
    if isinstance(name, int):
        hint = "write `- key: value`, and further keys below `key`"
    elif isinstance(value, str):
        key, equals, text = value.partition("=")
        if equals and key.strip().isidentifier() and len(value) <= 200 and value.isprintable():
            inside = text.strip().strip("\"'")
            quoted = inside if inside.lower() in ("true", "false") or _plain_number(inside) else f'"{inside}"'
            hint = f"write it with a colon:\n{name}:\n  {key.strip()}: {quoted}"
    elif isinstance(value, (list, tuple)):
        hint = f"write `key: value` lines below {shown(name)}, without dashes"
    problems.error(
        path, f"{label(path)} must be a mapping, found {found(value)}", hint or "write `key: value` lines, indented"
    )


def _plain_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def slip(name: str, known: Iterable[str]) -> str:
    """The known name that ``name`` is a slip of the pen for, or an empty string.

    >>> slip("recompte", ["recompute", "swap"])
    'recompute'
    """
    close = nearest(name, known, count=1) if len(name) <= 100 else []
    if not close:
        return ""
    alike = difflib.SequenceMatcher(None, name.casefold(), close[0].casefold()).ratio()
    return close[0] if alike >= CLOSE or name.replace("-", "_").casefold() == close[0].casefold() else ""


def report_unknown(keys: list[Any], known: list[str], path: Path, problems: Problems, *, strict: bool) -> None:
    """Report keys that no field has: an error where ``strict`` or nearly a known name, otherwise a warning."""
    inside = f" in {label(path)}" if path else ""
    for key in keys[:MOST_UNKNOWN]:
        here = (*path, key if isinstance(key, int) and not isinstance(key, bool) else str(key))
        meant = slip(str(key), known)
        section = _misplaced(str(key)) if path and not meant else ""
        if section:
            problems.error(
                here,
                f"{shown(key)} is not known{inside}; `{section}` is a section of its own",
                f"write `{section}:` without indentation",
                key=True,
            )
        elif meant:
            problems.error(here, f"{shown(key)} is not known{inside}", f"did you mean {shown(meant)}?", key=True)
        elif strict:
            close = nearest(str(key), known)
            hint = f"the nearest names are {', '.join(map(shown, close))}" if close else _all_names(known)
            problems.error(here, f"{shown(key)} is not known{inside}", hint, key=True)
        else:
            problems.warn(here, f"{shown(key)}{inside} is not known to lowtide and has no effect")
    left = len(keys) - MOST_UNKNOWN
    if left > 0:
        here = (*path, str(keys[MOST_UNKNOWN]))
        message = f"{left:,} more keys{inside} are not known"
        if strict:
            problems.error(here, message, _all_names(known), key=True)
        else:
            problems.warn(here, f"{message} to lowtide and have no effect")


def _misplaced(key: str) -> str:
    """The section that a key inside another section names, exactly or nearly."""
    names = [name for name in SECTIONS if "_" in name]
    return key if key in names else slip(key, names)


def _all_names(known: list[str]) -> str:
    names = ", ".join(sorted(known)[:12])
    return f"it takes {names}" + (", …" if len(known) > 12 else "")
