"""Each name that ``lowtide._torch_private`` offers has a test; what a torch lacks is a clear error."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import lowtide
from lowtide._torch_private.needed import needed_for
from lowtide.errors import UnsupportedTorchError

SOURCE = Path(lowtide.__file__).parent
PRIVATE = SOURCE / "_torch_private"
AREAS = sorted(path for path in PRIVATE.rglob("*.py") if path.name != "__init__.py")


NOT_TORCHS = {"_asdict", "_field_defaults", "_fields", "_replace", "_exit", "_getframe"}
"""Of named tuples, ``os`` and ``sys``."""
NOT_TORCHS |= {"_bit_generator", "_fingerprint", "_inst", "_rand"}
"""Of ``random``, numpy and datasets."""
NOT_TORCHS |= {"_results", "_should_accumulate", "_start_method"}
"""Of Lightning."""
ALWAYS_TORCHS = {"_base", "_buffers", "_cdata", "_modules", "_parameters", "_schema", "_version"}
"""Also where something of lowtide has the same name."""


def module_name(area: Path) -> str:
    return ".".join(("lowtide", *area.relative_to(SOURCE).with_suffix("").parts))


@pytest.mark.parametrize("area", AREAS, ids=lambda area: str(area.relative_to(PRIVATE)))
def test_every_name_of_an_area_has_a_test(area: Path) -> None:
    tests = "\n".join(path.read_text() for path in Path(__file__).parent.glob("test_torch_private*.py"))
    words = set(re.findall(r"\w+", tests))
    names = importlib.import_module(module_name(area)).__all__
    assert names == sorted(names, key=lambda name: (not name.isupper(), name[0].islower(), name))
    assert [name for name in names if name not in words] == []


def test_areas_are_short_and_imported_only_by_those_who_need_them() -> None:
    assert {path.name: len(path.read_text().splitlines()) for path in AREAS} == {
        path.name: pytest.approx(150, abs=150) for path in AREAS
    }
    inits = [PRIVATE / "__init__.py", PRIVATE / "training" / "__init__.py"]
    assert [node for path in inits for node in ast.parse(path.read_text()).body if not isinstance(node, ast.Expr)] == []
    core = [path for path in AREAS if path.parent == PRIVATE]
    assert [path for path in core if "_torch_private.training" in path.read_text()] == []


def test_no_private_name_of_torch_is_used_elsewhere() -> None:
    trees = {path: ast.parse(path.read_text()) for path in SOURCE.rglob("*.py") if PRIVATE not in path.parents}
    own = {name for tree in trees.values() for name in _defined(tree)} | NOT_TORCHS
    found = [
        f"{path.relative_to(SOURCE)}:{line}: {name}"
        for path, tree in trees.items()
        for line, name in _reached(tree)
        if name not in own or name in ALWAYS_TORCHS
    ]
    assert found == []


def _defined(tree: ast.AST) -> Iterator[str]:
    """The names that a file of lowtide gives to something of its own."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
            yield node.attr


def _is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def _reached(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """The names with an underscore that are imported from torch, or asked of an object."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom | ast.Import):
            module = getattr(node, "module", None) or ""
            for name in (f"{module}.{alias.name}".strip(".") for alias in node.names):
                if name.startswith("torch.") and "._" in name:
                    yield node.lineno, name
        elif isinstance(node, ast.Attribute) and _is_private(node.attr) and not _is_self(node.value):
            yield node.lineno, node.attr
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and "attr" in node.func.id:
            for given in node.args:
                if isinstance(given, ast.Constant) and _is_private(str(given.value)):
                    yield node.lineno, str(given.value)


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def test_what_torch_no_longer_has_is_an_error_that_names_the_version_and_the_feature() -> None:
    expected = pytest.raises(UnsupportedTorchError, match=r"for swapping tensors .*_no_such_name")
    with expected as missing, needed_for("swapping tensors"):
        from torch._C import _no_such_name  # noqa: F401
    assert f"torch {torch.__version__} " in str(missing.value)
    with pytest.raises(UnsupportedTorchError, match="for swapping tensors"), needed_for("swapping tensors"):
        torch.Tensor._no_such_name  # noqa: B018
    assert issubclass(UnsupportedTorchError, ImportError)
