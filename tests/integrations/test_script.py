"""``lowtide run``: scripts that know nothing of lowtide, each in a process of its own, as a user starts it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from lowtide import Policy, Recompute
from lowtide.integrations.discovery import Discovery
from lowtide.integrations.settings import Settings
from support.script_cases import SCRIPTS, Ended, same, start

FEW = ("--layers", "3")
"""What makes it short."""


@pytest.fixture(scope="module")
def nanogpt(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """The script that several tests start, alone, with plenty of memory."""
    ended = start(SCRIPTS / "nanogpt.py", *FEW, folder=tmp_path_factory.mktemp("nanogpt"))
    assert ended.code == 0, ended.error
    return ended


def written(folder: Path, text: str) -> Path:
    file = folder / "script.py"
    file.write_text(text)
    return file


@pytest.mark.parametrize(
    ("name", "arguments", "capacity", "said"),
    [
        ("nanogpt", FEW, 12 << 20, ["attached to GPT, 3 layers at 'h', stepped by AdamW"]),
        pytest.param(
            "gan", (), 60 << 20, ["attached to Sequential, 6 layers, stepped by Adam"] * 2, marks=pytest.mark.slow
        ),
    ],
)
def test_a_script_that_dies_alone_survives_with_the_same_results(
    name: str,
    arguments: tuple[str, ...],
    capacity: int,
    said: list[str],
    request: pytest.FixtureRequest,
    tmp_path: Path,
) -> None:
    script = SCRIPTS / f"{name}.py"
    alone = request.getfixturevalue(name) if name == "nanogpt" else start(script, folder=tmp_path)
    tight = start(script, *arguments, folder=tmp_path, capacity=capacity)
    options = ["--quiet", "--report", str(tmp_path / "report")]
    under = start(script, *arguments, folder=tmp_path, under=options, capacity=capacity)
    assert alone.code == 0
    assert tight.code == 1
    assert "OutOfMemoryError" in tight.error
    assert under.code == 0, under.error
    pages = sorted((tmp_path / "report").rglob("report.html"), key=lambda page: len(page.parts))
    assert all(page.read_text().startswith("<!doctype html>") for page in pages)
    assert under.said == [f"lowtide: {text}" for text in [*said, *(f"page: {page}" for page in pages)]]
    assert len(pages) == len(said)
    assert same(under.results, alone.results)


@pytest.mark.slow
def test_two_ranks_under_torchrun(tmp_path: Path) -> None:
    script = SCRIPTS / "ddp.py"
    alone = start(script, folder=tmp_path, ranks=2)
    under = start(script, folder=tmp_path, under=["--quiet"], capacity=40 << 20, ranks=2)
    assert under.code == 0, under.error
    assert under.said == ["lowtide: attached to Sequential, 8 layers at '1.layers', stepped by AdamW"]
    assert same(under.results, alone.results)


def test_what_cannot_be_attached_to_runs_as_alone_and_it_is_said_why(tmp_path: Path) -> None:
    alone = start(SCRIPTS / "no_layers.py", folder=tmp_path)
    under = start(SCRIPTS / "no_layers.py", folder=tmp_path, under=["--json"])
    assert under.code == 0
    assert same(under.results, alone.results)
    (said,) = under.said
    assert "not attached: Sequential has no layers of one kind" in said
    found = json.loads(under.output.splitlines()[-1])
    assert found["attached"] == []
    assert "--layers" in found["refused"][0]


def test_a_compiled_model_is_left_as_it_is(tmp_path: Path) -> None:
    script = written(
        tmp_path,
        """
import sys, torch
from torch import nn
torch.manual_seed(0)
model = torch.compile(nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3))), backend="eager")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(4):
    loss = model(torch.randn(4, 8)).square().mean()
    loss.backward()
    optimizer.step()
torch.save({"losses": [loss.item()]}, sys.argv[1])
""",
    )
    under = start(script, folder=tmp_path, under=[], device=False)
    assert under.code == 0, under.error
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()) for _ in range(3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):  # the backend is eager: compiled or not, these are the kernels
        loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
    assert under.results == {"losses": [loss.item()]}
    (said,) = under.said
    assert "is compiled" in said


def test_models_that_are_trained_one_after_another_are_let_go(tmp_path: Path) -> None:
    script = written(
        tmp_path,
        """
import gc, sys, torch, weakref
from torch import nn
torch.manual_seed(0)
gone = []
for _ in range(3):
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4))).to("tide")
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(6):
        optimizer.zero_grad()
        loss = model(torch.randn(32, 64, device="tide")).square().mean()
        loss.backward()
        optimizer.step()
    gone.append(weakref.ref(model))
del model, optimizer
gc.collect()
torch.save([one() is None for one in gone], sys.argv[1])
""",
    )
    under = start(script, folder=tmp_path, under=["--quiet"])
    assert under.code == 0, under.error
    assert under.said == ["lowtide: attached to Sequential, 4 layers, stepped by AdamW"] * 3
    assert under.results == [True, True, False]  # the last one is attached to until the script ends


def test_nothing_is_trained_here(tmp_path: Path) -> None:
    under = start(written(tmp_path, "print('hello')"), folder=tmp_path, under=[], device=False)
    assert (under.code, under.output) == (0, "hello\n")
    (said,) = under.said
    assert "attached to nothing: no optimizer of torch.optim was made in this process" in said


def test_an_optimizer_without_a_module(tmp_path: Path) -> None:
    script = written(
        tmp_path,
        """
