"""The same small training in each framework, with and without lowtide attached: what tests and benchmarks compare.

Each function trains a tiny Llama as a user of that framework would, on the CPU or on the virtual accelerator. The
frameworks are imported when they are used.
"""

from __future__ import annotations

import logging
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import lowtide

__all__ = ["CASES", "Case", "Job", "Trained", "batches", "llama", "on_tide", "tight"]

VOCABULARY = 64


@dataclass(frozen=True, kw_only=True)
class Job:
    """What to train, and how."""

    device: str = "cpu"
    layers: int = 4
    hidden: int = 32
    rows: int = 2
    tokens: int = 16
    steps: int = 7
    accumulate: int = 1
    evaluate: bool = False
    """Whether to evaluate after every second step."""
    checkpointing: bool = False
    """Whether the framework's gradient checkpointing, or the model's own, is on beforehand."""
    bf16: bool = False
    compiled: bool = False
    """Whether the framework compiles the model as a whole; a Trainer of transformers can be asked to."""
    lora: bool = False
    attach: dict[str, Any] | None = None
    """The settings of ``lowtide.attach``; None: it is not attached."""
    save: Path | None = None
    """Where to save after half of the steps; the training goes on."""
    resume: Path | None = None
    """What to resume from, for the second half of the steps."""
    disturb: Callable[[nn.Module], None] | None = None
    """Called with the model before the training begins."""


@dataclass
class Trained:
    """What came of it."""

    losses: list[float]
    state: dict[str, Tensor]
    saved: set[str] = field(default_factory=set)
    """The names of what was saved of the model."""
    attachment: Any = None

    def differs(self, other: Trained) -> str:
        """In what this differs from another training, which may have begun earlier; empty if in nothing."""
        if self.losses != other.losses[-len(self.losses) :]:
            return f"losses {self.losses} and {other.losses}"
        if set(self.state) != set(other.state):
            return f"names {sorted(set(self.state) ^ set(other.state))[:3]}"
        return ", ".join(name for name, value in self.state.items() if not torch.equal(value, other.state[name]))


Case = Callable[[Job], Trained]


def llama(job: Job) -> nn.Module:
    """The model, the same every time."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": job.hidden, "intermediate_size": 2 * job.hidden, "num_hidden_layers": job.layers}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "attention_dropout": 0.1}
    model: nn.Module = LlamaForCausalLM(
        LlamaConfig(vocab_size=VOCABULARY, use_cache=False, pad_token_id=0, **sizes, **heads)
    )
    if job.lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1))
    if job.disturb is not None:
        job.disturb(model)
    torch.manual_seed(1)
    return model


def in_training(job: Job) -> Any:
    """The model on its device, with gradient checkpointing if that is on beforehand."""
    model: Any = llama(job).to(job.device).train()
    if job.checkpointing:
        model.gradient_checkpointing_enable()
    return model


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-2)


def batches(job: Job) -> list[Tensor]:
    """As many micro-batches as the training takes."""
    generator = torch.Generator().manual_seed(2)
    shape = (job.rows, job.tokens)
    return [torch.randint(3, VOCABULARY, shape, generator=generator) for _ in range(job.steps * job.accumulate)]


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}


def attached(job: Job, target: Any) -> Any:
    return None if job.attach is None else lowtide.attach(target, **{"verbose": False, **job.attach})


@contextmanager
def quiet() -> Iterator[None]:
    """Without what frameworks say about small models."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


def on_tide(device: str) -> torch.device:
    """Make accelerate, and what is built on it, use the virtual accelerator: it knows devices by their names."""
    from accelerate import PartialState

    found = torch.device(device)
    PartialState(cpu=True).device = found
    return found


# transformers and TRL


def _arguments(job: Job, kind: Any, **more: Any) -> Any:
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    arguments = kind(
        output_dir=str(job.save or tempfile.mkdtemp()),
        max_steps=job.steps,
        per_device_train_batch_size=job.rows,
        gradient_accumulation_steps=job.accumulate,
        learning_rate=1e-2,
        logging_steps=1,
        save_strategy="steps" if job.save else "no",
        save_steps=(job.steps + 1) // 2,
        save_total_limit=None,
        eval_strategy="steps" if job.evaluate else "no",
        eval_steps=2,
        gradient_checkpointing=job.checkpointing,
        bf16=job.bf16,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        dataloader_drop_last=True,
        **more,
    )
    assert arguments.device.type == "cpu"  # it is found now, and replaced
    vars(arguments)["_setup_devices"] = on_tide(job.device)
    return arguments


