"""What lowtide is measured against: torch's own mechanisms, and a peer library's offloading.

Each is a context manager that puts something on a model's layers and takes it off again.

The peer is TRL's ``OffloadActivations`` (which continues torchtune's), read from an installed or unpacked ``trl``:
``pip install --no-deps trl``. Only its one module is loaded, not the package. The module asks for three small things
of packages that ``--no-deps`` leaves out; where they are missing they are replaced while it is imported:
``accelerate.logging.get_logger`` by ``logging.getLogger``, ``accelerate.utils.versions.is_torch_version`` by True (all
its questions are whether torch is new enough) and ``psutil.virtual_memory`` by one that never warns. Nothing else is
changed: it reaches tide through ``torch.accelerator`` as it would any device. Its hooks are put around each layer, as
lowtide's are, instead of around the whole model, so that both move the same tensors; its own ``with`` is around
the step, as its trainer has it.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import lowtide
from lowtide import LayerPolicy, Policy
from lowtide.operators.layers import find_layers
from lowtide.runtime.limits import Limits
from models import Attached

__all__ = [
    "applied",
    "bare",
    "by_hand_swap",
    "checkpointed",
    "on_cpu",
    "peer",
    "peer_offloading",
    "recomputed_by_hand",
    "selective",
    "unchanged",
]

PEER = "pip install --no-deps trl"


def applied(
    policy: LayerPolicy | Policy, limits: Limits | None = None
) -> Callable[[nn.Module], AbstractContextManager[Attached]]:
    """lowtide, with a Policy, or with one for each layer."""

    @contextmanager
    def attach(model: nn.Module) -> Iterator[Attached]:
        each = (policy,) * len(find_layers(model).modules) if isinstance(policy, LayerPolicy) else ()
        handle = lowtide.apply(model, policy if isinstance(policy, Policy) else Policy(each), limits=limits)
        try:
            yield Attached(handle)
        finally:
            handle.remove()

    return attach


@contextmanager
def bare(model: nn.Module) -> Iterator[Attached]:
    """Nothing."""
    yield Attached()


@contextmanager
def checkpointed(model: nn.Module, **options: Any) -> Iterator[Attached]:
    """Every layer under ``torch.utils.checkpoint``."""
    layers = find_layers(model).modules
    for layer in layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, **options)
    try:
        yield Attached()
    finally:
        for layer in layers:
            del layer.forward


def selective(model: nn.Module) -> AbstractContextManager[Attached]:
    """Every layer under selective checkpointing that saves all but silu and the product after it, as lowtide does.

    Views are computed again, which costs SAC nothing in bytes and less time than saving them.
    """
    return checkpointed(model, context_fn=_contexts)


def _contexts() -> Any:
    after_silu = {False: False, True: False}  # in forward, and in the repetition
    aten = torch.ops.aten

    def decide(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        repetition = context.is_recompute
        if operator is aten.silu.default or (operator is aten.mul.Tensor and after_silu[repetition]):
            after_silu[repetition] = operator is aten.silu.default
            return CheckpointPolicy.MUST_RECOMPUTE
        return CheckpointPolicy.MUST_RECOMPUTE if operator.is_view else CheckpointPolicy.MUST_SAVE

    return create_selective_checkpoint_contexts(decide)


@contextmanager
def _around_layers(model: nn.Module, context: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    """Run every layer inside a new ``context()``."""
    layers = find_layers(model).modules
    for layer in layers:
        layer.forward = partial(_inside, context, layer.forward)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def _inside(context: Callable[[], AbstractContextManager[Any]], function: Any, *args: Any, **kwargs: Any) -> Any:
    with context():
        return function(*args, **kwargs)


def _same(tensor: Tensor) -> Tensor:
    return tensor


@contextmanager
def on_cpu(model: nn.Module, *, parameters: bool = True) -> Iterator[Attached]:
    """Every layer under torch's ``save_on_cpu``, which pins memory only if the device is given.

    By itself it moves the layers' parameters as well; without ``parameters`` it is spared these.
    """
    hooks = save_on_cpu(pin_memory=True, device_type=next(model.parameters()).device.type)
    spared = set() if parameters else {parameter.data_ptr() for parameter in model.parameters()}

    def pack(tensor: Tensor) -> Any:
        return tensor if tensor.untyped_storage().data_ptr() in spared else hooks.pack_hook(tensor)

    def unpack(saved: Any) -> Tensor:
        return saved if isinstance(saved, Tensor) else hooks.unpack_hook(saved)

    with _around_layers(model, partial(saved_tensors_hooks, pack, unpack)):
        yield Attached()


@contextmanager
def unchanged(model: nn.Module) -> Iterator[Attached]:
    """Every layer under saved-tensor hooks that do nothing."""
    with _around_layers(model, partial(saved_tensors_hooks, _same, _same)):
        yield Attached()


@contextmanager
def recomputed_by_hand(model: nn.Module) -> Iterator[Attached]:
    """Every layer under saved-tensor hooks that do nothing, and the feed-forward's silu and product run twice."""
    blocks = [layer.mlp for layer in find_layers(model).modules]
    for block in blocks:
        block.forward = partial(_twice, block)
    try:
        with unchanged(model) as attached:
            yield attached
    finally:
        for block in blocks:
            del block.forward


