"""Device meshes and process groups that only the reference runner makes."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.distributed.device_mesh import DeviceMesh

from lowtide._torch_private.needed import needed_for

__all__ = [
    "flattened",
    "imagined_process_group",
]


@contextmanager
def imagined_process_group(world: int) -> Iterator[None]:
    """A process group of ``world`` ranks of which only this one is there, and in which nothing is sent."""
    dist = torch.distributed
    with needed_for("a dry run of several ranks"):
        store = importlib.import_module("torch.testing._internal.distributed.fake_pg").FakeStore()
    dist.init_process_group("fake", store=store, rank=0, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


def flattened(mesh: DeviceMesh, names: tuple[str, ...], name: str) -> DeviceMesh:
    """Some dimensions of a mesh as one, known to the mesh by ``name``."""
    part = mesh[names]
    with needed_for("flattening dimensions of a device mesh"):
        flatten = part._flatten
    return flatten(name)
