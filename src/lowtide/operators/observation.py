"""What one run of a layer showed: its calls, and every tensor that autograd saved. Plain data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

import torch

from lowtide.operators.calls import Site

__all__ = ["Call", "Observation", "Pack", "Source"]

Source = Literal["operator", "boundary", "root", "static"]
"""Whose value a tensor is: an operator's of the layer, the layer's input, something from outside, or a parameter's."""


class Pack(NamedTuple):
    """One tensor that autograd saved while the layer ran, in order."""

    operator: str
    """The operator that was running."""
    source: Source
    """Whose value it is."""
    owner: str
    """The operator that owns it; empty unless ``source`` is ``operator``."""
    storage: int
    """A number for its storage: packs of one storage share it."""
    storage_bytes: int
    """The size of the whole storage, which a saved view holds as well."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    movable: bool
    """False for integers and booleans, which routing depends on, and for what a selective checkpoint of the user's
    saves through our hooks: these are always kept."""
    cast: bool
    """Whether it is a cast of the owner's value rather than the value itself."""
    output: bool = False
    """Whether the node that saves it made it: holding it undetached for that node would be a reference cycle."""
    rewritten: bool = False
    """Whether its storage was written to after it was saved: autograd refuses to use it."""
    altered: bool = False
    """Whether its storage was written to, after it was saved or made, without a new version: through ``.data``, or by
    the very kernel that it was saved for. Backward sees what was written, so the storage itself has to be kept."""


class Call(NamedTuple):
    """One call of an operator, in order."""

    name: str
    """The operator's name inside the layer: ``mlp.act_fn``, ``self_attn.mul_1``."""
    site: Site
    """Where it is called."""
    reads: tuple[str, ...]
    """The operators whose values it read, views and casts looked through."""
    inputs: tuple[tuple[int, int], ...]
    """The (storage number, bytes) of each tensor it was given that is not static."""
    writes: bool
    """Whether it made a value: false for calls that only viewed or cast what they were given."""
    random: bool
    """Whether it drew random numbers."""
    repeatable: bool
    """False if its call cannot be replayed: it wrote into its inputs, or they were written to afterwards, or it made
    something of what its collectives gave."""
    communicates: bool = False
    """Whether it is a collective, or issues some inside."""


class Observation(NamedTuple):
    """What one run of a layer showed."""

    calls: tuple[Call, ...]
    packs: tuple[Pack, ...]
    owners: Mapping[int, str]
    """For each storage that an operator wrote, by number, the operator that wrote it last."""
    collectives: tuple[str, ...] = ()
    """The operator of each functional collective that was issued, in order."""
