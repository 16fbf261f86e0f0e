"""Parse YAML into a Document: plain values, with the line and column of every key and value.

Only the types of JSON come out (and tuples, from ``!!python/tuple``): no object is ever
constructed from a tag. Size, depth and the number of values after alias expansion are bounded,
so that a hostile file costs no more than a large one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from io import StringIO
from pathlib import Path as FilePath
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import (
    AliasEvent,
    DocumentStartEvent,
    Event,
    MappingEndEvent,
    MappingStartEvent,
    ScalarEvent,
    SequenceEndEvent,
    SequenceStartEvent,
)

from lowtide.config.document import Document, Mark, Path
from lowtide.config.problem import Problems

__all__ = ["load_document", "parse_document", "parse_value", "write_document"]

MAX_BYTES = 256 * 1024
MAX_DEPTH = 40
MAX_VALUES = 100_000
MAX_DIGITS = 400


def load_document(file: FilePath, problems: Problems) -> Document:
    """Read ``file``; what cannot be read is reported in ``problems``, never raised."""
    document = Document(name=str(file), text="")
    problems.document = document
    try:
        size = file.stat().st_size
        data = file.read_bytes() if size <= MAX_BYTES else b""
    except OSError as error:
        problems.error((), f"the file cannot be read: {error.strerror or error}", "give the path of a YAML file")
        return document
    if size > MAX_BYTES:
        problems.error((), f"the file has {size:,} bytes; at most {MAX_BYTES:,} are read", "split it")
        return document
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = data[: error.start]
        document.text = data.decode("utf-8", "replace")
        mark = Mark(before.count(b"\n") + 1, error.start - (before.rfind(b"\n") + 1) + 1)
        problems.error((), f"byte 0x{data[error.start]:02x} is not UTF-8", "save the file as UTF-8", mark=mark)
        return document
    return parse_document(text, problems, name=str(file))


def parse_document(text: str, problems: Problems, *, name: str = "<text>") -> Document:
    """Parse ``text``; what cannot be parsed is reported in ``problems``, never raised.

    >>> parse_document("a: [1, true]", Problems()).value
    {'a': [1, True]}
    """
    document = Document(name=name, text=text)
    problems.document = document
    if len(text) > MAX_BYTES:
        problems.error((), f"the document has {len(text):,} characters; at most {MAX_BYTES:,} are read", "split it")
        return document
    builder = _Builder(document)
    try:
        document.value = builder.build()
    except _Stop as stop:
        document.value = None
        problems.error((), stop.message, stop.hint, mark=stop.mark)
    except MarkedYAMLError as error:
        mark = _mark(error.problem_mark or error.context_mark)
        ellipsis = _ellipsis(text, mark)
        if ellipsis is not None:
            problems.error((), ellipsis.message, ellipsis.hint, mark=ellipsis.mark)
        else:
            context = f" ({error.context})" if error.context else ""
            problems.error((), f"not valid YAML: {error.problem or error}{context}", mark=mark)
    except (YAMLError, ValueError, RecursionError, AttributeError, IndexError, KeyError, TypeError) as error:
        # ruamel's scanner lets a few bare exceptions out on malformed directives, tags and escapes.
        reason = " ".join(str(error).split()) or type(error).__name__
        problems.error((), f"not valid YAML: {reason}", mark=Mark(1, 1))
    return document


def parse_value(text: str) -> Any:
    """Parse one YAML value, as for ``--set key=value``; ValueError where it is not one."""
    problems = Problems()
    document = parse_document(text, problems)
    if problems.errors:
        raise ValueError(problems.errors[0].message)
    return document.value


class _Stop(Exception):  # noqa: N818
    """Parsing cannot go on; carries the message for the user."""

    def __init__(self, mark: Mark, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.mark, self.message, self.hint = mark, message, hint


class _Node:
    """A value before it becomes plain: what it is and its position."""

    __slots__ = ("items", "kind", "mark", "value")

    def __init__(self, kind: str, mark: Mark, value: Any = None) -> None:
        self.kind, self.mark, self.value = kind, mark, value
        self.items: list[tuple[_Node | None, _Node]] = []


class _Builder:
    """Builds plain values from ruamel's events, without recursion on the way in."""

    def __init__(self, document: Document) -> None:
        self.document = document
        self.count = 0

    def build(self) -> Any:
        root = self.compose(YAML(typ="safe", pure=True).parse(self.document.text))
        if root is None:
            return None
        return self.construct(root, ())

    def compose(self, events: Iterator[Event]) -> _Node | None:
        root: _Node | None = None
        stack: list[_Node] = []
        pending: list[_Node | None] = []  # for each open mapping, the key that waits for its value
        anchors: dict[str, _Node] = {}
        documents = 0
        for event in events:
            mark = _mark(event.start_mark)
            if isinstance(event, DocumentStartEvent):
                documents += 1
                if documents > 1:
                    raise _ellipsis(self.document.text, mark) or _Stop(
                        mark, "a second YAML document starts here", "keep one document in a file: remove the `---` line"
                    )
                continue
            if isinstance(event, (MappingEndEvent, SequenceEndEvent)):
                stack.pop()
                pending.pop()
                continue
            if isinstance(event, AliasEvent):
                node = anchors.get(event.anchor)
                if node is None:
                    raise _Stop(mark, f"alias *{event.anchor} refers to no anchor", f"write &{event.anchor} before it")
                if node in stack:
                    raise _Stop(
                        mark, f"alias *{event.anchor} contains itself", "an anchor cannot be used inside itself"
                    )
            elif isinstance(event, ScalarEvent):
                node = _scalar(event, mark)
            elif isinstance(event, (MappingStartEvent, SequenceStartEvent)):
                node = _collection(event, mark)
            else:
                continue
            if not isinstance(event, AliasEvent) and event.anchor:
                anchors[event.anchor] = node
            if not stack:
                root = node
            elif stack[-1].kind == "mapping":
                if pending[-1] is None:
                    pending[-1] = node
                else:
                    stack[-1].items.append((pending[-1], node))
                    pending[-1] = None
            else:
                stack[-1].items.append((None, node))
            if isinstance(event, (MappingStartEvent, SequenceStartEvent)):
                if len(stack) >= MAX_DEPTH:
                    raise _Stop(mark, f"nested deeper than {MAX_DEPTH} levels", "no setting needs such depth")
                stack.append(node)
                pending.append(None)
        return root

    def construct(self, node: _Node, path: Path) -> Any:
        self.count += 1
        if self.count > MAX_VALUES:
            raise _Stop(node.mark, f"more than {MAX_VALUES:,} values once aliases are expanded", "use fewer aliases")
        if len(path) > MAX_DEPTH:  # only through aliases: the depth as written was checked before
            raise _Stop(node.mark, f"nested deeper than {MAX_DEPTH} levels once aliases are expanded")
        self.document.values[path] = node.mark
        if node.kind == "mapping":
            return self.mapping(node, path)
        if node.kind in ("list", "tuple"):
            items = [self.construct(child, (*path, index)) for index, (_, child) in enumerate(node.items)]
            return tuple(items) if node.kind == "tuple" else items
        return node.value

    def mapping(self, node: _Node, path: Path) -> dict[str, Any]:
        result: dict[str, Any] = {}
        merged: list[tuple[_Node, _Node]] = []
        for key, child in node.items:
            assert key is not None
            if key.kind != "scalar" or not isinstance(key.value, (str, int, float, bool)):
                raise _Stop(key.mark, "a key must be a plain name", "write `name: value`")
            name = key.value if isinstance(key.value, str) else str(key.value)
            if name == "<<":
                merged.append((key, child))
                continue
            here = (*path, name)
            if name in result:
                first = self.document.keys[here]
                raise _Stop(
                    key.mark,
                    f"the key {name!r} is given twice",
                    f"line {first.line} has it already",
                )
            self.document.keys[here] = key.mark
            result[name] = self.construct(child, here)
        for key, child in merged:
            for source in [item for _, item in child.items] if child.kind == "list" else [child]:
                if source.kind != "mapping":
                    raise _Stop(
                        key.mark, "`<<` merges a mapping; this is something else", "write `<<: *anchor` of a mapping"
                    )
                for name, value in self.mapping(source, path).items():
                    result.setdefault(name, value)
        return result


