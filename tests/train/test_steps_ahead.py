"""The host issues a step while the device runs the one before it."""

from __future__ import annotations

from support.layout_cases import data
from support.ranks import Ranks
from train import runs


def test_the_host_waits_for_a_step_only_when_the_next_is_issued(one: Ranks) -> None:
    (found,) = one.run(runs.host_ahead, data(1, 2))
    for step in found:
        assert step.finished > 0, "the device was idle when a step had been read"
        assert step.issued > 1.5 * step.finished, "the host waited while it issued a step"


def test_losses_read_late_are_those_of_the_steps(one: Ranks) -> None:
    (found,) = one.run(runs.host_ahead, data(1, 2))
    (expected,) = one.run(runs.train, "llama", data(1, 2), 3, "tide")
    assert [step.loss for step in found] == [loss for loss, _ in expected]


def test_a_run_writes_every_step_once_in_order(one: Ranks) -> None:
    saving = [{"type": "CheckpointMonitor", "save_checkpoint_steps": 3}]
    ((lines, saved),) = one.run(runs.whole_run, {**data(1, 2), "runner_config.stop_step": 5, "callbacks": saving})
    (expected,) = one.run(runs.train, "llama", data(1, 2), 5, "tide")
    assert [(line["step"], line["loss"]) for line in lines] == [(n, loss) for n, (loss, _) in enumerate(expected, 1)]
    assert all(line["seconds"] > 0 for line in lines)
    assert [line["samples"] for line in lines] == [n * lines[0]["samples"] for n in range(1, 6)]
    assert saved == [3, 5]


def test_a_loss_scale_has_the_host_wait(one: Ranks) -> None:
    """It decides about the update: this shows that the first test sees a wait."""
    (found,) = one.run(runs.host_ahead, {**data(1, 2), "runner_wrapper.scale_sense": 1024.0})
    assert all(step.issued < 1.5 * step.finished for step in found)
