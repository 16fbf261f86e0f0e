"""Checkpoints of one process: what is saved, what counts, what is kept, and what is said when something is wrong."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_saver import save

import lowtide.errors
from lowtide.train import checkpoint, commit, generators
from lowtide.train.checkpoint import Checkpoints
from lowtide.train.commit import checkpoints_in, written
from lowtide.train.state import TrainState
from train import checkpoint_programs as programs

CheckpointError = lowtide.errors.CheckpointError


def state_of(model: nn.Module, **more: Any) -> TrainState:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return TrainState(parts=[model], optimizers=[optimizer], progress={"step": 0}, **more)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def saved(directory: Path, steps: list[int], **more: Any) -> TrainState:
    """A run with a checkpoint after each of these steps."""
    state = programs.build("one", seed=0)
    with Checkpoints(directory, **more) as checkpoints:
        for step in steps:
            programs.train(state, step - state.progress["step"])
            checkpoints.save(step, state)
    return state


def flip(path: Path) -> None:
    """Change one bit."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def until_raised(call: Callable[..., Any], *arguments: Any) -> None:
    """Polling gives False until the save is over."""
    while call(*arguments) is False:
        pass


@pytest.mark.parametrize("asynchronous", [False, True], ids=["synchronous", "asynchronous"])
def test_a_resumed_run_goes_on_bit_by_bit(asynchronous: bool, tmp_path: Path) -> None:
    saved_digests, losses = programs.save("one", tmp_path, asynchronous)
    found, again, progress = programs.load("one", tmp_path)
    assert (found, again) == (saved_digests, losses)
    assert progress == {"step": 3, "samples": 12}


def test_what_a_rank_writes_is_hashed_as_it_is_written_and_not_read_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    monkeypatch.setattr(commit, "written", lambda path: (read.append(path.name), written(path))[1])
    saved(tmp_path, [1])
    assert read == [commit.METADATA]  # which rank 0 writes, of all ranks
    ((path, marker),) = checkpoints_in(tmp_path)
    assert commit.damage_of(path, marker, [0], checksums=True) is None
    flip(path / "__0_0.distcp")
    assert "its checksum is another" in str(commit.damage_of(path, marker, [0], checksums=True))


def test_what_all_ranks_are_sent_after_a_save_does_not_list_the_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[Metadata] = []
    monkeypatch.setattr(checkpoint, "save", lambda *given, **named: sent.append(save(*given, **named)))
    state = saved(tmp_path, [1])
    ((path, _),) = checkpoints_in(tmp_path)
    assert [len(one.state_dict_metadata) for one in sent] == [0]
    assert len(FileSystemReader(path).read_metadata().state_dict_metadata) == len(state.tensors())


def test_all_generators_come_back(tmp_path: Path) -> None:
    state = saved(tmp_path, [1])
    wanted = [torch.rand(3).tolist(), random.random(), numpy.random.rand()]
    generators.reseed(5)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.resume(state)
    assert [torch.rand(3).tolist(), random.random(), numpy.random.rand()] == wanted


def test_the_generator_of_the_device_comes_back() -> None:
    import tide

    assert tide.__name__
    torch.manual_seed(0)
    captured = generators.capture()
    wanted = torch.rand(3, device="tide").tolist()
    generators.reseed(5)
    assert torch.rand(3, device="tide").tolist() != wanted
    generators.restore(captured)
    assert torch.rand(3, device="tide").tolist() == wanted


def test_in_another_layout_generators_are_reseeded_from_the_seed_and_the_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved(tmp_path, [1, 2])
    drawn = []
    for seed in (3, 3, 4):
        state = programs.build("one", seed=1)
        state.layout, state.seed = "dp1", seed
        with Checkpoints(tmp_path) as checkpoints:
            checkpoints.resume(state)
        drawn.append(torch.rand(3).tolist())
    assert drawn[0] == drawn[1] != drawn[2]
    assert caplog.text.count("random generators are reseeded") == 3


def test_a_save_before_the_first_step_does_not_count_a_step(tmp_path: Path) -> None:
    state = saved(tmp_path, [0])
    assert not state.optimizers[0].state
    wanted = programs.train(state, 2)
    state = programs.build("one", seed=1)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.resume(state)
    assert not state.optimizers[0].state
    assert programs.train(state, 2) == wanted


