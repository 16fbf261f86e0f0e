"""Whether plans hold: OOM in steps that follow one, and memory that is not as planned. No torch here."""

from __future__ import annotations

from lowtide.adaptive.lengths import Shape
from lowtide.units import format_bytes

__all__ = ["PATIENT", "QUERY", "PlanMonitor"]

SETTLING = 1
"""Steps after a plan in which gradients are still where other steps had room for them: what is missing then will not
be missing later."""
LEAST_LOST = 4 << 20
"""The bytes that a plan gives up after an OOM, at least."""
PATIENT = 5
"""Steps in a row whose memory is not as planned before the run is re-planned."""
QUERY = 10
"""Steps between two queries of the other ranks."""


class PlanMonitor:
    """Compares steps with their plans, one for each bucket of batches."""

    def __init__(self, error: float, replan_every: int) -> None:
        self.error, self.replan_every = error, replan_every
        self.lost: dict[Shape, int] = {}
        """Bytes that were missing, by bucket."""
        self.lacking: set[Shape] = set()
        """The buckets in whose steps memory was missing since they were planned."""
        self.planned_at = -replan_every
        self.unlike = self.replans = 0

    def planned(self, bucket: Shape, step: int) -> None:
        """A bucket has a new plan, made after ``step``."""
        self.planned_at, self.unlike = step, 0
        self.lacking.discard(bucket)

    def missed(self, bucket: Shape, step: int, nbytes: int) -> None:
        """An allocation of a planned step failed, for lack of ``nbytes``."""
        if step > self.planned_at + SETTLING:
            self.lost[bucket] = self.lost.get(bucket, 0) + max(nbytes, LEAST_LOST)
            self.lacking.add(bucket)

    def wrong(self, bucket: Shape, peak: int, planned: int) -> str:
        """Why the plan of the step that has just ended does not hold; empty if it does.

        Compared are the most bytes that were allocated. What is reserved depends on other steps too: segments stay
        until the device asks for them back.
        """
        self.unlike = self.unlike + 1 if peak > planned * (1 + self.error) else 0
        if bucket in self.lacking:
            return "memory was missing"
        if self.unlike < PATIENT:
            return ""
        self.lost[bucket] = max(self.lost.get(bucket, 0), peak - planned)
        return f"{format_bytes(peak)} allocated where {format_bytes(planned)} were planned"

    def may_replan(self, step: int) -> bool:
        """Whether the run may be re-planned after ``step``.

        Soon at first, when it is the plan that was wrong; then less and less often, down to every ``replan_every``.
        """
        return step - self.planned_at >= min(self.replan_every, (SETTLING + 1) << self.replans)
