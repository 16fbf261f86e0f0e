"""Checkpoints that survive a kill at any moment: a fresh directory each, committed by a marker that is written last.

[Note: who commits, and when]
torch's distributed checkpoint runs a save in this order: every rank writes its files; the ranks report to rank 0; rank
0 writes ``.metadata``; rank 0 informs the others. Our writer adds to two of these steps and needs no message of its
own. A rank leaves its manifest of checksums before it reports. Rank 0 writes the marker after ``.metadata``, when all
have reported. If a rank dies before it has reported, rank 0's gathering fails, and the directory never gets a marker.

In an asynchronous save all of this happens on a thread, over a gloo group that nothing else uses while a save is under
way: every method that speaks over it first waits for that save. So each rank's messages on the group come in the same
order. The step itself waits only for the copy to host memory, and for no other rank.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, cast

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from lowtide.adaptive.agreement import Agreement
from lowtide.errors import CheckpointError
from lowtide.train.commit import (
    HashedFile,
    Marker,
    Written,
    checkpoints_in,
    damage_of,
    directory_name,
    is_checkpoint_name,
    is_committed,
    read_marker,
    remove_checkpoint,
    share_of,
    write_manifest,
    write_marker,
)
from lowtide.train.state import MODEL, Stored, TrainState, difference_between

__all__ = ["Checkpoints", "cause_of", "stored_in"]

logger = logging.getLogger(__name__)


class Checkpoints:
    """The checkpoints of a run in one directory. One job at a time may use it.

    Every rank makes one and calls the same methods in the same order. It works in a single process without a group too.

    >>> checkpoints = Checkpoints(Path("output/checkpoints"), keep=3, asynchronous=True)  # doctest: +SKIP
    >>> checkpoints.resume(state)  # doctest: +SKIP
    >>> for step in range(state.progress["step"] + 1, 1001):  # doctest: +SKIP
    ...     train(step)
    ...     checkpoints.poll()
    ...     if step % 100 == 0:
    ...         checkpoints.save(step, state)
    >>> checkpoints.close()  # doctest: +SKIP
    """

    def __init__(
        self, directory: Path, *, keep: int = 0, asynchronous: bool = False, timeout: timedelta = timedelta(hours=1)
    ) -> None:
        """``keep`` is how many stay, 0 for all; ``timeout`` how long ranks wait for each other in a save or a load."""
        self.directory = directory
        self.keep = keep
        self.asynchronous = asynchronous
        self._ranks = Agreement(timeout)
        self._flight: tuple[Path, Future[Any]] | None = None
        self._cleaning: threading.Thread | None = None
        self._damaged: set[str] = set()
        self._unchecked = not self._ranks.alone
        leftovers: list[Path] = []
        if self._ranks.rank == 0:
            directory.mkdir(parents=True, exist_ok=True)
            leftovers = [path for path in self._directories() if not is_committed(path)]
        # No name is used twice, that of a directory which is removed included: so all ranks name the next one alike.
        self._names: set[str] = set(self._ranks.from_first([path.name for path in self._directories()]))
        if leftovers:
            logger.info("removing %d checkpoints that were cut off: %s", len(leftovers), _names_of(leftovers))
            self._clean(leftovers)

    def save(self, step: int, state: TrainState) -> Path:
        """Save the state; where. When this returns the checkpoint is committed or, if asynchronous, under way.

        A save that is still under way is waited for first.

        Raises:
            CheckpointError: this save failed, or the one before it that was under way.
        """
        self.wait()
        name = directory_name(step, self._names)
        self._names.add(name)
        path = self.directory / name
        # Once: a mistake in naming weights shows at the first save; no later one may fail because copies drifted.
        samples = state.samples() if self._unchecked else {}
        self._unchecked = False
        common: dict[str, Any] = {
            "storage_writer": _Writer(path, step, self._ranks.world_size, samples),
            "process_group": self._ranks.group,
            "no_dist": self._ranks.alone,
        }
        try:
            if self.asynchronous:
                saving: Any = async_save(state.tensors(), **common)
                self._flight = (path, saving)
                return path
            save(state.tensors(), **common)
        except CheckpointError:
            raise
        except (Exception, CheckpointException) as error:
            raise _failed(path, error) from error
        if self._ranks.rank == 0:
            self._clean([])
        return path

    def poll(self) -> bool:
        """Whether no save is under way. Does not communicate and does not wait; an error of a finished save is
        raised."""
        if self._flight is None:
            return True
        if not self._flight[1].done():
            return False
        self.wait()
        return True

    def wait(self) -> None:
        """Wait for the save under way.

        Raises:
            CheckpointError: it failed.
        """
        if self._flight is None:
            return
        path, saving = self._flight
        try:
            saving.result()
        except (Exception, CheckpointException) as error:
            raise _failed(path, error) from error
        finally:
            self._flight = None
        if self._ranks.rank == 0:
            self._clean([])

    def latest(self) -> Path | None:
        """The checkpoint committed last whose files have the sizes they were written with; None if there is none.

        All ranks get the same answer.

        Raises:
            CheckpointError: there are checkpoints, and all are damaged.
        """
        self.wait()
        for path, _ in self._candidates(checksums=False):
            return path
        self._refuse_damaged()
        return None

    def load(self, state: TrainState, path: Path) -> None:
        """Load a checkpoint, at any number of ranks and in any layout, after comparing all its checksums.

        Raises:
            CheckpointError: it was not committed, or is damaged, or does not fit the model. The same on all ranks.
        """
        self.wait()
        marker = read_marker(path)
        if not self._ranks.all(marker is not None):
            raise CheckpointError(f"{path} is not a committed checkpoint: it has no committed.json that can be read")
        assert marker is not None
        if not self._intact(path, marker, checksums=True):
            raise CheckpointError(f"{path} is damaged: the log of the rank that found it says where; load another one")
        self._read(state, path)

    def resume(self, state: TrainState) -> Path | None:
        """Load the newest checkpoint that is not damaged, and say which; None if there is no checkpoint at all.

        Raises: CheckpointError: all are damaged (the run must not silently start over), or the newest does not fit the
        model.
        """
        self.wait()
        for path, marker in self._candidates(checksums=True):
            self._read(state, path)
            if self._ranks.rank == 0:
                logger.info("resumed from %s, step %d, written by %d ranks", path, marker.step, marker.world_size)
            return path
        self._refuse_damaged()
        return None

    def close(self) -> None:
        """Wait for the save under way and for removals, and give the process group back."""
        try:
            self.wait()
        finally:
            if self._cleaning is not None:
                self._cleaning.join()
                self._clean_now([])  # what came while the thread was busy
            self._ranks.close()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()  # after an error the other ranks may be gone: waiting for them would hide it

    def _refuse_damaged(self) -> None:
        """Nothing can be loaded: right in a new run, and an error where there are checkpoints."""
        unusable = self._ranks.from_first([path for path in self._directories() if is_committed(path)])
        if unusable:
            raise CheckpointError(
                f"no checkpoint in {self.directory} can be used: {_names_of(unusable)} are damaged, see the logs; "
                "to start over all the same, move them away"
            )

    def _candidates(self, *, checksums: bool) -> Iterator[tuple[Path, Marker]]:
        for name in self._ranks.from_first([path.name for path, _ in checkpoints_in(self.directory)]):
            path = self.directory / name
            marker = read_marker(path)
            if not self._ranks.all(marker is not None):
                continue
            assert marker is not None
            if self._intact(path, marker, checksums=checksums):
                yield path, marker

    def _intact(self, path: Path, marker: Marker, *, checksums: bool) -> bool:
        damage = damage_of(
            path, marker, share_of(marker, self._ranks.rank, self._ranks.world_size), checksums=checksums
        )
        if damage is not None:
            logger.error("checkpoint %s is damaged and not used: %s", path, damage)
        if self._ranks.all(damage is None):
            return True
        self._damaged.add(path.name)
        return False

    def _read(self, state: TrainState, path: Path) -> None:
        reader = _Reader(path)
        problem: CheckpointError | None = None
        wanted: dict[str, Any] = {}
        stored: dict[str, Stored] = {}
        try:
            stored = stored_in(reader.read_metadata())
            wanted = state.destination(stored)
        except CheckpointError as error:
            problem = CheckpointError(f"{path}: {error}")
        except Exception as error:  # whatever it is, the other ranks must hear of it before they wait for this one
            problem = CheckpointError(f"{path} cannot be read: {cause_of(error)}")
        if not self._ranks.all(problem is None):
            raise problem or CheckpointError(f"{path} does not fit the model: the log of another rank says how")
        weights = sorted(name for name in stored if name.startswith(MODEL))
        claimed = self._ranks.any_of([name in wanted for name in weights])
        if unclaimed := [name for name, taken in zip(weights, claimed, strict=True) if not taken]:
            raise CheckpointError(
                f"{path} holds {len(unclaimed)} weights that the model does not have, such as "
                f"{', '.join(unclaimed[:3])}: it is of another model"
            )
        try:
            load(wanted, storage_reader=reader, process_group=self._ranks.group, no_dist=self._ranks.alone)
            state.restore(wanted)
        except (Exception, CheckpointException) as error:
            raise CheckpointError(f"{path} cannot be loaded: {cause_of(error)}") from error

    def _clean(self, leftovers: list[Path]) -> None:
        if self._cleaning is None or not self._cleaning.is_alive():  # never waited for: other ranks wait for this one
            self._cleaning = threading.Thread(target=self._clean_now, args=(leftovers,), name="removal", daemon=True)
            self._cleaning.start()

    def _clean_now(self, leftovers: list[Path]) -> None:
        """Remove leftovers, and the oldest beyond what is kept; a damaged one is not counted as kept."""
        beyond: list[Path] = []
        if self.keep:
            committed = [path for path, _ in checkpoints_in(self.directory)]
            kept = [path for path in committed if path.name not in self._damaged][: self.keep]
            if len(kept) == self.keep:
                beyond = committed[committed.index(kept[-1]) + 1 :]
        for path in leftovers + beyond:
            try:
                remove_checkpoint(path)
            except OSError as error:
                logger.warning("checkpoint %s cannot be removed: %s", path, error)

    def _directories(self) -> list[Path]:
        if self._ranks.rank != 0:
            return []
        return sorted(path for path in self.directory.iterdir() if is_checkpoint_name(path.name))


class _Reader(FileSystemReader):
    """Reads the metadata once: they have an entry for each shard of each rank, and torch would read them again."""

    _metadata: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._metadata is None:
            self._metadata = super().read_metadata(*args, **kwargs)
        return self._metadata


class _HashedFiles(FileSystem):
    """Files whose checksums are known when they are written."""

    def __init__(self) -> None:
        self.written: dict[str, Written] = {}

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        """Open a file, which torch writes from its beginning to its end, or reads."""
        with super().create_stream(path, mode) as file:
            if mode != "wb":
                yield file
                return
            hashed = HashedFile(cast(BinaryIO, file))
            yield hashed
            self.written[Path(path).name] = hashed.written


class _Writer(FileSystemWriter):
    """Writes a checkpoint with its checksums and its marker. See [Note: who commits, and when]."""

    def __init__(self, directory: Path, step: int, world_size: int, samples: dict[str, list[float]]) -> None:
        super().__init__(directory, overwrite=False)
        self.directory, self.step, self.world_size, self.samples = directory, step, world_size, samples
        self.fs: _HashedFiles = _HashedFiles()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return replace(super().prepare_local_plan(plan), storage_data=self.samples)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Runs on rank 0 with the plans of all ranks, where a weight that several hold whole is written once."""
        if problem := difference_between([plan.storage_data for plan in plans]):
            raise CheckpointError(problem)
        return super().prepare_global_plan([replace(plan, storage_data=None) for plan in plans])

    def write_data(self, plan: Any, planner: Any) -> Any:
        results = super().write_data(plan, planner)
        names = {one.storage_data.relative_path for one in results.value()}
        write_manifest(self.directory, self.rank or 0, {name: self.fs.written[name] for name in names})
        return results

    def finish(self, metadata: Metadata, results: Any) -> None:
        super().finish(metadata, results)
        write_marker(self.directory, self.step, self.world_size)
        # torch sends this to every rank when it is written. It has an entry for each shard of each rank, and no rank
        # reads it: they read the file, if they load.
        metadata.state_dict_metadata, metadata.storage_data, metadata.planner_data = {}, None, None


def stored_in(metadata: Metadata) -> dict[str, Stored]:
    """The tensors that a checkpoint's metadata lists."""
    listed: Mapping[str, Any] = metadata.state_dict_metadata
    return {
        name: Stored(tuple(one.size), one.properties.dtype)
        for name, one in listed.items()
        if isinstance(one, TensorStorageMetadata)
    }


def _failed(path: Path, error: BaseException) -> CheckpointError:
    return CheckpointError(f"{path} could not be written and does not count: {cause_of(error)}")


def cause_of(error: BaseException) -> str:
    """What happened, in a line; torch's own exception (no ``Exception``) lists the whole trace of every rank."""
    if isinstance(error, CheckpointException) and error.failures:
        rank, (first, _) = min(error.failures.items(), key=lambda one: one[0])
        others = f", and {len(error.failures) - 1} more ranks failed" if len(error.failures) > 1 else ""
        return f"on rank {rank}: {type(first).__name__}: {first}{others}"
    return f"{type(error).__name__}: {error}"


def _names_of(paths: list[Path]) -> str:
    shown = ", ".join(path.name for path in paths[:5])
    return shown if len(paths) <= 5 else f"{shown} and {len(paths) - 5} more"
