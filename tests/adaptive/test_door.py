"""Each batch runs under the plan for its shape, which is chosen when the model is called."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
import torch

import tide
from support.length_cases import Loop, Net, on_ranks
from support.ranks import Ranks

LENGTHS = [64, 128, 40, 96, 64, 20, 150, 64, 33, 128, 80, 50, 100, 64, 20, 128, 200, 64]


def plain(lengths: list[int]) -> list[float]:
    loop = Loop()
    return [loop.step(length) for length in lengths]


@pytest.mark.parametrize("given", [True, False])
def test_nothing_changes_but_the_plan(given: bool) -> None:
    expected = plain(LENGTHS)
    loop = Loop()
    with loop.adapt() as run:
        found = [
            run.step(lambda length=length: loop.step(length)) if given else loop.step(length) for length in LENGTHS
        ]
        assert found == expected
        assert len(run.profiling.lengths.traces) == 3
        assert run.plans
        assert run.bucket[0] == 2
        assert run.bucket[1] >= 64
    assert not tide.races()


def test_a_batch_longer_than_any_that_was_measured_has_a_plan_too() -> None:
    loop = Loop()
    with loop.adapt() as run:
        for length in (64, 64, 32, 64, 48, 96):
            loop.step(length)
        measured = set(run.profiling.lengths.traces)
        bucket = run.profiling.lengths.bucket((2, 180, 32))
        deadline = time.monotonic() + 60
        while bucket not in run.plans and time.monotonic() < deadline:
            loop.step(180)
        loop.step(180)
        assert run.bucket == bucket
        assert set(run.profiling.lengths.traces) == measured
        torch.accelerator.reset_peak_memory_stats()
        loop.step(180)
        assert torch.accelerator.max_memory_allocated() <= run.plans[bucket].plan.simulation.peak * 1.05


def test_more_is_measured_when_other_batches_come_and_not_for_the_last_of_an_epoch() -> None:
    loop = Loop()
    with loop.adapt() as run:
        for _ in range(3):
            for _ in range(22):
                loop.step(64)
            loop.step(40)
        assert not run.profiling.lengths.vary
        for length in (40, 64, 90, 130, 64, 30, 100, 64):
            loop.step(length)
        assert run.profiling.lengths.vary


def test_of_several_micro_batches_the_longest_counts() -> None:
    def steps(loop: Loop) -> list[float]:
        return [loop.step(*lengths) for lengths in ((64, 100), (96, 32), (32, 64), (48, 90), (120, 64), (32, 110)) * 3]

    expected = steps(Loop())
    loop = Loop()
    with loop.adapt() as run:
        assert steps(loop) == expected
        assert run.profiling.lengths.vary
        assert run.bucket[1] >= 110


def test_other_models_beside_it_choose_nothing() -> None:
    """A reference model without gradients, and a second model that is trained by its own run."""

    def steps(adapted: bool) -> tuple[list[float], list[tuple[int, ...]]]:
        loop = Loop()
        reference, critic = Net().to("tide"), Net().to("tide")
        optimizer = torch.optim.SGD(critic.parameters(), lr=1e-3)
        import lowtide

        runs = [loop.adapt(), lowtide.adapt(critic, optimizer, verbose=False)] if adapted else []
        losses = []
        for length in LENGTHS:
            with torch.no_grad():
                wanted = reference(loop.batch(500))

            def both(length: int = length, wanted: torch.Tensor = wanted) -> float:
                return loop.step(length) + float(wanted)

            def critical(length: int = length) -> float:
                optimizer.zero_grad()
                loss = critic(torch.ones(1, 2 * length, 32, device="tide"))
                loss.backward()
                optimizer.step()
                return float(loss.detach())

            losses.append(runs[0].step(both) if adapted else both())
            losses.append(runs[1].step(critical) if adapted else critical())
        shapes = [shape for run in runs for shape in run.profiling.lengths.traces]
        for run in runs:
            run.remove()
        return losses, shapes

    expected, _ = steps(False)
    found, shapes = steps(True)
    assert found == expected
    assert {shape[0] for shape in shapes} == {1, 2}
    assert all(shape[1] < 500 for shape in shapes)
    assert not tide.races()


def test_plans_are_made_in_the_foreground_if_their_process_is_killed() -> None:
    expected = plain([*LENGTHS, 30, 60, 90, 45])
    loop = Loop()
    with loop.adapt() as run:
        found = [loop.step(length) for length in LENGTHS]
        process = run.planning.background._process
        assert process is not None
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        run.plans.clear()
        run.planning._asked.clear()
        found += [loop.step(length) for length in (30, 60, 90, 45)]
        assert found == expected
        assert run.planning.background.broken
        assert run.bucket == run.profiling.lengths.bucket((2, 45, 32))


def test_the_process_ends_with_the_run_however_that_ends() -> None:
    program = (
        "import sys, time, tide; from support.length_cases import Loop; loop = Loop(); run = loop.adapt()\n"
        "for length in (64, 64, 32, 64, 48, 96, 90, 20):\n"
        "    run.step(lambda: loop.step(length))\n"
        "print(run.planning.background._process.pid, flush=True)\n"
        "time.sleep(60)"
    )
    here = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])])}
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, env=environment) as run:
        assert run.stdout is not None
        planner = int(run.stdout.readline())
        os.kill(planner, 0)  # it is there
        run.kill()
        run.wait()
    deadline = time.monotonic() + 30
    while is_running(planner) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not is_running(planner)


def is_running(process: int) -> bool:
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize(
    ("given", "idle"),
    [
        pytest.param(True, False, marks=pytest.mark.slow),
        (False, False),
        pytest.param(False, True, marks=pytest.mark.slow),
    ],
)
def test_copies_on_ranks_choose_by_themselves_and_one_may_skip_the_model(ranks: Ranks, given: bool, idle: bool) -> None:
    expected = ranks.run(on_ranks, False, given, idle, False)
    found = ranks.run(on_ranks, True, given, idle, False)
    assert [losses for losses, _, _ in found] == [losses for losses, _, _ in expected]
    (_, buckets, events), (_, others, _) = found
    assert buckets != others
    assert len(set(buckets)) > 2
    assert events.count("measured") >= 2


@pytest.mark.parametrize("given", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_ranks_whose_layers_communicate_agree_on_the_longest_batch_of_them(ranks: Ranks, given: bool) -> None:
    expected = ranks.run(on_ranks, False, given, False, True)
    found = ranks.run(on_ranks, True, given, False, True)
    assert [losses for losses, _, _ in found] == [losses for losses, _, _ in expected]
    (_, buckets, events), (_, others, _) = found
    assert buckets == others
    assert len(set(buckets)) > 2
    assert events.count("measured") >= 2
