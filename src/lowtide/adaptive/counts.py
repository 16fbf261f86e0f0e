"""How often, and with how many bytes, the rescue acted."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

__all__ = ["Counts"]

REASONS = 100
"""Reasons that are kept until they are taken; more would only say the same."""


@dataclass
class Counts:
    """What the rescue did since :meth:`taken` was last called."""

    watermark: int = 0
    """Times that tensors were offloaded before a layer, since more was allocated than the watermark allows."""
    retried_operators: int = 0
    """Operators that ran out of memory, and succeeded after room was made."""
    retried_steps: int = 0
    """Steps that were retried from their beginning."""
    offloaded_bytes: int = 0
    """Bytes of saved tensors that were offloaded."""
    paged_bytes: int = 0
    """Bytes of parameters, gradients and optimizer states that were paged out."""
    missing: int = 0
    """The most bytes that a failed allocation asked for."""
    reasons: list[str] = field(default_factory=list)
    """What happened, one short line each, oldest first."""

    @property
    def any(self) -> bool:
        """Whether the rescue did anything."""
        return bool(self.watermark or self.retried_operators or self.retried_steps)

    def lack(self, missing: int) -> None:
        """An allocation of so many bytes failed."""
        self.missing = max(self.missing, missing)

    def note(self, reason: str) -> None:
        """Add a reason."""
        if len(self.reasons) < REASONS:
            self.reasons.append(reason)

    def taken(self) -> Counts:
        """What was counted so far; the counts are reset."""
        taken = replace(self)
        vars(self).update(vars(Counts()))
        return taken