def _fit(job: Job, trainer: Any) -> Trained:
    from transformers import PrinterCallback, ProgressCallback

    for callback in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(callback)
    attachment = attached(job, trainer)
    with quiet():
        trainer.train(resume_from_checkpoint=str(job.resume) if job.resume else None)
    losses = [one["loss"] for one in trainer.state.log_history if "loss" in one]
    begun = trainer.state.max_steps // 2 + trainer.state.max_steps % 2 if job.resume else 0
    saved: set[str] = set()
    if job.save is not None:
        from safetensors import safe_open

        (file,) = job.save.glob(f"checkpoint-{(job.steps + 1) // 2}/*.safetensors")
        with safe_open(file, "pt") as opened:
            saved = set(opened.keys())
    return Trained(losses[begun:], state_of(trainer.model), saved, attachment)


def transformers_trainer(job: Job) -> Trained:
    """``transformers.Trainer``."""
    from transformers import Trainer, TrainingArguments

    compiled = {"torch_compile": True, "torch_compile_backend": "aot_eager"} if job.compiled else {}
    arguments = _arguments(job, TrainingArguments, **compiled)
    rows = [row for batch in batches(job) for row in batch]
    data = [{"input_ids": row, "labels": row} for row in rows]
    trainer = Trainer(llama(job), arguments, train_dataset=data, eval_dataset=data[: job.rows])  # type: ignore[arg-type]
    return _fit(job, trainer)


def _tokenizer() -> Any:
    """Made without a download: a word for each number."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<eos>": 1, "<unk>": 2} | {str(one): one for one in range(3, VOCABULARY)}
    made = Tokenizer(WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def trl_sft(job: Job) -> Trained:
    """TRL's ``SFTTrainer``."""
    from datasets import Dataset, disable_progress_bars
    from trl import SFTConfig, SFTTrainer

    disable_progress_bars()
    arguments = _arguments(job, SFTConfig, max_length=None)
    data = Dataset.from_dict({"input_ids": [row.tolist() for batch in batches(job) for row in batch]})
    with quiet():
        trainer = SFTTrainer(
            llama(job),
            arguments,
            train_dataset=data,
            eval_dataset=data.select(range(job.rows)),
            processing_class=_tokenizer(),
        )
    return _fit(job, trainer)


# Loops of a user's own.


