"""When a checkpoint counts: its checksums, the marker that commits it, and whether what is on disk is what was written.

A checkpoint is a directory::

    step_00000100/
      __0_0.distcp, __1_0.distcp …   what the ranks wrote
      manifest_00000.json …          for each rank its files, their sizes and checksums
      .metadata                      where each tensor is, written when all ranks have reported
      committed.json                 the marker, written last: without it the directory does not count

Everything is flushed to the disk before the marker takes its name, so the marker never says more than is true.
Nothing here needs torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

__all__ = [
    "HashedFile",
    "Manifest",
    "Marker",
    "Written",
    "checkpoints_in",
    "damage_of",
    "directory_name",
    "flush_directory",
    "is_checkpoint_name",
    "is_committed",
    "read_marker",
    "remove_checkpoint",
    "share_of",
    "write_manifest",
    "write_marker",
    "written",
]

FORMAT = 1
MARKER = "committed.json"
METADATA = ".metadata"
NAME = re.compile(r"step_(\d{8,})(?:\.(\d+))?")
BLOCK = 1 << 22


@dataclass(frozen=True, slots=True)
class Written:
    """A file that was written."""

    bytes: int
    """Its size."""
    blake2b: str
    """Its checksum: BLAKE2b of 16 bytes, in hexadecimal digits."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """What one rank wrote."""

    rank: int
    """The rank."""
    files: dict[str, Written]
    """Its files by name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Marker:
    """What ``committed.json`` says."""

    step: int
    """The optimizer step after which the checkpoint was taken."""
    sequence: int
    """Counts the commits in the directory, from 1. The newest checkpoint is the one committed last: after a resume from
    an older one its step may be the smaller."""
    world_size: int
    """How many ranks wrote; each has a manifest."""
    metadata: Written
    """The file that says where each tensor is."""
    format: int = FORMAT
    """The version of this layout."""


def directory_name(step: int, taken: Iterable[str] = ()) -> str:
    """The directory for a step: ``step_00000100``, or ``step_00000100.1`` and so on if that one was ever used."""
    name, again, used = f"step_{step:08d}", 0, set(taken)
    while name in used:
        again += 1
        name = f"step_{step:08d}.{again}"
    return name


def is_checkpoint_name(name: str) -> bool:
    """Whether a directory of this name is ours."""
    return NAME.fullmatch(name) is not None


def written(path: Path) -> Written:
    """The size and checksum of a file."""
    digest, size = hashlib.blake2b(digest_size=16), 0
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
            size += len(block)
    return Written(size, digest.hexdigest())


class HashedFile:
    """A file that is being written from its beginning to its end, and its checksum: it need not be read back.

    The checksum is of what was handed over to be written, so a disk that keeps something else is found out too.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._digest, self._size = file, hashlib.blake2b(digest_size=16), 0

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Write what comes next."""
        self._digest.update(data)
        self._size += memoryview(data).nbytes
        return self._file.write(data)

    def tell(self) -> int:
        """Where the next byte goes."""
        return self._size

    def flush(self) -> None:
        """Hand what was written over to the system."""
        self._file.flush()

    def fileno(self) -> int:
        """The open file; what is not handed over to the system yet is handed over first, for the sake of fsync."""
        self._file.flush()
        return self._file.fileno()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    @property
    def written(self) -> Written:
        """What was written so far."""
        return Written(self._size, self._digest.hexdigest())


def write_manifest(directory: Path, rank: int, files: Mapping[str, Written]) -> None:
    """Leave the checksums of what a rank wrote on the disk."""
    manifest = Manifest(rank, dict(sorted(files.items())))
    _write_flushed(directory / _manifest_name(rank), asdict(manifest))


def write_marker(directory: Path, step: int, world_size: int) -> Marker:
    """Commit a checkpoint: everything of it must have been written and flushed."""
    sequence = 1 + max((marker.sequence for _, marker in checkpoints_in(directory.parent)), default=0)
    marker = Marker(step=step, sequence=sequence, world_size=world_size, metadata=written(directory / METADATA))
    flush_directory(directory)  # the names of all that the marker vouches for
    _write_flushed(directory / MARKER, asdict(marker))
    flush_directory(directory.parent)
    return marker


def is_committed(directory: Path) -> bool:
    """Whether a checkpoint has a marker, readable or not. What has none is left over from a save that was cut off."""
    return (directory / MARKER).exists()


def read_marker(directory: Path) -> Marker | None:
    """What the marker of a checkpoint says; None if there is none, or none that can be read."""
    try:
        found = json.loads((directory / MARKER).read_text())
        if found["format"] != FORMAT:
            return None
        return Marker(**{**found, "metadata": Written(**found["metadata"])})
    except (OSError, ValueError, TypeError, KeyError):
        return None


def checkpoints_in(directory: Path) -> list[tuple[Path, Marker]]:
    """The committed checkpoints, the one committed last first."""
    names = [path for path in directory.iterdir() if is_checkpoint_name(path.name)] if directory.is_dir() else []
    found = [(path, marker) for path in names if (marker := read_marker(path)) is not None]
    return sorted(found, key=lambda one: one[1].sequence, reverse=True)


def share_of(marker: Marker, reader: int, readers: int) -> range:
    """The ranks whose files a reader checks, so that all readers together check each file once."""
    return range(reader, marker.world_size, readers)


def damage_of(directory: Path, marker: Marker, ranks: Sequence[int], *, checksums: bool) -> str | None:
    """What is wrong with the files of these ranks, and with the metadata if rank 0 is among them; None if nothing.

    Sizes are always compared, contents if ``checksums``.
    """
    expected: dict[str, Written] = {METADATA: marker.metadata} if 0 in ranks else {}
    for rank in ranks:
        name = _manifest_name(rank)
        try:
            files = json.loads((directory / name).read_text())["files"]
            expected |= {file: Written(**found) for file, found in files.items()}
        except FileNotFoundError:
            return f"{name} is missing"
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            return f"{name} cannot be read: {error}"
    for name, wanted in expected.items():
        try:
            size = (directory / name).stat().st_size
            if size != wanted.bytes:
                return f"{name} has {size:,} bytes, {wanted.bytes:,} were written"
            if checksums and written(directory / name) != wanted:
                return f"the contents of {name} are not what was written: its checksum is another"
        except FileNotFoundError:
            return f"{name} is missing"
        except OSError as error:
            return f"{name} cannot be read: {error}"
    return None


def remove_checkpoint(directory: Path) -> None:
    """Remove a checkpoint, the marker first: one that is removed in part must not count."""
    (directory / MARKER).unlink(missing_ok=True)
    flush_directory(directory)
    shutil.rmtree(directory)


def flush_directory(directory: Path) -> None:
    """Wait until the names in a directory are on the disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:  # some network file systems refuse it for a directory; they write names through
        pass
    finally:
        os.close(descriptor)


def _manifest_name(rank: int) -> str:
    return f"manifest_{rank:05d}.json"


def _write_flushed(path: Path, content: dict[str, Any]) -> None:
    unfinished = path.with_name(path.name + ".tmp")
    with unfinished.open("w") as file:
        json.dump(content, file)
        file.flush()
        os.fsync(file.fileno())
    unfinished.rename(path)
    flush_directory(path.parent)
