"""The layouts that a model can be trained in on some devices, and the least time and memory that each can take.

[Note: what a layout takes at least]
Time: the parameters that a token meets take six FLOPs each, at the best share of the device's peak that matrix products
reach, and causal attention six for each token before it and each column of its heads. In a pipeline the stages also
wait for the first and the last micro-batch. Tensor parallel with sequence parallel adds the collectives that nothing
overlaps, expert parallel the exchanges of tokens, which are waited for at once. FSDP's gathers overlap the computation,
but not each other: a step takes at least as long as all of them. Every other kernel is left out, so no Policy is
faster, as the simulator counts. Memory: parameters, gradients and AdamW's states of the fullest share. In a pipeline
torch's FSDP also holds gathered parameters and whole gradients.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from lowtide.cost.device import Device
from lowtide.cost.kernel import kernel_seconds, peak_rate
from lowtide.cost.kernels import ATTENTION, MATMUL
from lowtide.errors import PlanError
from lowtide.models.shape import DecoderShape
from lowtide.planner.pipeline import Pipeline, even_pipeline
from lowtide.trace.trace import Kernel
from lowtide.train.degrees import check_degrees
from lowtide.train.run import Degrees

__all__ = ["Candidate", "Size", "candidates", "least_memory", "least_time"]

MICRO_BATCH_SIZES = (1, 2, 4, 8)
CHUNKS = (1, 2, 4)
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Of a number, by the type that is computed in."""
LEAST_PART = 8192
"""Samples are split over ranks (context parallel) only into parts of at least this many tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """One layout, with its micro-batches."""

    degrees: Degrees
    chunks: int = 1
    samples: int = 1
    """Samples of a micro-batch."""
    micro_batches: int = 1

    @property
    def traced_as(self) -> tuple[Degrees, int]:
        """All that the Trace of a rank depends on: layouts with the same, such as those that differ in virtual stages,
        share one."""
        return self.degrees, self.samples

    def pipeline(self, layers: int) -> Pipeline:
        """Its stages."""
        return even_pipeline(layers, self.degrees.pipeline, self.chunks, self.micro_batches)

    def __str__(self) -> str:
        degrees = self.degrees
        sharded = f"fsdp {degrees.shard}" if degrees.replicate == 1 else f"hsdp {degrees.replicate}x{degrees.shard}"
        parts = [
            f"tp {degrees.tensor}" if degrees.tensor > 1 else "",
            f"pp {degrees.pipeline}" if degrees.pipeline > 1 else "",
            f"vpp {self.chunks}" if self.chunks > 1 else "",
            f"cp {degrees.context}" if degrees.context > 1 else "",
            f"ep {degrees.expert}" if degrees.expert > 1 else "",
            sharded if degrees.data > 1 else "",
            f"{self.micro_batches} x {self.samples}",
        ]
        return ", ".join(filter(None, parts))


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """How many parameters a model has, in thirds: they are shared in other ways."""

    layers: int
    """Of all layers, experts aside."""
    experts: int
    """Of all routed experts."""
    around: int
    """Of the embedding and the head."""
    active: int
    """Those of the layers that one token meets."""


def candidates(
    shape: DecoderShape, devices: int, global_batch: int, sequence: int, devices_per_node: int
) -> Iterator[Candidate]:
    """Every layout of ``devices`` for steps of ``global_batch`` samples that the runner has."""
    contexts = [one for one in _powers(devices) if one == 1 or sequence // one >= LEAST_PART]
    for tensor, context in product(_powers(min(devices, devices_per_node)), contexts):
        if devices % (tensor * context):
            continue
        for stages in _divisors(devices // tensor // context):
            data = devices // tensor // context // stages
            if stages > shape.num_layers or global_batch % data:
                continue
            for expert in _powers(data) if shape.experts is not None else (1,):
                for replicate in _copies(data, tensor, expert, stages, devices_per_node):
                    degrees = Degrees(
                        replicate=replicate,
                        shard=data // replicate,
                        pipeline=stages,
                        tensor=tensor,
                        context=context,
                        expert=expert,
                        sequence_parallel=tensor > 1,
                    )
                    try:
                        check_degrees("", shape, degrees, sequence)
                    except PlanError:
                        continue
                    yield from _micro_batches(shape, degrees, global_batch // data)


def _micro_batches(shape: DecoderShape, degrees: Degrees, samples: int) -> Iterator[Candidate]:
    stages = degrees.pipeline
    for size in MICRO_BATCH_SIZES:
        count, left = divmod(samples, size)
        if left or count < stages:
            continue
        for chunks in CHUNKS if stages > 1 else (1,):
            # Interleaved stages take micro-batches in rounds of as many as there are stages.
            if shape.num_layers >= stages * chunks and (chunks == 1 or count % stages == 0):
                yield Candidate(degrees=degrees, chunks=chunks, samples=size, micro_batches=count)


def _copies(data: int, tensor: int, expert: int, stages: int, devices_per_node: int) -> tuple[int, ...]:
    """How many groups of ranks have copies of the parameters: one, or one for each node where the runner has HSDP."""
    nodes = data // devices_per_node
    plain = tensor == expert == stages == 1
    return (1, nodes) if plain and nodes > 1 and data % devices_per_node == 0 else (1,)


def least_time(
    candidate: Candidate, size: Size, shape: DecoderShape, device: Device, dtype: str, sequence: int
) -> float:
    """No Policy in this layout has a faster step. See [Note: what a layout takes at least]."""
    degrees, stages = candidate.degrees, candidate.degrees.pipeline
    shares, rate = device.efficiency, peak_rate(device, dtype)
    tokens = candidate.samples * sequence / degrees.context
    products = max((share for name, share in shares.items() if name in ("matmul", *MATMUL)), default=1.0)
    attention = max((share for name, share in shares.items() if name in ("attention", *ATTENTION)), default=1.0)
    columns = shape.num_attention_heads * shape.head_dim * shape.num_layers
    flops = size.active / products + (sequence / 2) * columns / attention
    compute = 6 * flops / stages * tokens / degrees.tensor / rate
    sent = 8 * shape.num_layers / stages * tokens * shape.hidden_size * 2 * (degrees.tensor - 1) / degrees.tensor
    collectives = sent / (device.interconnect * device.efficiency.get("collective", 1.0))
    exchanges = _exchanges(candidate, shape, device, dtype, sequence)
    rounds = candidate.micro_batches + (stages - 1) / candidate.chunks
    return max((compute + collectives + exchanges) * rounds, _gathers(candidate, size, shape, device, dtype))


def _exchanges(candidate: Candidate, shape: DecoderShape, device: Device, dtype: str, sequence: int) -> float:
    """Seconds in which a micro-batch's tokens are sent to their experts and back, in forward and in backward."""
    degrees, experts = candidate.degrees, shape.experts
    if experts is None or degrees.expert == 1:
        return 0.0
    slots = candidate.samples * sequence * experts.chosen * min(1.0, experts.capacity or 1.0)
    exchange = Kernel(
        "c10d::alltoall",
        ranks=degrees.expert,
        message=int(slots * shape.hidden_size * BYTES[dtype]),
        stride=degrees.tensor * degrees.context,
    )
    return 4 * kernel_seconds(device, exchange) * (shape.num_layers - experts.first_dense) / degrees.pipeline


