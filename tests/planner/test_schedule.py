"""Schedules against torch's own, and the rules that every schedule keeps."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage

from lowtide._torch_private.training.meshes import imagined_process_group
from lowtide.errors import PlanError
from lowtide.planner.pipeline import Pipeline, ScheduleName, even_pipeline
from lowtide.planner.schedule import Action, actions, held_together, in_flight, position, replay

_NAMES: dict[ScheduleName, str] = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "Interleaved1F1B",
    "zero_bubble": "InterleavedZeroBubble",
    "zero_bubble_v": "ZBVZeroBubble",
    "dualpipe_v": "DualPipeV",
}
_KINDS = {
    "FORWARD": "forward", "FULL_BACKWARD": "backward", "BACKWARD_INPUT": "input", "BACKWARD_WEIGHT": "weight",
}  # fmt: skip


def pipeline_of(schedule: ScheduleName, stages: int, chunks: int, micro_batches: int) -> Pipeline:
    return even_pipeline(stages * chunks, stages, chunks, micro_batches, schedule)


def torch_actions(pipeline: Pipeline) -> list[list[Action]]:
    """torch's list for the same pipeline, waits left out and overlapped pairs one after the other."""
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

    lists = get_schedule_ops(_NAMES[pipeline.schedule], pipeline.stages, pipeline.micro_batches, pipeline.chunks)
    found: list[list[Action]] = []
    for stage, ops in enumerate(lists):
        chunk_of = {position(pipeline, stage, chunk): chunk for chunk in range(pipeline.chunks)}
        flat: list[Any] = [part for one in ops if one is not None for part in (one.sub_actions or (one,))]
        found.append(
            [
                Action(_KINDS[one.computation_type.name], chunk_of[one.stage_index], one.microbatch_index)
                for one in flat
                if one.computation_type.name in _KINDS
            ]
        )
    return found


@pytest.mark.parametrize("micro_batches", [4, 8, 12])
@pytest.mark.parametrize("stages", [2, 4])
def test_gpipe_and_one_forward_one_backward_are_those_of_torch(stages: int, micro_batches: int) -> None:
    for schedule in ("gpipe", "1f1b"):
        pipeline = pipeline_of(schedule, stages, 1, micro_batches)
        ours, theirs = actions(pipeline), torch_actions(pipeline)
        # torch's listing of 1F1B is wrong for the last stage, where its own step runs F0 B0 F1 B1.
        known = stages - 1 if schedule == "1f1b" else stages
        assert [list(one) for one in ours[:known]] == theirs[:known]


@pytest.mark.parametrize(
    ("stages", "chunks", "micro_batches"), [(2, 2, 4), (2, 3, 2), (4, 2, 8), (4, 3, 10), (8, 2, 16)]
)
@pytest.mark.parametrize("schedule", ["interleaved", "zero_bubble"])
def test_interleaved_schedules_are_those_of_torch(
    schedule: ScheduleName, stages: int, chunks: int, micro_batches: int
) -> None:
    pipeline = pipeline_of(schedule, stages, chunks, micro_batches)
    assert [list(one) for one in actions(pipeline)] == torch_actions(pipeline)


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 4), (2, 9), (4, 8), (4, 13), (8, 20)])
@pytest.mark.parametrize("schedule", ["zero_bubble_v", "dualpipe_v"])
def test_schedules_shaped_as_a_v_are_those_of_torch(schedule: ScheduleName, stages: int, micro_batches: int) -> None:
    pipeline = pipeline_of(schedule, stages, 2, micro_batches)
    assert [list(one) for one in actions(pipeline)] == torch_actions(pipeline)


def test_few_micro_batches_are_left_out_of_the_v() -> None:
    pipeline = pipeline_of("zero_bubble_v", 4, 2, 3)
    assert [list(one) for one in actions(pipeline)] == torch_actions(pipeline)


@given(
    schedule=st.sampled_from(sorted(_NAMES)),
    stages=st.integers(1, 6),
    chunks=st.integers(1, 3),
    rounds=st.integers(1, 4),
)
def test_every_micro_batch_runs_once_and_no_stage_waits_for_ever(
    schedule: ScheduleName, stages: int, chunks: int, rounds: int
) -> None:
    chunks = {"gpipe": 1, "1f1b": 1, "zero_bubble_v": 2, "dualpipe_v": 2}.get(schedule, chunks)
    pipeline = pipeline_of(schedule, stages, chunks, 2 * stages * rounds)
    for stage in actions(pipeline):
        count = Counter((one.kind, one.chunk, one.micro_batch) for one in stage)
        for chunk in range(chunks):
            for micro_batch in range(pipeline.micro_batches):
                assert count["forward", chunk, micro_batch] == 1
                whole, half = count["backward", chunk, micro_batch], count["input", chunk, micro_batch]
                assert whole + half == 1
                assert half == count["weight", chunk, micro_batch]
    result = replay(pipeline, lambda stage, action: 1.0)
    work = sum(1 for _ in actions(pipeline)[0])
    assert result.seconds >= work
    assert 0 <= result.bubble < 1


