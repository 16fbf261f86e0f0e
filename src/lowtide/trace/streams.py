"""Which stream each kernel is issued on, and what streams wait for, where imagined ranks are traced on the CPU.

The streams of ``torch.cpu`` do nothing, but FSDP uses them as it uses those of a device: it gathers parameters on one
stream, reduces gradients on another, and has each wait for what it needs. So a Trace has the waits of the real run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lowtide._torch_private.streams import current_cpu_stream
from lowtide.trace.trace import Sync

__all__ = ["Streams"]


class Streams:
    """The streams of a recording, by number; the one that is current when it begins is 0."""

    def __init__(self, note: Callable[[Sync], None]) -> None:
        self.note = note
        self.numbers: dict[Any, int] = {current_cpu_stream(): 0}

    def number(self, stream: Any) -> int:
        """The number of a stream."""
        return self.numbers.setdefault(stream, len(self.numbers))

    @property
    def current(self) -> int:
        """The number of the stream that is current."""
        return self.number(current_cpu_stream())

    def marked(self, stream: Any, channel: str) -> None:
        """An event is recorded."""
        self.note(Sync(self.number(stream), channel, waits=False))

    def waited(self, stream: Any, channel: str) -> None:
        """A stream waits for an event."""
        self.note(Sync(self.number(stream), channel))

    def joined(self, stream: Any, other: Any) -> None:
        """A stream waits for another."""
        if stream is not other:
            self.note(Sync(self.number(stream), other=self.number(other)))
