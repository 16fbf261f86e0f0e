"""A setting that turns out to have no effect is in the rank's log and in its receipts."""

from __future__ import annotations

from pathlib import Path

from support.commands import TINY, log, merged, receipts, train


def test_an_idle_switch_is_in_the_log_and_in_every_receipt(tmp_path: Path) -> None:
    recompute = {"recompute_config": {"recompute": True, "mp_comm_recompute": False}}
    longer = {"runner_config": {"stop_step": 3}}
    done = train(tmp_path, merged(TINY, recompute, longer), "--nproc", "1")
    assert done.returncode == 0, done.stderr
    said = "reissue_collectives (mp_comm_recompute) has no effect in layer 0: its parameters are not tensor-parallel"
    lines = [line for line in log(tmp_path).splitlines() if said in line]
    assert len(lines) == 1
    assert lines[0].endswith(f"-WARNING - {said}")
    assert [said in receipt["without_effect"] for receipt in receipts(tmp_path)] == [True, True]
