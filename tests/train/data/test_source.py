"""From a file's ``train_dataset`` to samples; text through tokenizers."""

from __future__ import annotations

import json
import logging
import pickle
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch

from lowtide.errors import ConfigError, DataError
from lowtide.train.data import Source, batches_of, source_of
from lowtide.train.data.megatron import IndexedTokens, write
from lowtide.train.data.text import tokenized_files
from lowtide.train.data.tokenizer import ByteTokenizer, tokenizer_of
from support.schema_reading import read
from train.readers import tokens_of

WIKI = """ = Low tide =

 Twice a day the sea goes out , and what it had covered lies open for some hours .
 The word is also used for a time when there is little of something .

 = = Names = =

 Ebbe in German , 退潮 in Chinese , reflux in French .
"""


def source(loader: dict[str, Any], cache: Path, vocab_size: int = 300, seq_length: int = 8, **rest: Any) -> Source:
    settings, problems = read({"train_dataset": {"data_loader": loader, **rest}})
    assert problems.errors == []
    return source_of(settings, seq_length=seq_length, vocab_size=vocab_size, cache=cache)


def text_of(found: Source) -> str:
    tokens = found[0].tokens.tolist()[:1] + [one for index in range(len(found)) for one in found[index].labels.tolist()]
    return bytes(token for token in tokens if token < 256).decode(errors="ignore")


def test_text_is_read_byte_by_byte_without_any_package(tmp_path: Path) -> None:
    (tmp_path / "wiki.txt").write_text(WIKI, encoding="utf-8")
    found = source({"type": "TextDataLoader", "path": str(tmp_path / "wiki.txt")}, tmp_path / "cache")
    assert len(found) == len(WIKI.encode()) // 8
    assert WIKI.startswith(text_of(found)[:-3])
    assert "退潮" in text_of(found)
    again = pickle.loads(pickle.dumps(found))
    assert torch.equal(again[3].tokens, found[3].tokens)


def test_text_is_tokenized_once_and_again_when_it_changes(tmp_path: Path) -> None:
    class Counting(ByteTokenizer):
        calls = 0

        def encode(self, text: str, /) -> list[int]:
            type(self).calls += 1
            return super().encode(text)

    file = tmp_path / "a.txt"
    file.write_text("one")
    for _ in range(3):
        tokens = tokenized_files([file], Counting(), tmp_path / "cache")
    assert tokens.document(0).tolist() == [*b"one", 256]
    assert Counting.calls == 1
    file.write_text("two words")
    assert tokenized_files([file], Counting(), tmp_path / "cache").document(0).tolist() == [*b"two words", 256]
    assert Counting.calls == 2


def test_ranks_that_start_together_all_get_the_whole(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text(WIKI * 2000)
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        tasks = [pool.submit(tokens_of, [file], tmp_path / "cache") for _ in range(2)]
        found = [task.result() for task in tasks]
    assert found == [[*(WIKI * 2000).encode(), 256]] * 2
    assert sorted(one.suffix for one in (tmp_path / "cache").iterdir()) == [".bin", ".idx", ".lock"]


def test_json_lines_are_a_document_each(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "ab"}\n\n{"text": "c", "id": 3}\n')
    found = tokenized_files([tmp_path / "a.jsonl"], ByteTokenizer(), tmp_path / "cache")
    assert [found.document(number).tolist() for number in range(found.documents)] == [[97, 98, 256], [99, 256]]


@pytest.mark.parametrize(
    ("line", "message"),
    [("{", "line 2: expected one JSON object"), ('{"body": "x"}', "text below `text`, found body"), ("3", "found int")],
)
def test_a_wrong_line_is_named_and_nothing_is_cached(tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "ab"}\n' + line + "\n")
    with pytest.raises(DataError, match=message):
        tokenized_files([tmp_path / "a.jsonl"], ByteTokenizer(), tmp_path / "cache")
    assert [one.suffix for one in (tmp_path / "cache").iterdir()] == [".lock"]


def test_a_directory_is_all_its_texts(tmp_path: Path) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "b.txt").write_text("second file")
    (texts / "a.txt").write_text("first file ")
    (texts / "c.png").write_text("no text")
    found = source({"type": "TextDataLoader", "path": str(texts)}, tmp_path / "cache", seq_length=2)
    assert text_of(found).startswith("first file second file"[:20])
    with pytest.raises(DataError, match="no such file"):
        source({"type": "TextDataLoader", "path": str(tmp_path / "absent")}, tmp_path / "cache")


