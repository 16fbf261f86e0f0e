"""What is around the steps of somebody's own loop: on when one begins, off when it ends.

See [Note: steps of somebody's own loop] for where that is.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lowtide.adaptive.session import Adaptive

__all__ = ["OwnSteps"]

UNENDED = 100
"""Calls of the model, none of whose steps has ended, before that is said."""


class _BrokenOff(Exception):  # noqa: N818  nothing is wrong: it ends what is around a step
    """A step does not come to its end."""


class OwnSteps:
    """Begins and ends the steps of an adaptive run that are somebody's own."""

    def __init__(self, session: Adaptive) -> None:
        self.session = session
        self.ended_by_optimizers = False
        """Whether an optimizer's step ends them: inside ``with``."""
        self.around = ExitStack()
        """What is around the next step, or the one that runs, and touches only the model."""
        self.listening: list[Callable[[], AbstractContextManager[None]]] = []
        """Makes what is on while it runs."""
        self.running: ExitStack | None = None
        """What is on; None if no step runs."""
        self.calls = 0

    def prepare(self) -> None:
        """Be ready for the next one."""
        self.listening = self.session.prepare_own_step(self.around)

    def model_begins(self) -> None:
        """The model is called: a step begins, unless one runs."""
        if self.running is None:
            self._begin()
        self.calls += 1
        if self.calls == UNENDED and not self.session.number:
            self.session.say(
                "warned",
                f"the model was called {UNENDED} times and no step has ended: pass every optimizer of the loop to"
                " adapt(), or call run.step() after each step",
            )

    def optimizers_ended(self) -> None:
        """All optimizers have stepped."""
        if self.ended_by_optimizers:
            self.end()

    def _begin(self) -> None:
        running = self.running = ExitStack()
        try:
            for listening in self.listening:
                running.enter_context(listening())
            self.session.begin_own_step(running)
        except RuntimeError:  # inside one of torch.func's transforms hooks are not allowed: the step goes unwatched
            self.break_off()
            self.running = ExitStack()
        except BaseException:
            self.break_off()
            raise

    def end(self) -> None:
        """The step that runs has ended; if none does, its model was not called."""
        session = self.session
        running, self.running = self.running, None
        session.note_calls(running is not None)
        if running is None:
            if session.ranks.all.alone:
                return
            running = ExitStack()  # where others take part, what they decide together is decided here as well
            session.begin_own_step(running)
        try:
            running.close()
            self.around.close()
        except BaseException:
            self.break_off()
            raise
        session.end_own_step()
        self.prepare()

    def break_off(self) -> None:
        """End a step that does not come to its end, and about which ranks therefore do not agree."""
        running, self.running = self.running, None
        for stack in (running, self.around):
            if stack is not None:
                stack.__exit__(_BrokenOff, _BrokenOff(), None)
        self.listening = []
        self.session.take_off()
