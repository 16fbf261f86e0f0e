"""A Trace made by hand: layers of three operators, whose memory and time anyone can work out on paper.

A layer computes ``mul(silu(linear(x)), x)``. All its tensors have one size, every kernel takes a millisecond, and the
head gives the gradient back as it came.
"""

from __future__ import annotations

from lowtide.cost.device import Device
from lowtide.trace.trace import Call, Kernel, Pack, Part, Static, Trace, TracedOperator, Value

__all__ = ["DEVICE", "PARAMETER", "SIZE", "hand_made_trace"]

SIZE = 32 << 20
"""Of every tensor: an allocator gives it a segment of its own and adds nothing."""
PARAMETER = 16 << 20
DEVICE = Device(
    name="by hand",
    capacity=80 << 30,
    flops={"float32": 1e12},
    memory_bandwidth=1e12,
    link_out=SIZE / 1e-3,
    link_in=SIZE / 1e-3,
    interconnect=1e15,
    network=1e15,
    launch=0.0,
    kernel_latency=0.0,
    copy_latency=0.0,
    collective_latency=0.0,
)
"""A copy of a tensor takes as long as a kernel."""


def kernel(operator: str, kind: str = "aten::mul", writes: tuple[int, ...] = ()) -> Kernel:
    return Kernel(kind, operator, writes=writes, seconds=1e-3)


def layer() -> Part:
    values = (
        Value(SIZE, source="boundary"),  # 0: x
        Value(SIZE, "linear"),
        Value(SIZE, "silu"),
        Value(SIZE, "mul"),
        Value(SIZE),  # 4: the gradient of the output
        Value(SIZE, "mul"),
        Value(SIZE, "mul"),  # 6: the gradient of x
        Value(SIZE, "silu"),
        Value(PARAMETER, "linear", gradient=True),
        Value(SIZE, "linear"),
    )
    return Part(
        name="Layer",
        operators=(
            TracedOperator("linear", SIZE, SIZE, consumers=("silu",)),
            TracedOperator("silu", SIZE, SIZE, consumers=("mul",)),
            TracedOperator("mul", 0, 0),
        ),
        values=values,
        kernels=(
            kernel("linear", writes=(1,)),
            kernel("silu", writes=(2,)),
            kernel("mul", writes=(3,)),
            kernel("mul", writes=(5,)),
            kernel("mul", writes=(6,)),
            kernel("silu", writes=(7,)),
            kernel("linear", writes=(8,)),
            kernel("linear", writes=(9,)),
            kernel("mul", "aten::add_", writes=(6,)),
        ),
        calls=(Call("linear", (0,)), Call("silu", (1,), ("linear",)), Call("mul", (2, 0), ("silu",))),
        packs=(
            Pack(0, "linear", "", "boundary", 0),
            Pack(1, "silu", "linear", "operator", 1),
            Pack(2, "mul", "silu", "operator", 2),
            Pack(0, "mul", "", "boundary", 2),
        ),
        forward=(
            ("call", 0), ("save", 0), ("make", 1), ("run", 0), ("end", 0),
            ("call", 1), ("save", 1), ("make", 2), ("run", 1), ("end", 1), ("free", 1),
            ("call", 2), ("save", 2), ("save", 3), ("make", 3), ("run", 2), ("end", 2), ("free", 2), ("free", 0),
        ),
        backward=(
            ("use", 2), ("use", 3), ("make", 5), ("run", 3), ("make", 6), ("run", 4), ("done", 2), ("done", 3),
            ("free", 4),
            ("use", 1), ("make", 7), ("run", 5), ("done", 1), ("free", 5),
            ("use", 0), ("make", 8), ("run", 6), ("make", 9), ("run", 7), ("done", 0), ("free", 7),
            ("run", 8), ("free", 9),
        ),
        input=0,
        output=3,
        output_gradient=4,
        input_gradient=6,
        static=Static(parameters=(PARAMETER,), gradients=(PARAMETER,)),
    )  # fmt: skip


def hand_made_trace(layers: int = 2) -> Trace:
    before = Part(
        name="before",
        values=(Value(SIZE, "embedding"), Value(SIZE)),
        kernels=(kernel("embedding", writes=(0,)),),
        forward=(("make", 0), ("run", 0)),
        backward=(("free", 1),),
        output=0,
        output_gradient=1,
    )
    after = Part(
        name="after",
        values=(Value(SIZE, source="boundary"), Value(SIZE, "loss")),
        kernels=(kernel("loss"), kernel("loss", writes=(1,))),
        forward=(("run", 0), ("free", 0)),
        backward=(("make", 1), ("run", 1)),
        input=0,
        input_gradient=1,
    )
    return Trace(model="by hand", parts=(layer(),), layers=(0,) * layers, before=before, after=after)