def word_tokenizer(path: Path) -> Path:
    """A tokenizer.json of the words in WIKI."""
    tokenizers = pytest.importorskip("tokenizers")
    words = ["<unk>", "</s>", *sorted(set(WIKI.split()))]
    inner = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>")
    )
    inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    inner.save(str(path))
    return path


def test_a_tokenizer_file_is_used(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(str(word_tokenizer(tmp_path / "tokenizer.json")))
    (tmp_path / "wiki.txt").write_text(WIKI, encoding="utf-8")
    found = tokenized_files([tmp_path / "wiki.txt"], tokenizer, tmp_path / "cache").tokens.tolist()
    assert found[-1] == tokenizer.end == 1
    assert len(found) == len(WIKI.split()) + 1
    loader = {"type": "TextDataLoader", "path": str(tmp_path / "wiki.txt")}
    with pytest.raises(ConfigError, match=f"has {tokenizer.vocab_size} tokens, the model's vocabulary 10"):
        source(loader | {"tokenizer": str(tmp_path / "tokenizer.json")}, tmp_path / "cache", vocab_size=10)


def test_a_directory_of_transformers_is_used(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    word_tokenizer(tmp_path / "words.json")
    fast = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "words.json"), eos_token="</s>")
    fast.save_pretrained(str(tmp_path / "model"))
    found, plain = tokenizer_of(str(tmp_path / "model")), tokenizer_of(str(tmp_path / "words.json"))
    assert found.encode(WIKI) == plain.encode(WIKI)
    assert (found.end, found.vocab_size) == (plain.end, plain.vocab_size)


def test_an_unknown_tokenizer_is_an_error_that_names_the_one_without_files() -> None:
    with pytest.raises(ConfigError, match=r"'absent', which is no file.*`bytes`"):
        tokenizer_of("absent")


def test_hugging_face_files_need_no_package(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps({"text": "abcdefgh"}) + "\n")
    loader = {"type": "HFDataLoader", "path": "json", "data_files": str(tmp_path / "a.json")}
    assert source(loader, tmp_path / "cache", seq_length=8)[0].tokens.tolist() == list(b"abcdefgh")
    with pytest.raises(ConfigError, match="1 handlers"):
        source(loader | {"handler": [{"type": "take"}]}, tmp_path / "cache")


def test_hugging_face_names_the_missing_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"pip install 'lowtide\[datasets\]'"):
        source({"type": "HFDataLoader", "path": "wikitext"}, tmp_path / "cache")


def test_synthetic_data_needs_nothing(tmp_path: Path) -> None:
    found = source({"type": "SyntheticDataLoader", "sizes": [20, 0, 0]}, tmp_path, vocab_size=50, repeat=2)
    assert len(found) == 40
    assert torch.equal(found[3].tokens, found[23].tokens)
    few = source({"type": "SyntheticDataLoader", "vocab_size": 3}, tmp_path, vocab_size=50)
    assert max(int(few[index].tokens.max()) for index in range(20)) == 2
    with pytest.raises(ConfigError, match="above the model's vocabulary of 50"):
        source({"type": "SyntheticDataLoader", "vocab_size": 51}, tmp_path, vocab_size=50)


