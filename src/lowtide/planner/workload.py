"""What a plan is for, as every output of it says: the batch, the layout, the types of numbers, and the FLOPs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from lowtide.cost.device import Device
from lowtide.cost.kernels import ATTENTION
from lowtide.planner.pipeline import Pipeline
from lowtide.trace.layout import Layout
from lowtide.trace.trace import Kernel, Trace

__all__ = ["Workload", "workload_of"]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One step of a run. Zero and empty where the Trace does not say."""

    samples: int = 0
    """Samples of a micro-batch, of each data-parallel rank."""
    tokens: int = 0
    """Tokens of a micro-batch."""
    layout: Layout | None = None
    """All ranks, pipeline stages included; None where only one rank is known."""
    dtype: str = ""
    """What most parameters are stored in."""
    compute_dtype: str = ""
    """What most of the FLOPs are computed in."""
    optimizer: str = ""
    flops: float = 0.0
    """Model FLOPs of a step on each device, on average over the stages: matrix products and attention of forward and
    backward, without what is recomputed."""
    peak_flops: float = 0.0
    """What the device has of them in a second, in ``compute_dtype``."""

    @property
    def sequence(self) -> int:
        """Tokens of a sample."""
        return self.tokens // self.samples if self.samples else 0

    @property
    def data(self) -> int:
        """Data-parallel ranks."""
        return self.layout.data if self.layout is not None else 1

    @property
    def devices(self) -> int:
        """All devices of the run; 0 where it is not known."""
        return self.layout.world if self.layout is not None else 0

    def mfu(self, seconds: float) -> float | None:
        """Model FLOPs utilisation of a step that takes so long: the share of the device's peak that the model's own
        FLOPs are; None where either is not known."""
        most = self.peak_flops * seconds
        return self.flops / most if most and self.flops else None

    def as_json(self) -> dict[str, Any]:
        """The fields, and what follows from them, as plain JSON values."""
        layout = self.layout.as_json() if self.layout is not None else {}
        return {**asdict(self), "layout": layout, "sequence": self.sequence, "devices": self.devices}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Workload:
        """The reverse of :meth:`as_json`."""
        given = {name: one for name, one in value.items() if name not in ("sequence", "devices")}
        return Workload(**{**given, "layout": Layout.from_json(value.get("layout", {}))})


def workload_of(trace: Trace, device: Device, pipeline: Pipeline) -> Workload:
    """What a plan of a Trace is for."""
    parts = [trace.before, *(trace.parts[part] for part in trace.layers), trace.after]
    by_dtype: dict[str, float] = {}
    for part in parts:
        for kernel in part.kernels:
            by_dtype[kernel.dtype] = by_dtype.get(kernel.dtype, 0.0) + _model_flops(kernel)
    compute = max(by_dtype, key=lambda dtype: by_dtype[dtype], default="")
    stages = max(pipeline.stages, 1)
    return Workload(
        samples=trace.batch.get("samples", 0),
        tokens=trace.batch.get("tokens", 0),
        layout=replace(trace.layout, pipeline=stages) if trace.layout is not None else None,
        dtype=trace.dtype,
        compute_dtype=compute if by_dtype.get(compute) else "",
        optimizer=trace.optimizer_name,
        flops=sum(by_dtype.values()) * pipeline.micro_batches / stages,
        peak_flops=device.flops.get(compute, 0.0),
    )


def _model_flops(kernel: Kernel) -> float:
    """A kernel's FLOPs; attention's backward without the scores, one product of five, that it computes again."""
    again = kernel.kind in ATTENTION and kernel.kind.endswith("_backward")
    return kernel.flops * 0.8 if again else kernel.flops
