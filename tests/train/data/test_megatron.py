"""Megatron's token files, byte by byte, and the samples cut from them."""

from __future__ import annotations

import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lowtide.errors import DataError
from lowtide.train.data.blend import Blend, shares
from lowtide.train.data.documents import Documents
from lowtide.train.data.megatron import IndexedTokens, write

DOCUMENTS = [[1, 2, 3], [], [4, 5], [6, 7, 8, 9, 10]]


def test_the_index_is_written_as_megatron_reads_it(tmp_path: Path) -> None:
    write(tmp_path / "data", DOCUMENTS, dtype=np.uint16)
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 4, 5)
    index += struct.pack("<4i", 3, 0, 2, 5) + struct.pack("<4q", 0, 6, 6, 10) + struct.pack("<5q", 0, 1, 2, 3, 4)
    assert (tmp_path / "data.idx").read_bytes() == index
    assert (tmp_path / "data.bin").read_bytes() == struct.pack("<10H", *range(1, 11))
    assert sorted(one.name for one in tmp_path.iterdir()) == ["data.bin", "data.idx"]


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.uint16, np.int32, np.int64])
def test_documents_come_back(tmp_path: Path, dtype: Any) -> None:
    write(tmp_path / "data", DOCUMENTS, dtype=dtype)
    for files in (IndexedTokens(tmp_path / "data"), pickle.loads(pickle.dumps(IndexedTokens(tmp_path / "data.idx")))):
        assert [files.document(number).tolist() for number in range(files.documents)] == DOCUMENTS
        assert files.dtype == dtype


def test_sequences_of_one_document_stay_together(tmp_path: Path) -> None:
    write(tmp_path / "data", [iter([[1, 2], [3]]), [4]])
    files = IndexedTokens(tmp_path / "data")
    assert [files.document(number).tolist() for number in range(files.documents)] == [[1, 2, 3], [4]]


def test_a_file_that_was_cut_short_or_is_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"absent\.idx: cannot be read"):
        IndexedTokens(tmp_path / "absent").documents  # noqa: B018
    write(tmp_path / "data", DOCUMENTS)
    whole = (tmp_path / "data.bin").read_bytes()
    (tmp_path / "data.bin").write_bytes(whole[:-4])
    with pytest.raises(DataError, match="names 40 bytes, found 36"):
        IndexedTokens(tmp_path / "data").documents  # noqa: B018
    index = (tmp_path / "data.idx").read_bytes()
    for wrong, message in ((index[:-8], "cut short"), (b"x" * 100, "MMIDIDX"), (b"", "MMIDIDX")):
        (tmp_path / "data.idx").write_bytes(wrong)
        with pytest.raises(DataError, match=message):
            IndexedTokens(tmp_path / "data").documents  # noqa: B018


def test_a_token_that_its_type_cannot_hold_is_refused_and_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="0 to 65535"):
        write(tmp_path / "data", [[1], [70_000]], dtype=np.uint16)
    assert list(tmp_path.iterdir()) == []


def row_of(source: Documents) -> list[int]:
    """The tokens of all samples in a row, where samples are not shuffled."""
    result = [int(source[0].tokens[0])]
    for index in range(len(source)):
        assert int(source[index].tokens[0]) == result[-1]
        result += source[index].labels.tolist()
    return result


@given(st.lists(st.integers(0, 12), min_size=1, max_size=12), st.integers(1, 9))
def test_samples_are_cut_across_documents_without_gap(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], seq_length: int
) -> None:
    if sum(lengths) <= seq_length:
        return
    path = tmp_path_factory.mktemp("cut") / "data"
    ends = np.cumsum(lengths)
    write(path, [list(range(end - length, end)) for end, length in zip(ends, lengths, strict=True)])
    source = Documents(IndexedTokens(path), seq_length, 1000, shuffle=False)
    assert len(source) == (sum(lengths) - 1) // seq_length
    assert row_of(source) == list(range(len(source) * seq_length + 1))


def test_each_pass_has_all_documents_in_an_order_of_its_own(tmp_path: Path) -> None:
    write(tmp_path / "data", [[number * 10 + k for k in range(5)] for number in range(20)])
    source = Documents(IndexedTokens(tmp_path / "data"), 10, 1000, samples=20, cache=tmp_path / "cache")
    samples = {source._order(np.array([index]))[0]: source[index] for index in range(20)}
    row = torch.cat([samples[index].tokens for index in range(20)]).tolist()
    passes = [[token // 10 for token in row[start : start + 100 : 5]] for start in (0, 100)]
    for documents in passes:
        assert sorted(documents) == list(range(20))
    assert passes[0] != passes[1] != list(range(20))
    again = pickle.loads(pickle.dumps(source))
    in_memory = Documents(IndexedTokens(tmp_path / "data"), 10, 1000, samples=20)
    for index in range(20):
        assert torch.equal(source[index].tokens, again[index].tokens)
        assert torch.equal(source[index].tokens, in_memory[index].tokens)


def test_the_split_takes_the_first_documents(tmp_path: Path) -> None:
    write(tmp_path / "data", [[number] * 4 for number in range(10)])
    source = Documents(IndexedTokens(tmp_path / "data"), 3, 10, share=0.7)
    found = {token for index in range(len(source)) for token in source[index].tokens.tolist()}
    assert found == set(range(7))
    assert len(source) == 9
    with pytest.raises(DataError, match="0 of 10 documents have 0 tokens"):
        Documents(IndexedTokens(tmp_path / "data"), 3, 10, share=0.01)


def test_the_token_between_documents_and_the_filler_are_left_out_of_the_loss(tmp_path: Path) -> None:
    write(tmp_path / "data", [[5, 6, 0, 7, 9, 9]])
    sample = Documents(IndexedTokens(tmp_path / "data"), 5, 10, shuffle=False, eod=0, pad=9)[0]
    assert sample.tokens.tolist() == [5, 6, 0, 7, 9]
    assert sample.labels.tolist() == [6, 0, -100, -100, -100]


def test_tokens_above_the_vocabulary_are_an_error_before_the_embedding_sees_them(tmp_path: Path) -> None:
    write(tmp_path / "data", [[5, 6, 99]])
    with pytest.raises(DataError, match=r"from 5 to 99, the model's vocabulary has 50"):
        Documents(IndexedTokens(tmp_path / "data"), 2, 50)[0]


@given(st.integers(1, 1000), st.lists(st.floats(0.01, 100), min_size=1, max_size=6))
def test_shares_add_up_and_follow_the_weights(total: int, weights: list[float]) -> None:
    counts = shares(total, weights)
    assert sum(counts) == total
    assert all(abs(count - total * w / sum(weights)) < 1 for count, w in zip(counts, weights, strict=True))


def test_a_blend_takes_from_each_by_weight_and_mixes(tmp_path: Path) -> None:
    for name, token in (("a", 1), ("b", 2)):
        write(tmp_path / name, [[token] * 100])
    parts = [Documents(IndexedTokens(tmp_path / name), 4, 10, samples=count) for name, count in (("a", 75), ("b", 25))]
    blend = Blend(tuple(parts))
    tokens = [int(blend[index].tokens[0]) for index in range(len(blend))]
    assert (tokens.count(1), tokens.count(2)) == (75, 25)
    for quarter in range(4):
        assert 1 <= tokens[quarter * 25 : quarter * 25 + 25].count(2) <= 12
