"""What a checkpoint holds: weights and optimizer states by parameter name, the progress of the run, random generators.

Names are those of the whole model, whatever holds a parameter: a checkpoint of two pipeline stages can be read by one
process, by FSDP2 shards or by tensor parallel ranks. In a checkpoint a weight is ``model.layers.0.norm.weight``, its
optimizer state ``optimizer.layers.0.norm.weight.exp_avg`` and so on.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

from lowtide._torch_private.storages import storage_key
from lowtide._torch_private.subclasses import PLAIN
from lowtide.config.problem import nearest
from lowtide.errors import CheckpointError
from lowtide.train import generators

__all__ = ["MODEL", "Stored", "TrainState", "difference_between", "model_tensors", "problems_between"]

logger = logging.getLogger(__name__)

MODEL, OPTIMIZER, PROGRESS, GENERATORS = "model.", "optimizer.", "progress", "generators."
SAMPLED = 8
BY_NAME = StateDictOptions(flatten_optimizer_state_dict=True)


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in a checkpoint."""

    shape: tuple[int, ...]
    """Its whole shape, over all ranks."""
    dtype: torch.dtype
    """Its type."""


@dataclass(kw_only=True)
class TrainState:
    """The state of a training run on this rank, live: saving reads it, loading writes into it.

    An optimizer's settings, its learning rate among them, are the run's and not the checkpoint's: the resuming run sets
    the learning rate of the next step, from the step or from what was put into ``progress``.
    """

    parts: Sequence[nn.Module]
    """The model, or this rank's parts of it, with the parameter names of the whole model."""
    optimizers: Sequence[Optimizer]
    """One for each part."""
    progress: dict[str, Any]
    """The run's progress, the same on every rank and in JSON's types: step, samples consumed, epoch, loss scale."""
    seed: int = 0
    """What this rank's generators are reseeded from if the checkpoint's do not fit, mixed with the progress."""
    layout: str = ""
    """How the ranks are laid out, such as ``dp2 tp4``. Generators are only restored in the layout they were saved in:
    ranks that must draw the same numbers are others in another layout."""
    _restoring: list[dict[str, Any]] = field(default_factory=list, init=False, repr=False)

    def tensors(self) -> dict[str, Tensor]:
        """What this rank has to save. The tensors are the live ones, to be copied before the next step."""
        found: dict[str, Any] = _prefixed(MODEL, model_tensors(self.parts))
        for part, optimizer in zip(self.parts, self.optimizers, strict=True):
            # torch would make states for an optimizer that has made no step, counting one step that never was.
            if optimizer.state:
                states = get_optimizer_state_dict(part, optimizer, options=BY_NAME)
                found |= _prefixed(OPTIMIZER, _states(states))
        found[PROGRESS] = self._progress_tensor()
        found[f"{GENERATORS}{_rank():05d}"] = generators.capture()
        return found

    def samples(self) -> dict[str, list[float]]:
        """A few values of each matrix that this rank holds whole, by which other ranks' copies of it are known.

        A checkpoint has one place for a name. Ranks that hold different weights under one name, such as experts of
        their own in plain tensors, would lose all but one. Vectors say little: many begin equal, some are mere noise.
        """
        weights = {storage_key(one) for part in self.parts for one in part.parameters()}
        whole = {
            name: tensor
            for name, tensor in model_tensors(self.parts).items()
            if type(tensor) in PLAIN and tensor.dim() > 1 and storage_key(tensor) in weights
        }
        if not whole:
            return {}
        few = [one.detach().flatten()[:: max(1, one.numel() // SAMPLED)][:SAMPLED].double() for one in whole.values()]
        values = torch.cat(few).tolist()  # one copy from the device
        found: dict[str, list[float]] = {}
        for name, one in zip(whole, few, strict=True):
            found[name], values = values[: len(one)], values[len(one) :]
        return found

    def destination(self, stored: Mapping[str, Stored]) -> dict[str, Tensor]:
        """Where this rank's share of a checkpoint goes: weights and optimizer states in place.

        Raises:
            CheckpointError: the checkpoint lacks a weight, or has one of another shape.
        """
        wanted: dict[str, Any] = _prefixed(MODEL, model_tensors(self.parts))
        problems = problems_between(wanted, stored)
        self._restoring = []
        for part, optimizer in zip(self.parts, self.optimizers, strict=True):
            optimizer.zero_grad(set_to_none=True)
            optimizer.state.clear()  # what is not in the checkpoint must not stay
            states = get_optimizer_state_dict(part, optimizer, options=BY_NAME)
            named = _prefixed(OPTIMIZER, _states(states))
            held = {name: value for name, value in named.items() if name in stored}
            # A parameter that never had a gradient has no states; one that has some of them has another optimizer's.
            begun = {name.rpartition(".")[0] for name in held}
            expected = {name: value for name, value in named.items() if name.rpartition(".")[0] in begun}
            problems += problems_between(expected, stored)
            self._restoring.append(states)
            wanted |= held
        if problems:
            raise CheckpointError("the checkpoint does not fit the model: " + "; ".join(problems))
        _tell_of_conversions(wanted, stored)
        for name in (PROGRESS, f"{GENERATORS}{_rank():05d}"):
            if name in stored:
                wanted[name] = torch.empty(stored[name].shape, dtype=stored[name].dtype)
        return wanted

    def restore(self, loaded: Mapping[str, Any]) -> None:
        """Take what was read into :meth:`destination`."""
        for part in self.parts:
            names = get_model_state_dict(part)
            set_model_state_dict(part, {name: loaded[MODEL + name] for name in names})
        for part, optimizer, states in zip(self.parts, self.optimizers, self._restoring, strict=True):
            _restore_optimizer(part, optimizer, states, loaded)
        self._restoring = []
        saved = json.loads(bytes(loaded[PROGRESS].tolist()))
        self.progress.clear()
        self.progress.update(saved["progress"])
        self._restore_generators(saved, loaded.get(f"{GENERATORS}{_rank():05d}"))

    def _progress_tensor(self) -> Tensor:
        content = {"progress": self.progress, "layout": self.layout, "world_size": _world_size()}
        try:
            text = json.dumps(content)
        except TypeError as error:
            raise CheckpointError(
                f"the progress of the run cannot be saved: {error}; it holds numbers, texts, lists and dicts only"
            ) from None
        return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)

    def _restore_generators(self, saved: dict[str, Any], captured: Tensor | None) -> None:
        there, here = (saved["world_size"], saved["layout"]), (_world_size(), self.layout)
        if there == here and captured is not None:
            generators.restore(captured)
            return
        content = json.dumps([self.seed, saved["progress"]], sort_keys=True)
        seed = int.from_bytes(hashlib.blake2b(content.encode(), digest_size=7).digest())
        generators.reseed(seed)
        if _rank() == 0:
            logger.warning(
                "random generators are reseeded: the checkpoint is of %s, this run has %s",
                _shown(*there),
                _shown(*here),
            )


def model_tensors(parts: Sequence[nn.Module]) -> dict[str, Any]:
    """Weights and buffers of the parts by their names in the whole model."""
    found: dict[str, Any] = {}
    for part in parts:
        tensors = get_model_state_dict(part)
        if twice := sorted(found.keys() & tensors.keys()):
            raise CheckpointError(
                f"{twice[0]} is in two parts of the model on rank {_rank()}; a name of the whole model has one place"
            )
        found |= tensors
    return found


def problems_between(wanted: Mapping[str, Any], stored: Mapping[str, Stored]) -> list[str]:
    """How what is wanted differs from what is stored: missing names with the nearest, and other shapes."""
    found: list[str] = []
    missing = [name for name in wanted if name not in stored]
    for name in missing[:3]:
        close = nearest(name, stored)
        found.append(f"{name} is not in it" + (f" (the nearest names are {', '.join(close)})" if close else ""))
    if len(missing) > 3:
        found.append(f"{len(missing) - 3} more are not in it")
    for name, value in wanted.items():
        if name in stored and isinstance(value, Tensor) and tuple(value.shape) != stored[name].shape:
            found.append(f"{name} has the shape {list(stored[name].shape)} in it and {list(value.shape)} in the model")
    return found


def _tell_of_conversions(wanted: Mapping[str, Any], stored: Mapping[str, Stored]) -> None:
    others = [name for name, value in wanted.items() if isinstance(value, Tensor) and value.dtype != stored[name].dtype]
    if others and _rank() == 0:
        logger.warning(
            "%d tensors have another type than in the checkpoint and are converted, such as %s: %s there, %s here",
            len(others),
            others[0],
            stored[others[0]].dtype,
            wanted[others[0]].dtype,
        )


def difference_between(samples: Sequence[Mapping[str, Sequence[float]]]) -> str | None:
    """What is wrong if two ranks hold different weights under one name; copies that drifted by rounding are not."""
    first: dict[str, tuple[int, Sequence[float]]] = {}
    for rank, held in enumerate(samples):
        for name, values in held.items():
            other, known = first.setdefault(name, (rank, values))
            size = max((abs(value) for value in (*known, *values)), default=0.0)
            near = all(abs(one - two) <= 0.01 * size for one, two in zip(known, values, strict=False))
            if len(known) != len(values) or (not near and not any(map(math.isnan, (*known, *values)))):
                return (
                    f"ranks {other} and {rank} hold different weights under the name {name}, and a checkpoint has one "
                    "place for it: make it a DTensor that is sharded over these ranks, or give each its own name"
                )
    return None


def _restore_optimizer(
    part: nn.Module, optimizer: Optimizer, states: dict[str, Any], loaded: Mapping[str, Any]
) -> None:
    made_up = {id(value) for name, value in _states(states).items() if _renamed(OPTIMIZER, name) not in loaded}
    # A parameter without states in the checkpoint never had a gradient: it begins without, not with a step of zeros.
    stateless = [
        parameter
        for parameter, state in optimizer.state.items()
        if any(isinstance(value, Tensor) and id(value) in made_up for value in state.values())
    ]
    held = {name: loaded.get(_renamed(OPTIMIZER, name), value) for name, value in _states(states).items()}
    groups = optimizer.param_groups
    set_optimizer_state_dict(part, optimizer, {**states, **held}, options=BY_NAME)
    optimizer.param_groups = groups  # torch made new ones: a schedule that holds these would set the old ones' rates
    for parameter in stateless:
        del optimizer.state[parameter]


def _states(flat: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in flat.items() if name.startswith("state.")}


def _prefixed(prefix: str, tensors: Mapping[str, Any]) -> dict[str, Any]:
    return {_renamed(prefix, name): value for name, value in tensors.items()}


def _renamed(prefix: str, name: str) -> str:
    return prefix + (name.removeprefix("state.") if prefix == OPTIMIZER else name)


def _shown(world_size: int, layout: str) -> str:
    return f"{world_size} {'rank' if world_size == 1 else 'ranks'}" + (f" ({layout})" if layout else "")


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1
