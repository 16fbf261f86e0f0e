"""Every rank attaches, or none: checked before the first thing that the ranks do together."""

from __future__ import annotations

from datetime import timedelta
from itertools import count

import torch.distributed as dist

from lowtide._torch_private.stores import default_store
from lowtide.errors import LaunchError

__all__ = ["PATIENCE", "wait_for_every_rank"]

PATIENCE = timedelta(minutes=5)
"""How long a rank waits for the others. A rank that does not attach goes on into a collective of its framework, so
without this the ranks would wait for each other until the collective times out, with an error that says nothing."""

_times = count()
"""How often this process has waited; all ranks do so in the same order."""


def wait_for_every_rank(verb: str, patience: timedelta | None = None) -> None:
    """Return once all ranks have come here. LaunchError if one does not, or comes with another ``verb``."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return
    store, rank, number = default_store(), dist.get_rank(), next(_times)
    keys = [f"lowtide/attach/{number}/{one}" for one in range(dist.get_world_size())]
    store.set(keys[rank], verb)
    try:
        store.wait(keys, patience or PATIENCE)
    except dist.DistStoreError as error:
        missing = [str(one) for one, key in enumerate(keys) if not store.check([key])]
        raise LaunchError(
            f"rank {rank} has attached lowtide and rank {', '.join(missing)} has not after"
            f" {patience or PATIENCE}: call lowtide.attach on every rank, or on none"
        ) from error
    verbs = [store.get(key).decode() for key in keys]
    if len(set(verbs)) > 1:
        raise LaunchError(f"the ranks have attached lowtide with different settings: {', '.join(verbs)}, by rank")
