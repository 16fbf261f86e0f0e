"""Backward formulas that autograd replaces while a dispatch mode is on, and how to run them without ours.

[Note: formulas under a mode]
Some backward formulas have two forms: one for plain tensors, and one for tensor subclasses, which must not be written
into. With any dispatch mode on, torch takes the second, and the last bits of a gradient may differ: of a product, of a
minimum that several elements share, of the value that a mask was filled with. A mode that only observes must not cause
that. So it notes the results of these operators, and takes itself off before their nodes run in backward. Torch sets
the modes again for every node, so it is on for the next. The mode does not see what such a node does.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lowtide._torch_private.modes import TorchDispatchMode, hide_dispatch_mode
from lowtide.operators.calls import tensors_of

__all__ = ["Formulas", "has_two_formulas"]


class Formulas:
    """Runs the nodes of some operators without a mode. See [Note: formulas under a mode]."""

    def __init__(self, mode: TorchDispatchMode) -> None:
        self.mode = mode
        self.results: list[Tensor] = []
        """Of the last such operator, which have no nodes until it has ended."""

    def note(self, result: Any) -> None:
        """An operator with two formulas has made these tensors."""
        self.results += tensors_of(result)

    def settle(self) -> None:
        """The operator has ended: hook the nodes of its results."""
        results, self.results = self.results, []
        for tensor in results:
            node = tensor.grad_fn
            if node is not None:
                node.register_prehook(self._hide)

    def _hide(self, _: Any) -> None:
        hide_dispatch_mode(self.mode)


def has_two_formulas(operator: Any) -> bool:
    """Whether the backward of an operator uses another formula under a mode."""
    return operator.name() in _OPERATORS


_OPERATORS = frozenset(
    {
        "aten::cumprod", "aten::cumprod_",
        "aten::masked_fill.Tensor", "aten::masked_fill_.Tensor",
        "aten::masked_scatter", "aten::masked_scatter_",
        "aten::max", "aten::median", "aten::min", "aten::nanmedian",
        "aten::prod", "aten::prod.dim_int",
    }
)  # fmt: skip
"""A test sweeps torch's own database of operators for missing ones."""
