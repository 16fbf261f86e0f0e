from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hand_made_traces import llama_trace
from lowtide.cli.main import app
from lowtide.planner.plan_file import load_plan, plan_from_json, save_plan
from lowtide.policy import Policy
from plan_cases import llama_plan


def run(*arguments: str | Path, width: int = 100) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, list(map(str, arguments)), env={"COLUMNS": str(width)})
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("trace") / "trace.json"
    llama_trace(layers=4).save(file)
    return file


@pytest.fixture(scope="module")
def budget(trace: Path) -> int:
    """Between what any policy needs and what keeping everything does."""
    _, out, _ = run("explain", trace, "--budget", "80GiB", "--json")
    options = {option["name"]: option["reserved"] for option in json.loads(out)["options"]}
    return (options["keep everything"] + min(options.values())) // 2


def test_plan_says_that_it_fits_and_writes_what_it_is_asked_for(trace: Path, budget: int, tmp_path: Path) -> None:
    names = {"-o": "policy.json", "--html": "page.html", "--perfetto": "perfetto.json", "--save": "plan.json"}
    options = [part for option, name in names.items() for part in (option, tmp_path / name)]
    code, out, err = run("plan", trace, "--budget", budget, *options)
    assert (code, err) == (0, "")
    assert " fits in " in out
    plan = load_plan(tmp_path / "plan.json")
    assert plan.simulation.reserved <= budget == plan.budget
    assert Policy.from_json((tmp_path / "policy.json").read_text()) == plan.policy
    assert json.loads((tmp_path / "perfetto.json").read_text())["traceEvents"]
    assert "</html>" in (tmp_path / "page.html").read_text()
    assert all(f"written to {tmp_path / name}" in out.replace("\n", "") for name in names.values())


def test_plan_prints_one_json_object_that_is_a_plan(trace: Path, budget: int, tmp_path: Path) -> None:
    code, out, _ = run("plan", trace, "--budget", budget, "--json", "--trace-out", tmp_path / "again.json")
    assert code == 0
    assert plan_from_json(json.loads(out)).feasible
    assert json.loads((tmp_path / "again.json").read_text()) == json.loads(trace.read_text())


def test_a_plan_that_does_not_fit_exits_with_1_and_says_what_is_needed(trace: Path) -> None:
    code, out, _ = run("plan", trace, "--budget", "1MiB")
    assert code == 1
    assert "does not fit in 1 MiB: the least that any policy needs is" in out


def test_what_may_not_be_used_is_not_used(trace: Path, budget: int) -> None:
    _, out, _ = run("plan", trace, "--budget", budget, "--no-swap", "--json")
    assert '"swap"' not in json.dumps(json.loads(out)["policy"])


def test_the_layout_reaches_the_plan(trace: Path) -> None:
    _, out, _ = run(
        "plan", trace, "--budget", "80GiB", "--pp", 2, "--micro-batches", 4, "--schedule", "gpipe", "--json"
    )
    pipeline = json.loads(out)["pipeline"]
    assert pipeline == {"placement": [[[0, 1]], [[2, 3]]], "micro_batches": 4, "schedule": "gpipe"}


def test_explain_tells_the_peak_the_ways_and_the_recommendation(trace: Path, budget: int) -> None:
    code, out, _ = run("explain", trace, "--budget", budget)
    assert code == 0
    for text in ("the peak\n", "made of ", "options\n", "keep everything", "->", "recommended: "):
        assert text in out


def test_explain_exits_with_0_where_nothing_fits(trace: Path) -> None:
    code, out, _ = run("explain", trace, "--budget", "1MiB")
    assert code == 0
    assert "what to do\n  give it " in out


