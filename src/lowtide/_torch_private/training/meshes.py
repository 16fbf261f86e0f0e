"""Device meshes and process groups that only the reference runner makes."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lowtide._torch_private.modes import DisableTorchFunction
from lowtide._torch_private.needed import needed_for

__all__ = [
    "flattened",
    "imagined_process_group",
]


@contextmanager
def imagined_process_group(world: int) -> Iterator[None]:
    """A process group of ``world`` ranks of which only this one is there, and in which nothing is sent.

    Functional collectives are waited for where they are in a run. Under fake tensors torch takes itself to be
    compiling: it would wait for each at once, by an operator that makes a tensor of its own.
    """
    dist = torch.distributed
    with needed_for("a dry run of several ranks"):
        store = importlib.import_module("torch.testing._internal.distributed.fake_pg").FakeStore()
        functional: Any = importlib.import_module("torch.distributed._functional_collectives")
        forget = importlib.import_module("torch.distributed.tensor.debug")._clear_sharding_prop_cache
        before = {name: getattr(functional, name) for name in ("_maybe_wrap_tensor", "wait_tensor")}
        wrapper, wait = functional.AsyncCollectiveTensor, torch.ops._c10d_functional.wait_tensor
    dist.init_process_group("fake", store=store, rank=0, world_size=world)

    class UnderWay(torch.autograd.Function):
        """As torch's own operator does outside of fake tensors: the same memory, to be waited for at the first use."""

        @staticmethod
        def forward(ctx: Any, tensor: Tensor) -> Any:
            return wrapper(tensor)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient

    def waited(tensor: Tensor) -> Tensor:
        with DisableTorchFunction():  # it computes nothing, and is no operator of a layer
            wait(tensor)
        return tensor

    functional._maybe_wrap_tensor, functional.wait_tensor = UnderWay.apply, waited
    try:
        yield
    finally:
        for name, plain in before.items():
            setattr(functional, name, plain)
        dist.destroy_process_group()
        # DTensor knows what it did by meshes that are equal, and would use this one's groups for the next.
        forget()


def flattened(mesh: DeviceMesh, names: tuple[str, ...], name: str) -> DeviceMesh:
    """Some dimensions of a mesh as one, known to the mesh by ``name``."""
    part = mesh[names]
    with needed_for("flattening dimensions of a device mesh"):
        flatten = part._flatten
    return flatten(name)
