"""What building and loading a model of transformers needs at its peak, against the shard that a rank keeps of it.

A part of ``benchmarks/runner_memory.py``. A Llama of transformers with safetensors is built by the runner under FSDP2
on two ranks on tide, the virtual accelerator, and its weights are loaded (``load_checkpoint``).
``load_peak_over_shard`` is the peak of the device's allocator from the first tensor to the last weight, over the bytes
of one rank's parameters and buffers. ``weights_equal`` says whether all ranks together then hold what the files do.
"""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import tide  # noqa: F401  # torch's device of that name

__all__ = ["RANKS", "load_peaks"]

RANKS = 2
LAYERS, WIDTH, VOCABULARY = 8, 512, 8000
FILE = """
seed: 7
pretrained_model_dir: {directory}
load_checkpoint: {directory}
model:
  model_config: {{seq_length: 32, params_dtype: float32, compute_dtype: float32}}
parallel: {{enable_parallel_optimizer: true}}
parallel_config: {{data_parallel: {ranks}}}
runner_config: {{epochs: 1, batch_size: 1}}
lr_schedule: {{type: ConstantWarmUpLR, learning_rate: 1.0e-3}}
train_dataset: {{data_loader: {{type: SyntheticDataLoader, sizes: [64, 0, 0]}}}}
"""


def load_peaks(run: Callable[..., list[Any]]) -> dict[str, Any]:
    """The figures of the rank that needs most; ``run`` runs a program with its arguments on two processes."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_hidden_layers=LAYERS,
        num_attention_heads=8, num_key_value_heads=8, max_position_embeddings=64, tie_word_embeddings=False,
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="lowtide-load-") as scratch:
        directory = Path(scratch) / "model"
        torch.manual_seed(3)
        transformers.LlamaForCausalLM(config).save_pretrained(directory)
        (Path(scratch) / "run.yaml").write_text(FILE.format(directory=directory, ranks=RANKS))
        found = run(_loaded, Path(scratch))
    worst = max(found, key=lambda one: float(one["load_peak_over_shard"]))
    return {
        "load_peak_over_shard": round(worst["load_peak_over_shard"], 3),
        "shard_bytes": worst["shard_bytes"],
        "weights_equal": all(one["weights_equal"] for one in found),
        "ranks": RANKS,
    }


def _loaded(scratch: Path) -> dict[str, Any]:
    """Build and load on this rank."""
    import safetensors.torch

    from lowtide.train.main import prepare
    from lowtide.train.options import TrainOptions

    device = torch.device("tide", 0)
    options = TrainOptions(run_directory=scratch / "output", log_dir=scratch / "logs", watchdog=0)
    gc.collect()
    torch.accelerator.synchronize()
    held = torch.accelerator.memory_allocated()
    torch.accelerator.reset_peak_memory_stats()
    loop = prepare(scratch / "run.yaml", {}, options, device)
    loop.resume()
    torch.accelerator.synchronize()
    peak = torch.accelerator.max_memory_allocated() - held
    (model,) = loop.job.models
    shard = sum(one.to_local().nbytes for one in model.parameters())  # type: ignore[attr-defined]
    shard += sum(one.nbytes for one in model.buffers())
    stored: dict[str, torch.Tensor] = {}
    for file in sorted((scratch / "model").glob("*.safetensors")):
        stored |= safetensors.torch.load_file(file)
    equal = all(
        torch.equal(one.full_tensor().cpu(), stored[loop.job.rename(name)])  # type: ignore[attr-defined]
        for name, one in model.named_parameters()
    )
    loop.data.close()
    loop.checkpoints.close()
    dist.barrier()
    return {
        "load_peak_over_shard": peak / shard,
        "shard_bytes": shard,
        "weights_equal": equal,
    }
