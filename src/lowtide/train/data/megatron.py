"""Megatron's indexed token files: ``name.bin`` holds the tokens, ``name.idx`` where each sequence and document begins.

The index, all numbers little-endian: ``MMIDIDX`` and two zero bytes, version 1 (8 bytes), a code for the type of a
token (1 byte), the number of sequences and the number of entries of the document index (8 bytes each), then the
length of each sequence (int32), its place in the ``.bin`` file in bytes (int64), and the first sequence of each
document (int64) with the number of sequences behind the last.
"""

from __future__ import annotations

import os
import struct
import uuid
from array import array
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lowtide.errors import DataError

__all__ = ["IndexedTokens", "token_type", "write"]

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
TYPES: dict[int, type[np.integer[Any]]] = {
    1: np.uint8,
    2: np.int8,
    3: np.int16,
    4: np.int32,
    5: np.int64,
    8: np.uint16,
}
LONGEST = 2**31 - 1
"""Tokens of one sequence at most: its length is an int32."""


class _Index(NamedTuple):
    """An index as it lies in its file."""

    dtype: np.dtype[Any]
    """The type of a token."""
    places: npt.NDArray[np.int64]
    """At which byte each sequence begins."""
    firsts: npt.NDArray[np.int64]
    """The first sequence of each document, and behind the last the number of sequences."""
    total: int
    """All tokens."""