def _halves(job: Job) -> range:
    """The steps to run; those before a checkpoint were run already."""
    return range((job.steps + 1) // 2 if job.resume else 0, job.steps)


def _evaluate(job: Job, model: Any, batch: Tensor) -> None:
    model.eval()
    with torch.no_grad():
        model(input_ids=batch, labels=batch)
    model.train()


def accelerate_loop(job: Job) -> Trained:
    """A loop around an ``Accelerator``."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    on_tide(job.device)
    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=job.accumulate, mixed_precision="bf16" if job.bf16 else "no"
    )
    attachment = attached(job, accelerator)
    model: Any = in_training(job)
    optimizer: Any = optimizer_of(model)
    inner = model
    model, optimizer = accelerator.prepare(model, optimizer)
    if job.resume is not None:
        accelerator.load_state(str(job.resume))
    data, losses = [one.to(accelerator.device) for one in batches(job)], []
    for step in _halves(job):
        total = 0.0
        for batch in data[step * job.accumulate : (step + 1) * job.accumulate]:
            with accelerator.accumulate(model):
                loss = model(input_ids=batch, labels=batch).loss
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                total += loss.item()
        losses.append(total)
        if job.evaluate and step % 2:
            _evaluate(job, model, data[0])
        if job.save is not None and step == (job.steps + 1) // 2 - 1:
            accelerator.save_state(str(job.save))
    saved: set[str] = set()
    if job.save is not None:
        from safetensors import safe_open

        with safe_open(job.save / "model.safetensors", "pt") as opened:
            saved = set(opened.keys())
    accelerator.end_training()
    return Trained(losses, state_of(inner), saved, attachment)


def peft_loop(job: Job) -> Trained:
    """LoRA in a plain loop, with ``adapt`` or ``apply``: there is nothing to attach to."""
    from contextlib import nullcontext

    model: Any = llama(replace(job, lora=True)).to(job.device).train()
    if job.checkpointing:
        model.gradient_checkpointing_enable()
        model.enable_input_require_grads()
    optimizer = optimizer_of(model)
    if job.resume is not None:
        found = torch.load(job.resume / "state.pt", weights_only=False)
        model.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
        torch.set_rng_state(found["random"])
        if job.device != "cpu":
            torch.get_device_module(job.device).set_rng_state(found["device"])
    settings = {"verbose": False, **(job.attach or {})}
    around: Any = nullcontext()
    if job.attach is not None:
        policy = settings.pop("policy", None)
        around = lowtide.apply(model, policy) if policy else lowtide.adapt(model, optimizer, **settings)
    data, losses, saved = [one.to(job.device) for one in batches(job)], [], set[str]()
    with around as run:
        for step in _halves(job):
            total = 0.0
            for batch in data[step * job.accumulate : (step + 1) * job.accumulate]:
                loss = model(input_ids=batch, labels=batch).loss
                loss.backward()
                total += loss.item()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(total)
            if job.evaluate and step % 2:
                _evaluate(job, model, data[0])
            if job.save is not None and step == (job.steps + 1) // 2 - 1:
                device = torch.get_device_module(job.device).get_rng_state() if job.device != "cpu" else None
                saved = set(model.state_dict())
                states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save({**states, "random": torch.get_rng_state(), "device": device}, job.save / "state.pt")
    return Trained(losses, state_of(model), saved, run)


# Lightning


def _lightning_module(job: Job, *, manual: bool) -> Any:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model: Any = llama(job)
            if job.checkpointing:
                self.model.gradient_checkpointing_enable()
            self.automatic_optimization = not manual
            self.losses: list[float] = []

        def training_step(self, batch: list[Tensor], index: int) -> Tensor:
            loss: Tensor = self.model(input_ids=batch[0], labels=batch[0]).loss
            self.log("loss", loss, on_step=True, on_epoch=True)
            if manual:
                self.manual_backward(loss)
                if (index + 1) % job.accumulate == 0:
                    optimizer: Any = self.optimizers()
                    optimizer.step()
                    optimizer.zero_grad()
            return loss

        def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
            self.losses.append(float(outputs["loss"]))

        def on_train_epoch_end(self) -> None:
            self.losses.append(float(self.trainer.callback_metrics["loss_epoch"]))

        def validation_step(self, batch: list[Tensor], index: int) -> None:
            self.model(input_ids=batch[0], labels=batch[0])

        def configure_optimizers(self) -> Any:
            return optimizer_of(self)

    return Module()


def _lightning(job: Job, *, manual: bool) -> Trained:
    import lightning
    from lightning.pytorch.strategies import SingleDeviceStrategy
    from torch.utils.data import DataLoader, TensorDataset

    class Save(lightning.Callback):
        """Saves after half of the steps."""

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
            if job.save is not None and index + 1 == (job.steps + 1) // 2 * job.accumulate:
                trainer.save_checkpoint(job.save / "last.ckpt")

    module = _lightning_module(job, manual=manual)
    with quiet():
        trainer = lightning.Trainer(
            strategy=SingleDeviceStrategy(device=torch.device(job.device), accelerator=_accelerator(job.device)),
            max_epochs=1,
            accumulate_grad_batches=1 if manual else job.accumulate,
            precision="bf16-mixed" if job.bf16 else "32-true",
            val_check_interval=2 * job.accumulate if job.evaluate else None,
            limit_val_batches=1 if job.evaluate else 0,
            num_sanity_val_steps=0,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[Save()],
        )
        attachment = attached(job, trainer)
        rows = torch.cat(batches(job))
        loader = DataLoader(TensorDataset(rows), batch_size=job.rows)
        torch.manual_seed(1)
        trainer.fit(module, loader, loader, ckpt_path=job.resume / "last.ckpt" if job.resume else None)
    saved: set[str] = set()
    if job.save is not None:
        saved = set(torch.load(job.save / "last.ckpt", weights_only=False)["state_dict"])
    return Trained(module.losses, state_of(module), saved, attachment)


def _accelerator(device: str) -> Any:
    """Lightning knows accelerators by their names as well."""
    from lightning.pytorch.accelerators import CPUAccelerator

    class Any_(CPUAccelerator):  # noqa: N801
        def setup_device(self, device: torch.device) -> None:
            pass

    return Any_()


def lightning_automatic(job: Job) -> Trained:
    """Lightning's ``Trainer``, automatic optimisation."""
    return _lightning(job, manual=False)


def lightning_manual(job: Job) -> Trained:
    """Lightning's ``Trainer``, manual optimisation."""
    return _lightning(job, manual=True)


def fabric_loop(job: Job) -> Trained:
    """A loop around Lightning's ``Fabric``."""
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import SingleDeviceStrategy

    with quiet():
        fabric: Any = Fabric(
            strategy=SingleDeviceStrategy(device=torch.device(job.device), accelerator=_accelerator(job.device)),
            precision="bf16-mixed" if job.bf16 else "32-true",
        )
    fabric.launch()
    attachment = attached(job, fabric)
    model: Any = in_training(job)
    optimizer: Any = optimizer_of(model)
    inner = model
    model, optimizer = fabric.setup(model, optimizer)
    if job.resume is not None:
        fabric.load(job.resume / "state.ckpt", {"model": model, "optimizer": optimizer})
    data, losses, saved = [one.to(fabric.device) for one in batches(job)], [], set[str]()
    for step in _halves(job):
        total = 0.0
        for number, batch in enumerate(data[step * job.accumulate : (step + 1) * job.accumulate], 1):
            with fabric.no_backward_sync(model, enabled=number < job.accumulate):
                loss = model(input_ids=batch, labels=batch).loss
                fabric.backward(loss)
                total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
        if job.evaluate and step % 2:
            _evaluate(job, model, data[0])
        if job.save is not None and step == (job.steps + 1) // 2 - 1:
            fabric.save(job.save / "state.ckpt", {"model": model, "optimizer": optimizer})
            saved = set(torch.load(job.save / "state.ckpt", weights_only=False)["model"])
    if attachment is not None:
        attachment.remove()
    return Trained(losses, state_of(inner), saved, attachment)


# DeepSpeed

BUCKET = 1 << 14
"""Elements; its own default alone would take 1.9 GiB."""


def _deepspeed(job: Job, stage: int) -> Trained:
    import deepspeed
    import torch.distributed as dist

    from support.deepspeed_device import BACKEND, use_device

    os.environ.setdefault("LOCAL_RANK", "0")
    use_device(job.device)
    if not dist.is_initialized():
        dist.init_process_group(BACKEND, store=dist.HashStore(), rank=0, world_size=1)
    model = in_training(job)
    optimizer = optimizer_of(model)
    settings = {
        "train_micro_batch_size_per_gpu": job.rows,
        "gradient_accumulation_steps": job.accumulate,
        "bf16": {"enabled": job.bf16},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": BUCKET, "allgather_bucket_size": BUCKET},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    with quiet(), ExitStack() as at_the_end:
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings, dist_init_required=False)
        at_the_end.callback(engine.destroy)  # its hooks hold its memory
        return _engine_trained(job, engine)


def _engine_trained(job: Job, engine: Any) -> Trained:
    import deepspeed
    import torch.distributed as dist

    attachment = attached(job, engine)
    if job.resume is not None:
        engine.load_checkpoint(str(job.resume))
    data, losses, saved = batches(job), [], set[str]()
    for step in _halves(job):
        total = 0.0
        for batch in data[step * job.accumulate : (step + 1) * job.accumulate]:
            tokens = batch.roll(dist.get_rank(), 1).to(engine.device)  # each rank has its own
            loss = engine(input_ids=tokens, labels=tokens).loss
            engine.backward(loss)
            engine.step()
            total += loss.item()
        losses.append(total)
        if job.evaluate and step % 2:
            _evaluate(job, engine, data[0].to(engine.device))
        if job.save is not None and step == (job.steps + 1) // 2 - 1:
            engine.save_checkpoint(str(job.save))
            saved = set(engine.module_state_dict())
    if attachment is not None:
        attachment.remove()
    partitioned = engine.zero_optimization_stage() == 3
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters()), enabled=partitioned):
        state = state_of(engine.module)
    return Trained(losses, state, saved, attachment)


