"""From the settings of a file to its source of samples."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from lowtide.errors import ConfigError
from lowtide.train.data.blend import Blend, Repeated, shares
from lowtide.train.data.documents import Documents
from lowtide.train.data.huggingface import hugging_face_tokens
from lowtide.train.data.megatron import IndexedTokens
from lowtide.train.data.sample import Source
from lowtide.train.data.synthetic import Synthetic
from lowtide.train.data.text import text_files, tokenized_files
from lowtide.train.data.tokenizer import BYTES, Tokenizer, tokenizer_of

if TYPE_CHECKING:
    from lowtide.config.schema import Settings
    from lowtide.config.schema.dataset import BlendConfig, DataLoader, TrainDataset

__all__ = ["SYNTHETIC_SAMPLES", "dataset_of", "source_of"]

logger = logging.getLogger(__name__)

SYNTHETIC_SAMPLES = 100_000
"""Samples of one pass over synthetic data where `sizes` does not say."""


def source_of(settings: Settings, *, seq_length: int, vocab_size: int, cache: Path) -> Source:
    """The samples that ``train_dataset`` asks for.

    ``cache`` is a directory for what is made once, tokens of text and the order of documents; ranks may share it.
    """
    dataset = dataset_of(settings)
    loader = dataset.data_loader
    samples = _samples(loader)
    if loader.type == "BlendedMegatronDatasetDataLoader":
        source = _megatron(loader.config, samples, seq_length=seq_length, vocab_size=vocab_size, cache=cache)
    elif loader.type == "SyntheticDataLoader":
        seed = _seed(settings, dataset)
        if loader.vocab_size is not None and loader.vocab_size > vocab_size:
            raise ConfigError(
                f"`data_loader.vocab_size` is {loader.vocab_size}, above the model's vocabulary of {vocab_size}; "
                "make it smaller, or leave it out"
            )
        source = Synthetic(samples or SYNTHETIC_SAMPLES, seq_length, loader.vocab_size or vocab_size, seed)
    else:
        tokenizer = _tokenizer(settings, loader, vocab_size)
        if loader.type == "HFDataLoader":
            files = hugging_face_tokens(loader, tokenizer, cache)
        elif loader.path is None:
            raise ConfigError("TextDataLoader needs `path`: a text file, JSON lines, or a directory of them")
        else:
            files = tokenized_files(text_files(Path(loader.path)), tokenizer, cache)
        # Samples are shuffled as batches are made; a text's own order inside and between files stays as it is.
        source = Documents(files, seq_length, vocab_size, samples=samples, shuffle=False, cache=cache)
    return source if dataset.repeat == 1 else Repeated(source, dataset.repeat)


def dataset_of(settings: Settings) -> TrainDataset:
    """The section that describes the training data."""
    task = settings.train_dataset_task.dataset_config
    return task if task is not None and "train_dataset" not in settings.present else settings.train_dataset


def _seed(settings: Settings, dataset: TrainDataset) -> int:
    for seed in (dataset.data_loader.seed, dataset.seed):
        if seed is not None:
            return seed
    return settings.top_level.seed if settings.layout == "graph" else settings.training.seed


def _samples(loader: DataLoader) -> int | None:
    """Samples for training, of ``sizes``; none and 0 mean one pass."""
    first = loader.sizes[0] if loader.sizes else None
    if first is not None and first < 0:
        raise ConfigError(f"`sizes` must be whole numbers from 0, found {first}; write [1000, 0, 0]")
    return first or None


def _megatron(config: BlendConfig, samples: int | None, *, seq_length: int, vocab_size: int, cache: Path) -> Source:
    if config.seq_length is not None and config.seq_length != seq_length:
        raise ConfigError(
            f"`data_loader.config.seq_length` is {config.seq_length} and the model's `seq_length` {seq_length}; "
            "make them equal, or leave out the data's"
        )
    if config.eod_mask_loss and config.eod is None:
        raise ConfigError("`eod_mask_loss` needs `eod`, the token between documents; write `eod: 0`, or what it is")
    weights, paths = _weighted(config)
    share = _share(config.split)

    def documents(path: str, count: int | None) -> Documents:
        return Documents(
            IndexedTokens(path),
            seq_length,
            vocab_size,
            seed=config.seed,
            share=share,
            samples=count,
            eod=config.eod if config.eod_mask_loss else None,
            pad=config.pad,
            cache=cache,
        )

    if len(paths) == 1:
        return documents(paths[0], samples)
    total = samples or sum(len(documents(path, None)) for path in paths)
    counts = shares(total, weights)
    empty = [path for path, count in zip(paths, counts, strict=True) if not count]
    for path in empty:
        logger.warning("%s has so small a weight that none of %d samples is taken from it", path, total)
    parts = [documents(path, count) for path, count in zip(paths, counts, strict=True) if count]
    return Blend(tuple(parts), config.seed)


def _weighted(config: BlendConfig) -> tuple[list[float], list[str]]:
    given = config.data_path
    if isinstance(given, str):
        return [1.0], [given]
    if not given:
        raise ConfigError("`data_loader.config.data_path` is not set; write a path, or [weight, path, weight, path]")
    if all(isinstance(one, str) for one in given) and not any(_is_number(one) for one in given):
        return [1.0] * len(given), [str(one) for one in given]
    weights, paths = given[::2], given[1::2]
    if len(weights) != len(paths) or not all(_is_number(one) and float(one) > 0 for one in weights):
        raise ConfigError(
            f"`data_path` must be a path, or each path after its weight above 0: [0.3, a, 0.7, b]; found {given}"
        )
    return [float(one) for one in weights], [str(one) for one in paths]


def _is_number(value: str | int | float) -> bool:
    try:
        float(value)
    except ValueError:
        return False
    return True


def _share(split: str | None) -> float:
    """The part of the documents that is for training."""
    if split is None:
        return 1.0
    try:
        parts = [float(one) for one in split.replace("/", ",").split(",")]
    except ValueError:
        parts = []
    if not parts or len(parts) > 3 or min(parts) < 0 or parts[0] <= 0:
        raise ConfigError(
            f'`split` must be the shares of training, validation and test, such as "949, 50, 1", with something for '
            f"training; found {split!r}"
        )
    return parts[0] / sum(parts)


def _tokenizer(settings: Settings, loader: DataLoader, vocab_size: int) -> Tokenizer:
    name = loader.tokenizer or _processors(settings) or settings.top_level.pretrained_model_dir or BYTES
    tokenizer = tokenizer_of(name)
    if tokenizer.vocab_size > vocab_size:
        raise ConfigError(
            f"the tokenizer {name!r} has {tokenizer.vocab_size} tokens, the model's vocabulary {vocab_size}; "
            f"set the model's `vocab_size` to {tokenizer.vocab_size} or more"
        )
    return tokenizer


def _processors(settings: Settings) -> str | None:
    """The tokenizer's file of the section ``processor``."""
    tokenizer = settings.processor.tokenizer or {}
    for key in ("tokenizer_file", "pretrained_model_dir", "tokenizer_dir"):
        if isinstance(tokenizer.get(key), str):
            return str(tokenizer[key])
    return None
