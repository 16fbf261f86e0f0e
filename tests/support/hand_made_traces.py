"""Small Traces written by hand: a layer as a list of operators, each with its inputs and what it saves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from lowtide.cost.device import Device
from lowtide.trace.trace import Call, Event, Kernel, Pack, Part, Static, Trace, TracedOperator, Value


class Step(NamedTuple):
    """One operator."""

    name: str
    reads: tuple[str, ...]
    size: int
    """Bytes of its output."""
    saves: tuple[str, ...]
    """The values that its gradient needs; its own output by its own name."""
    flops: int = 0
    parameters: int = 0
    repeatable: bool = True


def made_part(name: str, steps: Sequence[Step], input_size: int) -> Part:
    """A part whose operators are ``steps``; ``input`` names what it is given."""
    values: list[Value] = [Value(input_size, source="boundary")]
    number = {"input": 0}
    for step in steps:
        number[step.name] = len(values)
        values.append(Value(step.size, step.name))
    last = {read: place for place, step in enumerate(steps) for read in step.reads}
    kernels: list[Kernel] = []
    packs: list[Pack] = []
    forward: list[Event] = []
    output = steps[-1].name
    for place, step in enumerate(steps):
        forward += [("call", place), ("make", number[step.name]), ("run", len(kernels))]
        reads = tuple(number[read] for read in step.reads)
        kernels.append(_kernel("aten::mm" if step.flops else "aten::mul", step, values, reads, 1))
        for saved in step.saves:
            source: Any = "boundary" if saved == "input" else "operator"
            forward.append(("save", len(packs)))
            packs.append(Pack(number[saved], step.name, "" if saved == "input" else saved, source, place))
        forward.append(("end", place))
        forward += [("free", number[read]) for read, end in last.items() if end == place]
    backward: list[Event] = []
    gradient = {output: len(values)}
    values.append(Value(steps[-1].size, source="root"))
    for place in reversed(range(len(steps))):
        step = steps[place]
        backward += [("use", n) for n, pack in enumerate(packs) if pack.position == place]
        for read in step.reads:
            if read not in gradient:
                gradient[read] = len(values)
                values.append(Value(values[number[read]].size, step.name))
                backward.append(("make", gradient[read]))
        if step.parameters:
            backward.append(("make", len(values)))
            values.append(Value(step.parameters, step.name, gradient=True))
        backward.append(("run", len(kernels)))
        kernels.append(_kernel("aten::mm" if step.flops else "aten::mul", step, values, (gradient[step.name],), 2))
        backward += [("done", n) for n, pack in enumerate(packs) if pack.position == place]
        backward.append(("free", gradient[step.name]))
    parameters = tuple(step.parameters for step in steps if step.parameters)
    owned = {step.name: 0 for step in steps}
    for value, owner in {(pack.value, pack.owner) for pack in packs if pack.owner}:
        owned[owner] += values[value].size
    return Part(
        name=name,
        operators=tuple(
            TracedOperator(
                step.name,
                owned[step.name],
                owned[step.name],
                repeatable=step.repeatable,
                consumers=tuple(other.name for other in steps if step.name in other.reads),
            )
            for step in steps
        ),
        values=tuple(values),
        kernels=tuple(kernels),
        calls=tuple(
            Call(step.name, tuple(number[read] for read in step.reads), tuple(r for r in step.reads if r != "input"))
            for step in steps
        ),
        packs=tuple(packs),
        forward=tuple(forward),
        backward=tuple(backward),
        input=0,
        output=number[output],
        output_gradient=gradient[output],
        input_gradient=gradient["input"],
        static=Static(parameters, (), parameters, tuple(2 * size for size in parameters)),
    )


def _kernel(kind: str, step: Step, values: Sequence[Value], reads: tuple[int, ...], times: int) -> Kernel:
    touched = times * (step.size + sum(values[read].size for read in reads))
    return Kernel(kind, step.name, "bfloat16", times * step.flops, touched, "", reads)


def llama_layer(tokens: int = 4096, width: int = 1024, hidden: int = 2816) -> Part:
    """A layer of a Llama in bfloat16."""
    narrow, wide = 2 * tokens * width, 2 * tokens * hidden
    square, gate = 2 * tokens * width * width, 2 * tokens * width * hidden
    weight, weight_wide = 2 * width * width, 2 * width * hidden
    return made_part(
        "Block",
        [
            Step("attention_norm", ("input",), narrow, ("input",), 0, 2 * width),
            Step("attention.wq", ("attention_norm",), narrow, ("attention_norm",), square, weight),
            Step("attention.wk", ("attention_norm",), narrow, ("attention_norm",), square, weight),
            Step("attention.wv", ("attention_norm",), narrow, ("attention_norm",), square, weight),
            Step("attention.rotary_q", ("attention.wq",), narrow, ()),
            Step("attention.rotary_k", ("attention.wk",), narrow, ()),
            Step(
                "attention.flash",
                ("attention.rotary_q", "attention.rotary_k", "attention.wv"),
                narrow,
                ("attention.rotary_q", "attention.rotary_k", "attention.wv", "attention.flash"),
                4 * tokens * tokens * width // 2,
            ),
            Step("attention.wo", ("attention.flash",), narrow, ("attention.flash",), square, weight),
            Step("add", ("input", "attention.wo"), narrow, ()),
            Step("ffn_norm", ("add",), narrow, ("add",), 0, 2 * width),
            Step("feed_forward.w1", ("ffn_norm",), wide, ("ffn_norm",), gate, weight_wide),
            Step("feed_forward.silu", ("feed_forward.w1",), wide, ("feed_forward.w1",)),
            Step("feed_forward.w3", ("ffn_norm",), wide, ("ffn_norm",), gate, weight_wide),
            Step(
                "feed_forward.mul",
                ("feed_forward.silu", "feed_forward.w3"),
                wide,
                ("feed_forward.silu", "feed_forward.w3"),
            ),
            Step("feed_forward.w2", ("feed_forward.mul",), narrow, ("feed_forward.mul",), gate, weight_wide),
            Step("add_1", ("add", "feed_forward.w2"), narrow, ()),
        ],
        narrow,
    )


def llama_trace(layers: int = 8, tokens: int = 4096, width: int = 1024, vocabulary: int = 8192) -> Trace:
    """A Llama with layers, an embedding and a loss."""
    narrow = 2 * tokens * width
    logits = 4 * tokens * vocabulary
    weight = 2 * width * vocabulary
    return Trace(
        model="hand-made llama",
        parts=(llama_layer(tokens, width),),
        layers=(0,) * layers,
        before=made_part("before", [Step("embedding", ("input",), narrow, ("input",), 0, weight)], 8 * tokens),
        after=made_part(
            "after",
            [
                Step("norm", ("input",), narrow, ("input",), 0, 2 * width),
                Step("head", ("norm",), logits, ("norm",), 2 * tokens * width * vocabulary, weight),
                Step("loss", ("head",), 4, ("head",)),
            ],
            narrow,
        ),
        batch={"samples": 1, "tokens": tokens},
    )


DEVICE = Device(
    name="hand-made",
    capacity=80 << 30,
    flops={"bfloat16": 4e14, "float32": 1e14},
    memory_bandwidth=2e12,
    link_out=2.5e10,
    link_in=2.5e10,
    interconnect=3e11,
    network=5e10,
)


def roofline(kernel: Kernel) -> float:
    """The seconds of a kernel on ``DEVICE``."""
    return max(kernel.flops / DEVICE.flops[kernel.dtype], kernel.touched / DEVICE.memory_bandwidth) + 2e-6