_WORDS = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL"), None),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}
_INT = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(
    r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
)
_TAG = "tag:yaml.org,2002:"


def _scalar(event: ScalarEvent, mark: Mark) -> _Node:
    text = str(event.value)
    tag = event.tag
    plain = bool(event.implicit[0])
    if tag in (None, "!", f"{_TAG}str") and not (plain and tag is None):
        return _Node("scalar", mark, text)
    if tag is not None and tag not in {f"{_TAG}{name}" for name in ("null", "bool", "int", "float")}:
        raise _Stop(
            mark, f"the tag {tag} is not allowed", "use plain values: text, numbers, true, false, null, lists, mappings"
        )
    value: object = text
    if text in _WORDS:
        value = _WORDS[text]
    elif _INT.fullmatch(text):
        if len(text) > MAX_DIGITS:
            raise _Stop(mark, f"a number of {len(text)} digits", "no setting needs so many")
        value = int(text, 0) if text[:2] in ("0o", "0x") else int(text)
    elif _FLOAT.fullmatch(text):
        value = float(
            text.replace(".inf", "inf").replace(".Inf", "inf").replace(".INF", "inf").lstrip(".")
            if text[-1] in "fFnN"
            else text
        )
    return _Node("scalar", mark, value)


def _collection(event: MappingStartEvent | SequenceStartEvent, mark: Mark) -> _Node:
    if isinstance(event, MappingStartEvent):
        kinds = {None: "mapping", f"{_TAG}map": "mapping"}
    else:
        kinds = {None: "list", f"{_TAG}seq": "list", f"{_TAG}python/tuple": "tuple"}
    if event.tag not in kinds:
        raise _Stop(mark, f"the tag {event.tag} is not allowed", "use plain lists and mappings")
    return _Node(kinds[event.tag], mark)


def _mark(mark: Any) -> Mark:
    return Mark(mark.line + 1, mark.column + 1) if mark is not None else Mark(1, 1)


def _ellipsis(text: str, mark: Mark) -> _Stop | None:
    """Explain a line of three dots, which guides print for "more keys here"."""
    lines = text.splitlines()
    for number in range(min(mark.line, len(lines)), 0, -1):
        line = lines[number - 1]
        if line.strip() != "...":
            continue
        after = next((later for later in lines[number:] if later.strip() not in ("", "...")), "")
        section = next((early for early in reversed(lines[: number - 1]) if re.match(r"\w+:\s*$", early)), "")
        example = f" and indent the keys:\n{section.strip()}\n  {after.strip()}" if section and after else ""
        what = "ends the YAML document here" if line.startswith("...") else "is not YAML"
        return _Stop(
            Mark(number, len(line) - 3 + 1),
            f"`...` {what}; guides print it where keys were left out",
            f"remove the line{example}",
        )
    return None


def write_document(value: object) -> str:
    """Plain values as YAML text, short lists and mappings on one line."""
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = None
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    yaml.width = 100
    stream = StringIO()
    yaml.dump(value, stream)
    return stream.getvalue()
