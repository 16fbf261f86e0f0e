"""Text files, tokenized once and kept as Megatron files."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lowtide.errors import DataError
from lowtide.train.data.cache import build_once, digest_of
from lowtide.train.data.megatron import IndexedTokens, token_type, write
from lowtide.train.data.tokenizer import Tokenizer

__all__ = ["text_files", "tokenized", "tokenized_files"]

PLAIN, LINES = (".txt", ".text", ".md"), (".jsonl", ".json")
PART = 1 << 20
"""Characters tokenized at a time: a file larger than memory is no problem."""


def text_files(path: Path) -> list[Path]:
    """The files of a path: itself, or the text files in a directory by name."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise DataError(f"{path}: no such file or directory; give a text file, JSON lines, or a directory of them")
    found = sorted(one for one in path.rglob("*") if one.suffix in PLAIN + LINES and one.is_file())
    if not found:
        raise DataError(f"{path}: found no file that ends in {', '.join(PLAIN + LINES)}; give a directory of text")
    return found


def tokenized_files(files: Sequence[Path], tokenizer: Tokenizer, cache: Path, *, key: str = "text") -> IndexedTokens:
    """The tokens of text files (each one document) and JSON lines (each line one document, its text below ``key``)."""
    states = [one.stat() for one in files]
    made_from = [(str(p.resolve()), s.st_size, s.st_mtime_ns) for p, s in zip(files, states, strict=True)]

    def documents() -> Iterator[Iterable[str]]:
        for path in files:
            if path.suffix in LINES:
                yield from _lines(path, key)
            else:
                yield _parts(path)

    return tokenized(documents, tokenizer, cache, digest_of(made_from, key))


def tokenized(
    documents: Callable[[], Iterable[Iterable[str]]], tokenizer: Tokenizer, cache: Path, identity: str
) -> IndexedTokens:
    """Documents, each given in parts, as tokens in ``cache``; read and tokenized only if they are not there yet."""
    prefix = cache / f"tokens-{digest_of(identity, tokenizer.identity)}"
    dtype = token_type(tokenizer.vocab_size)

    def build(draft: Path) -> None:
        write(prefix, (_tokens(parts, tokenizer) for parts in documents()), dtype=dtype, index=draft)

    build_once(prefix.with_name(prefix.name + ".idx"), build)
    return IndexedTokens(prefix)


def _tokens(parts: Iterable[str], tokenizer: Tokenizer) -> Iterator[npt.NDArray[np.int64]]:
    for part in parts:
        yield np.asarray(tokenizer.encode(part), dtype=np.int64)
    if tokenizer.end is not None:
        yield np.asarray([tokenizer.end], dtype=np.int64)


def _parts(path: Path) -> Iterator[str]:
    """A plain text in parts that end where lines end, so that few words are cut in two."""
    with open(path, encoding="utf-8", errors="replace") as file:
        while lines := file.readlines(PART):
            yield "".join(lines)


def _lines(path: Path, key: str) -> Iterator[list[str]]:
    with open(path, encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                value = json.loads(line)
            except ValueError as error:
                raise DataError(
                    f"{path}, line {number}: expected one JSON object, found {line.strip()[:60]!r} ({error})"
                ) from None
            text = value.get(key) if isinstance(value, dict) else None
            if not isinstance(text, str):
                known = ", ".join(value) if isinstance(value, dict) else type(value).__name__
                raise DataError(f"{path}, line {number}: expected an object with text below `{key}`, found {known}")
            yield [text]