def _gathers(candidate: Candidate, size: Size, shape: DecoderShape, device: Device, dtype: str) -> float:
    """Seconds in which the layers' sharded parameters are gathered in a step, one layer after the other."""
    degrees, layers = candidate.degrees, shape.num_layers / candidate.degrees.pipeline
    # A pipeline keeps them gathered. Else backward gathers them again, but perhaps those of the last layer.
    times = 1.0 if degrees.pipeline > 1 else candidate.micro_batches * (2 - 1 / layers)
    matrices, seconds = degrees.pipeline * degrees.tensor, 0.0
    for parameters, expert in ((size.layers, 1), (size.experts, degrees.expert)):
        ranks = degrees.sharded // expert
        if ranks > 1 and parameters:
            gather = Kernel(
                "c10d::allgather",
                ranks=ranks,
                message=int(parameters / matrices / expert / layers * BYTES[dtype]),
                stride=degrees.tensor * expert,
            )
            seconds += layers * kernel_seconds(device, gather)
    return seconds * times


def least_memory(candidate: Candidate, size: Size) -> int:
    """Bytes of the fullest device without any activation. See [Note: what a layout takes at least]."""
    degrees = candidate.degrees
    matrices = degrees.pipeline * degrees.tensor
    dense, experts = size.layers / matrices, size.experts / matrices / degrees.expert
    around = size.around / degrees.tensor / (2 if degrees.pipeline > 1 else 1)
    static = 16 * ((dense + around) / degrees.sharded + experts / (degrees.sharded // degrees.expert))
    whole = (2 + 4) * (dense + experts + around) if degrees.pipeline > 1 and degrees.sharded > 1 else 0
    return round(static + whole)


def _powers(most: int) -> tuple[int, ...]:
    return tuple(1 << power for power in range(most.bit_length()) if most % (1 << power) == 0)


def _divisors(number: int) -> tuple[int, ...]:
    return tuple(one for one in range(1, number + 1) if number % one == 0)
