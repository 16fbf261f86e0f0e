"""The Python of the README and the docs runs, and the YAML of the docs is accepted."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import pytest

from lowtide.config.check import check_text
from lowtide.operators.names import layer_operators

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs" / "guides").glob("*.md"))]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_of_a_page_runs_from_top_to_bottom(page: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    space: dict[str, object] = {}
    for block in blocks(page, "python"):
        exec(compile(block, str(page), "exec"), space)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_yaml_of_a_page_is_accepted(page: Path) -> None:
    for block in blocks(page, "yaml"):
        if block.startswith("#"):  # a comment line for an editor
            continue
        overrides = {}
        if "recompute:" in block and "full_recompute_layer" not in block:
            overrides = {
                ("model", "model_config"): {"num_layers": 48, "pp_interleave_num": 2, "offset": OFFSET},
                ("parallel_config",): {"pipeline_stage": 5, "micro_batch_num": 5},
            }
        elif "swap_config" in block:
            overrides = {("model", "model_config", "num_layers"): 4}
        result = check_text(block, layer_operators, overrides)
        assert result.ok, result.as_json()["errors"]


OFFSET = [[0, 1, 1, 1, 1], [1, 1, 1, 1, 0]]


@pytest.mark.parametrize("file", sorted((ROOT / "examples" / "yaml").glob("*.yaml")), ids=lambda file: file.name)
def test_every_example_is_accepted(file: Path) -> None:
    result = check_text(file.read_text(encoding="utf-8"), layer_operators)
    assert result.ok, result.as_json()["errors"]
    assert result.policy is not None


def test_every_path_of_the_glossary_exists() -> None:
    paths = re.findall(r"`(lowtide/[\w/.]+)`", (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8"))
    assert len(paths) > 20
    assert [path for path in paths if not (ROOT / "src" / path).exists()] == []


def test_every_message_of_the_troubleshooting_page_is_one_of_ours() -> None:
    page = (ROOT / "docs" / "guides" / "troubleshooting.md").read_text(encoding="utf-8")
    quoted = re.findall(r"^\| `(.+?)`", page, flags=re.MULTILINE)
    assert len(quoted) > 10
    texts = "\n".join(text for file in (ROOT / "src").rglob("*.py") for text in messages(file))
    assert [one for one in quoted if not re.search(".*".join(map(re.escape, re.split(r" ?… ?", one))), texts)] == []


@pytest.mark.parametrize("name", ["benchmarks", "commands", "devices", "yaml_keys"])
def test_a_generated_page_is_up_to_date(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    make = importlib.import_module(f"make_{name}")
    assert make.rendered() == make.PAGE.read_text(encoding="utf-8"), f"run python docs/make_{name}.py"


def messages(file: Path) -> list[str]:
    """The strings of a module, with a dot for each value that is put in."""
    return [
        "".join(str(part.value) if isinstance(part, ast.Constant) else "." for part in node.values)
        if isinstance(node, ast.JoinedStr)
        else str(node.value)
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.JoinedStr | ast.Constant)
    ]
