"""Data sets of the package ``datasets``, where it is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lowtide.errors import ConfigError, DataError
from lowtide.train.data.huggingface import hugging_face_tokens
from lowtide.train.data.tokenizer import ByteTokenizer
from support.schema_reading import read

datasets = pytest.importorskip("datasets")


def tokens(path: Path, columns: dict[str, list[Any]], **loader: Any) -> list[list[int]]:
    datasets.DatasetDict(train=datasets.Dataset.from_dict(columns)).save_to_disk(str(path / "stored"))
    return loaded(path, {"load_func": "load_from_disk", "path": str(path / "stored"), **loader})


def loaded(path: Path, loader: dict[str, Any]) -> list[list[int]]:
    settings, problems = read({"train_dataset": {"data_loader": {"type": "HFDataLoader", **loader}}})
    assert problems.errors == []
    files = hugging_face_tokens(settings.train_dataset.data_loader, ByteTokenizer(), path / "cache")
    return [files.document(number).tolist() for number in range(files.documents)]


def test_text_goes_through_the_tokenizer(tmp_path: Path) -> None:
    assert tokens(tmp_path, {"text": ["ab", "c"], "id": [1, 2]}) == [[97, 98, 256], [99, 256]]


def test_tokens_are_taken_as_they_are(tmp_path: Path) -> None:
    assert tokens(tmp_path, {"input_ids": [[1, 2], [70_000]]}) == [[1, 2], [70_000]]


def test_a_file_is_loaded_by_the_package_where_it_must(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text\nab\n")
    assert loaded(tmp_path, {"path": "csv", "data_files": str(tmp_path / "a.csv")}) == [[97, 98, 256]]


def test_other_columns_and_functions_are_errors(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has the columns body; expected `text` or `input_ids`"):
        tokens(tmp_path, {"body": ["a"]})
    with pytest.raises(ConfigError, match="expected load_dataset or load_from_disk, found 'concatenate_datasets'"):
        loaded(tmp_path, {"load_func": "concatenate_datasets", "path": "x"})
