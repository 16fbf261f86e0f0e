"""Weights alone: from a Hugging Face directory of safetensors, or from a checkpoint of ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load

from lowtide._torch_private.storages import storage_key
from lowtide._torch_private.subclasses import inner_tensor
from lowtide.adaptive.agreement import Agreement
from lowtide.errors import CheckpointError
from lowtide.train.checkpoint import cause_of, stored_in
from lowtide.train.commit import checkpoints_in, damage_of, is_committed, read_marker, share_of
from lowtide.train.state import MODEL, Stored, model_tensors, problems_between

__all__ = ["load_weights"]


def load_weights(
    model: nn.Module | Sequence[nn.Module],
    path: Path,
    *,
    rename: Callable[[str], str] | None = None,
    timeout: timedelta = timedelta(hours=1),
) -> None:
    """Load the weights of a model, or of this rank's parts of it, in place and in any layout.

    ``path`` is a directory of ``.safetensors`` files, one of our checkpoints, or a directory of our checkpoints, of
    which the newest is taken. ``rename`` gives for a name of the model the name in ``.safetensors`` files. With a
    process group all ranks call this together.

    Raises:
        CheckpointError: a weight is missing, or there are weights that the model does not have, or ``path`` is neither.

    >>> load_weights(model, Path("Llama-3.1-8B"), rename=hugging_face_name)  # doctest: +SKIP
    """
    ranks = Agreement(timeout)
    try:
        _load(ranks, [model] if isinstance(model, nn.Module) else model, path, rename or _same)
    finally:
        ranks.close()


def _load(ranks: Agreement, parts: Sequence[nn.Module], path: Path, rename: Callable[[str], str]) -> None:
    problem: CheckpointError | None = None
    wanted: dict[str, Any] = {}
    stored: dict[str, Stored] = {}
    reader: Any = None
    try:
        directory = _directory_of(path)
        ours = is_committed(directory)
        reader = _reader_of(ranks, directory, ours)
        prefix = MODEL if ours else ""
        stored = {name: one for name, one in stored_in(reader.read_metadata()).items() if name.startswith(prefix)}
        wanted = {prefix + (name if ours else rename(name)): tensor for name, tensor in model_tensors(parts).items()}
        missing = _tied(wanted, stored)
        if problems := problems_between({name: one for name, one in wanted.items() if name not in missing}, stored):
            raise CheckpointError(f"the weights in {directory} do not fit the model: " + "; ".join(problems))
        wanted = {name: one for name, one in wanted.items() if name in stored}
    except CheckpointError as error:
        problem = error
    except Exception as error:  # whatever it is, the other ranks must hear of it before they wait for this one
        problem = CheckpointError(f"{path} cannot be read: {cause_of(error)}")
    if not ranks.all(problem is None):
        raise problem or CheckpointError(f"{path} does not fit the model: the log of another rank says how")
    names = sorted(stored)
    claimed = ranks.any_of([name in wanted for name in names])
    if unclaimed := [name for name, taken in zip(names, claimed, strict=True) if not taken]:
        raise CheckpointError(
            f"{path} holds {len(unclaimed)} weights that the model does not have, such as {', '.join(unclaimed[:3])}; "
            f"the model has names such as {', '.join(sorted(wanted)[:3])}"
        )
    try:
        load(wanted, storage_reader=reader, process_group=ranks.group, no_dist=ranks.alone)
    except (Exception, CheckpointException) as error:
        raise CheckpointError(f"{path} cannot be loaded: {cause_of(error)}") from error


def _directory_of(path: Path) -> Path:
    if is_committed(path) or any(path.glob("*.safetensors")):
        return path
    if committed := checkpoints_in(path):
        return committed[0][0]
    what = "is not a directory" if not path.is_dir() else "holds neither .safetensors files nor a committed checkpoint"
    raise CheckpointError(f"{path} {what}; give a Hugging Face model directory or one of our checkpoints")


def _reader_of(ranks: Agreement, directory: Path, ours: bool) -> Any:
    if ours:
        marker = read_marker(directory)
        damage = "committed.json cannot be read" if marker is None else None
        if marker is not None:
            damage = damage_of(directory, marker, share_of(marker, ranks.rank, ranks.world_size), checksums=True)
        if damage is not None:
            raise CheckpointError(f"{directory} is damaged: {damage}; take another checkpoint")
        return FileSystemReader(directory)
    if find_spec("safetensors") is None:
        raise CheckpointError(
            f"{directory} holds safetensors, and the package that reads them is not installed: "
            "pip install 'lowtide[transformers]'"
        )
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    return HuggingFaceStorageReader(str(directory))


def _tied(wanted: Mapping[str, Any], stored: Mapping[str, Stored]) -> set[str]:
    """Names that are missing and need not be there: the same weight is stored under another name."""
    held = {_identity(value) for name, value in wanted.items() if name in stored and isinstance(value, Tensor)}
    return {
        name
        for name, value in wanted.items()
        if name not in stored and isinstance(value, Tensor) and _identity(value) in held
    }


def _identity(tensor: Tensor) -> tuple[int, int, tuple[int, ...]]:
    return storage_key(tensor), int(inner_tensor(tensor).storage_offset()), tuple(tensor.shape)


def _same(name: str) -> str:
    return name
