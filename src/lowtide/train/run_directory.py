"""The directory of a run: what is in it, who may write into it, and whether a start continues what is there.

::

    output/
      run.json          whose directory it is: the digest of the settings
      run.lock          held by the run that is writing
      config.yaml       the file of the run, with what the command line changed
      policy.json       what becomes of each layer's activations
      adaptive.json     what a run with `adapt` decided and met, step by step; trace.json, plan.json and policy.yaml
      metrics.jsonl     one object a step
      receipts.jsonl    what lowtide did, on rank 0; receipts.N.jsonl on rank N
      checkpoints/      one directory a checkpoint
      logs/             worker_N.log of each rank, unless --log-dir says otherwise
      earlier/1/        the files of an earlier run, moved here when a new one began

A start into a directory that was used before never overwrites: it continues, or moves the earlier run aside, or is an
error that says how to do either. Which of them is decided by :func:`open_run_directory`.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from lowtide.errors import RunDirectoryError

__all__ = ["RunDirectory", "config_text", "digest_of", "on_first_rank", "open_run_directory"]

OWNED = (
    *("run.json", "config.yaml", "policy.json", "metrics.jsonl", "checkpoints", "logs", "tensorboard", "watchdog"),
    *("adaptive.json", "plan.json", "policy.yaml", "trace.json"),
)
"""What an earlier run left and a new one would mix with; ``receipts*.jsonl`` too."""

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunDirectory:
    """The directory of a run, opened; plain data, so that rank 0 can send it to the others."""

    path: Path
    """The directory."""
    checkpoint: Path | None
    """The checkpoint to continue from; None for the beginning."""
    reason: str
    """Why the run starts or continues there, in words for the log."""

    @property
    def metrics(self) -> Path:
        """One object a step."""
        return self.path / "metrics.jsonl"

    @property
    def policy(self) -> Path:
        """The Policy of the run."""
        return self.path / "policy.json"

    @property
    def checkpoints(self) -> Path:
        """The directory of the checkpoints."""
        return self.path / "checkpoints"

    def receipts(self, rank: int) -> Path:
        """Where one rank writes its receipts."""
        return self.path / ("receipts.jsonl" if rank == 0 else f"receipts.{rank}.jsonl")


def open_run_directory(
    path: Path,
    *,
    settings: Mapping[str, Any],
    config: str,
    checkpoint: Path | None,
    resume: str | None = None,
    fresh: bool = False,
    restarted: bool = False,
) -> RunDirectory:
    """Make ``path`` the directory of this run, or say why it cannot be. Call it on one rank only: see on_first_rank.

    ``settings`` is the file as read with the command line's changes, ``config`` the text to keep of it, ``checkpoint``
    the newest committed checkpoint in the directory or None. Then:

    ==================================================  ===============================================
    the directory holds                                 without ``resume`` and ``fresh``
    ==================================================  ===============================================
    nothing of a run                                    the run starts
    a run without a committed checkpoint                its files are moved to ``earlier/N``; the run starts
    a committed checkpoint, the same settings           the run continues from it
    a committed checkpoint, other settings              RunDirectoryError
    ==================================================  ===============================================

    ``resume="auto"`` continues from the newest committed checkpoint whatever the settings, or starts; a path continues
    from that checkpoint. ``fresh`` moves aside and starts. A restart by torchrun (``restarted``) is the same run: it
    continues from the newest committed checkpoint, or starts again where it started before.
    """
    path.mkdir(parents=True, exist_ok=True)
    _lock(path)
    before = _read_identity(path)
    digest = digest_of(settings)
    used = before is not None or checkpoint is not None or (path / "metrics.jsonl").exists()
    start: Path | None = None
    if restarted:
        start = checkpoint or (_existing(resume) if resume not in (None, "auto") else None)
        reason = (
            f"was started again after a failure: continues from {start}"
            if start
            else "was started again after a failure"
        )
    elif fresh:
        aside = _move_aside(path) if used else None
        reason = "starts from the beginning" + (f"; the earlier run is in {aside}" if aside else "")
    elif resume == "auto":
        start = checkpoint
        reason = f"continues from {start}" if start else "starts: there is no committed checkpoint to continue from"
    elif resume is not None:
        start = _existing(resume)
        inside = path.resolve() in start.resolve().parents
        aside = None if inside or not used else _refuse_or_move(path, before, digest, checkpoint, same_is_fine=False)
        reason = f"continues from {start}" + (f"; the earlier run is in {aside}" if aside else "")
    elif checkpoint is not None and before == digest:
        start = checkpoint
        reason = f"continues from {start}: the directory holds this run (--fresh starts from the beginning)"
    else:
        aside = _refuse_or_move(path, before, digest, checkpoint) if used else None
        reason = "starts" + (f"; the earlier run is in {aside}" if aside else "")
    (path / "checkpoints").mkdir(exist_ok=True)
    _write(path / "config.yaml", config)
    _write(path / "run.json", json.dumps({"digest": digest, "host": socket.gethostname(), "pid": os.getpid()}) + "\n")
    return RunDirectory(path=path, checkpoint=start, reason=reason)


def on_first_rank(work: Callable[[], Result]) -> Result:
    """Do ``work`` on rank 0 and give every rank what came of it, an exception included.

    For the start of a run only: all ranks wait for rank 0. Without a process group it is a plain call.
    """
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return work()
    box: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            box[0] = work()
        except Exception as error:  # every rank must know, or the others wait until they time out
            box[1] = error
    dist.broadcast_object_list(box, src=0)
    if box[1] is not None:
        raise box[1]
    result: Result = box[0]
    return result


def digest_of(settings: Mapping[str, Any]) -> str:
    """The digest of a file's settings; the name of the output directory does not count."""
    value = {key: inner for key, inner in settings.items() if key != "output_dir"}
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=16).hexdigest()


