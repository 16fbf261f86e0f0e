"""The optimizer and its learning rate: ``optimizer``, ``lr_schedule`` (``lr_scheduler``), ``grouped_lr_schedule``."""

from typing import Annotated, Any, Literal

from pydantic import Field

from lowtide.config.schema.field import Count, Fraction, Index, ListOf, NotNegative, Positive, Refused, Section

__all__ = ["GroupedLrSchedule", "LrSchedule", "Optimizer"]

MUON = Refused(
    "the optimizer Muon is not supported",
    "use `type: AdamW` and remove Muon's keys",
    when=lambda value: value is not None,
)


class Optimizer(Section):
    """The optimizer: AdamW with decoupled weight decay."""

    type: Annotated[
        str,
        Refused(
            "only AdamW is supported",
            "use AdamW (FusedAdamW and PmaAdamW are read as AdamW)",
            when=lambda value: value not in ("AdamW", "FusedAdamW", "PmaAdamW"),
        ),
    ] = "AdamW"
    """AdamW; FusedAdamW and PmaAdamW are read as AdamW; default AdamW."""
    betas: ListOf[Fraction] | None = None
    """The two decay rates of the moments; default 0.9 and 0.999."""
    eps: Positive = 1e-8
    """Added to the root of the second moment; default 1e-8."""
    weight_decay: NotNegative = 0.0
    """The weight decay, apart from the gradient; default 0."""
    learning_rate: NotNegative | None = None
    """The learning rate where no schedule is given; default: the schedule's."""
    swap: bool = False
    """Whether the optimizer's states live on the host; default false."""
    momentum: Annotated[float, MUON] | None = None
    """A key of Muon; not supported; default: unset."""
    nesterov: Annotated[bool, MUON] | None = None
    """A key of Muon; not supported; default: unset."""
    matched_adamw_rms: Annotated[float, MUON] | None = None
    """A key of Muon; not supported; default: unset."""
    ns_steps: Annotated[int, MUON] | None = None
    """A key of Muon; not supported; default: unset."""
    ns_coefficients: Annotated[ListOf[Any], MUON] | None = None
    """A key of Muon; not supported; default: unset."""
    qk_clip_enabled: Annotated[bool, MUON] | None = None
    """A key of Muon; not supported; default: unset."""
    qk_clip_threshold: Annotated[float, MUON] | None = None
    """A key of Muon; not supported; default: unset."""


class LrSchedule(Section):
    """The learning rate over the steps: a warm-up, then a curve."""

    type: Literal[
        "ConstantWarmUpLR",
        "LinearWithWarmUpLR",
        "CosineWithWarmUpLR",
        "CosineWithRestartsAndWarmUpLR",
        "PolynomialWithWarmUpLR",
        "WarmUpStableDecayLR",
        "ConstantWithCoolDownLR",
        "CosineAnnealingLR",
        "CosineAnnealingWarmRestarts",
        "CosineAnnealingWarmRestartsLR",
    ] = "ConstantWarmUpLR"
    """The curve after the warm-up; default ConstantWarmUpLR."""
    learning_rate: NotNegative | None = None
    """The rate at the end of the warm-up; default: the optimizer's."""
    base_lr: NotNegative | None = None
    """The first rate of CosineAnnealingLR; default: `learning_rate`."""
    lr_end: NotNegative | None = None
    """The rate at the end; default 0, or 1e-7 with PolynomialWithWarmUpLR and WarmUpStableDecayLR."""
    lr_end1: NotNegative = 0.0
    """The rate after the decay of ConstantWithCoolDownLR; default 0."""
    lr_end2: NotNegative | None = None
    """The last rate of ConstantWithCoolDownLR; default: `lr_end1`."""
    keep_steps: Index = 0
    """Steps at the full rate after the warm-up of ConstantWithCoolDownLR; default 0."""
    final_steps: Index = 0
    """Steps at `lr_end1` of ConstantWithCoolDownLR; default 0."""
    eta_min: NotNegative = 0.0
    """The lowest rate of CosineAnnealingLR; default 0."""
    warmup_steps: Index | None = None
    """Steps of the warm-up; default 0."""
    warmup_ratio: Fraction | None = None
    """The share of all steps that warms up; default: `warmup_steps`."""
    warmup_epochs: Index | None = None
    """Epochs of the warm-up; asks for `warmup_ratio` too; default: unset."""
    warmup_lr_init: NotNegative = 0.0
    """The rate of the first step; default 0."""
    total_steps: Annotated[int, Field(ge=-1)] | None = None
    """Steps of the whole curve; -1 or unset for all training steps."""
    decay_steps: Index | None = None
    """Steps of the decay; default: all after the warm-up."""
    decay_ratio: Fraction | None = None
    """The share of all steps that decays; default: unset."""
    decay_start_steps: Index | None = None
    """The step at which the decay begins; default: unset."""
    decay_start_ratio: Fraction | None = None
    """The share of all steps after which the decay begins; default: unset."""
    num_cycles: Positive | None = None
    """Cosine waves of the curve; default 0.5, or 1 with restarts."""
    power: Positive = 1.0
    """The exponent of the polynomial; default 1."""
    t_max: Count | None = None
    """Steps from the highest to the lowest rate of CosineAnnealingLR; default: unset."""
    t_0: Count | None = None
    """Steps until the first restart of CosineAnnealingWarmRestarts; default: unset."""
    t_mult: Count = 1
    """The growth of that length with each restart; default 1."""
    params: ListOf[str] | None = None
    """Regular expressions of the parameters it is for, inside `grouped_lr_schedule`; default: all."""


class GroupedLrSchedule(Section):
    """Schedules for groups of parameters."""

    default: LrSchedule | None = None
    """The schedule of parameters in no group; default: `lr_schedule`."""
    grouped: ListOf[LrSchedule] | None = None
    """One schedule for each group, with `params`; default: no groups."""
