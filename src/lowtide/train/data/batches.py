"""Which samples make each step, on each rank; and reading them ahead.

[Note: positions] The samples of a run are one endless sequence. The place in it, ``consumed``, is the number of
samples that all ranks together have used: the whole state of the data. Position ``p`` is in epoch ``p //
epoch_samples`` at slot ``p % epoch_samples``, and the epoch's permutation says which sample of the source that is. A
step takes the next ``samples_per_step`` positions, whichever rank reads them, so that neither the number of ranks nor
accumulation changes what a step is made of, and a run may go on with other numbers of both. Every rank computes its own
positions from ``consumed``; ranks never speak to each other about data, and nothing here grows with their number.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from lowtide.errors import ConfigError
from lowtide.train.data.permutation import Permutation
from lowtide.train.data.sample import Source
from lowtide.train.data.source import dataset_of

if TYPE_CHECKING:
    from lowtide.config.schema import Settings

__all__ = ["Batch", "Batches", "batches_of"]


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """The samples of one micro-step on one rank."""

    tokens: Tensor
    """int64, [batch, sequence]."""
    labels: Tensor
    """int64, [batch, sequence]: the next token, or -100."""
    sample_ids: list[int]
    """The samples' numbers in the source."""


class Batches:
    """The batches of one data-parallel rank; see [Note: positions].

    >>> from lowtide.train.data.synthetic import Synthetic
    >>> batches = Batches(Synthetic(8, 4, 16), batch_size=2, data_rank=0, data_ranks=2, seed=0, samples_per_step=4)
    >>> batches.steps_per_epoch, len(batches.for_step(0)), batches.for_step(4)[0].tokens.shape
    (2, 1, torch.Size([2, 4]))
    """

    def __init__(
        self,
        source: Source,
        *,
        batch_size: int,
        data_rank: int,
        data_ranks: int,
        seed: int,
        samples_per_step: int,
        shuffle: bool = True,
        drop_remainder: bool = True,
        workers: int = 0,
        prefetch: int | None = None,
    ) -> None:
        if samples_per_step % (batch_size * data_ranks):
            raise ConfigError(
                f"a step of {samples_per_step} samples cannot be split among {data_ranks} data-parallel ranks in "
                f"micro-batches of {batch_size}; make it a multiple of {batch_size * data_ranks}"
            )
        if len(source) < samples_per_step:
            raise ConfigError(
                f"the training data has {len(source)} samples, a step takes {samples_per_step}; use more data, a "
                "shorter `seq_length`, or smaller batches"
            )
        self.samples_per_step = samples_per_step
        self.steps_per_epoch = len(source) // samples_per_step
        self.epoch_samples = self.steps_per_epoch * samples_per_step if drop_remainder else len(source)
        """Samples that an epoch uses; what is left over would be no whole step."""
        self.micro_steps = samples_per_step // (batch_size * data_ranks)
        self._batch_size, self._rank, self._ranks = batch_size, data_rank, data_ranks
        self._reader = _Reader(source, self.epoch_samples, seed if shuffle else None)
        self._workers, self._prefetch = workers, prefetch
        self._thread: ThreadPoolExecutor | None = None
        self._ahead: dict[int, Future[list[Batch]]] = {}
        self._stream: tuple[int, Iterator[Batch]] | None = None

    def for_step(self, consumed: int) -> list[Batch]:
        """This rank's micro-batches of the step after ``consumed`` samples; those of the next step are read ahead."""
        return self._from_workers(consumed) if self._workers else self._from_thread(consumed)

    def epoch(self, consumed: int) -> int:
        """The epoch of the next step, from 0."""
        return consumed // self.epoch_samples

    def state(self, consumed: int) -> dict[str, int]:
        """What a checkpoint keeps of the data."""
        return {"samples": consumed, "epoch_samples": self.epoch_samples}

    def restored(self, state: dict[str, int]) -> int:
        """``consumed`` of a checkpoint.

        Where steps have another size now, an epoch may leave out another number of samples at its end; the place in
        the epoch stays.
        """
        before = state.get("epoch_samples", self.epoch_samples)
        epochs, within = divmod(state["samples"], before)
        return epochs * self.epoch_samples + min(within, self.epoch_samples)

    def close(self) -> None:
        """Stop reading ahead."""
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)
        self._thread = self._stream = None
        self._ahead = {}

    def _positions(self, consumed: int, micro_step: int) -> range:
        """The positions of one micro-step on this rank."""
        start = consumed + (micro_step * self._ranks + self._rank) * self._batch_size
        return range(start, start + self._batch_size)

    def _read(self, consumed: int) -> list[Batch]:
        return [self._reader.batch(self._positions(consumed, micro)) for micro in range(self.micro_steps)]

    def _from_thread(self, consumed: int) -> list[Batch]:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="lowtide-data")
        ready = self._ahead.pop(consumed, None)
        batches = self._read(consumed) if ready is None else ready.result()
        following = [consumed + step * self.samples_per_step for step in range(1, self._steps_ahead + 1)]
        for place in set(self._ahead) - set(following):  # left behind by a jump
            self._ahead.pop(place).cancel()
        for place in following:
            if place not in self._ahead:
                self._ahead[place] = self._thread.submit(self._read, place)
        return batches

    @property
    def _steps_ahead(self) -> int:
        return max(1, -(-(self._prefetch or 1) // self.micro_steps))

    def _from_workers(self, consumed: int) -> list[Batch]:
        if self._stream is None or self._stream[0] != consumed:
            loader: Any = DataLoader(
                self._reader,
                batch_sampler=_Endless(self, consumed),
                collate_fn=_as_it_is,
                num_workers=self._workers,
                prefetch_factor=self._prefetch,
                multiprocessing_context="spawn",  # a fork would copy the locks of the communication threads
            )
            self._stream = consumed, iter(loader)
        batches = [next(self._stream[1]) for _ in range(self.micro_steps)]
        self._stream = consumed + self.samples_per_step, self._stream[1]
        return batches


class _Reader(Dataset[Batch]):
    """Batches by their positions."""

    def __init__(self, source: Source, epoch_samples: int, seed: int | None) -> None:
        self.source, self.epoch_samples, self.seed = source, epoch_samples, seed

    def samples(self, positions: range) -> list[int]:
        """The samples at these positions."""
        where = np.arange(positions.start, positions.stop, dtype=np.int64)
        epochs, slots = np.divmod(where, self.epoch_samples)
        if self.seed is None:
            return _plain(slots)
        result = np.empty_like(slots)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            result[here] = Permutation(len(self.source), (self.seed, int(epoch)))(slots[here])
        return _plain(result)

    def batch(self, positions: range) -> Batch:
        """The batch at these positions."""
        numbers = self.samples(positions)
        samples = [self.source[number] for number in numbers]
        tokens = torch.stack([sample.tokens for sample in samples])
        labels = torch.stack([sample.labels for sample in samples])
        return Batch(tokens, labels, numbers)

    def __getitems__(self, positions: list[int]) -> Batch:
        """What a worker of torch's DataLoader asks for."""
        return self.batch(range(positions[0], positions[-1] + 1))


class _Endless(Sampler[list[int]]):
    """The positions of all micro-steps from a place on."""

    def __init__(self, batches: Batches, consumed: int) -> None:
        self.batches, self.consumed = batches, consumed

    def __iter__(self) -> Iterator[list[int]]:
        consumed = self.consumed
        while True:
            for micro_step in range(self.batches.micro_steps):
                yield list(self.batches._positions(consumed, micro_step))
            consumed += self.batches.samples_per_step


def _plain(numbers: npt.NDArray[np.int64]) -> list[int]:
    return [int(number) for number in numbers]


def _as_it_is(batch: Any) -> Any:
    return batch


def batches_of(
    settings: Settings,
    source: Source,
    *,
    batch_size: int,
    data_rank: int,
    data_ranks: int,
    samples_per_step: int,
    seed: int,
) -> Batches:
    """Batches in the order that ``train_dataset`` asks for; ``seed`` is the run's, for data without one of its own."""
    dataset = dataset_of(settings)
    loader = dataset.data_loader
    seeds = [one for one in (dataset.seed, loader.seed, seed) if one is not None]
    shuffles = [one for one in (dataset.shuffle, loader.shuffle, True) if one is not None]
    return Batches(
        source,
        batch_size=batch_size,
        data_rank=data_rank,
        data_ranks=data_ranks,
        seed=seeds[0],
        samples_per_step=samples_per_step,
        shuffle=shuffles[0],
        drop_remainder=dataset.drop_remainder,
        workers=dataset.num_parallel_workers or 0,
        prefetch=dataset.prefetch_size,
    )
