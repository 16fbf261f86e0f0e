"""Values and types in plain words, for messages."""

import math
from typing import Any, Literal, get_args, get_origin

from pydantic_core import ErrorDetails

from lowtide.config.problem import nearest
from lowtide.config.schema.field import SIZE, Refused, Section, Ways, branches

__all__ = ["BOUNDS", "complaint", "found", "label", "shown"]

LONGEST = 60
BOUNDS = {
    "greater_than_equal": "at least",
    "greater_than": "above",
    "less_than_equal": "at most",
    "finite_number": "finite",
}
"""What pydantic says of a number that is of the right type and still wrong, in plain words."""


def shown(text: object) -> str:
    """A name as a message shows it: short, on one line, printable."""
    name = text if isinstance(text, str) else str(text)
    name = name if len(name) <= LONGEST else name[: LONGEST - 1] + "…"
    return f"`{repr(name)[1:-1]}`" if not name.isprintable() else f"`{name}`"


def label(path: tuple[str | int, ...]) -> str:
    """The last name of a path, with the places in lists after it: ```betas[1]```."""
    places = ""
    for part in reversed(path):
        if isinstance(part, str):
            return f"{shown(part)[:-1]}{places}`"
        places = f"[{part}]{places}"
    return "the file" if not places else f"`{places}`"


def found(value: object) -> str:
    """A value as a message names it."""
    if value is None:
        return "nothing (null)"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return f"the number {number(value)}"
    if isinstance(value, str):
        short = value if len(value) <= LONGEST else value[: LONGEST - 1] + "…"
        return f"the text {short!r}"
    if isinstance(value, (list, tuple)):
        return "an empty list" if not value else "a list"
    if isinstance(value, dict):
        return "a mapping"
    return "something else"


def number(value: int | float) -> str:
    """A number in at most some forty characters."""
    if isinstance(value, float):
        return "nan" if math.isnan(value) else repr(value)
    if abs(value).bit_length() <= 120:
        return str(value)
    return f"{'-' if value < 0 else ''}2^{abs(value).bit_length() - 1} or more"


def complaint(ways: Ways, detail: ErrorDetails) -> tuple[str, str]:
    """What pydantic found wrong, after the name of the place, and what to write instead.

    ``ways`` are the ways that the value at that place may be written.
    """
    value, kind = detail["input"], detail["type"]
    if kind == "finite_number":
        return f"must be a finite number, found {number(value)}", "write a plain number"
    if kind in BOUNDS and _is_size(ways):
        return f"must be above 0 and below 2^63 bytes, found {found(value)}", ""
    if kind in BOUNDS:
        (bound,) = detail["ctx"].values()
        return f"must be {BOUNDS[kind]} {bound:{',' if isinstance(bound, int) else 'g'}}, found {number(value)}", ""
    if kind == "float_type" and type(value) is int:
        return f"is too {'large' if value > 0 else 'small'}: {number(value)}", "write a plain number"
    hint = _spelling(ways, value)
    choices = [str(one) for base, notes in ways for one in _supported(base, notes)]
    if not hint and choices and isinstance(value, str):
        close = nearest(value, choices, count=1)
        hint = f"did you mean {close[0]}?" if close else ""
    return f"must be {_expected(ways)}, found {found(value)}", hint


def _is_size(ways: Ways) -> bool:
    return any(SIZE in notes for _, notes in ways)


def _expected(ways: Ways) -> str:
    """What a field takes: ``a whole number or a list of text``."""
    words: list[str] = []
    for base, notes in ways:
        word = _word(base, notes)
        if word not in words:
            words.append(word)
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _word(base: Any, notes: tuple[Any, ...]) -> str:
    if SIZE in notes:
        return 'a size such as "58GB"'
    origin = get_origin(base)
    if origin is Literal:
        values = _supported(base, notes)
        return f"one of {', '.join(str(value) for value in values)}" if len(values) > 1 else f'"{values[0]}"'
    if origin is list:
        items = {bool: "true and false", int: "whole numbers", float: "numbers", str: "texts"}
        inner = {items.get(one) for one, _ in branches(get_args(base)[0])}
        name = next(iter(inner)) if len(inner) == 1 else None
        return f"a list of {name}" if name else "a list"
    if origin is dict or (isinstance(base, type) and issubclass(base, Section)):
        return "a mapping"
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
    return names.get(base, "a value")


def _supported(base: Any, notes: tuple[Any, ...]) -> list[Any]:
    """The choices of a field that has some, but for those that are refused."""
    origin: Any = get_origin(base)
    choices = get_args(base) if origin is Literal else ()
    return [one for one in choices if not any(isinstance(note, Refused) and note.when(one) for note in notes)]


def _spelling(ways: Ways, value: object) -> str:
    """What to write instead of ``value``, where that can be guessed."""
    if _is_size(ways):
        return 'write "58GB" or "24GiB"'
    kinds = {base for base, _ in ways}
    if isinstance(value, str):
        text = value.strip()
        if len(text) > LONGEST:
            return ""
        if int in kinds and text.lstrip("-").isdecimal() and text.isascii():
            return f"write {text} without quotes"
        if float in kinds and _is_number(text):
            return f"write {text} without quotes"
        if bool in kinds and text.lower() in ("true", "yes", "on", "false", "no", "off"):
            return f"write {'true' if text.lower() in ('true', 'yes', 'on') else 'false'} without quotes"
    elif isinstance(value, bool):
        if kinds & {int, float}:
            return "write a number, such as 1"
        if str in kinds:
            return f'write "{str(value).lower()}" in quotes'
    elif (
        isinstance(value, float) and int in kinds and math.isfinite(value) and value == int(value) and abs(value) < 1e15
    ):
        return f"write {int(value)}"
    elif isinstance(value, (int, float)):
        if bool in kinds and type(value) is int and value in (0, 1):
            return f"write {'true' if value else 'false'}"
        if str in kinds:
            return f'write "{number(value)}" in quotes'
    if any(get_origin(base) is list for base in kinds) and isinstance(value, (str, int, float, dict)):
        return "write a list: `[…]`, or one `- ` line each"
    return ""


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text)) and text.isascii()
    except ValueError:
        return False