def deepspeed_1(job: Job) -> Trained:
    """DeepSpeed's engine with ZeRO-1."""
    return _deepspeed(job, 1)


def deepspeed_2(job: Job) -> Trained:
    """DeepSpeed's engine with ZeRO-2."""
    return _deepspeed(job, 2)


def deepspeed_3(job: Job) -> Trained:
    """DeepSpeed's engine with ZeRO-3."""
    return _deepspeed(job, 3)


CASES: dict[str, Case] = {
    "transformers": transformers_trainer,
    "trl": trl_sft,
    "accelerate": accelerate_loop,
    "peft": peft_loop,
    "lightning": lightning_automatic,
    "lightning manual": lightning_manual,
    "fabric": fabric_loop,
    "deepspeed zero-1": deepspeed_1,
    "deepspeed zero-2": deepspeed_2,
    "deepspeed zero-3": deepspeed_3,
}
"""By the name of the framework."""

_SMALL = Job(device="tide", layers=6, hidden=64, rows=4, tokens=64, accumulate=2, evaluate=True)


def tight(name: str) -> tuple[Job, float]:
    """A training on the virtual accelerator, and the share of its peak that is a capacity at which it dies.

    TRL computes logits in a buffer of 128 KiB for each token: the model has more layers there, so that this is not all.
    With the layers and tokens of the others it dies at 0.8 of its peak, attached or not.
    """
    return (replace(_SMALL, layers=24, tokens=32), 0.8) if name == "trl" else (_SMALL, 0.6)
