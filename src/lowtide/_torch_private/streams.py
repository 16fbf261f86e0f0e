"""The streams of ``torch.cpu``, which do nothing: what code that is written for any device asks of them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

__all__ = ["StreamWatcher", "current_cpu_stream", "watch_cpu_streams"]


class StreamWatcher(Protocol):
    """What streams report to."""

    def marked(self, stream: Any, channel: str) -> None:
        """An event was recorded on a stream. Events that one line of code records have one channel."""

    def waited(self, stream: Any, channel: str) -> None:
        """A stream waits for the event that was last recorded there."""

    def joined(self, stream: Any, other: Any) -> None:
        """A stream waits for all that another was given so far."""


def current_cpu_stream() -> Any:
    """The stream that is current."""
    return torch.cpu.current_stream()


@contextmanager
def watch_cpu_streams(watcher: StreamWatcher) -> Iterator[None]:
    """Tell ``watcher`` what streams wait for, inside this context."""
    stream_class: Any = torch.cpu.Stream
    event_class: Any = torch.cpu.Event
    channels: dict[Any, str] = {}  # by event, held so that its identity stays its own

    def wait_stream(self: Any, stream: Any) -> None:
        watcher.joined(self, stream)

    def record_event(self: Any) -> Any:
        event = event_class()
        channels[event] = _caller()
        watcher.marked(self, channels[event])
        return event

    def wait_event(self: Any, event: Any) -> None:
        if event in channels:
            watcher.waited(self, channels[event])

    def record(self: Any, stream: Any = None) -> None:
        channels[self] = _caller()
        watcher.marked(stream or current_cpu_stream(), channels[self])

    def wait(self: Any, stream: Any = None) -> None:
        if self in channels:
            watcher.waited(stream or current_cpu_stream(), channels[self])

    patches: list[tuple[Any, Callable[..., Any]]] = [
        (stream_class, wait_stream), (stream_class, record_event), (stream_class, wait_event),
        (event_class, record), (event_class, wait),
    ]  # fmt: skip
    plain = [(owner, one.__name__, getattr(owner, one.__name__)) for owner, one in patches]
    for owner, one in patches:
        setattr(owner, one.__name__, one)
    try:
        yield
    finally:
        for owner, name, before in plain:
            setattr(owner, name, before)


def _caller() -> str:
    """Where an event is recorded."""
    frame = sys._getframe(2)
    return f"{frame.f_code.co_name}:{frame.f_lineno}"
