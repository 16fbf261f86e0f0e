"""The notebooks run from top to bottom, on the virtual accelerator where they need a device."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parents[1] / "examples" / "notebooks").glob("*.ipynb"))


SMALLER = {"plan_70b": ("llama3-70b", "llama3-8b")}
"""What a notebook plans, and what is planned in its place with every change: two plans of 80 layers take a minute."""
CASES = [
    *(pytest.param(file, file.stem in SMALLER, id=file.stem) for file in NOTEBOOKS),
    *(pytest.param(file, False, id=f"{file.stem} as it is", marks=pytest.mark.slow)
      for file in NOTEBOOKS if file.stem in SMALLER),
]  # fmt: skip


@pytest.mark.parametrize(("file", "smaller"), CASES)
def test_a_notebook_runs(file: Path, smaller: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = Path(sys.executable).parent  # where lowtide is, if this environment is not activated
    monkeypatch.setenv("PATH", f"{commands}{os.pathsep}{os.environ['PATH']}")
    notebook = nbformat.read(file, as_version=4)
    cells = notebook.cells
    notebook.cells = [cell for cell in cells if "install" not in cell.metadata.get("tags", [])]
    assert len(notebook.cells) == len(cells) - 1
    if smaller:
        old, new = SMALLER[file.stem]
        (cell,) = [cell for cell in notebook.cells if cell.cell_type == "code" and old in cell.source]
        cell.source = cell.source.replace(old, new)
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert "selftest" in notebook.cells[-1].source
    assert "bitwise" in notebook.cells[-1].outputs[0].text


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_a_notebook_is_saved_with_what_it_printed(file: Path) -> None:
    cells = nbformat.read(file, as_version=4).cells
    printed = [
        cell for cell in cells if cell.cell_type == "code" and "print(" in cell.source and "def " not in cell.source
    ]
    assert printed
    assert all(cell.outputs for cell in printed)