class IndexedTokens:
    """The documents of one ``.bin`` and ``.idx`` pair, memory-mapped when first read.

    A document is the tokens between two entries of the document index; they lie side by side in the ``.bin`` file.
    """

    def __init__(self, prefix: str | os.PathLike[str]) -> None:
        self.prefix = _prefix(prefix)

    def __reduce__(self) -> tuple[type[IndexedTokens], tuple[Path]]:
        return IndexedTokens, (self.prefix,)  # a memory-mapped file is opened again, not copied

    @cached_property
    def _index(self) -> _Index:
        path = _with(self.prefix, ".idx")
        with _opened(path) as file:
            head = file.read(HEADER.size)
        if len(head) < HEADER.size or not head.startswith(MAGIC):
            raise DataError(
                f"{path}: expected a Megatron index that begins with {MAGIC!r}, found {head[:9]!r}; "
                "give the name of files that Megatron's preprocess_data.py, or lowtide, wrote"
            )
        _, version, code, sequences, entries = HEADER.unpack(head)
        if version != 1 or code not in TYPES:
            raise DataError(
                f"{path}: expected version 1 and tokens of a whole-number type ({', '.join(map(str, TYPES))}), "
                f"found version {version} and type {code}; write the data again"
            )
        dtype = np.dtype(TYPES[code]).newbyteorder("<")
        expected = HEADER.size + sequences * (4 + 8) + entries * 8
        if _size(path) < expected:
            raise DataError(f"{path}: expected {expected} bytes, found {_size(path)}: cut short; copy it again")
        if sequences == 0 or entries < 2:
            raise DataError(f"{path}: found no document; data to train on has at least one")
        sizes = np.memmap(path, dtype="<i4", mode="r", offset=HEADER.size, shape=(sequences,))
        places = np.memmap(path, dtype="<i8", mode="r", offset=HEADER.size + 4 * sequences, shape=(sequences,))
        firsts = np.memmap(path, dtype="<i8", mode="r", offset=HEADER.size + 12 * sequences, shape=(entries,))
        if int(firsts[0]) != 0 or int(firsts[-1]) != sequences:
            raise DataError(f"{path}: the document index does not run from 0 to {sequences}; write the data again")
        total = int(places[-1]) + int(sizes[-1]) * dtype.itemsize
        found = _size(_with(self.prefix, ".bin"))
        if found != total:
            raise DataError(
                f"{_with(self.prefix, '.bin')}: the index names {total} bytes, found {found}; "
                "the two files do not belong together, or one is cut short: copy both again"
            )
        return _Index(dtype, places, firsts, total // dtype.itemsize)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of a token in the file."""
        return self._index.dtype

    @property
    def documents(self) -> int:
        """The number of documents."""
        return len(self._index.firsts) - 1

    def start(self, number: int) -> int:
        """At which token a document begins; behind the last one, the number of all tokens."""
        index = self._index
        first = int(index.firsts[number])
        return int(index.places[first]) // index.dtype.itemsize if first < len(index.places) else index.total

    def lengths(self, documents: int) -> npt.NDArray[np.int64]:
        """The tokens of each of the first documents. Takes memory for all of them."""
        index = self._index
        firsts = np.asarray(index.firsts[: documents + 1])
        places = np.append(index.places, index.total * index.dtype.itemsize)
        lengths = np.diff(places[firsts]) // index.dtype.itemsize
        if lengths.size and int(lengths.min()) < 0:
            raise DataError(f"{self.prefix}.idx: documents do not lie one behind the other; write the data again")
        return lengths.astype(np.int64)

    @cached_property
    def tokens(self) -> npt.NDArray[Any]:
        """All tokens in a row, in the file's own type."""
        if self._index.total == 0:  # an empty file cannot be mapped
            return np.empty(0, dtype=self.dtype)
        return np.memmap(_with(self.prefix, ".bin"), dtype=self.dtype, mode="r")

    def document(self, number: int) -> npt.NDArray[Any]:
        """The tokens of one document."""
        return self.tokens[self.start(number) : self.start(number + 1)]


def token_type(vocab_size: int) -> type[np.integer[Any]]:
    """The smallest type for a vocabulary that Megatron writes too."""
    return np.uint16 if vocab_size <= 2**16 else np.int32


def write(
    prefix: str | os.PathLike[str],
    documents: Iterable[npt.ArrayLike | Iterator[npt.ArrayLike]],
    *,
    dtype: type[np.integer[Any]] = np.int32,
    index: Path | None = None,
) -> None:
    """Write documents as ``prefix.bin`` and ``prefix.idx``; neither has its name before it is complete.

    A document is its tokens, or for a long one an iterator of parts, which become sequences of one document.
    ``index`` is where the index is written instead, for a caller that gives it its name later.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     write(f"{directory}/numbers", [[1, 2, 3], [4, 5]])
    ...     IndexedTokens(f"{directory}/numbers").document(1).tolist()
    [4, 5]
    """
    where = _prefix(prefix)
    where.parent.mkdir(parents=True, exist_ok=True)
    limits, kind = np.iinfo(dtype), np.dtype(dtype).newbyteorder("<")
    sizes, firsts = array("i"), array("q", [0])
    draft = where.with_name(f"{where.name}.{os.getpid()}-{uuid.uuid4().hex[:8]}")
    try:
        with open(_with(draft, ".bin"), "wb") as file:
            for document in documents:
                for part in document if isinstance(document, Iterator) else (document,):
                    tokens: npt.NDArray[Any] = np.asarray(part)
                    if tokens.size and not limits.min <= int(tokens.min()) <= int(tokens.max()) <= limits.max:
                        raise DataError(
                            f"{where}: found tokens from {tokens.min()} to {tokens.max()}; "
                            f"{np.dtype(dtype).name} holds {limits.min} to {limits.max}: give a larger `dtype`"
                        )
                    for begin in range(0, max(len(tokens), 1), LONGEST):
                        piece = tokens[begin : begin + LONGEST]
                        file.write(piece.astype(kind).tobytes())
                        sizes.append(len(piece))
                firsts.append(len(sizes))
        code = next(code for code, known in TYPES.items() if known == dtype)
        lengths = np.asarray(sizes, dtype="<i4")
        places = (np.cumsum(lengths, dtype=np.int64) - lengths) * kind.itemsize
        with open(_with(draft, ".idx"), "wb") as file:
            file.write(HEADER.pack(MAGIC, 1, code, len(sizes), len(firsts)))
            file.write(lengths.tobytes())
            file.write(places.astype("<i8").tobytes())
            file.write(np.asarray(firsts, dtype="<i8").tobytes())
        os.replace(_with(draft, ".bin"), _with(where, ".bin"))
        os.replace(_with(draft, ".idx"), index or _with(where, ".idx"))  # last: the index says that all is there
    finally:
        _with(draft, ".bin").unlink(missing_ok=True)
        _with(draft, ".idx").unlink(missing_ok=True)


def _prefix(path: str | os.PathLike[str]) -> Path:
    where = Path(path)
    return where.with_suffix("") if where.suffix in (".bin", ".idx") else where


def _with(prefix: Path, suffix: str) -> Path:
    return prefix.with_name(prefix.name + suffix)


def _opened(path: Path) -> Any:
    try:
        return open(path, "rb")
    except OSError as error:
        raise _missing(path, error) from None


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise _missing(path, error) from None


def _missing(path: Path, error: OSError) -> DataError:
    return DataError(
        f"{path}: cannot be read ({error.strerror}); a Megatron data path is the common name of a .bin and an .idx file"
    )
