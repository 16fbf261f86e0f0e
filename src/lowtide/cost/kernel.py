"""How long a kernel, a copy or a collective takes on a device."""

from __future__ import annotations

from typing import Literal, Protocol

from lowtide.cost.device import Device
from lowtide.cost.kernels import ATTENTION, MATMUL

__all__ = ["FREE", "KernelWork", "copy_seconds", "fingerprint", "is_free", "kernel_class", "kernel_seconds"]

FREE = frozenset(
    f"aten::{name}"
    for name in (
        "_conj", "_fw_primal", "_make_dual", "_neg_view", "_nested_get_values", "_nested_view_from_buffer",
        "_nested_view_from_jagged", "_reshape_alias", "_unsafe_view", "alias", "as_strided", "as_strided_", "chunk",
        "detach", "detach_", "diagonal", "empty", "empty_like", "empty_permuted", "empty_strided", "expand",
        "expand_as", "imag", "lift", "lift_fresh", "movedim", "narrow", "new_empty", "new_empty_strided", "permute",
        "real", "record_stream", "resize_", "select", "set_", "slice", "split", "split_with_sizes", "squeeze",
        "squeeze_", "swapaxes", "swapdims", "sym_numel", "sym_size", "sym_stride", "t", "t_", "tensor_split",
        "transpose", "transpose_", "unbind", "unflatten", "unfold", "unsafe_split", "unsafe_split_with_sizes",
        "unsqueeze", "unsqueeze_", "values", "view", "view_as", "view_as_complex", "view_as_real",
    )
)  # fmt: skip
"""Kinds that are no work of a device: views, and allocations that write nothing."""


class KernelWork(Protocol):
    """A kernel as far as its time goes; a kernel of a Trace is one."""

    @property
    def kind(self) -> str:
        """Its name: ``aten::mm``."""

    @property
    def dtype(self) -> str:
        """What it computes in: ``bfloat16``."""

    @property
    def flops(self) -> int:
        """Floating-point operations, where they can bound it."""

    @property
    def touched(self) -> int:
        """Bytes read and written."""

    @property
    def shape(self) -> str:
        """What it was given, in short."""

    @property
    def ranks(self) -> int:
        """For a collective, how many ranks take part; otherwise 0."""

    @property
    def message(self) -> int:
        """For a collective, the bytes of a rank's full buffer."""

    @property
    def stride(self) -> int:
        """For a collective, how far apart neighbouring ranks of its group are."""

    @property
    def seconds(self) -> float | None:
        """How long it took, if it was measured."""


def fingerprint(kernel: KernelWork) -> str:
    """What a measurement of the kernel is filed under."""
    return f"{kernel.kind}|{kernel.dtype}|{kernel.shape}"


def is_free(kind: str) -> bool:
    """Whether a kind is no work of a device."""
    return kind in FREE or kind.endswith(("::wait_tensor", "::wait_tensors"))


def kernel_class(kind: str) -> Literal["matmul", "attention", "memory"]:
    """What bounds kernels of a kind, as efficiencies are named."""
    if kind in ATTENTION:
        return "attention"
    return "matmul" if kind in MATMUL else "memory"


def kernel_seconds(device: Device, kernel: KernelWork) -> float:
    """Seconds of the device that a kernel takes: measured with it, else measured on the device, else estimated.

    The estimate is a roofline: the time of an empty kernel, and the longer of its computation and its memory traffic,
    at the share of the peak that the kind is known to reach, else its class.
    """
    if kernel.seconds is not None:
        return kernel.seconds
    if is_free(kernel.kind):
        return 0.0
    if (measured := device.measured.get(fingerprint(kernel))) is not None:
        return measured
    if kernel.ranks > 0:
        return _collective_seconds(device, kernel)
    shares = device.efficiency
    known = shares.get(kernel.kind)
    of_compute = shares.get(kernel_class(kernel.kind), 1.0) if known is None else known
    of_memory = shares.get(f"{kernel.kind}|memory", shares.get("memory", 1.0) if known is None else known)
    compute = kernel.flops / (peak_rate(device, kernel.dtype) * of_compute) if kernel.flops else 0.0
    memory = kernel.touched / (device.memory_bandwidth * of_memory)
    return device.kernel_latency + max(compute, memory)


def copy_seconds(device: Device, size: int, direction: Literal["out", "in"]) -> float:
    """Seconds of the link that a copy of ``size`` bytes to the host (``out``) or from it (``in``) takes."""
    rate = device.link_out if direction == "out" else device.link_in
    return device.copy_latency + size / (rate * device.efficiency.get(f"link_{direction}", 1.0))


def peak_rate(device: Device, dtype: str) -> float:
    """Operations per second in a dtype; one that the device does not list has the rate of the nearest that it does."""
    nearest: tuple[str, ...] = ()
    if dtype.startswith("float8"):
        nearest = ("float8_e4m3fn", "bfloat16", "float16")
    elif dtype in ("float16", "bfloat16"):
        nearest = ("float16", "bfloat16")
    for name in (dtype, *nearest, "float32"):
        if name in device.flops:
            return device.flops[name]
    return max(device.flops.values())


def _collective_seconds(device: Device, kernel: KernelWork) -> float:
    """The time of a collective once every rank is there. See [Note: collectives].

    [Note: collectives]
    Of ``n`` ranks each sends, and gets, ``(n - 1) / n`` of the full buffer in a ring's ``n - 1`` steps; an all-reduce
    is a reduce-scatter and an all-gather. A broadcast or a reduction to one passes the whole buffer along.

    A node has ``devices_per_node`` ranks with neighbouring numbers, and of a group whose ranks are ``stride`` apart so
    many fewer. Ranks of one node use its interconnect. A ring over several nodes enters and leaves a node once for
    each of the group's ranks there, whose network ports are all at work, and cannot be faster than the interconnect
    inside; the node's other ports serve its other groups, which do the same at the same time. In an all-to-all
    each rank sends to the others' nodes through its own port, while the rest stays inside. A send is one step.
    """
    ranks, size = kernel.ranks, kernel.message
    if ranks < 2:
        return device.kernel_latency
    share = device.efficiency.get("collective", 1.0)
    inside, port = device.interconnect * share, device.network * share
    together = min(ranks, max(1, device.devices_per_node // kernel.stride))
    """How many of the group are in one node."""
    spread = together < ranks
    name = kernel.kind.partition("::")[2].replace("_", "")
    if "alltoall" in name:
        outside = (ranks - together) / ranks * size / port
        within = (together - 1) / ranks * size / inside
        return (ranks - 1) * device.collective_latency + max(outside, within)
    if name.startswith(("send", "recv")):
        return device.collective_latency + size / (port if spread else inside)
    rate = min(inside, port * together) if spread else inside
    steps, factor = ranks - 1, (ranks - 1) / ranks
    if "allreduce" in name:
        steps, factor = 2 * steps, 2 * factor
    elif not any(word in name for word in ("gather", "reducescatter", "scatter")):
        factor = 1.0
    return steps * device.collective_latency + factor * size / rate
