"""A step whose parts are run one by one, by a loop that is not ours.

[Note: parts of a step]
A framework's loop calls one function for each micro-batch, forward and backward, and steps the optimizer elsewhere. The
whole step is no function that could be called again, but a micro-batch is: it is a part of the step, and is passed to
:meth:`lowtide.adaptive.session.Adaptive.part`. Where a part fails on OOM and no operator can be retried, what the step
began with is restored and all parts so far are retried in order, without a Policy, so that everything saved can be
offloaded. The loop has seen the results of the earlier parts already, and a retry gives the same.

The loop says which part is the last of its step. After that part the ranks agree whether any of them has to retry. What
follows, up to the end of the optimizer's step, is a part of the loop's step as always, and is not retried.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from lowtide.adaptive.rescue import ATTEMPTS, Rescue
from lowtide.adaptive.step_snapshot import RetryStep, StepSnapshot

if TYPE_CHECKING:
    from lowtide.adaptive.session import Adaptive

__all__ = ["StepParts"]

Result = TypeVar("Result")


class StepParts:
    """The parts of the running step. See [Note: parts of a step]."""

    def __init__(self, run: Adaptive) -> None:
        self.run = run
        self._snapshot: StepSnapshot | None = None
        """What the running step began with; None before its first part."""
        self._parts: list[Callable[[], Any]] = []
        """Those that were begun."""

    def run_part(self, part: Callable[[], Result], *, last: bool) -> Result:
        """Run a part; if nothing else helps on OOM, retry it together with those before it."""
        rescue = self.run.rescue
        if rescue is None:  # on a CPU, or not wanted
            return part()
        snapshot = self._snapshot = self._snapshot or rescue.snapshot()
        self._parts.append(part)
        try:
            with rescue.retryable(snapshot):
                result = self._attempt(part, rescue, snapshot, last=last)
            if last:
                rescue.succeeded(snapshot)
                self._clear()
        except BaseException:
            self._clear()
            raise
        return result

    def _attempt(self, part: Callable[[], Result], rescue: Rescue, snapshot: StepSnapshot, *, last: bool) -> Result:
        why, earlier = "", list[Callable[[], Any]]()
        for _ in range(ATTEMPTS):
            try:
                for one in earlier:
                    one()
                result = part()
                if last:
                    rescue.agree()
                return result
            except (RetryStep, RuntimeError) as error:
                if (reason := rescue.reason_to_retry(error)) is None:
                    raise
                why = reason
            earlier = self._parts[:-1]
            self.run.restart_step(partial(rescue.restore, snapshot, why))
        raise rescue.never_fits(why)

    def _clear(self) -> None:
        self._snapshot, self._parts = None, []
