import re
import subprocess
import sys
from pathlib import Path

import tide

README = Path(__file__).parents[1] / "README.md"


def test_exported_names_are_these():
    assert set(tide.__all__) == {
        "PRESETS",
        "Access",
        "Preset",
        "Race",
        "RaceError",
        "Timeline",
        "advance",
        "check_races",
        "clear_races",
        "configuration",
        "configure",
        "faults",
        "idle_at",
        "now",
        "pinned_memory_stats",
        "preset",
        "races",
        "record",
        "reset",
        "scaled",
    }
    assert all(hasattr(tide, name) for name in tide.__all__)


def test_the_readme_names_every_function():
    text = README.read_text()
    for name in tide.__all__:
        if name[0].islower():
            assert f"`{name}" in text or f" {name}" in text or f"`{name}(" in text, name
    for name in vars(tide.faults):
        if not name.startswith("_") and callable(getattr(tide.faults, name)) and name.islower():
            assert f"faults.{name}" in text, name


def test_the_readme_example_runs_and_its_missing_wait_is_reported():
    example = re.search(r"## Example\n\n```python\n(.*?)```", README.read_text(), re.S).group(1)

    def output(program: str) -> str:
        return subprocess.run(
            [sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True
        ).stdout

    assert output(example).startswith("[]")
    broken = re.sub(r"copies\.wait_stream.*", "", example)
    assert broken != example
    assert output(broken).startswith("[Race(kind='read after write'")


def test_settings_survive_what_does_not_name_them():
    tide.configure(preset="a100", launch=77)
    tide.configure(capacity=2**30)
    settings = tide.configuration()
    assert (settings["name"], settings["launch"], settings["capacity"]) == ("a100", 77, 2**30)
    tide.reset()
    settings = tide.configuration()
    assert (settings["name"], settings["launch"], settings["capacity"]) == (
        "h100",
        5000,
        80 * 2**30,
    )


def test_a_process_may_end_with_work_in_flight():
    program = """
import torch, tide
tide.configure(mode="async")
a = torch.ones(1500, 1500, device="tide", dtype=torch.float64)
for _ in range(5):
    a = (a @ a).clamp_(max=1)
host = torch.empty(10, pin_memory=True)
host.copy_(a[0, :10].float(), non_blocking=True)
"""
    subprocess.run([sys.executable, "-P", "-c", program], check=True, timeout=120)
