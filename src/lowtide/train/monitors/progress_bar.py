"""The run as a bar at the foot of a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lowtide.train.record import StepRecord

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

__all__ = ["ProgressBar"]


class ProgressBar:
    """Draws a bar on ``console``, if that is a terminal; log lines printed on the same console stay above it.

    ``ProgressBar(logs.console)`` on rank 0; with None, on the other ranks, nothing is drawn.
    """

    def __init__(self, console: Console | None) -> None:
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        if console is None or not console.is_terminal:
            return
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=None),
            TextColumn("loss {task.fields[loss]:.4f}  {task.fields[speed]:,.0f} tokens/s"),
            TimeRemainingColumn(compact=True),
            console=console,
            refresh_per_second=4,
        )

    def step(self, record: StepRecord) -> None:
        """Move the bar; the first step draws it, at the step a resumed run has reached."""
        if self._progress is None:
            return
        speed = record.tokens_per_second
        if self._task is None:
            self._task = self._progress.add_task(
                "steps", total=record.steps, completed=record.step, loss=record.loss, speed=speed
            )
            self._progress.start()
        self._progress.update(self._task, completed=record.step, loss=record.loss, speed=speed)

    def close(self) -> None:
        """Leave the bar as it is and release the terminal."""
        if self._progress is not None and self._task is not None:
            self._progress.stop()
