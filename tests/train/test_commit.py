"""What makes a checkpoint count, without torch: names, the marker, checksums."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowtide.train.commit import (
    METADATA,
    HashedFile,
    Marker,
    Written,
    checkpoints_in,
    damage_of,
    directory_name,
    is_checkpoint_name,
    read_marker,
    remove_checkpoint,
    share_of,
    write_manifest,
    write_marker,
    written,
)


def committed(directory: Path, world_size: int = 2, step: int = 1) -> Marker:
    """A checkpoint as ranks leave it."""
    directory.mkdir(parents=True)
    for rank in range(world_size):
        name = f"__{rank}_0.distcp"
        (directory / name).write_bytes(bytes(range(100)) * (rank + 1))
        write_manifest(directory, rank, {name: written(directory / name)})
    (directory / METADATA).write_bytes(b"where each tensor is")
    return write_marker(directory, step, world_size)


@given(st.lists(st.binary(max_size=50)))
def test_a_files_checksum_is_known_when_it_is_written(pieces: list[bytes]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "file"
        with file.open("wb") as stream:
            hashed = HashedFile(stream)
            for piece in pieces:
                hashed.write(memoryview(piece))
            assert hashed.tell() == sum(map(len, pieces))
        assert hashed.written == written(file)


def test_a_checkpoint_counts_with_its_marker_and_not_before(tmp_path: Path) -> None:
    directory = tmp_path / "step_00000001"
    marker = committed(directory)
    assert read_marker(directory) == marker
    assert damage_of(directory, marker, range(2), checksums=True) is None
    assert not list(directory.glob("*.tmp"))
    (directory / "committed.json").unlink()
    assert read_marker(directory) is None
    assert checkpoints_in(tmp_path) == []


@pytest.mark.parametrize(
    ("name", "checksums"),
    [("__1_0.distcp", False), ("__0_0.distcp", True), (METADATA, True), ("manifest_00001.json", False)],
)
@pytest.mark.parametrize("how", ["removed", "cut", "changed"])
def test_any_damage_is_found(name: str, how: str, checksums: bool, tmp_path: Path) -> None:
    directory = tmp_path / "step_00000001"
    marker = committed(directory)
    content = bytearray((directory / name).read_bytes())
    if how == "removed":
        (directory / name).unlink()
    elif how == "cut":
        (directory / name).write_bytes(content[:-1])
    else:
        content[len(content) // 2] ^= 1
        (directory / name).write_bytes(content)
    damage = damage_of(directory, marker, range(2), checksums=True)
    assert damage is not None
    assert name in damage or how == "changed"  # a changed manifest accuses the file it is about
    if how == "changed" and checksums:  # sizes alone do not tell
        assert damage_of(directory, marker, range(2), checksums=False) is None


@given(st.integers(1, 50), st.integers(1, 50))
def test_readers_together_check_every_rank_once(world_size: int, readers: int) -> None:
    marker = Marker(step=1, sequence=1, world_size=world_size, metadata=Written(0, ""))
    checked = [rank for reader in range(readers) for rank in share_of(marker, reader, readers)]
    assert sorted(checked) == list(range(world_size))


@given(st.integers(0, 10**12), st.integers(0, 5))
def test_a_name_is_never_given_twice(step: int, again: int) -> None:
    taken: list[str] = []
    for _ in range(again + 1):
        taken.append(directory_name(step, taken))
    assert len(set(taken)) == again + 1
    assert all(is_checkpoint_name(name) for name in taken)
    assert taken[0] == f"step_{step:08d}"


def test_commits_are_counted_on(tmp_path: Path) -> None:
    for number, step in enumerate((5, 9, 7), 1):
        assert committed(tmp_path / f"step_{step:08d}", step=step).sequence == number
    assert [marker.step for _, marker in checkpoints_in(tmp_path)] == [7, 9, 5]
    remove_checkpoint(tmp_path / "step_00000009")
    assert [marker.step for _, marker in checkpoints_in(tmp_path)] == [7, 5]
