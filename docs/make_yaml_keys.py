"""Write docs/yaml_keys.md from the schema of a training file: ``python docs/make_yaml_keys.py``.

A test fails if it is out of date.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parent / "yaml_keys.md"
TEXT = """\
# YAML keys

Every key that a training file may have, in either form. This page is written by `docs/make_yaml_keys.py` from the
schema that `lowtide schema` prints, which an editor can use to complete and check a file; a test fails if it is out of
date. A key that is not here is an error with the nearest that is.

## The top of the file

{top}
"""


def rendered() -> str:
    """The page as the schema is now."""
    from lowtide.config.schema import json_schema

    schema = json_schema()
    sections = schema["$defs"]
    page = TEXT.format(top=table(schema))
    for name in sorted(sections):
        if "properties" not in sections[name]:
            continue
        text = " ".join(sections[name].get("description", "").split())
        page += f"\n({name.lower()})=\n## {name}\n\n{text}\n\n{table(sections[name])}\n"
    return page


def table(section: dict[str, Any]) -> str:
    """The keys of one section."""
    lines = ["| key | value | |", "|---|---|---|"]
    for key, field in section["properties"].items():
        text = " ".join(str(field.get("description", "")).split()).replace("|", "\\|")
        lines.append(f"| `{key}` | {value(field)} | {text} |")
    return "\n".join(lines)


def value(field: dict[str, Any]) -> str:
    """What kind of value a key takes."""
    if "$ref" in field:
        name = field["$ref"].rsplit("/", 1)[1]
        return f"[{name}](#{name.lower()})"
    if "enum" in field:
        return ", ".join(f"`{json.dumps(one)}`".replace('"', "") for one in field["enum"])
    if "const" in field:
        return f"`{field['const']}`"
    for several in ("anyOf", "oneOf"):
        if several in field:
            kinds = [value(one) for one in field[several] if one.get("type") != "null"]
            return " or ".join(dict.fromkeys(kinds))
    if field.get("type") == "array":
        return f"list of {value(field['items'])}" if isinstance(field.get("items"), dict) else "list"
    if field.get("type") == "object":
        return "mapping"
    kinds = field.get("type", "any")
    return " or ".join(kinds) if isinstance(kinds, list) else str(kinds)


if __name__ == "__main__":
    PAGE.write_text(rendered(), encoding="utf-8")
