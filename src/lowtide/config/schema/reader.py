"""Reads one section: its names and verdicts here, its values by pydantic; errors are in plain words."""

import difflib
from collections.abc import Iterable
from typing import Any, TypeVar, get_args, get_origin

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from lowtide.config.problem import Problem, Problems, nearest
from lowtide.config.schema.catalogue import SECTIONS
from lowtide.config.schema.field import (
    NoEffect,
    Refused,
    Section,
    Ways,
    branches,
    exactly,
    fields_of,
    handed_on,
    known_names,
    validator,
    ways_of,
)
from lowtide.config.schema.wording import BOUNDS, complaint, found, label, shown

__all__ = ["mapping_error", "read_section", "report_unknown", "slip"]

Path = tuple[str | int, ...]
AnySection = TypeVar("AnySection", bound=Section)

MOST_UNKNOWN = 20
"""Unknown keys of one section that are reported one by one; comparing names is slow."""
MOST_SECTIONS = 1000
"""The longest list of sections; reading one is slow."""
MOST_ERRORS = 20
"""Errors in a list of sections after which the rest of the list is left unread."""
CLOSE = 0.85
"""How alike two names must be for one to be a slip of the pen for the other."""


def read_section(section: type[AnySection], value: object, path: Path, problems: Problems) -> AnySection:
    """Read ``value`` as a ``section``; whatever is wrong is reported, and its default used instead."""
    if value is None:
        return section.model_construct()
    if not isinstance(value, dict):
        mapping_error(value, path, problems)
        return section.model_construct()
    errors, warnings = len(problems.errors), len(problems.warnings)
    keys = _names(section, value, path, problems)
    values: dict[str, Any] = {}
    for name, key in keys.items():
        ways = ways_of(section, name)
        if handed_on(ways):
            values[name] = value[key]
        elif value[key] is not None:  # `key:` with nothing after it leaves the default
            values[name] = _inside(ways, value[key], (*path, key), problems)
    result = _validate(section, values, {name: (*path, key) for name, key in keys.items()}, problems)
    _sort(problems.errors, errors, value, len(path))
    _sort(problems.warnings, warnings, value, len(path))
    return result


def _names(section: type[Section], value: dict[Any, Any], path: Path, problems: Problems) -> dict[str, str]:
    """The fields that ``value`` sets, each with the key that sets it; other keys are reported."""
    fields = fields_of(section)
    keys: dict[str, str] = {}
    unknown: list[Any] = []
    for key in value:
        name = section.aliases.get(key, key) if isinstance(key, str) else key
        if name not in fields:
            unknown.append(key)
        elif name in keys:
            _same_setting(value, keys[name], key, path, problems)
        else:
            keys[name] = key
    if unknown:
        report_unknown(unknown, known_names(section), path, problems, strict=section.unknown == "error")
    return keys


def _inside(ways: Ways, value: Any, path: Path, problems: Problems) -> Any:
    """``value`` with the sections inside it read, each with its own names and verdicts.

    Pydantic takes a section that was read as it is.
    """
    if isinstance(value, dict):
        sections = _sections(ways)
        return read_section(sections[0], value, path, problems) if sections else value
    if not isinstance(value, (list, tuple)):
        return value
    items = _items(ways)
    if not _sections(items):
        return list(value)
    if len(value) > MOST_SECTIONS:
        problems.error(path, f"{label(path)} must have at most {MOST_SECTIONS:,} entries, found {len(value):,}")
        return []
    result = []
    before = len(problems.errors)
    for index, item in enumerate(value):
        if len(problems.errors) - before >= MOST_ERRORS:
            break
        result.append(_inside(items, item, (*path, index), problems))
    return result


def _sections(ways: Ways) -> list[type[Section]]:
    return [base for base, _ in ways if isinstance(base, type) and issubclass(base, Section)]


def _items(ways: Ways) -> Ways:
    """The ways the elements of a list may be written."""
    kinds: list[tuple[Any, Any]] = [(get_origin(base), base) for base, _ in ways]
    return tuple(way for origin, base in kinds if origin is list for way in branches(get_args(base)[0]))


def _validate(
    section: type[AnySection], values: dict[str, Any], paths: dict[str, Path], problems: Problems
) -> AnySection:
    """The section that pydantic makes of ``values``, but for those it rejects and those that are refused.

    Each value is validated by its own field: building the validator of a whole section takes longer than reading a
    file, and files set few of its fields.
    """
    good = {}
    for name, value in values.items():
        ways = ways_of(section, name)
        if not handed_on(ways) and not isinstance(value, Section):
            try:
                value = validator(section, name).validate_python(value)
            except ValidationError as error:
                _report(ways, error.errors(include_url=False), paths[name], problems)
                continue
        if _honoured(section, name, values[name], paths[name], problems):
            good[name] = value
    return section.model_construct(**good)


def _report(ways: Ways, details: list[ErrorDetails], path: Path, problems: Problems) -> None:
    """Report what is wrong with one field, once.

    A value that may be written in several ways is wrong in each of them; the way that it was meant for is the one that
    pydantic followed furthest: into a list, or up to a bound.
    """
    detail = max(details, key=lambda one: (len(_places(one)), one["type"] in BOUNDS))
    for place in _places(detail):
        ways, path = _items(ways), (*path, place)
    message, hint = complaint(ways, detail)
    problems.error(path, f"{label(path)} {message}", hint)


def _places(detail: ErrorDetails) -> list[int]:
    """Where in a list, or a list of lists, an error is; what else pydantic gives names the way it followed."""
    return [part for part in detail["loc"] if isinstance(part, int)]


def _honoured(section: type[Section], name: str, value: object, path: Path, problems: Problems) -> bool:
    """Whether a value of the right type is used; a verdict on it is reported."""
    ways = ways_of(section, name)
    if handed_on(ways):
        return True
    for note in {id(note): note for _, notes in ways for note in notes}.values():
        if isinstance(note, Refused) and note.when(value):
            problems.error(path, f"{label(path)} is {found(value)}: {note.reason}", note.instead)
            return False
        if isinstance(note, NoEffect) and _matters(note, fields_of(section)[name].default, value):
            problems.warn(path, f"{label(path)} is accepted and has no effect here: {note.reason}")
    return True


def _matters(note: NoEffect, default: object, value: object) -> bool:
    if note.when is not None:
        return note.when(value)
    usual = note.harmless or (() if default is None else (default,))
    return not exactly(*usual)(value)


def _sort(found: list[Problem], start: int, value: dict[Any, Any], depth: int) -> None:
    """Put the problems of a section into the order of its keys."""
    if len(found) - start > 1:
        order = {key: place for place, key in enumerate(value)}
        found[start:] = sorted(found[start:], key=lambda one: order.get(one.path[depth], len(order)))


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
