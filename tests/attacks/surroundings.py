"""What stands around a program in its process: modes, hooks, patched functions, threads, files and memory."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks
from torch.optim import Optimizer
from torch.optim import optimizer as optimizer_hooks
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from lowtide._torch_private.modes import function_modes
from lowtide._torch_private.saved_tensor_hooks import top_saved_tensors_hooks

__all__ = ["Memory", "Surroundings", "has_own_forward", "settled", "shape_of"]

PATCHABLE: tuple[tuple[Any, str], ...] = (
    (torch.UntypedStorage, "resize_"),
    (torch.Tensor, "backward"),
    (torch.autograd, "backward"),
    (torch.autograd, "grad"),
    (torch.utils.checkpoint, "checkpoint"),
    (torch.optim.Optimizer, "step"),
    (torch.optim.Optimizer, "zero_grad"),
    (torch.amp.GradScaler, "step"),
    (torch.amp.GradScaler, "unscale_"),
    (nn.Module, "__call__"),
    (nn.Module, "_call_impl"),
    (nn.Module, "__getattr__"),
    (torch, "save"),
)
"""Functions of torch that something might replace for a while."""


_THREADS_OF_OTHERS = ("TMonitor", "_DummyThread")
"""Classes of tqdm's, and of those that autograd has made and Python has come to know of."""


@dataclass(frozen=True)
class Surroundings:
    """The process's global state, to be the same before and after."""

    saved_tensor_hooks: bool
    function_modes: int
    dispatch_modes: int
    functions: tuple[int, ...]
    """Those of torch that could be replaced, by identity."""
    module_hooks: tuple[int, ...]
    optimizer_hooks: tuple[int, int]
    collects_garbage: bool
    gradients: bool
    default_dtype: torch.dtype
    deterministic: bool
    autocast: tuple[bool, bool]
    threads: int

    @classmethod
    def now(cls) -> Surroundings:
        return cls(
            saved_tensor_hooks=top_saved_tensors_hooks(False) is not None,
            function_modes=function_modes(),
            dispatch_modes=len(_get_current_dispatch_mode_stack()),
            functions=tuple(id(getattr(owner, name)) for owner, name in PATCHABLE),
            module_hooks=tuple(len(hooks) for name, hooks in vars(module_hooks).items() if name.endswith("_hooks")),
            optimizer_hooks=(
                len(optimizer_hooks._global_optimizer_pre_hooks),
                len(optimizer_hooks._global_optimizer_post_hooks),
            ),
            collects_garbage=gc.isenabled(),
            gradients=torch.is_grad_enabled(),
            default_dtype=torch.get_default_dtype(),
            deterministic=torch.are_deterministic_algorithms_enabled(),
            autocast=(torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled()),
            threads=sum(type(thread).__name__ not in _THREADS_OF_OTHERS for thread in threading.enumerate()),
        )

    def changed(self, later: Surroundings) -> list[str]:
        """What is otherwise later, in words."""
        pairs = zip(PATCHABLE, self.functions, later.functions, strict=True)
        found = [f"{owner.__name__}.{name} is patched" for (owner, name), mine, other in pairs if mine != other]
        return found + [
            f"{field.name.replace('_', ' ')} {getattr(self, field.name)} became {getattr(later, field.name)}"
            for field in fields(self)
            if field.name != "functions" and getattr(self, field.name) != getattr(later, field.name)
        ]


@dataclass(frozen=True)
class Memory:
    """What the process holds."""

    device_bytes: int
    pinned_bytes: int
    tensors: int
    """Tensors that are alive and that the cycle collector knows."""
    files: int

    @classmethod
    def now(cls, device: torch.device) -> Memory:
        device_bytes = pinned_bytes = 0
        if device.type == "tide":
            import tide

            device_bytes = int(torch.accelerator.memory_allocated())
            pinned_bytes = tide.pinned_memory_stats()["allocated"]
        return cls(
            device_bytes=device_bytes,
            pinned_bytes=pinned_bytes,
            tensors=sum(isinstance(one, Tensor) for one in gc.get_objects()),
            files=len(os.listdir("/proc/self/fd")),
        )

    def grown(self, later: Memory) -> dict[str, int]:
        """What there is more of later, and how much."""
        more = {one.name.replace("_", " "): getattr(later, one.name) - getattr(self, one.name) for one in fields(self)}
        return {name: count for name, count in more.items() if count > 0}


def settled(condition: Callable[[], bool], seconds: float = 1.0) -> bool:
    """Whether it comes true soon: graphs may end late, and the disk tier works on threads of its own."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        gc.collect()
        time.sleep(0.01)
    return True


def shape_of(models: Iterable[nn.Module], optimizers: Iterable[Optimizer]) -> dict[str, Any]:
    """What modules and optimizers are made of: their classes, attributes and numbers of hooks."""
    shape: dict[str, Any] = {}
    for number, model in enumerate(models):
        for name, module in model.named_modules():
            shape[f"model {number} {name or 'itself'}"] = _made_of(module)
    for number, optimizer in enumerate(optimizers):
        shape[f"optimizer {number}"] = _made_of(optimizer)
    return shape


def has_own_forward(module: Any) -> bool:
    """Whether a module runs something else than its class's forward."""
    own = vars(module).get("forward")
    return own is not None and (getattr(own, "__self__", None), getattr(own, "__func__", None)) != (
        module,
        type(module).forward,
    )


def _made_of(thing: Any) -> dict[str, Any]:
    attributes = vars(thing)
    hooks = {name: len(value) for name, value in attributes.items() if name.endswith("_hooks") and value}
    names = set(attributes)
    if isinstance(thing, nn.Module) and not has_own_forward(thing):
        names.discard("forward")  # the class's, bound: as good as none
    own = attributes.get("step") if isinstance(thing, Optimizer) else None
    return {
        "class": type(thing).__qualname__,
        "attributes": frozenset(names),
        "hooks": hooks,
        "step": getattr(own, "__qualname__", type(own).__qualname__),
    }
