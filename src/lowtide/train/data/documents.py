"""Samples cut from documents laid end to end, as Megatron's GPT data set cuts them."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lowtide.errors import DataError
from lowtide.train.data.cache import build_once, digest_of
from lowtide.train.data.megatron import IndexedTokens
from lowtide.train.data.permutation import Permutation
from lowtide.train.data.sample import LEFT_OUT, Sample, sample_of

__all__ = ["Documents"]


@dataclass(frozen=True)
class Documents:
    """Samples of ``seq_length + 1`` tokens, each beginning where the one before ends, across document borders.

    In each pass over the files the documents are in another order. A sample's last token is the next one's first, so
    that every token but the very first is predicted once.
    """

    files: IndexedTokens
    """Where the tokens are."""
    seq_length: int
    """Tokens of a sample."""
    vocab_size: int
    """The model's vocabulary; tokens must be below it."""
    seed: int = 1234
    """Decides the order of documents and of samples."""
    share: float = 1.0
    """The first part of the documents that is used."""
    samples: int | None = None
    """Samples to give; documents are used in several passes if one has fewer. None for one pass."""
    shuffle: bool = True
    """Whether documents and samples are put into another order."""
    eod: int | None = None
    """The token between documents, whose position is left out of the loss; None to leave none out."""
    pad: int | None = None
    """The token that fills samples and is never a label; None for no such token."""
    cache: Path | None = None
    """A directory for the order of the documents, shared by ranks; None to hold it in memory."""
    _orders: dict[int, npt.NDArray[np.int64]] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self._tokens < 2 or self._length < 1:
            raise DataError(
                f"{self.files.prefix}: {self._used} of {self.files.documents} documents have {self._tokens} tokens, "
                f"a sample needs {self.seq_length + 1}: use more data, a larger `split`, or a shorter `seq_length`"
            )

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name in self.__dataclass_fields__} | {
            "_orders": {}
        }

    @cached_property
    def _used(self) -> int:
        """Documents that are used."""
        return round(self.share * self.files.documents)

    @cached_property
    def _tokens(self) -> int:
        """Tokens of one pass."""
        return self.files.start(self._used)

    @cached_property
    def _length(self) -> int:
        return (self._tokens - 1) // self.seq_length if self.samples is None else self.samples

    @cached_property
    def _order(self) -> Permutation:
        return Permutation(self._length, (self.seed, 0))

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int, /) -> Sample:
        if not 0 <= index < self._length:
            raise IndexError(index)
        if self.shuffle:
            index = int(self._order(np.array([index]))[0])
        tokens = self._read(index * self.seq_length, self.seq_length + 1)
        if not 0 <= int(tokens.min()) <= int(tokens.max()) < self.vocab_size:
            raise DataError(
                f"{self.files.prefix}: found tokens from {tokens.min()} to {tokens.max()}, the model's vocabulary has "
                f"{self.vocab_size}; set the model's `vocab_size`, or use data made with its tokenizer"
            )
        sample = sample_of(tokens)
        if self.eod is not None:
            sample.labels[sample.tokens == self.eod] = LEFT_OUT
        if self.pad is not None:
            sample.labels[sample.labels == self.pad] = LEFT_OUT
        return sample

    def _read(self, start: int, count: int) -> npt.NDArray[np.int64]:
        """Tokens in a row, of the endless row of all passes."""
        result = np.empty(count, dtype=np.int64)
        done = 0
        while done < count:
            number, place = divmod(start + done, self._tokens)
            documents, ends = self._pass(number)
            slot = int(np.searchsorted(ends, place, side="right"))
            while done < count and slot < len(ends):
                taken = min(int(ends[slot]) - place, count - done)
                begin = self.files.start(int(documents[slot]) + 1) - (int(ends[slot]) - place)
                result[done : done + taken] = self.files.tokens[begin : begin + taken]
                done, place, slot = done + taken, place + taken, slot + 1
        return result

    def _pass(self, number: int) -> npt.NDArray[np.int64]:
        """The documents of one pass in order, and at which token of the pass each ends."""
        if number not in self._orders:
            self._orders[number] = self._stored(number) if self.cache is not None else self._shuffled(number)
        return self._orders[number]

    def _shuffled(self, number: int) -> npt.NDArray[np.int64]:
        documents = np.arange(self._used)
        if self.shuffle:
            np.random.default_rng([self.seed, number]).shuffle(documents)
        return np.stack([documents, np.cumsum(self.files.lengths(self._used)[documents])])

    def _stored(self, number: int) -> npt.NDArray[np.int64]:
        assert self.cache is not None
        index = self.files.prefix.with_name(self.files.prefix.name + ".idx")
        written = index.stat()
        made_from = (str(index.resolve()), written.st_size, written.st_mtime_ns, self._used, self.shuffle)
        target = self.cache / f"order-{digest_of(*made_from, self.seed, number)}.npy"

        def build(draft: Path) -> None:
            with open(draft, "wb") as file:
                np.save(file, self._shuffled(number))

        build_once(target, build)
        order: npt.NDArray[np.int64] = np.load(target, mmap_mode="r")
        return order
