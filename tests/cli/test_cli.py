from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lowtide import __version__
from lowtide.cli.main import app

EXAMPLE = Path(__file__).parents[2] / "examples" / "yaml" / "llama_48_layers.yaml"
BROKEN = "model:\n  model_config:\n    num_layers: 4\nrecompute_config:\n  recompute: [1, 2]\n  select_recompte: true\n"


def run(*arguments: str, width: int = 100) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": str(width)})
    return result.exit_code, result.stdout, result.stderr


def test_check_prints_log_table_and_warnings() -> None:
    code, out, err = run("check", str(EXAMPLE))
    assert code == 0
    assert "INFO - Formative layer_recompute: [[2, 1, 0, 0, 0], [1, 0, 0, 0, 0]]" in out
    assert "INFO - Set full recompute at layer 24" in out
    assert "stage 0" in out
    assert "0-1 full" in out
    assert "48 layers over 5 stages x 2 chunks" in out
    assert "has no effect in layers 0,4,24" in err


def test_check_shows_errors_like_a_compiler(tmp_path: Path) -> None:
    file = tmp_path / "broken.yaml"
    file.write_text(BROKEN)
    code, out, err = run("check", str(file))
    assert code == 1
    assert out == ""
    assert f"--> {file}:6:3" in err
    assert "6 |   select_recompte: true\n  |   ^" in err
    assert "= help: did you mean `select_recompute`?" in err or "= help: did you mean select_recompute?" in err
    assert f"--> {file}:5:14" in err
    assert "2 errors" in err


def test_check_json_is_one_object_a_file_on_one_line(tmp_path: Path) -> None:
    file = tmp_path / "broken.yaml"
    file.write_text(BROKEN)
    code, out, _ = run("check", "--json", str(EXAMPLE), str(file))
    assert code == 1
    good, bad = (json.loads(line) for line in out.splitlines())
    assert set(good) == set(bad) == {"file", "ok", "matched_against", "normalized", "log", "warnings", "errors"}
    assert good["ok"]
    assert good["normalized"]["layer_recompute"] == [[2, 1, 0, 0, 0], [1, 0, 0, 0, 0]]
    assert not bad["ok"]
    assert {"path", "line", "column", "message", "hint"} == set(bad["errors"][0])


def test_check_is_plain_on_anything_but_a_terminal() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "lowtide", "check", str(EXAMPLE)], capture_output=True, text=True, check=True
    )
    assert "\x1b[" not in result.stdout + result.stderr


@pytest.mark.parametrize(("flags", "coloured"), [((), True), (("--no-color",), False)])
def test_check_colours_a_terminal_unless_a_flag_says_not_to(flags: tuple[str, ...], coloured: bool) -> None:
    result = CliRunner().invoke(app, ["check", *flags, str(EXAMPLE)], env={"FORCE_COLOR": "1", "TERM": "xterm"})
    assert ("\x1b[33m" in result.stdout) is coloured


def test_check_needs_no_torch() -> None:
    program = (
        "import sys; from lowtide.cli.main import app\n"
        f"try: app(['check', {str(EXAMPLE)!r}])\n"
        "except SystemExit: pass\n"
        "assert 'torch' not in sys.modules and 'scipy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)


def test_set_adds_and_replaces_values(tmp_path: Path) -> None:
    file = tmp_path / "fragment.yaml"
    file.write_text("recompute_config:\n  recompute: true\n")
    assert run("check", str(file))[0] == 1
    code, out, _ = run("check", str(file), "--set", "model.model_config.num_layers=3", "--json")
    assert code == 0
    assert json.loads(out)["normalized"]["layer_list"] == [[3]]


@pytest.mark.parametrize("text", ["num_layers", "=3", "a..b=3", "a=[1"])
def test_a_wrong_override_is_a_usage_error(text: str) -> None:
    code, _, err = run("check", str(EXAMPLE), "--set", text)
    assert code == 2
    assert "Traceback" not in err


def test_a_missing_file_is_an_error_without_traceback(tmp_path: Path) -> None:
    code, _, err = run("check", str(tmp_path / "missing.yaml"))
    assert code == 1
    assert "No such file" in err


def test_wide_pipelines_are_shown_in_blocks_that_fit(tmp_path: Path) -> None:
    file = tmp_path / "wide.yaml"
    file.write_text(
        "model: {model_config: {num_layers: 64}}\nparallel_config: {pipeline_stage: 16, micro_batch_num: 16}\n"
        "recompute_config: {recompute: [1, 1]}\n"
    )
    _, out, _ = run("check", str(file), width=60)
    table = out[out.index("stage 0") :]
    assert "stage 15" in table
    assert max(len(line.rstrip()) for line in table.splitlines()) <= 60


def test_convert_writes_a_file_that_check_reads_back(tmp_path: Path) -> None:
    target = tmp_path / "newer.yaml"
    code, _, err = run("convert", str(EXAMPLE), "--to", "2026", "-o", str(target))
    assert (code, err) == (0, "")
    assert run("check", str(target))[0] == 0
    code, out, _ = run("convert", str(target), "--to", "legacy", "--json")
    assert code == 0
    assert json.loads(out)["settings"]["recompute_config"]["recompute"] == [[2, 1, 0, 0, 0], [1, 0, 0, 0, 0]]


def test_convert_says_what_it_lost_and_what_it_cannot_do(tmp_path: Path) -> None:
    file = tmp_path / "swap.yaml"
    file.write_text("model: {model_config: {num_layers: 4}}\nswap_config: {swap: true}\n")
    code, out, err = run("convert", str(file), "--to", "2026")
    assert code == 3
    assert "op_swap" in out
    assert "not expressed: a prefetch counts operators" in err
    assert run("convert", str(file), "--to", "legacy")[0] == 1


def test_schema_is_json_schema(tmp_path: Path) -> None:
    target = tmp_path / "schema.json"
    assert run("schema", "-o", str(target))[0] == 0
    schema = json.loads(target.read_text())
    assert "recompute_config" in schema["properties"]
    assert json.loads(run("schema", "--json")[1]) == schema


def test_version_is_printed() -> None:
    assert run("--version")[1].strip() == f"lowtide {__version__}"
