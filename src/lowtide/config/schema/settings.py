"""All sections of a file; a section the file does not have is its defaults, made on first use."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast

from lowtide.config.schema.catalogue import Layout
from lowtide.config.schema.field import Section

if TYPE_CHECKING:
    from lowtide.config.schema.adapt import Adapt
    from lowtide.config.schema.callbacks import Callback
    from lowtide.config.schema.context import Context
    from lowtide.config.schema.dataset import Processor, TrainDataset, TrainDatasetTask
    from lowtide.config.schema.memory import RecomputeConfig, SwapConfig
    from lowtide.config.schema.model import ModelConfig, ModelSection
    from lowtide.config.schema.moe import MoEConfig
    from lowtide.config.schema.optimizer import GroupedLrSchedule, LrSchedule, Optimizer
    from lowtide.config.schema.parallel import Parallel, ParallelConfig
    from lowtide.config.schema.pynative import Checkpoint, Parallelism, Recompute, RecomputeComm, Swap, Training
    from lowtide.config.schema.runner import RunnerConfig, RunnerWrapper
    from lowtide.config.schema.top_level import TopLevel, Trainer

__all__ = ["Settings"]

AnySection = TypeVar("AnySection", bound=Section)


class Settings:
    """Every section of a file; a section the file does not have is its defaults, made on first use."""

    def __init__(
        self,
        layout: Layout = "graph",
        sections: dict[str, Section] | None = None,
        callbacks: tuple[Callback, ...] = (),
        written: dict[str, dict[str, Any]] | None = None,
    ) -> None:
        self.layout: Layout
        """How the file is laid out: MindSpore Transformers' graph mode, or its form of 2026."""
        self.callbacks: tuple[Callback, ...]
        """What happens around a step, in the file's order."""
        self._sections: dict[str, Section]
        self._written: dict[str, dict[str, Any]]
        self.__dict__.update(
            layout=layout, callbacks=callbacks, _sections=dict(sections or {}), _written=dict(written or {})
        )

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError("Settings are frozen; use with_section(name, section)")

    def with_section(self, name: str, section: Section) -> Settings:
        """The same settings with one section changed."""
        return Settings(self.layout, {**self._sections, name: section}, self.callbacks, self._written)

    @property
    def present(self) -> frozenset[str]:
        """The sections that the file has."""
        return frozenset(self._sections) | frozenset(self._written)

    def _get(self, name: str, section: type[AnySection]) -> AnySection:
        if name in self._sections:
            return cast(AnySection, self._sections[name])
        return section.model_construct(**self._written.get(name, {}))

    @cached_property
    def top_level(self) -> TopLevel:
        """The keys outside every section."""
        from lowtide.config.schema.top_level import TopLevel

        return self._get("top_level", TopLevel)

    @cached_property
    def trainer(self) -> Trainer:
        """The reference's trainer."""
        from lowtide.config.schema.top_level import Trainer

        return self._get("trainer", Trainer)

    @cached_property
    def runner_config(self) -> RunnerConfig:
        """The length of a run and the size of its steps."""
        from lowtide.config.schema.runner import RunnerConfig

        return self._get("runner_config", RunnerConfig)

    @cached_property
    def runner_wrapper(self) -> RunnerWrapper:
        """One optimizer step: clipping, loss scale, skipping."""
        from lowtide.config.schema.runner import RunnerWrapper

        return self._get("runner_wrapper", RunnerWrapper)

    @cached_property
    def parallel(self) -> Parallel:
        """The kind of parallelism and of sharding."""
        from lowtide.config.schema.parallel import Parallel

        return self._get("parallel", Parallel)

    @cached_property
    def parallel_config(self) -> ParallelConfig:
        """The degrees of parallelism."""
        from lowtide.config.schema.parallel import ParallelConfig

        return self._get("parallel_config", ParallelConfig)

    @cached_property
    def context(self) -> Context:
        """The device and its memory."""
        from lowtide.config.schema.context import Context

        return self._get("context", Context)

    @cached_property
    def model_section(self) -> ModelSection:
        """The graph layout's `model`, with the reference's class of the model."""
        from lowtide.config.schema.model import ModelSection

        return self._get("model_section", ModelSection)

    @cached_property
    def model(self) -> ModelConfig:
        """The model: `model.model_config`, a top-level `model_config`, or the flat `model` of 2026."""
        from lowtide.config.schema.model import ModelConfig

        return self._get("model", ModelConfig)

    @cached_property
    def moe_config(self) -> MoEConfig:
        """Experts, their router and its losses."""
        from lowtide.config.schema.moe import MoEConfig

        return self._get("moe_config", MoEConfig)

    @cached_property
    def optimizer(self) -> Optimizer:
        """The optimizer."""
        from lowtide.config.schema.optimizer import Optimizer

        return self._get("optimizer", Optimizer)

    @cached_property
    def lr_schedule(self) -> LrSchedule:
        """The learning rate over the steps: `lr_schedule`, or `lr_scheduler` of 2026."""
        from lowtide.config.schema.optimizer import LrSchedule

        name = "lr_schedule" if self.layout == "graph" else "lr_scheduler"
        return self._get(name, LrSchedule)

    @cached_property
    def grouped_lr_schedule(self) -> GroupedLrSchedule:
        """Learning rates for groups of parameters."""
        from lowtide.config.schema.optimizer import GroupedLrSchedule

        return self._get("grouped_lr_schedule", GroupedLrSchedule)

    @cached_property
    def train_dataset(self) -> TrainDataset:
        """The training data."""
        from lowtide.config.schema.dataset import TrainDataset

        return self._get("train_dataset", TrainDataset)

    @cached_property
    def eval_dataset(self) -> TrainDataset:
        """The data of an evaluation; the file's where `do_eval` is true."""
        from lowtide.config.schema.dataset import TrainDataset

        return self._get("eval_dataset", TrainDataset)

    @cached_property
    def train_dataset_task(self) -> TrainDatasetTask:
        """What the data is used for."""
        from lowtide.config.schema.dataset import TrainDatasetTask

        return self._get("train_dataset_task", TrainDatasetTask)

    @cached_property
    def processor(self) -> Processor:
        """The tokenizer."""
        from lowtide.config.schema.dataset import Processor

        return self._get("processor", Processor)

    @cached_property
    def recompute_config(self) -> RecomputeConfig:
        """What is computed again in backward; values as written."""
        from lowtide.config.schema.memory import RecomputeConfig

        return self._get("recompute_config", RecomputeConfig)

    @cached_property
    def swap_config(self) -> SwapConfig:
        """What waits on the host between forward and backward; values as written."""
        from lowtide.config.schema.memory import SwapConfig

        return self._get("swap_config", SwapConfig)

    @cached_property
    def recompute(self) -> Recompute:
        """What is computed again in backward (2026); values as written."""
        from lowtide.config.schema.pynative import Recompute

        return self._get("recompute", Recompute)

    @cached_property
    def recompute_comm(self) -> RecomputeComm:
        """Collectives re-issued in backward (2026); values as written."""
        from lowtide.config.schema.pynative import RecomputeComm

        return self._get("recompute_comm", RecomputeComm)

    @cached_property
    def swap(self) -> Swap:
        """What waits on the host between forward and backward (2026); values as written."""
        from lowtide.config.schema.pynative import Swap

        return self._get("swap", Swap)

    @cached_property
    def adapt(self) -> Adapt:
        """How the run adapts itself to its memory."""
        from lowtide.config.schema.adapt import Adapt

        return self._get("adapt", Adapt)

    @cached_property
    def training(self) -> Training:
        """The length of a run and the size of its steps (2026)."""
        from lowtide.config.schema.pynative import Training

        return self._get("training", Training)

    @cached_property
    def parallelism(self) -> Parallelism:
        """The degrees of parallelism (2026)."""
        from lowtide.config.schema.pynative import Parallelism

        return self._get("parallelism", Parallelism)

    @cached_property
    def checkpoint(self) -> Checkpoint:
        """Saving and loading (2026)."""
        from lowtide.config.schema.pynative import Checkpoint

        return self._get("checkpoint", Checkpoint)
