"""How the work is sharded over devices: ``parallel`` and ``parallel_config``."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from lowtide.config.schema.field import EXACT, Count, Degree, Free, Index, ListOf, NoEffect, Refused, Section, exactly

__all__ = ["Parallel", "ParallelConfig", "ParallelOptimizerConfig", "PipelineConfig"]

SHARDED = "data is sharded by the data-parallel degree"
NO_SEARCH = "layouts are not searched for"


class ParallelConfig(Section):
    """The degrees of parallelism; their product is the number of devices."""

    unknown: ClassVar[Literal["error", "warn"]] = "error"

    data_parallel: Degree = 1
    """Replicas that share each batch; default 1."""
    model_parallel: Degree = 1
    """Devices that share each layer's weights (tensor parallel); default 1."""
    pipeline_stage: Annotated[int, Field(ge=1, le=65_536)] = 1
    """Pipeline stages; recompute lists count by stage, even on one device; default 1."""
    context_parallel: Degree = 1
    """Devices that share each sequence; default 1."""
    expert_parallel: Degree = 1
    """Devices that share the experts of each layer; default 1."""
    micro_batch_num: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    """Micro-batches of a pipeline step, at least as many as stages; default: as many as stages."""
    use_seq_parallel: bool = False
    """Whether tensor parallel also shards norms and dropout by sequence; default false."""
    gradient_aggregation_group: Annotated[Count, NoEffect("torch groups gradients itself", harmless=(4,))] = 4
    """Gradients sent in one collective; default 4."""
    vocab_emb_dp: Annotated[bool, NoEffect("the embedding follows the device mesh")] = True
    """Whether the embedding is sharded by data parallel only; default true."""
    mem_coeff: Annotated[float, NoEffect(NO_SEARCH)] = 0.1
    """The weight of memory in the reference's layout search; default 0.1."""
    optimizer_shard: Annotated[bool | None, NoEffect("use `parallel.enable_parallel_optimizer`")] = None
    """A former name for sharded optimizer states; default: unset."""
    context_parallel_algo: Literal["colossalai_cp", "ulysses_cp", "hybrid_cp"] = "colossalai_cp"
    """How sequences are shared under context parallel; the runner has ulysses_cp and says so; default colossalai_cp."""
    ulysses_degree_in_cp: Degree = 1
    """Devices of context parallel that exchange heads, with hybrid_cp; divides context_parallel; default 1."""
    seq_split_num: Annotated[
        Count,
        Refused(
            "splitting sequences over pipeline steps (seqpipe) is not supported",
            "remove `seq_split_num` and raise `micro_batch_num`",
            when=lambda value: value > 1,
        ),
    ] = 1
    """Parts of a sequence in the seqpipe schedule; only 1 is supported; default 1."""


class ParallelOptimizerConfig(Section):
    """How optimizer states are sharded."""

    optimizer_weight_shard_size: Annotated[int, Field(ge=-1, le=1_000_000)] = -1
    """Devices that share optimizer states; -1 for all of data parallel; default -1."""
    gradient_accumulation_shard: bool = False
    """Whether accumulated gradients are sharded too; default false."""
    parallel_optimizer_threshold: Annotated[Index, NoEffect("parameters of every size are sharded", harmless=(64,))] = (
        64
    )
    """Parameters below this size in KB stay whole in the reference; default 64."""


class PipelineConfig(Section):
    """The pipeline schedule."""

    pipeline_interleave: bool | None = None
    """Whether `pp_interleave_num` counts; false makes it 1; default: unset."""
    pipeline_scheduler: Annotated[
        Literal["gpipe", "1f1b", "seqpipe", "zero_bubble_v"],
        Refused(
            "the schedule seqpipe is not supported",
            "use 1f1b, gpipe or zero_bubble_v",
            when=exactly("seqpipe"),
        ),
    ] = "1f1b"
    """The order of micro-batches: gpipe, 1f1b or zero_bubble_v, which folds the second chunk back; default 1f1b."""


class Parallel(Section):
    """The kind of parallelism and of sharding."""

    parallel_mode: Annotated[
        Literal[0, 1, 2, 3, "stand_alone", "data_parallel", "semi_auto_parallel", "auto_parallel", "hybrid_parallel"],
        EXACT,
        Refused(
            "layouts are never searched for here",
            "use 1 (semi-automatic) with the degrees in `parallel_config`, or 0 (data parallel)",
            when=exactly(2, 3, "auto_parallel", "hybrid_parallel"),
        ),
    ] = 1
    """0 data parallel, 1 semi-automatic by the degrees given; 2 and 3 are refused; default 1."""
    enable_parallel_optimizer: bool = False
    """Whether optimizer states (and parameters) are sharded over data parallel; default false."""
    parallel_optimizer_config: ParallelOptimizerConfig = Field(default_factory=ParallelOptimizerConfig.model_construct)
    """How optimizer states are sharded."""
    gradients_mean: bool = True
    """Whether gradients are averaged over data parallel instead of summed; default true."""
    full_batch: Annotated[bool, NoEffect(SHARDED)] | None = None
    """Whether each device of the reference reads the whole batch; default: unset."""
    dataset_strategy: Annotated[str | ListOf[Any], NoEffect(SHARDED)] | None = None
    """How the reference shards each input; default: unset."""
    enable_alltoall: Annotated[bool, NoEffect("the collective is chosen by the operator")] | None = None
    """Whether the reference may use all-to-all; default: unset."""
    search_mode: Annotated[str, NoEffect(NO_SEARCH)] | None = None
    """How the reference searches layouts; default: unset."""
    strategy_ckpt_config: Annotated[Free, NoEffect("layouts are not written to files")] | None = None
    """Where the reference writes its layout; default: unset."""
    strategy_ckpt_save_file: Annotated[str, NoEffect("layouts are not written to files")] | None = None
    """The file the reference writes its layout to; default: unset."""
    loss_repeated_mean: Annotated[bool, NoEffect("the loss is averaged once")] | None = None
    """Whether the reference averages a repeated loss; default: unset."""
    pipeline_config: PipelineConfig = Field(default_factory=PipelineConfig.model_construct)
    """The pipeline schedule."""