def test_the_holder_of_the_parameter_groups_still_sets_the_learning_rate_after_a_load(tmp_path: Path) -> None:
    state = saved(tmp_path, [1])
    group = state.optimizers[0].param_groups[0]
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.resume(state)
    group["lr"] = 0.0
    before = programs.digests(state)
    programs.train(state, 1)
    after = programs.digests(state)
    assert [name for name in before if name.endswith("weight") and before[name] != after[name]] == []
    assert state.optimizers[0].param_groups[0]["params"] == list(state.parts[0].parameters())


def test_a_parameter_that_never_had_a_gradient_has_no_state_afterwards_either(tmp_path: Path) -> None:
    def build() -> tuple[TrainState, nn.Module]:
        model = nn.ModuleDict({"used": nn.Linear(2, 2), "idle": nn.Linear(2, 2)})
        return state_of(model), model

    state, model = build()
    model["used"](torch.ones(2)).sum().backward()  # type: ignore[index]
    state.optimizers[0].step()
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state)
        other, model = build()
        checkpoints.resume(other)
    assert set(other.optimizers[0].state) == set(model["used"].parameters())  # type: ignore[index]
    assert programs.digests(other) == programs.digests(state)


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    saved(tmp_path, [1, 2, 3, 4], keep=2)
    assert names(tmp_path) == ["step_00000003", "step_00000004"]
    saved(tmp_path / "all", [1, 2, 3])
    assert names(tmp_path / "all") == ["step_00000001", "step_00000002", "step_00000003"]


def test_nothing_is_removed_for_a_save_that_failed(tmp_path: Path) -> None:
    state = saved(tmp_path, [1])
    checkpoints = Checkpoints(tmp_path, keep=1)
    (tmp_path / "step_00000002").write_text("in the way")
    with pytest.raises(CheckpointError, match="step_00000002 could not be written and does not count"):
        checkpoints.save(2, state)
    checkpoints.close()
    assert [path.name for path, _ in checkpoints_in(tmp_path)] == ["step_00000001"]


def test_an_error_in_the_background_is_raised_at_the_next_call(tmp_path: Path) -> None:
    state = saved(tmp_path, [1])
    for call in ("save", "wait", "close", "poll"):
        checkpoints = Checkpoints(tmp_path, asynchronous=True)
        path = tmp_path / "step_00000002"
        path.write_text("in the way")
        checkpoints.save(2, state)
        with pytest.raises(CheckpointError, match="does not count"):
            until_raised(getattr(checkpoints, call), *((3, state) if call == "save" else ()))
        path.unlink()
        checkpoints.close()


def test_a_damaged_checkpoint_is_said_and_the_one_before_is_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = saved(tmp_path, [1, 2, 3])
    flip(tmp_path / "step_00000003" / "__0_0.distcp")
    (tmp_path / "step_00000002" / "__0_0.distcp").unlink()
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        assert checkpoints.resume(state) == tmp_path / "step_00000001"
        assert "the contents of __0_0.distcp are not what was written" in caplog.text
        assert "step_00000002 is damaged and not used: __0_0.distcp is missing" in caplog.text
        with pytest.raises(CheckpointError, match="step_00000003 is damaged"):
            checkpoints.load(state, tmp_path / "step_00000003")
        # Run on from step 1: a damaged one is not among the two that are kept, and its name is not used again.
        programs.train(state, 2)
        checkpoints.save(3, state)
    good = [path.name for path, _ in checkpoints_in(tmp_path)]
    assert good == ["step_00000003.1", "step_00000003", "step_00000002", "step_00000001"]
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.resume(state) == tmp_path / "step_00000003.1"