def megatron(path: Path, **config: Any) -> dict[str, Any]:
    for name in ("a", "b"):
        if not (path / f"{name}.idx").exists():
            write(path / name, [[{"a": 1, "b": 2}[name]] * 50 for _ in range(10)])
    return {"type": "BlendedMegatronDatasetDataLoader", "config": {"data_path": str(path / "a"), **config}}


def test_megatron_files_are_blended_by_weight(tmp_path: Path) -> None:
    loader = megatron(tmp_path, data_path=[0.25, str(tmp_path / "a"), 0.75, str(tmp_path / "b")])
    found = source(loader | {"sizes": [400, 0, 0]}, tmp_path / "cache")
    tokens = [int(found[index].tokens[0]) for index in range(len(found))]
    assert (tokens.count(1), tokens.count(2)) == (100, 300)
    one_pass = source(loader, tmp_path / "cache")
    assert len(one_pass) == 2 * (499 // 8)


def test_megatron_takes_one_path_and_a_split(tmp_path: Path) -> None:
    assert len(source(megatron(tmp_path), tmp_path / "cache")) == 499 // 8
    assert len(source(megatron(tmp_path, split="8, 1, 1"), tmp_path / "cache")) == 399 // 8
    assert len(source(megatron(tmp_path, split="1, 0, 0", data_path=[1, str(tmp_path / "a")]), tmp_path)) == 499 // 8


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"data_path": None}, "`data_loader.config.data_path` is not set"),
        ({"data_path": [1, "a", 2]}, "each path after its weight"),
        ({"data_path": [0, "a", 1, "b"]}, "each path after its weight"),
        ({"split": "0, 1, 0"}, "something for training"),
        ({"split": "half"}, "something for training"),
        ({"seq_length": 16}, "is 16 and the model's `seq_length` 8"),
        ({"eod_mask_loss": True}, "needs `eod`"),
    ],
)
def test_what_megatron_settings_cannot_mean_is_an_error(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        source(megatron(tmp_path, **config), tmp_path / "cache")


def test_a_source_without_samples_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    loader = megatron(tmp_path, data_path=[1000, str(tmp_path / "a"), 1, str(tmp_path / "b")])
    with caplog.at_level(logging.WARNING):
        assert len(source(loader | {"sizes": [10, 0, 0]}, tmp_path / "cache")) == 10
    assert "so small a weight" in caplog.text


def test_batches_follow_the_settings(tmp_path: Path) -> None:
    loader = {"type": "SyntheticDataLoader", "sizes": [10, 0, 0]}
    document = {"train_dataset": {"data_loader": loader, "shuffle": False, "drop_remainder": False, "seed": 4}}
    settings, _ = read(document)
    found = source_of(settings, seq_length=4, vocab_size=16, cache=tmp_path)
    batches = batches_of(settings, found, batch_size=4, data_rank=0, data_ranks=1, samples_per_step=4, seed=0)
    assert batches.for_step(8)[0].sample_ids == [8, 9, 0, 1]
    batches.close()


def test_the_task_may_hold_the_data(tmp_path: Path) -> None:
    data = {"data_loader": {"type": "SyntheticDataLoader", "sizes": [10, 0, 0]}}
    settings, problems = read({"train_dataset_task": {"dataset_config": data}})
    assert problems.errors == []
    assert len(source_of(settings, seq_length=4, vocab_size=16, cache=tmp_path)) == 10


def test_files_written_by_hand_are_plain_megatron(tmp_path: Path) -> None:
    """What is cached can be given to Megatron, and back to us as such."""
    (tmp_path / "wiki.txt").write_text(WIKI, encoding="utf-8")
    tokens = tokenized_files([tmp_path / "wiki.txt"], ByteTokenizer(), tmp_path / "cache")
    assert IndexedTokens(tokens.prefix).dtype.itemsize == 2
    loader = {"type": "BlendedMegatronDatasetDataLoader", "config": {"data_path": str(tokens.prefix)}}
    assert len(source(loader, tmp_path / "cache")) == len(WIKI.encode()) // 8