import torch
from torch import nn
weight = torch.zeros(4, requires_grad=True)
optimizer = torch.optim.SGD([weight], lr=0.25)
for _ in range(5):  # gradients add up: 1, 2, 3, and there relu ends
    nn.ReLU()(weight + 1).sum().backward()
    optimizer.step()
print(weight.tolist(), nn.Module.__call__ is nn.Module._wrapped_call_impl)  # calls are not looked at any more
""",
    )
    under = start(script, folder=tmp_path, under=[], device=False)
    assert (under.code, under.output) == (0, "[-3.0, -3.0, -3.0, -3.0] True\n")
    (said,) = under.said
    assert "no module that was called with gradients enabled holds the parameters of SGD" in said


def test_a_script_finds_what_it_would_find_alone(tmp_path: Path) -> None:
    script = written(
        tmp_path,
        """
import gc, os, sys
print(sys.argv[2:], __name__, __file__, sys.path[0], gc.isenabled(), os.environ.get("PYDANTIC_DISABLE_PLUGINS"))
print("torch" in sys.modules)
import helper
print(helper.__name__)
""",
    )
    (tmp_path / "helper.py").write_text("")
    alone = start(script, "--budget", "x", folder=tmp_path, device=False)
    under = start(script, "--budget", "x", folder=tmp_path, under=["--budget", "1GiB"], device=False)
    assert alone.code == under.code == 0, under.error
    assert under.output == alone.output


def test_a_module_is_run_with_m(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    (tmp_path / "package" / "tool.py").write_text("import sys\nprint(sys.argv[2:], __package__)")
    under = start(Path("package.tool"), "-x", folder=tmp_path, under=["-m"], device=False)
    assert (under.code, under.output) == (0, "['-x'] package\n"), under.error


@pytest.mark.parametrize(
    ("text", "code"), [("raise SystemExit(3)", 3), ("import sys; sys.exit('no')", 1), ("1 / 0", 1)]
)
def test_a_script_ends_as_it_would_alone(text: str, code: int, tmp_path: Path) -> None:
    script = written(tmp_path, f"print('begun')\n{text}\n")
    alone = start(script, folder=tmp_path, device=False)
    under = start(script, folder=tmp_path, under=[], device=False)
    assert (under.code, under.output) == (alone.code, alone.output) == (code, "begun\n")
    assert [line for line in under.error.splitlines() if not line.startswith("lowtide: ")] == alone.error.splitlines()


def test_a_policy_is_applied(nanogpt: Ended, tmp_path: Path) -> None:
    script = SCRIPTS / "nanogpt.py"
    Policy.uniform(default=Recompute()).save(tmp_path / "policy.json")
    applied = start(script, *FEW, folder=tmp_path, under=["--policy", str(tmp_path / "policy.json")])
    assert applied.code == 0, applied.error
    assert applied.said == ["lowtide: applies the Policy to GPT, 3 layers at 'h'"]
    assert same(applied.results, nanogpt.results)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--budget", "80"], "for 80 GiB write"),
        (["--policy", "missing.json"], "missing.json"),
        (["--policy", "missing.json", "--budget", "1GiB"], "leave out --budget"),
    ],
)
def test_wrong_options_are_said_before_the_script_begins(options: list[str], expected: str, tmp_path: Path) -> None:
    under = start(written(tmp_path, "print('begun')"), folder=tmp_path, under=options, device=False)
    assert under.code in (1, 2)
    assert under.output == ""
    assert expected in " ".join(under.error.replace("│", " ").split())


def test_a_missing_script(tmp_path: Path) -> None:
    under = start(tmp_path / "absent.py", folder=tmp_path, under=[], device=False)
    assert under.code == 2
    assert "there is no script" in under.error


def test_a_script_that_uses_lowtide_itself(tmp_path: Path) -> None:
    script = written(
        tmp_path,
        """
import sys, torch, lowtide
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4))).to("tide")
optimizer = torch.optim.AdamW(model.parameters())
with lowtide.adapt(model, optimizer, verbose=False) as run:
    for _ in range(6):
        optimizer.zero_grad()
        model(torch.randn(32, 64, device="tide")).square().mean().backward()
        optimizer.step()
    torch.save(run.number, sys.argv[1])
""",
    )
    under = start(script, folder=tmp_path, under=[])
    assert under.code == 0, under.error
    assert under.results == 6
    (said,) = under.said
    assert "is adapted by lowtide.adapt() in the script" in said


def test_the_module_call_is_restored() -> None:
    call = torch.nn.Module.__call__
    made = torch.optim.Optimizer.__init__
    with Discovery(Settings(verbose=False), lambda text: None).searching():
        torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
        assert torch.nn.Module.__call__ is not call
    assert torch.nn.Module.__call__ is call
    assert torch.optim.Optimizer.__init__ is made
