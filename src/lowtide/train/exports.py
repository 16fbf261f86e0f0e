"""A layout in the words of other trainers, and what cannot be said there."""

from __future__ import annotations

from typing import NamedTuple

from lowtide.policy import Keep, Policy, Recompute
from lowtide.train.candidates import Candidate

__all__ = ["Export", "megatron", "run_yaml", "torchtitan"]


class Export(NamedTuple):
    """Flags, and what they do not say."""

    flags: tuple[str, ...]
    missing: tuple[str, ...]


def torchtitan(candidate: Candidate, policy: Policy, global_batch: int, sequence: int) -> Export:
    """The flags of torchtitan for a layout and a Policy."""
    degrees = candidate.degrees
    schedule = "Interleaved1F1B" if candidate.chunks > 1 else "1F1B"
    local = candidate.samples * (candidate.micro_batches if degrees.pipeline > 1 else 1)
    mode, missing = _checkpointing(policy)
    flags = [
        f"--parallelism.data_parallel_replicate_degree={degrees.replicate}",
        f"--parallelism.data_parallel_shard_degree={degrees.shard}",
        f"--parallelism.tensor_parallel_degree={degrees.tensor}",
        f"--parallelism.pipeline_parallel_degree={degrees.pipeline}",
        f"--parallelism.expert_parallel_degree={degrees.expert}",
        f"--training.local_batch_size={local}",
        f"--training.global_batch_size={global_batch}",
        f"--training.seq_len={sequence}",
        f"--activation_checkpoint.mode={mode}",
    ]
    if degrees.context > 1:
        flags.append(f"--parallelism.context_parallel_degree={degrees.context}")
    if degrees.pipeline > 1:
        flags += [
            f"--parallelism.pipeline_parallel_schedule={schedule}",
            f"--parallelism.pipeline_parallel_microbatch_size={candidate.samples}",
        ]
    return Export(tuple(flags), missing)


def megatron(candidate: Candidate, policy: Policy, global_batch: int, sequence: int, layers: int) -> Export:
    """The flags of Megatron-LM for a layout and a Policy."""
    degrees = candidate.degrees
    mode, missing = _checkpointing(policy)
    flags = [
        f"--tensor-model-parallel-size {degrees.tensor}",
        f"--pipeline-model-parallel-size {degrees.pipeline}",
        f"--expert-model-parallel-size {degrees.expert}",
        f"--micro-batch-size {candidate.samples}",
        f"--global-batch-size {global_batch}",
        f"--seq-length {sequence}",
        "--bf16",
    ]
    if degrees.context > 1:
        flags += [f"--context-parallel-size {degrees.context}", "--cp-comm-type a2a"]
    if degrees.sequence_parallel:
        flags.append("--sequence-parallel")
    if candidate.chunks > 1:
        flags.append(f"--num-layers-per-virtual-pipeline-stage {layers // degrees.pipeline // candidate.chunks}")
    if degrees.sharded > 1 and degrees.pipeline == 1:
        flags.append("--use-torch-fsdp2")
    elif degrees.sharded > 1:
        flags.append("--use-distributed-optimizer")
        missing = (*missing, "parameters and gradients sharded together with pipeline stages (FSDP): only states are")
    if mode == "full":
        flags += ["--recompute-granularity full", "--recompute-method uniform", "--recompute-num-layers 1"]
    return Export(tuple(flags), missing)


def run_yaml(candidate: Candidate, sequence: int) -> str:
    """The layout as a training file of lowtide's says it, in the graph form."""
    degrees = candidate.degrees
    lines = [
        "parallel_config:",
        f"  data_parallel: {degrees.data}",
        f"  model_parallel: {degrees.tensor}",
        *([f"  context_parallel: {degrees.context}"] if degrees.context > 1 else []),
        f"  pipeline_stage: {degrees.pipeline}",
        f"  expert_parallel: {degrees.expert}",
        f"  use_seq_parallel: {str(degrees.sequence_parallel).lower()}",
        *([f"  micro_batch_num: {candidate.micro_batches}"] if degrees.pipeline > 1 else []),
        "parallel:",
        f"  enable_parallel_optimizer: {str(degrees.shard > 1).lower()}",
        "  parallel_optimizer_config:",
        f"    optimizer_weight_shard_size: {degrees.shard}",
        "    gradient_accumulation_shard: true",
        *(["  pipeline_config:", "    pipeline_interleave: true"] if candidate.chunks > 1 else []),
        "runner_config:",
        f"  batch_size: {candidate.samples}",
        *([f"  gradient_accumulation_steps: {candidate.micro_batches}"] if degrees.pipeline == 1 else []),
        "model:",
        "  model_config:",
        f"    seq_length: {sequence}",
        *([f"    pp_interleave_num: {candidate.chunks}"] if candidate.chunks > 1 else []),
    ]
    return "\n".join(lines) + "\n"


def _checkpointing(policy: Policy) -> tuple[str, tuple[str, ...]]:
    """The nearest that every trainer has, and what of the Policy is lost."""
    if all(layer.recomputed_as_a_whole for layer in policy.layers):
        return "full", ()
    if all(layer.default == Keep() and not layer.rules and layer.boundary == Keep() for layer in policy.layers):
        return "none", ()
    recomputes = any(
        isinstance(decision, Recompute)
        for layer in policy.layers
        for decision in (layer.default, *(rule.decision for rule in layer.rules))
    )
    lost = "which operators of which layers are recomputed or swapped: lowtide.apply does that in either trainer"
    return ("selective" if recomputes else "none"), (lost,)
