"""Build a model without memory, and fill it later with the very values that building it on the host would have given.

[Note: replayed initialisation]
A model is constructed with fake tensors, which take no memory and say that they are on the host, under a mode that
records every operator. Replayed in the same order with the same seed, these operators draw the same random numbers, so
the weights are bitwise those of a model that was built whole. Storages are made when an operator first makes them, and
handed over and freed after the last operator that touches them: at any time the host holds little more than one weight.
Views need no replay: every tensor is described by its storage, offset, sizes and strides.

In between the model's parameters are on meta, where they are sharded. A weight that is handed over is cut to this
rank's shard on the host, so that the device never holds more than the shard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lowtide._torch_private.fake import FakeTensor, FakeTensorMode
from lowtide._torch_private.modes import TorchDispatchMode
from lowtide._torch_private.modules import buffers_of, parameters_of
from lowtide._torch_private.operators import schema_of, tree_leaves, tree_map
from lowtide._torch_private.placements import held_indices
from lowtide._torch_private.storages import storage_key

__all__ = ["Deferred", "build_deferred"]

Model = TypeVar("Model", bound=nn.Module)


class _Described(NamedTuple):
    """A tensor of the recording."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class _Call(NamedTuple):
    """An operator, with its tensors described."""

    operator: Any
    given: tuple[tuple[Any, ...], dict[str, Any]]
    outputs: tuple[_Described, ...]

    @property
    def storages(self) -> set[int]:
        return {one.storage for one in (*_described_in(self.given), *self.outputs)}


class _Recorder(TorchDispatchMode):
    """Records what runs; keeps every tensor alive, so that no storage's address is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[_Call] = []
        self.alive: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = (args, kwargs or {})
        output = func(*given[0], **given[1])
        self.alive.append((given, output))
        outputs = tuple(_describe(one) for one in tree_leaves(output) if isinstance(one, Tensor))
        self.calls.append(_Call(func, tree_map(_recorded, given), outputs))
        return output


def build_deferred(build: Callable[[], Model], *, seed: int) -> tuple[Model, Deferred]:
    """The model that ``build`` constructs, with its tensors on meta, and what fills it as if it had been built here.

    ``seed`` is that of the host's generator. Fails as fake tensors do where ``build`` reads a tensor's values.
    """
    recorder = _Recorder()
    with FakeTensorMode(allow_non_fake_inputs=True), recorder:
        model = build()
    held: dict[str, _Described] = {}
    on_meta: dict[int, Tensor] = {}
    for name, module, tensors, key, tensor in _tensors(model):
        held[name] = _describe(tensor)
        if id(tensor) not in on_meta:
            empty = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")
            parameter = key in parameters_of(module)
            on_meta[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if parameter else empty
        tensors[key] = on_meta[id(tensor)]
    return model, Deferred(recorder.calls, held, seed)


class Deferred:
    """A model's initialisation, recorded; see [Note: replayed initialisation]."""

    def __init__(self, calls: list[_Call], held: dict[str, _Described], seed: int) -> None:
        self._calls, self._held, self._seed = calls, held, seed

    def fill(self, model: nn.Module, device: torch.device) -> None:
        """Put the model's tensors on a device and fill them; it may be sharded, and converted to other dtypes."""
        places: dict[str, tuple[Any, str]] = {}
        made: dict[int, Tensor] = {}  # tied parameters stay tied
        meta: list[Tensor] = []  # so that an id is not used again
        for name, module, tensors, key, tensor in list(_tensors(model, kind=Tensor)):
            places[name] = (tensors, key)
            if tensor.device.type != "meta":
                continue
            if id(tensor) not in made:
                registered = key in parameters_of(module) or key in buffers_of(module)
                empty = torch.empty_like(tensor, device=device if registered else "cpu", requires_grad=False)
                made[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if key in parameters_of(module) else empty
                meta.append(tensor)
            tensors[key] = made[id(tensor)]
        for name, value in self._replay():
            if name in places:
                tensors, key = places[name]
                _copy(tensors[key], value)

    def _replay(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of the model by its name, on the host, each as soon as nothing more is written to it."""
        last = {storage: number for number, call in enumerate(self._calls) for storage in call.storages}
        names: dict[int, list[str]] = {}
        for name, one in self._held.items():
            names.setdefault(one.storage, []).append(name)
        storages: dict[int, torch.UntypedStorage] = {}
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.default_generator.manual_seed(self._seed)  # the host's alone: the device's is the rank's own
            for number, call in enumerate(self._calls):
                _run(call, storages)
                for storage in call.storages:
                    if last[storage] == number and storage in storages:
                        for name in names.get(storage, ()):
                            yield name, _tensor(self._held[name], storages)
                        del storages[storage]


def _run(call: _Call, storages: dict[int, torch.UntypedStorage]) -> None:
    """Replay one operator, unless all it made was a view."""
    if all(one.storage in storages for one in call.outputs) and not schema_of(call.operator).is_mutable:
        return
    arguments, keywords = tree_map(lambda one: _replayed(one, storages), call.given, is_leaf=_is_described)
    results = [one for one in tree_leaves(call.operator(*arguments, **keywords)) if isinstance(one, Tensor)]
    for described, tensor in zip(call.outputs, results, strict=True):
        storages.setdefault(described.storage, tensor.untyped_storage())


def _copy(target: Tensor, value: Tensor) -> None:
    """Fill a tensor, of a DTensor the part that this rank holds."""
    local = target
    if isinstance(target, DTensor):
        local = target.to_local()
        for dimension, places in enumerate(held_indices(target)):
            if len(places) != value.shape[dimension]:
                value = value.index_select(dimension, places)
    local.detach().copy_(value.to(local.dtype))


def _tensors(model: nn.Module, kind: type[Tensor] = FakeTensor) -> Iterator[tuple[str, nn.Module, Any, str, Tensor]]:
    """Each parameter, buffer and other attribute that is a tensor: its name, its module, where it is and as what."""
    for path, module in model.named_modules():
        for tensors in (parameters_of(module), buffers_of(module), vars(module)):
            for key, tensor in list(tensors.items()):
                if isinstance(tensor, kind):
                    yield f"{path}.{key}", module, tensors, key, tensor


def _describe(tensor: Tensor) -> _Described:
    size, stride = tuple(tensor.shape), tuple(tensor.stride())
    return _Described(storage_key(tensor), tensor.dtype, size, stride, int(tensor.storage_offset()))


def _recorded(value: Any) -> Any:
    return _describe(value) if isinstance(value, FakeTensor) else value  # others are constants: torch.tensor(0.5)


def _is_described(value: Any) -> bool:
    return isinstance(value, _Described)


def _described_in(value: Any) -> Iterator[_Described]:
    return (one for one in tree_leaves(value, is_leaf=_is_described) if isinstance(one, _Described))


def _replayed(value: Any, storages: dict[int, torch.UntypedStorage]) -> Any:
    if isinstance(value, _Described):
        return _tensor(value, storages)
    return value.clone() if isinstance(value, Tensor) else value


def _tensor(described: _Described, storages: dict[int, torch.UntypedStorage]) -> Tensor:
    empty = torch.empty(0, dtype=described.dtype)
    return empty.set_(storages[described.storage], described.offset, described.size, described.stride)
