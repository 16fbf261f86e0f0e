"""The docstring below each field, read from the source when the schema is asked for."""

import ast
import inspect
import sys
from functools import cache

from lowtide.config.schema.field import Section

__all__ = ["descriptions"]


def descriptions(section: type[Section]) -> dict[str, str]:
    """The docstring below each field of a section, read from the module's source."""
    return _docstrings(section.__module__).get(section.__name__, {})


@cache
def _docstrings(module: str) -> dict[str, dict[str, str]]:
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    result: dict[str, dict[str, str]] = {}
    for node in tree.body:
        if not isinstance(node, ast.ClassDef):
            continue
        texts = result.setdefault(node.name, {})
        for field, below in zip(node.body, node.body[1:], strict=False):
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(field.target, ast.Name)
                and isinstance(below, ast.Expr)
                and isinstance(below.value, ast.Constant)
                and isinstance(below.value.value, str)
            ):
                texts[field.target.id] = " ".join(below.value.value.split())
    return result
