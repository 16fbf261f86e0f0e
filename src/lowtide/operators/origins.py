"""Whose value each storage holds, while a layer is profiled. See [Note: how owners are found]."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor

from lowtide._torch_private.storages import StorageWeakRef, storage_bytes, storage_key, weak_storage
from lowtide.operators.calls import Site
from lowtide.operators.observation import Call, Source

__all__ = ["OpenCall", "Origin", "Origins"]


class Origin(NamedTuple):
    """Whose value a storage holds."""

    source: Source
    owner: str
    """The operator that wrote it; empty unless ``source`` is ``operator``."""
    number: int
    """The storage's number: addresses are reused."""
    alive: StorageWeakRef
    cast: bool
    """Whether it is a cast of the owner's value."""


class Origins:
    """The origins of all storages that a profiled layer has touched."""

    def __init__(self) -> None:
        self.owners: dict[int, str] = {}
        """The owner of each storage, by number."""
        self._by_key: dict[int, Origin] = {}

    def of(self, tensor: Tensor) -> Origin:
        """The origin of a tensor's storage; a storage that was never seen comes from the root."""
        known = self._by_key.get(storage_key(tensor))
        if known is not None and not known.alive.expired():
            return known
        return self.record(tensor, "root", "")

    def record(self, tensor: Tensor, source: Source, owner: str, *, cast: bool = False) -> Origin:
        """Set the origin of a tensor's storage."""
        key = storage_key(tensor)
        known = self._by_key.get(key)
        number = known.number if known is not None and not known.alive.expired() else len(self.owners)
        origin = self._by_key[key] = Origin(source, owner, number, weak_storage(tensor), cast)
        self.owners[number] = owner
        return origin


class OpenCall:
    """A call of an operator while it runs, and until the layer has ended."""

    def __init__(self, name: str, site: Site) -> None:
        self.name, self.site = name, site
        self.reads: dict[str, None] = {}
        self.inputs: dict[int, int] = {}
        self.made: set[int] = set()
        """The numbers of the storages that it made."""
        self.received: set[int] = set()
        """Those of them that a collective filled."""
        self.writes = self.random = self.communicates = False
        self.repeatable = True

    def read(self, origin: Origin, tensor: Tensor) -> None:
        """It was given a tensor."""
        if origin.source == "operator" and origin.owner:
            self.reads[origin.owner] = None
        if origin.source != "static":
            self.inputs[origin.number] = storage_bytes(tensor)

    def returns(self, numbers: Iterable[int]) -> None:
        """It communicates, and returns these storages.

        Only its collectives are re-issued, never the whole call: see [Note: re-issued collectives] in
        :mod:`lowtide.runtime.collectives`. What it made of their results, such as the rows of an exchange put in order,
        is kept; and so they must not be re-issued for nothing.
        """
        self.repeatable &= not self.made.difference(self.received).intersection(numbers)

    def close(self) -> Call:
        """The call as plain data."""
        reads, inputs = tuple(self.reads), tuple(self.inputs.items())
        return Call(self.name, self.site, reads, inputs, self.writes, self.random, self.repeatable, self.communicates)