def _twice(block: Any, x: Tensor) -> Tensor:
    gate, up = block.gate_proj(x), block.up_proj(x)
    product = block.act_fn(gate) * up
    with torch.no_grad():
        block.act_fn(gate) * up
    return block.down_proj(product)


def by_hand_swap(positions: frozenset[int]) -> Callable[[nn.Module], AbstractContextManager[Attached]]:
    """Every layer under hooks, a dozen lines, that copy the tensors saved at these positions to the host and back."""

    def hooks() -> saved_tensors_hooks:
        position = -1

        def pack(tensor: Tensor) -> Any:
            nonlocal position
            position += 1
            if position not in positions:
                return tensor
            return tensor.device, tensor.to("cpu")

        def unpack(saved: Any) -> Tensor:
            return saved if isinstance(saved, Tensor) else saved[1].to(saved[0])

        return saved_tensors_hooks(pack, unpack)

    @contextmanager
    def attach(model: nn.Module) -> Iterator[Attached]:
        with _around_layers(model, hooks):
            yield Attached()

    return attach


def peer_offloading() -> ModuleType | None:
    """The peer's module; None if it is not installed."""
    package = importlib.util.find_spec("trl")
    if package is None or package.origin is None:
        return None
    file = Path(package.origin).parent / "models" / "activation_offloading.py"
    specification = importlib.util.spec_from_file_location("peer_activation_offloading", file)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    with _stand_ins():
        specification.loader.exec_module(module)
    return module


@contextmanager
def _stand_ins() -> Iterator[None]:
    """What the peer's module wants of packages that are not installed."""
    wanted: dict[str, dict[str, Any]] = {
        "accelerate": {},
        "accelerate.logging": {"get_logger": logging.getLogger},
        "accelerate.utils": {},
        "accelerate.utils.versions": {"is_torch_version": lambda operation, version: True},
        "psutil": {"virtual_memory": lambda: SimpleNamespace(percent=0.0)},
    }
    missing = [name for name in wanted if importlib.util.find_spec(name.partition(".")[0]) is None]
    for name in missing:
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update(wanted[name])
    try:
        yield
    finally:
        for name in missing:
            del sys.modules[name]


def peer(module: ModuleType, stash: int) -> Callable[[nn.Module], AbstractContextManager[Attached]]:
    """Every layer under the peer's hooks; ``stash`` is how many tensors it keeps in flight, 5 by default."""

    @contextmanager
    def attach(model: nn.Module) -> Iterator[Attached]:
        offload = module.OffloadActivations(max_fwd_stash_size=stash)
        offload.update_model_params(model)

        @contextmanager
        def around() -> Iterator[None]:
            with offload, saved_tensors_hooks(_same, _same):  # the second: nothing is moved outside the layers
                yield

        with _around_layers(model, partial(saved_tensors_hooks, offload.pack_hook, offload.unpack_hook)):
            yield Attached(around=around)

    return attach
