"""The data: ``train_dataset``, ``train_dataset_task``, ``processor``."""

from typing import Annotated, ClassVar

from pydantic import Field

from lowtide.config.schema.field import Count, Free, Index, ListOf, NoEffect, Refused, Section, Seed

__all__ = ["BlendConfig", "DataLoader", "Processor", "TrainDataset", "TrainDatasetTask"]

LOADERS = ("BlendedMegatronDatasetDataLoader", "HFDataLoader", "TextDataLoader", "SyntheticDataLoader")
MASKS = "masks are made by the attention kernel"


class BlendConfig(Section):
    """Megatron data files and how samples are cut from them."""

    data_path: ListOf[str | int | float] | str | None = None
    """Paths without .bin and .idx, each after its weight; default: none."""
    seq_length: Count | None = None
    """Tokens of a sample; default: the model's."""
    split: str | None = None
    """Shares of training, validation and test, such as "1, 0, 0"; default: all for training."""
    seed: Seed = 1234
    """The seed of the order; default 1234."""
    eod: int | None = None
    """The token between documents; default: unset."""
    pad: int | None = None
    """The token that fills a sample; default: unset."""
    eod_mask_loss: bool = False
    """Whether the token between documents is left out of the loss; default false."""
    reset_position_ids: bool = False
    """Whether positions start again with each document; needs `eod`, and no pipeline stages; default false."""
    reset_attention_mask: bool = False
    """Whether attention stops at a document's end; needs `eod`, and no pipeline stages; default false."""
    create_attention_mask: Annotated[bool, NoEffect(MASKS, harmless=(False,))] = False
    """Whether the whole mask is made with each sample; default false."""
    create_compressed_eod_mask: bool = False
    """The same as `reset_attention_mask`, as the reference writes it for its kernels; default false."""
    eod_pad_length: Annotated[Count, NoEffect("a sample may have any number of documents", harmless=(128,))] = 128
    """Documents of a sample at most, with the compressed form; default 128."""


class DataLoader(Section):
    """Where samples come from."""

    type: Annotated[
        str,
        Refused(
            "this data loader is not supported",
            "use BlendedMegatronDatasetDataLoader for .bin and .idx files, TextDataLoader for text, HFDataLoader, or "
            "SyntheticDataLoader",
            when=lambda value: value not in LOADERS,
        ),
    ] = "BlendedMegatronDatasetDataLoader"
    """BlendedMegatronDatasetDataLoader, HFDataLoader, TextDataLoader or SyntheticDataLoader; default the first."""
    config: BlendConfig = Field(default_factory=BlendConfig.model_construct)
    """Megatron data files and how samples are cut from them."""
    sizes: ListOf[int] | None = None
    """Samples for training, validation and test; default: as many as needed."""
    load_func: str = "load_dataset"
    """The function of Hugging Face datasets that loads; default load_dataset."""
    path: str | None = None
    """A Hugging Face data set, or a text file, JSON lines, or a directory of them; default: none."""
    tokenizer: str | None = None
    """How text becomes tokens: a tokenizer.json, a model's directory, or bytes; default: `processor`'s, or bytes."""
    vocab_size: Count | None = None
    """Tokens of synthetic samples are below this; default: the model's vocabulary."""
    split: str | None = None
    """Which part of a Hugging Face data set; default train."""
    data_files: str | ListOf[str] | Free | None = None
    """The files of a Hugging Face data set; default: its own."""
    handler: ListOf[Free] | None = None
    """Steps that turn a Hugging Face sample into tokens, in order; default: none."""
    shuffle: bool | None = None
    """Whether samples are shuffled; default: the data set's."""
    seed: Seed | None = None
    """The seed of the order; default: the run's."""


class TrainDataset(Section):
    """The training data and how batches are made."""

    aliases: ClassVar[dict[str, str]] = {"dataloader": "data_loader"}

    data_loader: DataLoader = Field(default_factory=DataLoader.model_construct)
    """Where samples come from (`dataloader` in the 2026 layout)."""
    input_columns: ListOf[str] | None = None
    """The names of a sample's columns, in the model's order; default: the data set's."""
    drop_remainder: bool = True
    """Whether a last, smaller batch is left out; default true."""
    shuffle: bool | None = None
    """Whether samples are shuffled; default: the loader's."""
    seed: Seed | None = None
    """The seed of the order; default: the run's."""
    num_parallel_workers: Index | None = None
    """Processes that read ahead; default 0, in the training process."""
    prefetch_size: Count | None = None
    """Micro-batches read ahead, of each worker if there are any; default: those of the next step, or torch's 2."""
    batch_size: Count | None = None
    """Samples of a batch; default: the run's."""
    repeat: Count = 1
    """Passes over the data inside an epoch; default 1."""
    python_multiprocessing: Annotated[bool, NoEffect("workers are always processes", harmless=(False,))] = False
    """Whether the reference's workers are processes; default false."""
    numa_enable: Annotated[bool, NoEffect("processes are not bound to memory", harmless=(False,))] = False
    """Whether the reference binds processes to memory; default false."""
    construct_args_key: Annotated[ListOf[str], NoEffect("columns are given by name")] | None = None
    """The order of the reference's model inputs; default: unset."""
    use_broadcast_data: Annotated[bool, NoEffect("each rank reads its own data")] | None = None
    """Whether the reference sends data from rank to rank; default: unset."""


class TrainDatasetTask(Section):
    """What the data is used for."""

    type: Annotated[
        str,
        Refused(
            "this task is not supported",
            "use CausalLanguageModelDataset",
            when=lambda value: value != "CausalLanguageModelDataset",
        ),
    ] = "CausalLanguageModelDataset"
    """The task: CausalLanguageModelDataset."""
    dataset_config: TrainDataset | None = None
    """The same as `train_dataset`, usually an alias of it; default: `train_dataset`."""


class Processor(Section):
    """The tokenizer, where a data set is not tokenized yet."""

    type: str | None = None
    """The reference's class of the processor; default: unset."""
    tokenizer: Free | None = None
    """The tokenizer: `type` and its files; default: the model directory's."""
    return_tensors: Annotated[str, NoEffect("tokens are always tensors")] | None = None
    """The reference's kind of tensors; default: unset."""