def config_text(text: str, overrides: Mapping[tuple[str | int, ...], Any], settings: Mapping[str, Any]) -> str:
    """The file's text with the command line's changes in it, comments kept.

    Where that would read back as something else than ``settings`` (a change inside an anchor that is used twice), the
    plain settings are written instead, without comments.
    """
    if not overrides:
        return text
    from ruamel.yaml import YAML

    from lowtide.config.parse import parse_document
    from lowtide.config.problem import Problems

    yaml = YAML()
    yaml.preserve_quotes = True
    yaml.width = 4096
    value = yaml.load(text) or {}
    for path, new in overrides.items():
        inner = value
        for part in path[:-1]:
            if not isinstance(inner.get(part), dict):
                inner[part] = {}
            inner = inner[part]
        inner[path[-1]] = new
    changed = io.StringIO()
    yaml.dump(value, changed)
    problems = Problems()
    if parse_document(changed.getvalue(), problems).value == settings and not problems.errors:
        return changed.getvalue()
    plain = YAML(typ="safe", pure=True)
    plain.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    changed = io.StringIO()
    plain.dump(json.loads(json.dumps(settings)), changed)
    return changed.getvalue()


def _refuse_or_move(
    path: Path, before: str | None, digest: str, checkpoint: Path | None, *, same_is_fine: bool = True
) -> Path:
    """Move an earlier run aside, unless it has a checkpoint: that is work the user may still want, at this path."""
    if checkpoint is None:
        return _move_aside(path)
    whose = "the same settings" if before == digest and not same_is_fine else "other settings"
    raise RunDirectoryError(
        f"{path} holds a run with {whose} and a checkpoint, {checkpoint.name}. To continue that run with this file,"
        " pass --resume auto; to start from the beginning and move that run to"
        f" {path / 'earlier'}, pass --fresh; to leave it alone, choose another directory:"
        " --set output_dir=DIRECTORY"
    )


def _move_aside(path: Path) -> Path:
    number = 1
    while True:
        try:
            (path / "earlier").mkdir(exist_ok=True)
            (path / "earlier" / str(number)).mkdir()
            break
        except FileExistsError:
            number += 1
    aside = path / "earlier" / str(number)
    for name in (*OWNED, *(file.name for file in path.glob("receipts*.jsonl"))):
        if name == "logs":  # this run's ranks have their logs open there; they put earlier ones aside themselves
            continue
        if (path / name).exists():
            (path / name).rename(aside / name)
    return aside


def _existing(checkpoint: str | None) -> Path:
    path = Path(checkpoint or "")
    if not path.is_dir():
        raise RunDirectoryError(
            f"--resume {checkpoint}: there is no such directory. Give the directory of one checkpoint, such as"
            " output/checkpoints/step_00000100, or auto for the newest"
        )
    return path


def _read_identity(path: Path) -> str | None:
    try:
        value = json.loads((path / "run.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    digest = value.get("digest") if isinstance(value, dict) else None
    return digest if isinstance(digest, str) else ""


_LOCKS: dict[Path, int] = {}
"""The locks this process holds, until it ends: closing a file would give its lock back."""


def _lock(path: Path) -> None:
    """Hold the directory for as long as this process lives; the system gives a dead process's lock back."""
    try:
        import fcntl
    except ImportError:  # Windows
        return
    file = (path / "run.lock").resolve()
    if file in _LOCKS:
        return
    lock = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(lock, 200).decode("utf-8", "replace").strip() or "an unknown process"
        os.close(lock)
        raise RunDirectoryError(
            f"{path} is being written by another run, {holder}. Wait for it, end it, or choose another directory:"
            " --set output_dir=DIRECTORY"
        ) from None
    except OSError:  # a file system without locks: nothing can be said about others
        os.close(lock)
        return
    os.ftruncate(lock, 0)
    os.write(lock, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
    _LOCKS[file] = lock


def _write(file: Path, text: str) -> None:
    """All of it or nothing: a reader, or a kill, never finds half a file."""
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(file)
