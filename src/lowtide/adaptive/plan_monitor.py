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
FORGIVING = 100
"""Steps without an OOM before what was missing is forgotten, at first."""
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
        self._roomy = 0
        """Steps in a row in which the device has given more than was planned for."""
        self._capacities: dict[Shape, int | None] = {}
        """What the device gave this process when each bucket was planned."""
        self._missed_in: dict[Shape, int] = {}
        """The last step in which memory was missing, by bucket."""
        self._patience: dict[Shape, int] = {}
        """Steps without an OOM before what was missing is forgotten, by bucket."""

    def planned(self, bucket: Shape, step: int, capacity: int | None) -> None:
        """A bucket has a new plan, made after ``step`` for so much of the device."""
        self.planned_at, self.unlike, self._roomy = step, 0, 0
        self.lacking.discard(bucket)
        self._capacities[bucket] = capacity

    def missed(self, bucket: Shape, step: int, nbytes: int, capacity: int | None) -> None:
        """An allocation of a planned step failed, for lack of ``nbytes``.

        Where the device gives less than when the plan was made, another process has the rest: the plan was not wrong.
        """
        self._missed_in[bucket] = step
        if step > self.planned_at + SETTLING:
            planned = self._capacities.get(bucket)
            if planned is None or capacity is None or capacity + nbytes > planned:
                self.lost[bucket] = self.lost.get(bucket, 0) + max(nbytes, LEAST_LOST)
            self.lacking.add(bucket)

    def has_room(self, bucket: Shape, step: int, capacity: int | None) -> str:
        """Why the plan of the step that has just ended may give way to one that takes more; empty if it may not.

        The device gives more than when it was made, or no memory was missing for long. What is forgotten and then
        missing again is remembered twice as long.
        """
        planned = self._capacities.get(bucket)
        roomy = planned is not None and capacity is not None and capacity > planned + max(LEAST_LOST, planned // 20)
        self._roomy = self._roomy + 1 if roomy else 0
        if planned is not None and capacity is not None and self._roomy >= PATIENT:
            return f"the device gives this process {format_bytes(capacity)}, and gave {format_bytes(planned)} before"
        patience = self._patience.get(bucket, FORGIVING)
        if not self.lost.get(bucket) or step - self._missed_in.get(bucket, step) < patience:
            return ""
        return f"no memory was missing for {patience} steps"

    def forgive(self, bucket: Shape) -> None:
        """Forget what was missing."""
        if self.lost.pop(bucket, 0):
            self._patience[bucket] = 2 * self._patience.get(bucket, FORGIVING)

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