@pytest.mark.parametrize("command", ["plan", "explain"])
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--budget", "24 parsecs"), "parsecs"),
        (("--budget", "60GiB", "--device", "h1000"), "h100"),
        (("--budget", "60GiB", "--host-memory", "much"), "much"),
        (("--budget", "60GiB", "--pp", "64"), "64 stages"),
    ],
)
def test_what_is_wrong_is_said_in_words_with_exit_code_1(
    trace: Path, command: str, options: tuple[str, ...], words: str
) -> None:
    code, out, err = run(command, trace, *options)
    assert (code, out) == (1, "")
    assert err.startswith("error: ")
    assert words in err


def test_a_model_that_does_not_run_with_fake_tensors_is_an_error_in_words(tmp_path: Path) -> None:
    file = tmp_path / "looks.py"
    file.write_text(
        "import torch\n"
        "class Looks(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.layers = torch.nn.ModuleList(torch.nn.Sequential(torch.nn.Linear(4, 4)) for _ in range(2))\n"
        "    def forward(self, x):\n"
        "        for layer in self.layers:\n"
        "            x = layer(x) if x.sum().item() > 0 else x\n"
        "        return x\n"
        "def model():\n"
        "    return Looks(), (torch.ones(2, 4),)\n"
    )
    code, _, err = run("plan", f"{file}:model", "--budget", "1GiB")
    assert code == 1
    assert "does not run with fake tensors" in err
    assert "Traceback" not in err


def test_a_page_is_made_from_a_plans_file_and_a_runs(tmp_path: Path) -> None:
    save_plan(llama_plan(4), tmp_path / "plan.json")
    (tmp_path / "memory.json").write_text("[[0, 1000], [1, 2000]]")
    page = tmp_path / "page.html"
    code, out, err = run("report", tmp_path / "plan.json", "--memory", tmp_path / "memory.json", "-o", page)
    assert (code, err) == (0, "")
    assert str(page) in out.replace("\n", "")
    assert "measured as 1.953 KiB" in page.read_text()


def test_the_error_of_each_prediction_is_json_too(tmp_path: Path) -> None:
    plan = llama_plan(4)
    save_plan(plan, tmp_path / "plan.json")
    (tmp_path / "memory.json").write_text(json.dumps([[0, 0], [1, plan.simulation.peak * 2]]))
    options = ("--memory", tmp_path / "memory.json", "-o", tmp_path / "page.html", "--json")
    _, out, _ = run("report", tmp_path / "plan.json", *options)
    peak, step = json.loads(out)["predictions"]
    assert (peak["what"], peak["error"]) == ("peak", -0.5)
    assert (step["what"], step["error"]) == ("step", None)
    code, _, err = run("report", tmp_path / "plan.json", *options, "--stage", 3)
    assert code == 1
    assert "stage 3 was measured" in err


@pytest.mark.parametrize("arguments", [("missing.json",), ("--receipt", "missing.jsonl"), ("--memory", "missing.json")])
def test_a_missing_file_of_a_report_is_an_error_without_traceback(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    given = [one if one.startswith("--") else str(tmp_path / one) for one in arguments]
    code, _, err = run("report", *given, "-o", tmp_path / "page.html")
    assert code == 1
    assert "No such file" in err
    assert not (tmp_path / "page.html").exists()


def test_a_report_of_nothing_is_a_usage_error() -> None:
    assert run("report")[0] == 2


def test_a_directory_that_is_not_there_is_found_before_anything_is_planned(trace: Path, tmp_path: Path) -> None:
    options = ("-o", tmp_path / "none" / "policy.json", "--save", tmp_path / "plan.json")
    code, out, err = run("plan", trace, "--budget", "80GiB", *options)
    assert (code, out) == (1, "")
    assert f"there is no directory {tmp_path / 'none'}" in err
    assert not (tmp_path / "plan.json").exists()


@pytest.mark.parametrize("command", ["plan", "explain", "report"])
def test_help_has_an_example(command: str) -> None:
    code, out, _ = run(command, "--help")
    assert code == 0
    assert f"Example: lowtide {command}" in out
