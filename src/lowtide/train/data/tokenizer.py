"""Text to tokens."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from lowtide.errors import ConfigError
from lowtide.train.data.cache import digest_of

__all__ = ["BYTES", "ByteTokenizer", "Tokenizer", "tokenizer_of"]

BYTES = "bytes"
"""The name of the tokenizer that needs no file and no package."""


class Tokenizer(Protocol):
    """Text to tokens."""

    @property
    def vocab_size(self) -> int:
        """Tokens are below this."""

    @property
    def end(self) -> int | None:
        """The token behind a document; None if the tokenizer has none."""

    @property
    def identity(self) -> str:
        """Differs where tokens may differ."""

    def encode(self, text: str, /) -> list[int]:
        """The tokens of a text, without any at its begin or end."""


@dataclass(frozen=True)
class ByteTokenizer:
    """Each byte of the text in UTF-8 is a token, and 256 is the token behind a document."""

    vocab_size: int = 257
    end: int | None = 256
    identity: str = BYTES

    def encode(self, text: str, /) -> list[int]:
        """The bytes."""
        return list(text.encode("utf-8", errors="replace"))


@dataclass(frozen=True)
class FileTokenizer:
    """A ``tokenizer.json`` of the package ``tokenizers``."""

    inner: Any
    vocab_size: int
    end: int | None
    identity: str

    def encode(self, text: str, /) -> list[int]:
        """The tokens."""
        tokens: list[int] = self.inner.encode(text, add_special_tokens=False).ids
        return tokens


@dataclass(frozen=True)
class DirectoryTokenizer:
    """A directory that ``transformers`` reads a tokenizer from."""

    inner: Any
    vocab_size: int
    end: int | None
    identity: str

    def encode(self, text: str, /) -> list[int]:
        """The tokens."""
        tokens: list[int] = self.inner.encode(text, add_special_tokens=False)
        return tokens


ENDS = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "[EOS]", "<|eos|>")
"""The names that families give the token behind a document; a tokenizer.json does not say which it is."""


def tokenizer_of(name: str) -> Tokenizer:
    """The tokenizer of a name: ``bytes``, a ``tokenizer.json``, or a directory that transformers reads."""
    if name == BYTES:
        return ByteTokenizer()
    path = Path(name)
    if path.is_file() and path.suffix == ".json":
        return _from_file(path)
    if path.is_dir():
        return _from_directory(path)
    raise ConfigError(
        f"`tokenizer`: found {name!r}, which is no file and no directory; expected a tokenizer.json, a directory that "
        f"holds a tokenizer, or `{BYTES}`, which needs neither"
    )


def _from_file(path: Path) -> Tokenizer:
    try:
        from tokenizers import Tokenizer as Inner
    except ImportError:
        raise ConfigError(
            f"reading the tokenizer {path} needs the package `tokenizers`: pip install 'lowtide[transformers]', "
            f"or use `tokenizer: {BYTES}`"
        ) from None
    try:
        inner = Inner.from_file(str(path))
    except Exception as error:  # the package raises bare exceptions
        raise ConfigError(f"{path}: is no tokenizer ({error}); give the tokenizer.json of a model") from None
    known = (inner.token_to_id(one) for one in ENDS)
    end = next((one for one in known if one is not None), None)
    identity = digest_of(path.read_bytes())
    return FileTokenizer(inner, inner.get_vocab_size(with_added_tokens=True), end, identity)


def _from_directory(path: Path) -> Tokenizer:
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise ConfigError(
            f"reading the tokenizer in {path} needs transformers: pip install 'lowtide[transformers]', "
            f"or use `tokenizer: {BYTES}`"
        ) from None
    try:
        inner = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    except Exception as error:  # so does this one
        raise ConfigError(f"{path}: holds no tokenizer that transformers reads ({error})") from None
    files = sorted(one for one in path.iterdir() if one.name.startswith(("tokenizer", "vocab", "merges", "special_")))
    identity = digest_of(*((one.name, one.read_bytes()) for one in files if one.is_file()))
    return DirectoryTokenizer(inner, len(inner), inner.eos_token_id, identity)