def test_if_all_are_damaged_the_run_does_not_start_over(tmp_path: Path) -> None:
    state = saved(tmp_path, [1, 2])
    flip(tmp_path / "step_00000001" / ".metadata")
    (tmp_path / "step_00000002" / "committed.json").write_text("{")
    with Checkpoints(tmp_path) as checkpoints, pytest.raises(CheckpointError, match="step_00000001, step_00000002 are"):
        checkpoints.resume(state)
    (tmp_path / "step_00000001" / ".metadata").unlink()
    with Checkpoints(tmp_path) as checkpoints, pytest.raises(CheckpointError, match="step_00000001, step_00000002 are"):
        checkpoints.latest()
    assert names(tmp_path) == ["step_00000001", "step_00000002"]


def test_an_empty_directory_is_a_fresh_start(tmp_path: Path) -> None:
    state = programs.build("one", seed=0)
    with Checkpoints(tmp_path / "new") as checkpoints:
        assert checkpoints.latest() is None
        assert checkpoints.resume(state) is None
        with pytest.raises(CheckpointError, match="not a committed checkpoint"):
            checkpoints.load(state, tmp_path / "new" / "step_00000001")


def test_what_was_cut_off_is_removed_and_its_name_not_used_again(tmp_path: Path) -> None:
    state = saved(tmp_path, [1, 2])
    (tmp_path / "step_00000002" / "committed.json").unlink()
    (tmp_path / "notes").mkdir()
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.resume(state) == tmp_path / "step_00000001"
        programs.train(state, 1)
        checkpoints.save(2, state)
    assert names(tmp_path) == ["notes", "step_00000001", "step_00000002.1"]


def test_the_newest_is_the_one_committed_last_and_not_the_highest_step(tmp_path: Path) -> None:
    state = saved(tmp_path, [2, 4])
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.load(state, tmp_path / "step_00000002")
        programs.train(state, 1)
        checkpoints.save(3, state)
        assert checkpoints.latest() == tmp_path / "step_00000003"


def test_another_model_is_refused_with_the_nearest_names(tmp_path: Path) -> None:
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state_of(nn.ModuleDict({"first": nn.Linear(2, 3), "second": nn.Linear(2, 2)})))
        with pytest.raises(
            CheckpointError, match=r"model\.frist\.weight is not in it \(the nearest names are model\.fir"
        ):
            checkpoints.resume(state_of(nn.ModuleDict({"frist": nn.Linear(2, 3), "second": nn.Linear(2, 2)})))
        with pytest.raises(
            CheckpointError, match=r"first\.weight has the shape \[3, 2\] in it and \[4, 2\] in the model"
        ):
            checkpoints.resume(state_of(nn.ModuleDict({"first": nn.Linear(2, 4), "second": nn.Linear(2, 2)})))
        with pytest.raises(
            CheckpointError, match=r"holds 2 weights that the model does not have, such as model\.second"
        ):
            checkpoints.resume(state_of(nn.ModuleDict({"first": nn.Linear(2, 3)})))


def test_a_conversion_of_the_weights_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved(tmp_path, [1])
    state = programs.build("one", seed=1)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.resume(state)
        assert "converted" not in caplog.text
        state.parts[0].bfloat16()
        checkpoints.resume(state)
    assert "are converted, such as model." in caplog.text
    assert "torch.float32 there, torch.bfloat16 here" in caplog.text


def test_states_of_another_optimizer_are_refused(tmp_path: Path) -> None:
    state = saved(tmp_path, [1])
    state.optimizers = [torch.optim.AdamW(state.parts[0].parameters(), amsgrad=True)]
    with Checkpoints(tmp_path) as checkpoints, pytest.raises(CheckpointError, match="max_exp_avg_sq is not in it"):
        checkpoints.resume(state)


def test_progress_that_json_cannot_hold_is_refused(tmp_path: Path) -> None:
    state = programs.build("one", seed=0)
    state.progress["loss"] = torch.ones(1)
    with (
        Checkpoints(tmp_path) as checkpoints,
        pytest.raises(CheckpointError, match="numbers, texts, lists and dicts only"),
    ):
        checkpoints.save(1, state)


def test_a_checkpoint_says_its_step_without_torch(tmp_path: Path) -> None:
    saved(tmp_path, [1, 2])
    marker = json.loads((tmp_path / "step_00000002" / "committed.json").read_text())
    assert (marker["step"], marker["sequence"], marker["world_size"]) == (2, 2, 1)
