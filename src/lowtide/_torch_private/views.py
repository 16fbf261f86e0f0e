"""Views: what a tensor is a view of, and the view with the other sign."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter

from torch import Tensor

from lowtide._torch_private.needed import needed_for

with needed_for("restoring views"):
    from torch import _neg_view as negated_view

__all__ = ["negated_view", "view_base"]


view_base: Callable[[Tensor], Tensor | None] = attrgetter("_base")
"""The tensor that a tensor is a view of; None if it is none."""
