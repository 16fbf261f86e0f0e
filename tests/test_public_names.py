"""What users and scripts depend on: a change here is a change for them, and goes into the changelog."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module

import pytest
import typer

import lowtide
from lowtide.cli.main import app

NAMES = [
    "CollectiveRule",
    "Communication",
    "ConfigError",
    "Decision",
    "Handle",
    "InfeasibleError",
    "Keep",
    "LayerPolicy",
    "Limits",
    "LowtideError",
    "ModelError",
    "Pattern",
    "PatternError",
    "Plan",
    "PlanError",
    "Policy",
    "PolicyError",
    "RebuildError",
    "Recompute",
    "RescueError",
    "Rule",
    "Swap",
    "SwapError",
    "TraceError",
    "UnitError",
    "UnmatchedError",
    "VerificationError",
    "adapt",
    "apply",
    "attach",
    "load_policy",
    "plan",
    "verify",
]

PLANNED = [
    "--autocast",
    "--budget",
    "--compile",
    "--device",
    "--devices",
    "--dp",
    "--dtype",
    "--cp",
    "--ep",
    "--expandable-segments",
    "--expert-skew",
    "--global-batch",
    "--host-memory",
    "--layers",
    "--lora",
    "--micro-batch-size",
    "--micro-batches",
    "--no-recompute",
    "--no-swap",
    "--optimizer",
    "--pp",
    "--replicate",
    "--reserve",
    "--schedule",
    "--seq",
    "--tp",
    "--vpp",
    "CONFIG|MODEL|TRACE",
]
COMMANDS = {
    "": ["--version"],
    "calibrate": [
        "--device",
        "--json",
        "--like",
        "--micro-batch-size",
        "--output",
        "--seconds",
        "--seq",
        "-o",
        "MODEL|TRACE",
    ],
    "check": [
        "--autocast",
        "--batch",
        "--json",
        "--layers",
        "--model",
        "--no-color",
        "--sequence",
        "--set",
        "--trace",
        "FILE",
    ],
    "devices": ["--json"],
    "explain": [*PLANNED, "--json"],
    "plan": [
        *PLANNED,
        "--html",
        "--json",
        "--output",
        "--perfetto",
        "--save",
        "--sweep",
        "--trace-out",
        "--yaml",
        "-o",
    ],
    "report": ["--config", "--json", "--memory", "--metrics", "--output", "--receipt", "--stage", "-o", "PLAN|RUN"],
    "convert": ["--json", "--output", "--set", "--to", "-o", "FILE"],
    "selftest": ["--device", "--json", "--output", "--small", "-o"],
    "operators": ["--autocast", "--batch", "--json", "--layers", "--sequence", "MODEL"],
    "run": [
        "--budget",
        "--json",
        "--layers",
        "--module",
        "--policy",
        "--quiet",
        "--report",
        "--swap",
        "-m",
        "SCRIPT",
        "[ARGUMENT]...",
    ],
    "schema": ["--json", "--output", "-o"],
    "train": [
        "--adaptive-recompute-device-size",
        "--adaptive-recompute-device-swap",
        "--adaptive-recompute-profiling-step",
        "--config",
        "--device",
        "--dry-run",
        "--fresh",
        "--gradient_accumulation_steps",
        "--json",
        "--log-dir",
        "--master-addr",
        "--master-port",
        "--max-restarts",
        "--nnodes",
        "--node-rank",
        "--nproc",
        "--resume",
        "--run_mode",
        "--set",
        "--stop-signal",
        "--swap-disk-bytes",
        "--swap-disk-directory",
        "--swap-host-bytes",
        "--swap-in-flight-bytes",
        "--timeout",
        "--use-legacy-models",
        "--use_parallel",
        "--track",
        "--watchdog",
        "CONFIG",
    ],
}


def test_exported_names_are_exactly_these() -> None:
    assert lowtide.__all__ == NAMES
    assert sorted(NAMES) == NAMES


def test_every_exported_name_can_be_used_and_says_where_it_is_from() -> None:
    for name in lowtide.__all__:
        assert getattr(lowtide, name) is not None
    assert set(NAMES) <= set(dir(lowtide))


@pytest.mark.parametrize(
    ("package", "name"),
    [
        ("adaptive", "Adaptive"),
        ("models", "chunked_cross_entropy"),
        ("planner", "Pipeline"),
        ("planner", "even_pipeline"),
        ("planner", "load_plan"),
        ("policy", "resolve"),
        ("runtime", "Receipt"),
        ("runtime", "Verification"),
        ("trace", "Trace"),
    ],
)
def test_other_names_are_imported_from_their_package(package: str, name: str) -> None:
    module = import_module(f"lowtide.{package}")
    assert name in module.__all__
    assert getattr(module, name).__name__ == name
    with pytest.raises(AttributeError):
        _ = module.no_such_name


def test_commands_and_flags_are_exactly_these() -> None:
    group = typer.main.get_command(app)
    assert isinstance(group, typer.core.TyperGroup)
    found = {"": [flag for p in group.params for flag in p.opts]}
    for name, command in group.commands.items():
        flags = [flag for p in command.params for flag in (p.opts if p.param_type_name == "option" else [p.metavar])]
        found[name] = sorted(str(flag) for flag in flags)
    assert found == {name: sorted(flags) for name, flags in COMMANDS.items()}


def test_every_command_has_help_with_an_example_and_json() -> None:
    group = typer.main.get_command(app)
    assert isinstance(group, typer.core.TyperGroup)
    for name, command in group.commands.items():
        assert "Example:" in (command.help or ""), name
        assert any("--json" in p.opts for p in command.params), name


def test_import_is_light() -> None:
    heavy = ["torch", "pydantic", "ruamel", "typer", "rich", "scipy", "numpy"]
    program = f"import sys, lowtide; print([name for name in {heavy!r} if name in sys.modules])"
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert printed.stdout.strip() == "[]"
