"""Write plain values as YAML without a package for it: the Policy imports none."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

__all__ = ["as_yaml"]


def as_yaml(value: dict[str, Any]) -> str:
    """A mapping of plain JSON values as YAML in block style. Scalars are written as JSON, which YAML reads alike.

    >>> print(as_yaml({"layers": [{"layers": "0-3", "default": "keep"}], "fingerprint": None}), end="")
    layers:
      - layers: "0-3"
        default: "keep"
    fingerprint: null
    """
    return "".join(line + "\n" for line in _mapping(value))


def _mapping(value: dict[str, Any]) -> Iterator[str]:
    for key, inner in value.items():
        if isinstance(inner, (dict, list)) and inner:
            yield f"{key}:"
            yield from ("  " + line for line in (_mapping(inner) if isinstance(inner, dict) else _sequence(inner)))
        else:
            yield f"{key}: {_scalar(inner)}"


def _sequence(value: list[Any]) -> Iterator[str]:
    for inner in value:
        first, *others = _mapping(inner) if isinstance(inner, dict) else [_scalar(inner)]
        yield f"- {first}"
        yield from ("  " + line for line in others)


def _scalar(value: object) -> str:
    """As JSON, but for what YAML would take for a line break or cannot read at all."""
    return re.sub(r"[^\x20-\x7e]", lambda found: f"\\U{ord(found[0]):08x}", json.dumps(value, ensure_ascii=False))
