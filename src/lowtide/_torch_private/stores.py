"""The store through which the ranks of the default process group have found each other."""

from __future__ import annotations

from lowtide._torch_private.needed import needed_for

with needed_for("attaching on several ranks"):
    from torch.distributed.distributed_c10d import _get_default_store as default_store

__all__ = ["default_store"]
