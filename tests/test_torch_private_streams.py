"""What lowtide relies on in the streams of ``torch.cpu``, which do nothing."""

from __future__ import annotations

from typing import Any

import torch

from lowtide._torch_private.streams import StreamWatcher, current_cpu_stream, watch_cpu_streams
from lowtide.trace.streams import Streams
from lowtide.trace.trace import Sync


def test_waits_of_streams_are_reported_and_the_classes_left_as_they_were() -> None:
    found: list[Sync] = []
    before = vars(torch.cpu.Stream).copy(), vars(torch.cpu.Event).copy()
    streams = Streams(found.append)
    other = torch.cpu.Stream()
    with watch_cpu_streams(streams):
        event = other.record_event()
        torch.cpu.current_stream().wait_event(event)
        other.wait_stream(torch.cpu.current_stream())
        with torch.cpu.stream(other):
            assert streams.current == 1
    assert (vars(torch.cpu.Stream), vars(torch.cpu.Event)) == before
    recorded, waited, joined = found
    assert (recorded.stream, recorded.waits) == (1, False)
    assert waited == Sync(0, recorded.channel)
    assert joined == Sync(1, other=0)


def test_events_that_know_their_stream_are_reported_too() -> None:
    class Watcher:
        def __init__(self) -> None:
            self.found: list[tuple[str, Any]] = []

        def marked(self, stream: Any, channel: str) -> None:
            self.found.append(("marked", stream))

        def waited(self, stream: Any, channel: str) -> None:
            self.found.append(("waited", stream))

        def joined(self, stream: Any, other: Any) -> None:
            raise AssertionError("no stream waits for all of another")

    watcher = Watcher()
    watched: StreamWatcher = watcher
    with watch_cpu_streams(watched):
        event = torch.cpu.Event()
        event.record()
        event.wait()
    assert watcher.found == [("marked", current_cpu_stream()), ("waited", current_cpu_stream())]
