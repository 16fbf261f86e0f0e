"""How long and how a step is run: ``runner_config`` and ``runner_wrapper``."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from lowtide.config.schema.field import Count, Index, NoEffect, NotNegative, Positive, Refused, Section, exactly

__all__ = ["LossScale", "RunnerConfig", "RunnerWrapper"]


class RunnerConfig(Section):
    """The length of a run and the size of its steps."""

    unknown: ClassVar[Literal["error", "warn"]] = "error"

    epochs: Count | None = None
    """Passes over the data set; default: until the given number of steps."""
    batch_size: Count = 1
    """Samples of one data-parallel rank in one micro-step; default 1."""
    sink_mode: Annotated[bool, NoEffect("steps are issued one by one", harmless=(False,))] = False
    """Several steps in one call of the host; default false."""
    sink_size: Annotated[int, Field(ge=-1), NoEffect("steps are issued one by one", harmless=(1, -1))] = 1
    """Steps in one call of the host; default 1."""
    gradient_accumulation_steps: Annotated[int, Field(ge=1, le=1_000_000)] = 1
    """Micro-steps whose gradients are averaged before the optimizer's step; default 1."""
    stop_step: Index | None = None
    """The step after which training ends early; default: none."""
    num_classes: Annotated[Count | None, NoEffect("it belongs to classifiers")] = None
    """The number of classes of a classifier; default: unset."""


class LossScale(Section):
    """A loss scale that adapts itself to overflows."""

    type: Annotated[
        Literal["DynamicLossScaleUpdateCell", "FixedLossScaleUpdateCell", "AdaptiveLossScaleUpdateCell"],
        Refused(
            "the adaptive loss scale is not supported",
            "use `type: DynamicLossScaleUpdateCell`, or bfloat16, which needs none",
            when=exactly("AdaptiveLossScaleUpdateCell"),
        ),
    ] = "DynamicLossScaleUpdateCell"
    """How the scale changes; default DynamicLossScaleUpdateCell."""
    loss_scale_value: Positive = 65536.0
    """The scale of the first step; default 65536."""
    scale_factor: Annotated[float, Field(gt=1)] = 2.0
    """An overflow divides the scale by it, a window without overflow multiplies it; default 2."""
    scale_window: Count = 1000
    """Steps without overflow after which the scale grows; default 1000."""


class RunnerWrapper(Section):
    """One optimizer step: clipping, loss scale, skipping."""

    type: Annotated[
        str,
        NoEffect(
            "the step is chosen by the parallel settings",
            harmless=("MFTrainOneStepCell", "MFPipelineWithLossScaleCell"),
        ),
    ] = "MFTrainOneStepCell"
    """The reference's class of a step; default MFTrainOneStepCell."""
    use_clip_grad: bool = False
    """Whether gradients are clipped to `max_grad_norm`; default false."""
    max_grad_norm: Positive = 1.0
    """The largest norm of all gradients together; default 1.0."""
    scale_sense: Positive | LossScale | None = None
    """A fixed loss scale, or a mapping for one that adapts itself; default: no scaling."""
    local_norm: Annotated[bool, NoEffect("norms of single parameters are not logged", harmless=(False,))] = False
    """Whether the norm of each parameter's gradient is logged; default false."""
    calculate_per_token_loss: bool = False
    """Whether the loss is averaged over all tokens of a step instead of over micro-batches; default false."""
    use_skip_data_by_global_norm: bool = False
    """Whether a step is skipped when its gradient norm is at the threshold or above; default false."""
    global_norm_spike_threshold: NotNegative | None = None
    """The gradient norm from which a step is skipped; default: none."""
