"""Layers that write into their own buffers, such as running statistics, and are recomputed as a whole.

Torch's checkpoint runs such a layer a second time on buffers that the first time has changed, and changes them once
more. Here the second time finds them as the first did, and leaves them as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lowtide._torch_private import current_backward, is_dynamo_compiling
from lowtide.operators.wrappers import Function

__all__ = ["BufferKeeper"]

_BEFORE = "lowtide_buffers_before"
"""The keyword by which a call takes its copies along to where it is repeated."""


class BufferKeeper:
    """Knows which buffers of a layer a run changes: found out in the first one, for training and evaluation each."""

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer
        self.changing: dict[bool, frozenset[str]] = {}

    def around(self, whole: Function) -> Function:
        """The layer, recomputed as a whole; ``whole`` repeats what :meth:`repeated` gave."""

        def with_copies(*args: Any, **kwargs: Any) -> Any:
            names = self.changing.get(self.layer.training)
            if (names is not None and not names) or not torch.is_grad_enabled() or is_dynamo_compiling():
                return whole(*args, **kwargs)
            with torch.no_grad():
                before = {
                    name: one.clone() for name, one in self.layer.named_buffers() if names is None or name in names
                }
            return whole(*args, **kwargs, **{_BEFORE: before})

        return with_copies

    def repeated(self, again: Function) -> Function:
        """The layer's forward, as it runs first and again in backward."""

        def run(*args: Any, **kwargs: Any) -> Any:
            before = kwargs.pop(_BEFORE, None)
            if before is None:
                return again(*args, **kwargs)
            if current_backward() != -1:
                with self._as_they_were(before):
                    return again(*args, **kwargs)
            output = again(*args, **kwargs)
            if self.layer.training not in self.changing:
                buffers = dict(self.layer.named_buffers())
                changed = (name for name, one in before.items() if not torch.equal(one, buffers[name]))
                self.changing[self.layer.training] = frozenset(changed)
            return output

        return run

    @contextmanager
    def _as_they_were(self, before: Mapping[str, Tensor]) -> Iterator[None]:
        buffers = {name: one for name, one in self.layer.named_buffers() if name in before}
        with torch.no_grad():
            now = {name: one.clone() for name, one in buffers.items()}
            for name, one in buffers.items():
                one.copy_(before[name])
        try:
            yield
        finally:
            with torch.no_grad():
                for name, one in buffers.items():
                    one.copy_(now[name])
