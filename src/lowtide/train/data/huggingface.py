"""Data sets of the package ``datasets``, and the plain files it reads too."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lowtide.errors import ConfigError, DataError
from lowtide.train.data.cache import build_once, digest_of
from lowtide.train.data.megatron import IndexedTokens, write
from lowtide.train.data.text import text_files, tokenized, tokenized_files
from lowtide.train.data.tokenizer import Tokenizer

if TYPE_CHECKING:
    from lowtide.config.schema.dataset import DataLoader

__all__ = ["hugging_face_tokens"]

FILES_ALONE = ("json", "text")
"""Loaders that only read files: they need no package here."""


def hugging_face_tokens(loader: DataLoader, tokenizer: Tokenizer, cache: Path) -> IndexedTokens:
    """The tokens of a data set: of its column ``input_ids``, or of its column ``text`` through the tokenizer."""
    if loader.handler:
        raise ConfigError(
            f"`data_loader.handler`: found {len(loader.handler)} handlers, which are the reference's own classes and "
            "not known here; store the data set with the column `text` or `input_ids` and remove `handler`"
        )
    if loader.path is None and loader.data_files is None:
        raise ConfigError("HFDataLoader needs `path` or `data_files`; write `path: json` and `data_files: my.jsonl`")
    files = _files(loader.data_files)
    if files is not None and loader.path in (None, *FILES_ALONE):
        return tokenized_files([file for one in files for file in text_files(Path(one))], tokenizer, cache)
    return _through_package(loader, tokenizer, cache)


def _files(given: Any) -> list[str] | None:
    if isinstance(given, dict):
        given = given.get("train")
    if isinstance(given, str):
        return [given]
    return given if isinstance(given, list) else None


def _through_package(loader: DataLoader, tokenizer: Tokenizer, cache: Path) -> IndexedTokens:
    try:
        datasets = import_module("datasets")
    except ImportError:
        raise ConfigError(
            f"reading the data set {loader.path!r} needs the package `datasets`: pip install 'lowtide[datasets]', "
            "or give `path: json` or `path: text` with `data_files`, which needs no package"
        ) from None
    load = getattr(datasets, loader.load_func, None)
    if loader.load_func not in ("load_dataset", "load_from_disk") or load is None:
        raise ConfigError(f"`load_func`: expected load_dataset or load_from_disk, found {loader.load_func!r}")
    split = loader.split or "train"
    if loader.load_func == "load_from_disk":
        rows = load(loader.path)
        rows = rows[split] if hasattr(rows, "keys") else rows
    else:
        rows = load(loader.path, data_files=loader.data_files, split=split)
    identity = digest_of(rows._fingerprint, split)
    if "input_ids" in rows.column_names:
        prefix = cache / f"tokens-{digest_of(identity)}"

        def build(draft: Path) -> None:
            write(prefix, (np.asarray(row["input_ids"]) for row in rows), index=draft)

        build_once(prefix.with_name(prefix.name + ".idx"), build)
        return IndexedTokens(prefix)
    if "text" not in rows.column_names:
        raise DataError(
            f"the data set {loader.path!r} has the columns {', '.join(rows.column_names)}; "
            "expected `text` or `input_ids`"
        )

    def documents() -> Iterator[list[str]]:
        for row in rows:
            yield [row["text"]]

    return tokenized(documents, tokenizer, cache, identity)
