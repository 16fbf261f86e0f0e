"""The examples that train are the guide's, as written there, with what makes them a run."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from lowtide.config.check import check_file
from lowtide.models.shape import shape_of
from lowtide.operators.names import layer_operators
from lowtide.train.run import read_run
from support.guide_examples import DEEPSEEK, FORTY_EIGHT_LAYERS, SWAP_CASES

EXAMPLES = Path(__file__).parents[1] / "examples" / "yaml"
SWAPS = [case.text for case in SWAP_CASES.values()]
OF_THE_GUIDE = {
    "train_swap_default.yaml": SWAPS[0],
    "train_swap_layers.yaml": SWAPS[1],
    "train_swap_operators.yaml": SWAPS[2],
    "train_swap_recompute.yaml": SWAPS[3],
    "train_recompute_48_layers.yaml": FORTY_EIGHT_LAYERS,
    "train_recompute_16_stages.yaml": DEEPSEEK,
}


def leaves(value: Any, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    if isinstance(value, dict):
        return {key: leaf for name, inner in value.items() for key, leaf in leaves(inner, (*path, name)).items()}
    return {path: value}


@pytest.mark.parametrize("name", OF_THE_GUIDE)
def test_an_example_says_everything_the_guide_says(name: str) -> None:
    guide = leaves(YAML(typ="safe").load(OF_THE_GUIDE[name]))
    example = leaves(YAML(typ="safe").load(EXAMPLES / name))
    assert guide.items() <= {path: value for path, value in example.items() if path in guide}.items()
    sections = ("recompute_config", "swap_config")
    assert {path for path in example if path[0] in sections} == {path for path in guide if path[0] in sections}


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("train_*.yaml")), ids=lambda file: file.name)
def test_an_example_names_itself_in_the_commands_it_gives(file: Path) -> None:
    named = set(re.findall(r"examples/yaml/(\S+\.yaml)", file.read_text()))
    assert named == {file.name}
    check = check_file(file, layer_operators)
    assert check.settings is not None
    assert shape_of(check.settings).num_layers == read_run(check).placement.num_layers  # a whole model and a whole run
    # The guide's own settings are kept, those about tensor parallel too, which an example for a laptop has none of.
    expected = "no effect" if file.name in OF_THE_GUIDE else "no effect in layers"
    assert not [problem for problem in check.problems.warnings if expected not in problem.message]


def test_the_slurm_script_is_shell_and_asks_for_its_file() -> None:
    script = EXAMPLES / "slurm.sbatch"
    subprocess.run(["bash", "-n", str(script)], check=True)
    done = subprocess.run(["bash", str(script)], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "which file?" in done.stderr