@pytest.mark.parametrize("stages", [2, 4, 8])
def test_the_bubble_of_one_forward_one_backward_is_that_of_the_formula(stages: int) -> None:
    micro_batches = 16
    pipeline = pipeline_of("1f1b", stages, 1, micro_batches)
    result = replay(pipeline, lambda stage, action: 1.0 if action.kind == "forward" else 2.0)
    assert result.seconds == 3.0 * (micro_batches + stages - 1)
    assert result.bubble == pytest.approx((stages - 1) / (micro_batches + stages - 1))


def test_interleaving_divides_the_bubble_by_the_number_of_chunks() -> None:
    whole = replay(pipeline_of("1f1b", 4, 1, 16), lambda stage, action: 2.0)
    halves = replay(pipeline_of("interleaved", 4, 2, 16), lambda stage, action: 1.0)
    assert halves.seconds - 64 == pytest.approx((whole.seconds - 64) / 2)


def test_zero_bubble_is_shorter_than_one_forward_one_backward() -> None:
    seconds = {"forward": 1.0, "backward": 2.0, "input": 1.0, "weight": 1.0}
    plain = replay(pipeline_of("1f1b", 4, 1, 12), lambda stage, action: seconds[action.kind])
    split = replay(pipeline_of("zero_bubble", 4, 1, 12), lambda stage, action: seconds[action.kind])
    assert split.seconds < plain.seconds


def test_a_transfer_delays_the_next_stage_only() -> None:
    pipeline = pipeline_of("gpipe", 2, 1, 1)
    assert replay(pipeline, lambda stage, action: 1.0, transfer=lambda source, stage: 0.5).seconds == 5.0
    assert (
        replay(pipeline_of("gpipe", 1, 1, 1), lambda stage, action: 1.0, transfer=lambda source, stage: 0.5).seconds
        == 2.0
    )


def test_earlier_stages_hold_more_micro_batches() -> None:
    assert in_flight(actions(pipeline_of("1f1b", 4, 1, 16))) == ((4,), (3,), (2,), (1,))
    assert in_flight(actions(pipeline_of("gpipe", 4, 1, 16))) == ((16,),) * 4


def test_chunks_are_counted_where_they_are_held_at_one_time() -> None:
    first = actions(pipeline_of("interleaved", 4, 2, 8))[0]
    cases = held_together(first)
    assert max(map(sum, cases)) == 11
    assert all(a != b and not all(x <= y for x, y in zip(a, b, strict=True)) for a in cases for b in cases if a != b)


def test_the_stages_of_the_dualpipe_v_hold_almost_the_same() -> None:
    totals = [max(map(sum, held_together(stage))) for stage in actions(pipeline_of("dualpipe_v", 4, 2, 16))]
    assert max(totals) - min(totals) <= 1


@pytest.mark.parametrize(
    ("schedule", "stages", "chunks", "micro_batches"),
    [("1f1b", 2, 2, 4), ("zero_bubble_v", 2, 1, 4), ("dualpipe_v", 4, 2, 7), ("interleaved", 4, 2, 9)],
)
def test_a_schedule_that_cannot_be_run_is_refused(
    schedule: ScheduleName, stages: int, chunks: int, micro_batches: int
) -> None:
    pipeline = pipeline_of(schedule, stages, chunks, micro_batches)
    with pytest.raises(PlanError, match=schedule):
        actions(pipeline)


@pytest.mark.skipif(not hasattr(pipelining, "analyze_pipeline_activation_liveness"), reason="since torch 2.15")
@pytest.mark.parametrize("schedule", ["interleaved", "zero_bubble", "zero_bubble_v", "dualpipe_v"])
@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 4), (2, 8), (4, 8), (4, 16)])
def test_a_stage_holds_as_many_micro_batches_as_torch_finds_alive(
    schedule: ScheduleName, stages: int, micro_batches: int
) -> None:
    pipeline = pipeline_of(schedule, stages, 2, micro_batches)
    kind = getattr(pipelining, f"Schedule{_NAMES[schedule]}")
    ours = [max(map(sum, held_together(one))) for one in actions(pipeline)]
    found = []
    with imagined_process_group(stages):
        places = [position(pipeline, 0, chunk) for chunk in range(2)]
        made = [PipelineStage(nn.Linear(1, 1), place, 2 * stages, torch.device("cpu")) for place in places]
        order = kind(made, n_microbatches=micro_batches, loss_fn=nn.functional.mse_loss)
        for stage in range(stages):
            alive = pipelining.analyze_pipeline_activation_liveness(
                order,
                pp_rank=stage,
                stage_indices=[position(pipeline, stage, chunk) for chunk in range(2)],
                granularity="stage_microbatch",
            )
            found.append(alive.num_slots)
    assert found == ours
