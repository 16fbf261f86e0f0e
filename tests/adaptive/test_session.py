"""A run adapts itself: measured, planned, switched, bit by bit the run that it would have been."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
import torch

import lowtide
import tide
from lowtide import LayerPolicy, Policy, Recompute
from lowtide._torch_private.memory import MemoryStats
from lowtide.adaptive.fragmentation import Fragmentation
from lowtide.adaptive.record import load_record
from lowtide.adaptive.session import Adaptive
from lowtide.planner.plan_file import load_plan
from lowtide.trace import Trace
from support.garbage import collect_garbage
from support.ranks import Ranks
from support.session_cases import in_session, session_on_ranks
from support.sweep_cases import single
from support.tiny_models import tiny

SIZES = {"hidden_size": 64, "intermediate_size": 256, "vocab_size": 200}
PLENTY = 1 << 30


class Training:
    """A tiny model of transformers and its optimizer, the same from the same start every time."""

    def __init__(self, name: str = "llama", layers: int = 3, **sizes: int) -> None:
        tide.reset()
        tide.configure(preset="h100", capacity=PLENTY)
        self.model = tiny(name, layers=layers, **{**SIZES, **sizes}).to("tide")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.tokens = torch.randint(3, 200, (8, 128), generator=torch.Generator().manual_seed(0))

    def step(self) -> float:
        """A whole step, and its loss."""
        self.optimizer.zero_grad(set_to_none=True)
        tokens = self.tokens.to("tide")
        loss = self.model(tokens, labels=tokens).loss
        loss.backward()
        self.optimizer.step()
        return float(loss.item())


def undisturbed(name: str = "llama", steps: int = 9) -> tuple[list[float], int, int]:
    """Losses, what is static, and what keeping everything reserves."""
    training = Training(name)
    losses = [training.step() for _ in range(2)]
    collect_garbage()
    torch.accelerator.empty_cache()
    torch.accelerator.reset_peak_memory_stats()
    losses += [training.step() for _ in range(steps - 2)]
    return losses, torch.accelerator.memory_allocated(), torch.accelerator.max_memory_reserved()


def adapted(training: Training, steps: int = 9, **options: object) -> tuple[list[float], Adaptive]:
    """The losses of a run that adapts itself after 5 steps."""
    run = lowtide.adapt(training.model, training.optimizer, profiling_steps=5, verbose=False, **options)
    return [run.step(training.step) or 0.0 for _ in range(steps)], run


def of_lengths(training: Training, lengths: list[int], run: Adaptive | None = None) -> list[float]:
    """The losses of steps whose batches have these lengths."""
    whole, losses = training.tokens, []
    for length in lengths:
        training.tokens = whole[:, :length]
        losses.append(training.step() if run is None else run.step(training.step) or 0.0)
    training.tokens = whole
    return losses


@pytest.mark.parametrize("name", ["llama", pytest.param("mixtral", marks=pytest.mark.slow)])
def test_a_model_that_was_never_prepared_fits_in_one_line(name: str) -> None:
    expected, static, kept = undisturbed(name)
    training = Training(name)
    tide.configure(capacity=static + (kept - static) * 6 // 10)
    losses, run = adapted(training)
    assert losses == expected
    # The experts' load changes from step to step, so that the run may be re-planned.
    assert [event.kind for event in run.events][:2] == ["measured", "switched"]
    assert run.plan is not None
    assert any(layer != LayerPolicy() for layer in run.policy.layers)
    run.remove()
    assert not tide.races()


def test_adapt_can_be_put_around_the_users_loop() -> None:
    expected, static, kept = undisturbed()
    training = Training()
    tide.configure(capacity=static + (kept - static) * 6 // 10)
    forwards = [dict(vars(module)) for module in training.model.modules()]
    with lowtide.adapt(training.model, training.optimizer, profiling_steps=5, verbose=False) as run:
        losses = [training.step() for _ in range(9)]
        assert [event.kind for event in run.events] == ["measured", "switched"]
        assert run.rescue is not None
        assert not run.rescue.armed  # nothing gives a reason
    assert losses == expected
    assert [set(vars(module)) for module in training.model.modules()] == [set(one) for one in forwards]


def test_steps_of_the_users_loop_end_when_step_is_called() -> None:
    expected, _, _ = undisturbed(steps=7)
    training = Training()
    run = lowtide.adapt(training.model, training.optimizer, profiling_steps=5, verbose=False)
    losses = []
    for _ in range(7):
        losses.append(training.step())
        run.step()
    assert losses == expected
    assert run.plan is not None
    run.remove()


def test_memory_that_disappears_costs_a_step_and_no_bit() -> None:
    expected, static, kept = undisturbed()
    training = Training()
    losses, run = adapted(training, 7)
    attempts = []

    def less_memory() -> float:
        """Only the first time."""
        attempts.append(len(attempts))
        if len(attempts) == 1:
            tide.faults.shrink_capacity(60, (kept - static) // 4)
        else:
            tide.faults.disarm()
            tide.configure(capacity=PLENTY)
        return training.step()

    losses.append(run.step(less_memory) or 0.0)
    losses.append(run.step(training.step) or 0.0)
    run.remove()
    assert losses == expected
    assert [step.rescued > 0 for step in run.steps] == [False] * 7 + [True, False]
    assert [event.kind for event in run.events].count("retried") == 1


def test_memory_that_shrinks_in_step_after_step_changes_no_bit() -> None:
    tide.reset()
    outcomes = in_session(single("reference", "none"), stride=45)
    assert [str(one) for one in outcomes if not one.exact] == []
    assert {one.phase for one in outcomes} >= {"forward", "backward"}
    assert sum(one.line > 0 for one in outcomes) >= 4


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["fsdp2", "pp2", "tp2"])
def test_memory_that_shrinks_on_one_rank_changes_no_bit_and_hangs_no_other(ranks: Ranks, layout: str) -> None:
    seen = ranks.run(session_on_ranks, layout, 300)
    assert [str(one) for outcomes in seen for one in outcomes if not one.exact] == []
    for turn, outcomes in enumerate(zip(*seen, strict=True)):
        assert [one.line for one in outcomes] == [2 * (turn % 2 == rank) for rank in range(2)]


def test_a_device_size_that_is_too_small_ends_in_full_recompute() -> None:
    expected, static, _ = undisturbed(steps=6)
    said: list[str] = []
    training = Training()
    losses, run = adapted(training, 6, budget=static)
    said = [event.text for event in run.events if event.kind == "switched"]
    assert losses == expected
    assert run.policy.layers == (LayerPolicy(Recompute()),) * 3
    assert "nothing fits the device size" in said[0]
    run.remove()


SCARCE = {"layers": 4, "hidden_size": 256, "intermediate_size": 896, "vocab_size": 2000}
TOO_LITTLE = 98 << 20
"""For any Policy of such a model, though not for steps in which everything is offloaded."""


@pytest.mark.slow
@pytest.mark.parametrize("around", [False, True])
def test_a_run_on_a_device_too_small_for_a_plan_goes_on_and_reports_what_is_enough(around: bool) -> None:
    training = Training(**SCARCE)
    expected = [training.step() for _ in range(8)]
    del training

    def trained(capacity: int) -> tuple[list[float], Adaptive]:
        collect_garbage()
        training = Training(**SCARCE)
        tide.configure(capacity=capacity)
        with lowtide.adapt(training.model, training.optimizer, profiling_steps=5, verbose=False) as run:
            losses = [training.step() if around else run.step(training.step) or 0.0 for _ in range(8)]
        return losses, run

    losses, run = trained(TOO_LITTLE)
    assert losses == expected
    assert run.decided is not None
    assert run.decided.policy is None
    enough = re.search(r"\((\d+) bytes\) works", run.decided.reason)
    assert enough is not None
    del run  # it holds the model
    losses, run = trained(int(enough[1]))
    assert losses == expected
    assert run.plan is not None
    assert run.plan.feasible


@pytest.mark.slow
def test_a_batch_that_fits_no_plan_runs_with_everything_offloaded() -> None:
    lengths = [32, 64, 128, 32, 64, 128, 64, 128]

    expected = of_lengths(Training(**SCARCE), lengths)
    training = Training(**SCARCE)
    tide.configure(capacity=TOO_LITTLE)
    run = lowtide.adapt(training.model, training.optimizer, profiling_steps=4, verbose=False)
    assert of_lengths(training, lengths, run) == expected
    assert any(decided.policy is None for decided in run.plans.values())
    assert any("too little for any plan" in event.text for event in run.events)
    run.remove()
    assert not tide.races()


def test_what_was_measured_and_planned_is_saved(tmp_path: Path) -> None:
    training = Training()
    _, run = adapted(training, 6, directory=tmp_path)
    run.remove()
    assert Trace.load(tmp_path / "trace.json").measured
    assert Policy.from_json((tmp_path / "policy.json").read_text()) == run.policy
    record = load_record(tmp_path / "adaptive.json")
    assert record.plan is not None
    assert load_plan(tmp_path / record.plan).policy == run.policy
    assert [step.step for step in record.steps] == [1, 2, 3, 4, 5, 6]
    assert [step.phase for step in record.steps] == ["measuring"] * 5 + ["planned"]


def test_decisions_of_the_user_stay() -> None:
    expected, _, _ = undisturbed(steps=6)
    fixed = Policy((LayerPolicy(Recompute()), *(LayerPolicy(),) * 2))
    losses, run = adapted(Training(), 6, policy=fixed)
    assert losses == expected
    assert run.policy.layers[0] == LayerPolicy(Recompute())
    assert run.policy.layers[2] != LayerPolicy(Recompute())
    run.remove()


@pytest.mark.slow  # ``test_door.py`` has it too
def test_each_length_has_its_plan() -> None:
    lengths = [40, 64, 128, 100, 30, 128, 64, 128, 36, 100, 128]
    expected = of_lengths(Training(), lengths)
    training = Training()
    with lowtide.adapt(training.model, training.optimizer, verbose=False) as run:
        assert of_lengths(training, lengths) == expected
        assert set(run.profiling.lengths.traces) == {(8, 128), (8, 100), (8, 30)}
        assert [event.kind for event in run.events].count("measured") == 3
        assert run.bucket == (8, 128)
        deadline = time.monotonic() + 120
        while (
            not {(8, 69), (8, 35)} <= set(run.plans) and time.monotonic() < deadline
        ):  # they are made in the background
            of_lengths(training, [60])
        of_lengths(training, [60])
        assert run.bucket == (8, 69)
        assert run.plans[8, 69].plan.simulation.peak < run.plans[8, 128].plan.simulation.peak
        of_lengths(training, [100, 30])
        assert run.bucket == (8, 35)


def test_memory_that_a_neighbour_takes_and_gives_back_is_planned_with_each_time() -> None:
    steps = 26
    expected, static, kept = undisturbed(steps=steps)
    training = Training()
    capacities = {share: static + (kept - static) * share // 10 for share in (6, 9)}
    tide.configure(capacity=capacities[9])
    run = lowtide.adapt(training.model, training.optimizer, verbose=False)
    losses, policies = [], {}
    for number in range(steps):
        if number in (8, 16):
            collect_garbage()
            torch.accelerator.empty_cache()  # the neighbour can only have what is free
            tide.configure(capacity=capacities[6 if number == 8 else 9])
        losses.append(run.step(training.step))
        policies[number] = run.policy
    assert losses == expected
    assert policies[7] != policies[15]
    assert policies[25] == policies[7]
    assert not run.planning.monitor.lost
    assert any("and gave" in event.text for event in run.events)
    run.remove()


def test_memory_that_is_reserved_and_not_in_use_is_said_once() -> None:
    fragmentation = Fragmentation()
    said = []
    for step in range(100):
        unused = 0 if step < 5 else 200
        said.append(fragmentation.ended(MemoryStats(0, 500, 0, 500 + unused, 0), 1000, "tide"))
    (text,) = filter(None, said)
    assert said.index(text) == 24
    assert text == "200 B were reserved and not in use in each of the last 20 steps, 20% of what this process can have"


@pytest.mark.parametrize(("settings", "recommended"), [("", True), ("expandable_segments:True", False)])
def test_expandable_segments_are_recommended_where_they_are_not_on(
    monkeypatch: pytest.MonkeyPatch, settings: str, recommended: bool
) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", settings)
    fragmentation = Fragmentation()
    said = [fragmentation.ended(MemoryStats(0, 500, 0, 700, 0), 1000, "cuda") for _ in range(20)]
    assert ("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True" in said[-1]) == recommended


def test_a_layer_count_that_does_not_fit_is_refused() -> None:
    from lowtide.planner.pipeline import even_pipeline

    with pytest.raises(lowtide.PolicyError, match="places"):
        Adaptive([tiny("llama")], pipeline=even_pipeline(4, stages=2))
