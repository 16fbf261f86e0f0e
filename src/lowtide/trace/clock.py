"""When a kernel began and ended, by the device's events; on a CPU by the clock. Waited for is one copy, at first."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from lowtide._torch_private.modes import DisableTorchFunction
from lowtide.cost.stopwatch import moment, seconds_between
from lowtide.operators.calls import tensors_of

__all__ = ["Clock"]

MOST, LEAST = 1 << 20, 1 << 14
"""Bytes of the copy that an idle device is given to do while a kernel is issued."""
ISSUING = 200e-6
"""Seconds that the copy should take: a kernel has been issued by then."""


class Clock:
    """Times kernels as they are issued.

    An idle device would reach the first event at once and then wait for the kernel. So it is given a copy to do first:
    see [Note: behind a copy] in cost/stopwatch.py.
    """

    def __init__(self) -> None:
        self.fillers: dict[torch.Stream, tuple[Tensor, Tensor]] = {}
        """For each stream that was idle, what it is given to copy."""

    def begin(self, args: Any, kwargs: Any) -> Any:
        """A kernel with these arguments is about to be issued."""
        made_on = torch.device(kwargs.get("device") or "cpu")  # what is given nothing says where it makes something
        device = next((tensor.device for tensor in tensors_of((args, kwargs))), made_on)
        if device.type in ("cpu", "meta"):
            return perf_counter()
        stream = torch.accelerator.current_stream(device)
        if stream.query():
            self._occupy(stream)
        return moment(device)

    def end(self, begin: Any) -> Any:
        """It has been issued."""
        return perf_counter() if isinstance(begin, float) else moment(begin.device)

    def close(self) -> None:
        """Free the copies."""
        self.fillers.clear()

    def _occupy(self, stream: torch.Stream) -> None:
        with DisableTorchFunction():  # or call trackers would see it
            if stream not in self.fillers:
                self.fillers[stream] = _filler(stream.device)
            host, there = self.fillers[stream]
            there.copy_(host, non_blocking=True)


def _filler(device: torch.device) -> tuple[Tensor, Tensor]:
    """What to copy, and where to; a slow link is given less to do."""
    host = torch.zeros(MOST, dtype=torch.uint8, device="cpu").pin_memory()
    there = torch.zeros(MOST, dtype=torch.uint8, device=device)
    begin = moment(device)
    there.copy_(host, non_blocking=True)
    end = moment(device)
    end.synchronize()
    size = min(MOST, max(LEAST, int(MOST * ISSUING / max(seconds_between(begin, end), 1e-9))))
    return host[:size], there[:size]
