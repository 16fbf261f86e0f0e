"""How often, and with how many bytes, the rescue had to act."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

__all__ = ["Counts"]

REASONS = 100
"""Reasons that are kept until somebody takes them; more would only repeat these."""


@dataclass
class Counts:
    """What the rescue did since it was last asked."""

    watermark: int = 0
    """Times that tensors left before a layer, since more was allocated than the watermark allows."""
    retried: int = 0
    """Operators that failed for want of memory, and succeeded after room was made."""
    repeated: int = 0
    """Steps that were begun anew."""
    sent_bytes: int = 0
    """Bytes of saved tensors that were sent to the host."""
    paged_bytes: int = 0
    """Bytes of parameters, gradients and optimizer states that were sent to the host."""
    missing: int = 0
    """The most bytes that an allocation lacked."""
    reasons: list[str] = field(default_factory=list)
    """What happened, one short line each, oldest first."""

    @property
    def any(self) -> bool:
        """Whether the rescue did anything."""
        return bool(self.watermark or self.retried or self.repeated)

    def lack(self, missing: int) -> None:
        """An allocation lacked so many bytes."""
        self.missing = max(self.missing, missing)

    def note(self, reason: str) -> None:
        """Remember why something was done."""
        if len(self.reasons) < REASONS:
            self.reasons.append(reason)

    def taken(self) -> Counts:
        """What was counted so far; counting begins anew."""
        taken = replace(self)
        vars(self).update(vars(Counts()))
        return taken
