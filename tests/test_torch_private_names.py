"""Each name that ``lowtide._torch_private`` offers has a test; what a torch lacks is a clear error."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import pytest
import torch

import lowtide
from lowtide._torch_private.needed import needed_for
from lowtide.errors import UnsupportedTorchError

SOURCE = Path(lowtide.__file__).parent
PRIVATE = SOURCE / "_torch_private"
AREAS = sorted(path for path in PRIVATE.rglob("*.py") if path.name != "__init__.py")


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


def test_what_torch_no_longer_has_is_an_error_that_names_the_version_and_the_feature() -> None:
    expected = pytest.raises(UnsupportedTorchError, match=r"for swapping tensors .*_no_such_name")
    with expected as missing, needed_for("swapping tensors"):
        from torch._C import _no_such_name  # noqa: F401
    assert f"torch {torch.__version__} " in str(missing.value)
    with pytest.raises(UnsupportedTorchError, match="for swapping tensors"), needed_for("swapping tensors"):
        torch.Tensor._no_such_name  # noqa: B018
    assert issubclass(UnsupportedTorchError, ImportError)
