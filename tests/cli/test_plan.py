from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lowtide.cli.console import make_console
from lowtide.cli.main import app
from lowtide.cli.traced import LayoutOptions, trace_of
from lowtide.cost.devices import find_device
from lowtide.planner.pipeline import even_pipeline
from lowtide.planner.plan_file import load_plan, plan_from_json, save_plan
from lowtide.policy import Policy
from lowtide.trace.layout import Layout
from support.hand_made_traces import llama_trace
from support.plan_cases import llama_plan


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


@pytest.mark.parametrize("sweep", [(), ("--sweep", "budget=40GiB,80GiB")], ids=["one", "sweep"])
def test_a_page_that_cannot_be_drawn_is_refused_before_anything_is_planned(
    sweep: tuple[str, ...], trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "plotly", None)
    budget = () if sweep else ("--budget", "80GiB", "--save", tmp_path / "plan.json")
    code, out, err = run("plan", trace, *sweep, *budget, "--html", tmp_path / "plan.html")
    assert (code, out) == (1, "")
    assert "pip install 'lowtide[report]'" in err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", ["plan", "explain", "report"])
def test_help_has_an_example(command: str) -> None:
    code, out, _ = run(command, "--help")
    assert code == 0
    assert f"Example: lowtide {command}" in out


REFUSED = (
    ("llama3-8b --budget 80", 'for 80 GiB write "80GiB"'),
    ("llama9-8b", "did you mean llama3-8b"),
    ("llama3-8b --device h1000", "did you mean h100"),
    ("llama3-8b --tp 3", "has 32 attention heads and 8 key-value heads, which tensor parallel splits evenly"),
    ("llama3-8b --tp 16", "possible are 1, 2, 4, 8"),
    ("llama3-8b --tp 8 --seq 4097", "samples of 4097 tokens"),
    ("llama3-8b --dp 8 --ep 8", "llama3-8b is dense"),
    ("mixtral-8x7b --dp 4 --ep 8", "of which there are 4 (--dp); possible are 1, 2, 4"),
    ("mixtral-8x7b --dp 16 --ep 16", "has 8 experts a layer"),
    ("llama3-8b --pp 64", "32 layers cannot be spread over 64 stages"),
    ("llama3-8b --pp 2 --vpp 2 --schedule 1f1b", "1f1b has one chunk a stage"),
    ("llama3-8b --lora 8", "--lora is for models of transformers and functions"),
    ("no_such_module:build", "there is no module 'no_such_module'"),
    ("missing.py:build", "there is no file missing.py"),
    ("missing.json", "there is no file missing.json"),
    ("missing.yaml", "missing.yaml"),
    (".", "has no config.json"),
    ("llama3-8b -o nowhere/policy.json", "there is no directory nowhere"),
)


def test_bad_arguments_are_one_line_before_torch_is_imported(tmp_path: Path) -> None:
    program = f"""
import json, sys
from typer.testing import CliRunner
from lowtide.cli.main import app

for arguments in {[arguments for arguments, _ in REFUSED]!r}:
    result = CliRunner().invoke(app, ["plan", *arguments.split()])
    print(json.dumps([arguments, result.exit_code, result.stdout, result.stderr, "torch" in sys.modules]))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=tmp_path)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == len(REFUSED)
    for (arguments, words), (_, code, out, err, torch_is_there) in zip(REFUSED, found, strict=True):
        assert (code, out, torch_is_there) == (1, "", False), arguments
        assert words in err, arguments
        assert arguments == "missing.yaml" or err.count("\n") == 1, arguments


TOY = """
import torch
from beside_it import WIDTH

