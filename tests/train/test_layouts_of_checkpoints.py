"""A checkpoint of one layout is read bit by bit by any other, and two ranks agree on which one counts."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import save_file

from lowtide.train.checkpoint import Checkpoints
from lowtide.train.state import difference_between
from support.ranks import Ranks
from train import checkpoint_programs as programs


def union(*found: dict[str, str]) -> dict[str, str]:
    """What all ranks hold; where several hold the same, it must be equal."""
    whole: dict[str, str] = {}
    for one in found:
        assert all(whole.get(name, digest) == digest for name, digest in one.items())
        whole |= one
    return whole


CASES = [
    pytest.param(
        layout, asynchronous, marks=pytest.mark.slow if layout == "ddp" or (asynchronous and layout != "fsdp2") else []
    )
    for layout in ("ddp", "fsdp2", "tp2", "pp2")
    for asynchronous in (False, True)
]


@pytest.mark.parametrize(("layout", "asynchronous"), CASES)
def test_two_ranks_save_and_any_other_layout_loads(
    layout: str, asynchronous: bool, ranks: Ranks, tmp_path: Path
) -> None:
    (first, first_losses), (second, second_losses) = ranks.run(programs.save, layout, tmp_path, asynchronous)
    saved = union(first, second)
    assert len(saved) == 4 * 7 + 1 + 3 * (4 * 6 + 1)
    one_process, _, progress = programs.load("one", tmp_path)
    assert one_process == saved
    assert progress == {"step": 3, "samples": 12}
    again = ranks.run(programs.load, layout, tmp_path)
    assert [loaded for loaded, _, _ in again] == [first, second]
    assert [losses for _, losses, _ in again] == [first_losses, second_losses]
    if not asynchronous:
        for other in {"fsdp2", "tp2", "pp2"} - {layout}:
            assert union(*(loaded for loaded, _, _ in ranks.run(programs.load, other, tmp_path))) == saved


@pytest.mark.parametrize("layout", ["fsdp2", "tp2", "pp2"])
def test_one_process_saves_and_two_ranks_load(layout: str, ranks: Ranks, tmp_path: Path) -> None:
    saved, _ = programs.save("one", tmp_path, False)
    assert union(*(loaded for loaded, _, _ in ranks.run(programs.load, layout, tmp_path))) == saved


@pytest.mark.parametrize("layout", ["fsdp2", "tp2", "pp2"])
def test_two_ranks_load_weights_alone(layout: str, ranks: Ranks, tmp_path: Path) -> None:
    state = programs.build("one", seed=0)
    wanted = {name: digest for name, digest in programs.digests(state).items() if name.startswith("model.")}
    (tmp_path / "plain").mkdir()
    save_file(state.parts[0].state_dict(), str(tmp_path / "plain" / "model.safetensors"))
    with Checkpoints(tmp_path / "ours") as checkpoints:
        checkpoints.save(1, state)
    for path in (tmp_path / "plain", tmp_path / "ours"):
        assert union(*ranks.run(programs.weights, layout, path)) == wanted


def test_a_file_of_rank_1_is_damaged_and_both_ranks_take_the_one_before(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(programs.save_several, tmp_path, [2, 4, 6])
    newest = tmp_path / "step_00000006" / "__1_0.distcp"
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 1
    newest.write_bytes(content)
    assert ranks.run(programs.resumed_from, tmp_path) == [("step_00000006", "step_00000004")] * 2
    newest.write_bytes(content[:-1])
    (tmp_path / "step_00000004" / ".metadata").unlink()
    assert ranks.run(programs.resumed_from, tmp_path) == [("step_00000002", "step_00000002")] * 2


@pytest.mark.parametrize("asynchronous", [False, True], ids=["synchronous", "asynchronous"])
def test_one_rank_cannot_write_and_both_report_it_and_the_next_save_counts(
    asynchronous: bool, ranks: Ranks, tmp_path: Path
) -> None:
    for said, goes_on in ranks.run(programs.fail_on_rank_1, tmp_path, asynchronous):
        assert "step_00000001 could not be written and does not count: on rank 1: IsADirectoryError" in said
        assert goes_on


def test_different_weights_under_one_name_are_refused_instead_of_lost(ranks: Ranks, tmp_path: Path) -> None:
    for said in ranks.run(programs.save_experts_of_its_own, tmp_path):
        assert "ranks 0 and 1 hold different weights under the name expert.weight" in said
        assert "make it a DTensor" in said


def test_copies_that_drifted_by_rounding_are_copies() -> None:
    copy = {"norm.weight": [1.0, 0.5, 0.0]}
    assert difference_between([copy, copy, {"norm.weight": [1.001, 0.499, 1e-9]}, {"other": [3.0]}]) is None
    assert difference_between([copy, {"norm.weight": [1.0, 0.5, float("nan")]}]) is None
    assert difference_between([copy, {"norm.weight": [1.0, 0.6, 0.0]}]) is not None
    assert difference_between([copy, {"norm.weight": [1.0, 0.5]}]) is not None
    assert difference_between([{"bias": [0.0]}, {"bias": [0.0]}]) is None
