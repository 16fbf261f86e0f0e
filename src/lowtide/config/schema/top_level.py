"""The keys outside every section, and ``trainer``."""

from typing import Annotated, Literal

from lowtide.config.schema.field import Count, Free, Index, NoEffect, Refused, Section, Seed, exactly

__all__ = ["TopLevel", "Trainer"]

WEIGHTS = "safetensors are sharded as they are loaded"
LAYERWISE = "all layers have the same learning rate"
PROFILER = "torch's profiler has one level"


class TopLevel(Section):
    """The keys outside every section."""

    seed: Seed = 0
    """The seed of weights, dropout and data; default 0."""
    output_dir: str = "./output"
    """Where logs and checkpoints are written; default ./output."""
    run_mode: Annotated[
        Literal["train", "finetune", "predict", "eval", "export"],
        Refused(
            "lowtide trains; it does not predict",
            "use `run_mode: train`",
            when=exactly("predict", "eval", "export"),
        ),
    ] = "train"
    """Either train or finetune; default train."""
    load_checkpoint: str = ""
    """The weights to start from; default: fresh ones."""
    load_ckpt_format: Annotated[
        Literal["safetensors", "ckpt"],
        Refused("MindSpore's ckpt files cannot be read", "convert the weights to safetensors", when=exactly("ckpt")),
    ] = "safetensors"
    """The format of those weights; only safetensors is supported."""
    resume_training: bool | str = False
    """Whether the optimizer and the step are loaded too, or from which checkpoint; default false."""
    auto_trans_ckpt: Annotated[bool, NoEffect(WEIGHTS, harmless=(False,))] = False
    """Whether the reference reshards weights before loading; default false."""
    src_strategy_path_or_dir: Annotated[str, NoEffect(WEIGHTS, harmless=("",))] = ""
    """How the weights were sharded; default: unset."""
    remove_redundancy: Annotated[bool, NoEffect(WEIGHTS, harmless=(False,))] = False
    """Whether the checkpoint holds each part once; default false."""
    transform_process_num: Annotated[Count, NoEffect(WEIGHTS, harmless=(1,))] = 1
    """Processes that reshard weights; default 1."""
    use_parallel: bool = False
    """Whether the run is distributed; start it with torchrun; default false."""
    use_legacy: bool = True
    """Whether operators have the older names (feed_forward), not the newer (mlp, self_attention); default true."""
    pretrained_model_dir: str = ""
    """The directory of a Hugging Face configuration; default: none."""
    micro_batch_interleave_num: Annotated[
        Count,
        NoEffect("the batch is enlarged, computing and sending do not overlap", harmless=(1,)),
    ] = 1
    """Copies of a batch whose computing and sending overlap; enlarges the batch; default 1."""
    only_save_strategy: Annotated[
        bool, Refused("layouts are not written to files", "remove `only_save_strategy` to train")
    ] = False
    """Whether the reference writes its layout and stops; only false is supported."""
    train_precision_sync: bool | None = None
    """Whether only deterministic kernels are used; default: `context.deterministic`."""
    layer_scale: Annotated[bool, Refused(LAYERWISE, "write false, or use `grouped_lr_schedule`")] = False
    """Whether each layer has its own learning rate; default false."""
    layer_decay: Annotated[float, Refused(LAYERWISE, "remove it, or use `grouped_lr_schedule`")] | None = None
    """The factor from layer to layer; default: unset."""
    lr_scale_factor: Annotated[float, NoEffect("`lr_scale` is not supported: set the learning rate itself")] | None = (
        None
    )
    """A divisor of the learning rate; default: unset."""
    lr_scale: Annotated[
        bool, Refused("the learning rate is taken as it is", "write the learning rate itself in `lr_schedule`")
    ] = False
    """Whether the divisor is used; default false."""
    print_separate_loss: bool = False
    """Whether the parts of the loss are logged too; default false."""
    profile: bool = False
    """Whether a window of steps is profiled; default false."""
    profile_start_step: Index = 1
    """The first profiled step; default 1."""
    profile_stop_step: Index = 10
    """The last profiled step; default 10."""
    init_start_profile: bool = False
    """Whether profiling begins before the first step; default false."""
    profile_memory: bool = True
    """Whether the profile holds memory; default true."""
    profile_communication: Annotated[bool, NoEffect("collectives are always profiled", harmless=(False,))] = False
    """Whether the profile holds collectives; default false."""
    profiler_level: Annotated[int | str, NoEffect(PROFILER)] | None = None
    """How much the reference profiles; default: unset."""
    monitor_config: Annotated[Free, NoEffect("norms are logged with the loss")] | None = None
    """What the reference's state monitor logs; default: unset."""
    compile: bool = False
    """Whether each layer is compiled by `torch.compile`; for data parallel and FSDP only; default false."""
    compile_backend: str = "inductor"
    """The backend of `torch.compile`: inductor, aot_eager or another that torch knows; default inductor."""
    do_eval: bool = False
    """Whether the loss over `eval_dataset` is computed while training; default false."""
    eval_step_interval: int = -1
    """Steps between two evaluations; -1 for none; default -1."""
    eval_epoch_interval: int = -1
    """Epochs between two evaluations; -1 for none; default -1."""
    eval_dataset: Free | None = None
    """The data of an evaluation, with the keys of `train_dataset`; read with `do_eval: true`; default: unset."""
    eval_dataset_task: Free | None = None
    """The data of an evaluation as its `dataset_config`, usually an alias of `eval_dataset`; default: unset."""
    pet_config: (
        Annotated[
            Free,
            Refused("adapters such as LoRA are not supported", "remove the section to train all weights"),
        ]
        | None
    ) = None
    """Settings of an adapter such as LoRA; not supported; default: none."""


class Trainer(Section):
    """The reference's trainer."""

    type: str = "CausalLanguageModelingTrainer"
    """The reference's class of the trainer; default CausalLanguageModelingTrainer."""
    model_name: str | None = None
    """The model's name, for logs; default: unset."""