class Toy(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(100, WIDTH)
        self.first = torch.nn.ModuleList(torch.nn.TransformerEncoderLayer(WIDTH, 2, 64) for _ in range(3))
        self.second = torch.nn.ModuleList(torch.nn.TransformerEncoderLayer(WIDTH, 2, 64) for _ in range(2))
        self.head = torch.nn.Linear(WIDTH, 100)

    def forward(self, tokens):
        hidden = self.embedding(tokens)
        for layer in (*self.first, *self.second):
            hidden = layer(hidden)
        return self.head(hidden)

def build():
    return Toy()

def with_loss():
    model, tokens = Toy(), torch.zeros(3, 8, dtype=torch.long)
    return model, lambda: model(tokens).square().mean()
"""


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "toy_of_test.py").write_text(TOY.replace("beside_it", "width_of_test"))
    (tmp_path / "width_of_test.py").write_text("WIDTH = 32\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("toy_of_test", "width_of_test"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def planned(*arguments: str | int | Path) -> dict[str, Any]:
    code, out, err = run("plan", *map(str, arguments), "--json")
    assert code == 0, err
    value: dict[str, Any] = json.loads(out)
    return value


def test_a_function_in_the_working_directory_is_planned_with_its_loss_counted(toy: None) -> None:
    plan = planned("toy_of_test:build", "--seq", 64, "--micro-batch-size", 2)
    work, notes = plan["workload"], " ".join(plan["notes"])
    assert (work["samples"], work["sequence"], work["devices"]) == (2, 64, 1)
    assert (work["dtype"], work["compute_dtype"], work["optimizer"]) == ("float32", "float32", "AdamW")
    assert "the cross-entropy of the logits" in notes
    assert "not covered: the 2 layers in second" in notes
    assert plan["pipeline"]["placement"] == [[[0, 1, 2]]]


def test_a_function_that_brings_its_own_loss_is_planned_with_it(toy: None) -> None:
    plan = planned("toy_of_test.py:with_loss")
    assert (plan["workload"]["samples"], plan["workload"]["sequence"]) == (3, 8)
    assert "the loss is taken to be" not in " ".join(plan["notes"])


def test_dtype_autocast_optimizer_and_layers_reach_the_trace(toy: None, tmp_path: Path) -> None:
    options = ("--dtype", "bf16", "--optimizer", "sgd", "--layers", "second", "--seq", 16)
    plan = planned("toy_of_test:build", *options)
    work = plan["workload"]
    assert (work["dtype"], work["compute_dtype"], work["optimizer"]) == ("bfloat16", "bfloat16", "SGD")
    assert plan["pipeline"]["placement"] == [[[0, 1]]]
    mixed = planned("toy_of_test:build", "--autocast", "bf16", "--optimizer", "none", "--seq", 16)["workload"]
    assert (mixed["dtype"], mixed["compute_dtype"], mixed["optimizer"]) == ("float32", "bfloat16", "")


def test_compiled_layers_are_planned_with_fake_tensors_and_the_notes_and_the_page_say_so(
    toy: None, tmp_path: Path, trace: Path
) -> None:
    page = tmp_path / "page.html"
    plan = planned("toy_of_test:build", "--compile", "--seq", 64, "--html", page)
    said = "are priced from the split joint graph of torch.compile"
    assert any(said in note for note in plan["notes"])
    assert said in page.read_text()
    eager = planned("toy_of_test:build", "--seq", 64)
    assert not any("priced" in note for note in eager["notes"])
    assert plan["simulation"]["stages"][0]["peak"] < eager["simulation"]["stages"][0]["peak"]
    code, _, err = run("plan", trace, "--compile")
    assert code == 1
    assert "is traced already, and cannot take --compile; found --compile: leave it out" in err.replace("\n", " ")


def test_lora_is_planned_with_fake_tensors(toy: None, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    (tmp_path / "lora_of_test.py").write_text(
        "import toy_of_test\nfrom peft import LoraConfig, get_peft_model\n\n"
        "def build():\n"
        "    return get_peft_model(toy_of_test.Toy(), LoraConfig(r=4, target_modules=['linear1', 'linear2']))\n"
    )
    full = planned("toy_of_test:build", "--seq", 64)
    for arguments in (("toy_of_test:build", "--lora", 4), ("lora_of_test:build",)):
        adapted = planned(*arguments, "--seq", 64)
        static, all_of_it = (one["simulation"]["stages"][0]["static"] for one in (adapted, full))
        assert static < all_of_it / 2  # nearly no gradients, nearly no states
        assert adapted["mfu"] is not None


def test_a_config_without_a_dtype_says_what_is_assumed(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(
        json.dumps(
            {
                "model_type": "llama",
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "vocab_size": 100,
            }
        )
    )
    plan = planned(str(tmp_path), "--seq", 16)
    assert "config.json has no dtype: float32 is assumed" in " ".join(plan["notes"])
    plan = planned(str(tmp_path), "--seq", 16, "--dtype", "bf16")
    assert plan["workload"]["dtype"] == "bfloat16"
    assert "no dtype" not in " ".join(plan["notes"])


def test_a_trace_remembers_its_layout(tmp_path: Path) -> None:
    file, again = tmp_path / "trace.json", tmp_path / "again.json"
    layout = Layout(shard=8)
    batch = {"samples": 1, "tokens": 4096}
    replace(llama_trace(layers=4), layout=layout, batch=batch).save(file)
    planned(file, "--pp", 2, "--micro-batches", 4, "--trace-out", again)
    remembered = planned(again)
    assert remembered["pipeline"] == even_pipeline(4, 2, micro_batches=4).as_json()
    assert remembered["workload"]["devices"] == 16
    assert planned(again, "--dp", 8, "--pp", 4)["workload"]["devices"] == 32
    code, _, err = run("plan", again, "--dp", 4)
    assert code == 1
    assert "was traced with --dp 8; found --dp 4" in err


def test_a_sample_longer_than_a_shapes_positions_is_planned_and_noted() -> None:
    trace = trace_of("llama3-8b", LayoutOptions(sequence=8200)).trace
    assert trace.batch["tokens"] == 8200
    assert "has positions for 8192 tokens; it is planned as if it had them for 8200" in trace.notes[0]


def test_devices_are_listed() -> None:
    code, out, _ = run("devices", width=200)
    assert code == 0
    assert all(name in out for name in ("h100", "79.1 GiB", "1.062 GiB", "688 MiB", "mi300x", "910b"))
    known = json.loads(run("devices", "--json")[1])
    h100 = find_device("h100")
    assert known["h100"]["capacity"] == h100.capacity
    assert known["h100"]["budget"] == h100.budget
    assert known["h100"]["reserve"]["communication"] == 688 << 20


def test_the_budget_is_the_devices_unless_given(trace: Path) -> None:
    assert planned(trace)["budget"] == find_device("h100").budget
    assert planned(trace, "--device", "910b")["budget"] == find_device("910b").budget
    kept_back = planned(trace, "--reserve", "3GiB")
    assert kept_back["budget"] == find_device("h100").capacity - (3 << 30)
    assert any("less a reserve of 3 GiB, which was given" in note for note in kept_back["notes"])


@pytest.mark.parametrize("command", ["plan", "explain"])
def test_what_is_assumed_for_the_budget_is_said(trace: Path, command: str) -> None:
    code, out, _ = run(command, str(trace), width=200)
    assert code == 0
    assert "less 1.062 GiB, which is assumed: 1 GiB for the driver, 64 MiB for workspaces" in out
    assert run(command, str(trace), "--budget", "1GiB", "--reserve", "1GiB")[0] == 1


def test_a_piped_report_is_not_cut_off(trace: Path, budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert make_console().width == 160
    out = CliRunner().invoke(app, ["explain", str(trace), "--budget", str(budget)]).stdout
    assert "…" not in out.replace("lowtide plan …", "")
    assert max(map(len, out.splitlines())) > 80


def test_a_reader_that_stops_early_costs_no_file_and_shows_no_traceback(trace: Path, tmp_path: Path) -> None:
    program = "from lowtide.cli.entry import run; run()"
    arguments = [sys.executable, "-c", program, "plan", str(trace), "-o", str(tmp_path / "policy.json")]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.close()  # as `head` does when it has enough
        assert process.stderr is not None
        assert process.stderr.read() == ""
    assert Policy.load(tmp_path / "policy.json").layers
