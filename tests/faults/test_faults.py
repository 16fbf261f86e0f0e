"""Every fault ends as the table in ``fault_cases`` says: training goes on, exactly, or stops with a typed exception."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

import tide
from support.fault_cases import FAULTS, FAULTY, STEPS, Fault, Session, as_markdown, settle
from support.stacks import lines, same, swap
from tide.testing import fresh_tide  # noqa: F401

ROOT = Path(__file__).parents[2]


@cache
def expected(device: str) -> tuple[list[Tensor], ...]:
    """The same steps without lowtide."""
    session = Session(None, device, Path(), {})
    return tuple(session.step(number) for number in range(STEPS))


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_training_goes_on_exactly_or_stops_with_a_typed_error(fault: Fault, tmp_path: Path) -> None:
    reference = expected(fault.device)
    session = Session(swap(prefetch=fault.prefetch, tier=fault.tier), fault.device, tmp_path, fault.limits)
    for number in range(STEPS):
        if number == (0 if fault.first else FAULTY):
            session.model.zero_grad()
            held = settle(session)
            if fault.error is not None:
                with pytest.raises(fault.error, match=fault.message or None), fault.arm(session):
                    session.step(number)
                session.model.zero_grad()
                assert settle(session, held) == held
                found = session.step(number)
            else:
                with fault.arm(session):
                    found = session.step(number)
        else:
            found = session.step(number)
        assert same(reference[number], found), f"step {number}"
    if fault.error is None:
        assert any(fault.seen in note for note in session.notes) or not fault.seen
    assert not list(tmp_path.iterdir())
    assert tide.races() == []


def test_a_disk_that_really_is_full(tmp_path: Path) -> None:
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(tmp_path)], capture_output=True)
    if mounted.returncode:
        pytest.skip("needs the right to mount a file system")
    try:
        session = Session(swap(tier="disk"), "cpu", tmp_path, {})
        found = [session.step(number) for number in range(STEPS)]
        assert all(same(a, b) for a, b in zip(expected("cpu"), found, strict=True))
        assert any("No space left" in note for note in session.notes)
        session.attached.remove()
        del session
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


CHILD = """
    import sys, torch
    from pathlib import Path
    from support.fault_cases import Session
    from support.stacks import lines, swap

    session = Session(swap(tier="disk", prefetch=1), "cpu", Path(sys.argv[1]), {})
    session.step(0)
    loss = session.model(session.batches[1]).sum()
    session.written()
    assert session.attached.manager.disk.end > 0
    print("swapped", flush=True)
    while True:
        loss = session.model(session.batches[1]).sum()
        loss.backward()
"""


def test_a_killed_process_leaves_no_file(tmp_path: Path) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(CHILD), str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "swapped\n"
    open_files = [os.readlink(link) for link in Path(f"/proc/{child.pid}/fd").iterdir() if link.is_symlink()]
    assert any(str(tmp_path) in name for name in open_files)  # it is in use
    child.kill()
    assert child.wait() == -signal.SIGKILL
    assert list(tmp_path.iterdir()) == []


def test_a_read_of_one_failing_tensor_does_not_harm_the_others(tmp_path: Path) -> None:
    """What failed to come back ahead of its use, and is not asked for, stops nobody."""
    session = Session(swap(tier="disk", prefetch=3), "tide", tmp_path, {})
    for number in range(2):
        session.step(number)
    loss = session.model(session.batches[2]).sum()
    disk = session.written()
    os.ftruncate(disk.buffered, 0)
    leaf = session.model.layers[2].down.bias
    torch.autograd.grad(loss, leaf)  # needs nothing that was swapped
    del loss
    assert any(line.swaps for line in lines(session.attached))
    settle(session)
    assert same(expected("tide")[2], session.step(2))


def test_the_table_of_the_documentation_is_up_to_date() -> None:
    page = ROOT / "docs" / "faults.md"
    assert page.read_text(encoding="utf-8") == as_markdown(), "python tests/support/fault_cases.py writes it"
