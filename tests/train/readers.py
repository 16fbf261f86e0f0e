"""What processes of the data tests run; a module of its own, so that they can import it."""

from __future__ import annotations

from pathlib import Path

from lowtide.train.data.text import tokenized_files
from lowtide.train.data.tokenizer import ByteTokenizer


def tokens_of(files: list[Path], cache: Path) -> list[int]:
    """The tokens of text files, through the cache."""
    tokens: list[int] = tokenized_files(files, ByteTokenizer(), cache).tokens.tolist()
    return tokens
