"""What a pipeline stage receives and sends, and how long it holds that."""

from __future__ import annotations

from collections.abc import Mapping

from lowtide.planner.pipeline import Pipeline
from lowtide.planner.rank import Rank, Storage
from lowtide.planner.schedule import same_stage, shortened
from lowtide.trace.trace import Part

__all__ = ["StageEnds", "boundary_bytes"]


class StageEnds:
    """A chunk's ends: what it receives and sends, and how long that is held.

    [Note: receive buffers]
    Up to torch 2.14 a stage has a receive buffer for every micro-batch from its first step on, and holds each output
    until its backward has ended. Since 2.15 (``Trace.frees_boundaries``) a buffer is allocated right before its
    receive. An input is held until its backward has ended, and until the next one is received: the schedule's list of
    operations refers to it. An output that was sent is freed: when the next forward has ended or the next backward is
    about to begin and has its gradient; under GPipe, when the last forward has ended. The last chunk holds all its
    inputs until the step ends: the schedule keeps the losses, whose graphs end in the nodes that accumulate the
    inputs' gradients.

    Where the next chunk is on the same stage, as at the turn of a V, nothing is sent: the other chunk's buffer is
    replaced by the output itself, or by the gradient.

    [Note: sent boundaries]
    The schedules of several chunks collect their sends and wait for them when the step ends. Until then each holds what
    it sends: the outputs and the inputs' gradients of all micro-batches. They do not refer to an output any longer than
    its backward does.
    """

    def __init__(self, rank: Rank, first: Part, last: Part, pipeline: Pipeline, place: int, *, frees: bool) -> None:
        """``first`` and ``last`` are the chunk's outermost parts, ``place`` its index among all chunks."""
        chunks = pipeline.stages * pipeline.chunks
        self.place = place
        self.rank, self.frees, self.gpipe = rank, frees, pipeline.schedule == "gpipe"
        self.first, self.last, self.split = place == 0, place == chunks - 1, chunks > 1
        self.sent: Storage | None = None
        self.latest: list[Storage] = []
        """Outputs that are being sent, or that the schedule refers to."""
        self.input_size = 0 if self.first else boundary_bytes(first, "input")
        self.gradient_size = 0 if self.last else boundary_bytes(last, "output_gradient")
        self.receives = self.frees and not self.last
        """Whether inputs are allocated when they are received. Not in the last chunk: at its peak it has all of them,
        those of micro-batches that are not replayed too."""
        everyone = range(pipeline.micro_batches)
        inputs = () if self.receives or not self.input_size else everyone
        gradients = () if self.frees or not self.gradient_size else everyone
        self.collected: list[Storage] | None = None
        """What was sent in this step; see [Note: sent boundaries]. None where it is not held."""
        if pipeline.schedule not in ("gpipe", "1f1b") and self.split:
            left_out = pipeline.micro_batches - shortened(pipeline).micro_batches
            sizes = ((place + 1, self.gradient_size), (place - 1, self.input_size))
            self.collected = [
                self._buffer(size)
                for other, size in sizes
                if size and not same_stage(pipeline, place, other)
                for _ in range(left_out)
            ]
        self.sends = self.collected is not None and not self.last and not same_stage(pipeline, place, place + 1)
        self.sends_back = self.collected is not None and not self.first and not same_stage(pipeline, place, place - 1)
        self.inputs = {number: self._buffer(self.input_size) for number in inputs}
        self.gradients = {number: self._buffer(self.gradient_size) for number in gradients}
        self.received: Storage | None = None
        self.before: StageEnds | None = None
        """Those of the chunk before, if it is on this stage."""
        self.after: StageEnds | None = None
        """Those of the chunk after, if it is on this stage."""

    def _buffer(self, size: int) -> Storage:
        storage = self.rank.make(size)
        storage.what = "boundaries"
        return storage

    def input(self, micro_batch: int) -> Storage | None:
        """What the chunk is given, with one more reference. See [Note: receive buffers]."""
        if self.receives and self.input_size and self.before is None:
            storage = self.inputs[micro_batch] = self._buffer(self.input_size)
            storage.count += 1
            if self.received is not None:
                self.rank.drop(self.received)
            self.received = storage
        return _held(self.inputs, micro_batch)

    def gradient(self, micro_batch: int) -> Storage | None:
        """The gradient of its output, with one more reference."""
        if self.frees:
            if self.gpipe:
                self._sent()
            if self.gradient_size and self.after is None:
                self.gradients[micro_batch] = self._buffer(self.gradient_size)
            self._sent()
        return _held(self.gradients, micro_batch)

    def hold_output(self, output: Storage | None, micro_batch: int) -> Storage | None:
        """A forward has ended; what is returned is to be held until its backward has ended."""
        if not (self.frees and self.gpipe):
            self._sent()
        if output is None or not self.split:
            return output
        self._collect(output, self.sends)
        if self.after is not None:
            self.after._give(self.after.inputs, micro_batch, output)
        if self.collected is not None or (self.frees and self.last):
            return output
        self.latest.append(output)
        if self.frees:
            return None
        output.count += 1
        return output

    def _collect(self, sent: Storage | None, held: bool) -> None:
        """Something is sent; see [Note: sent boundaries]."""
        if held and sent is not None and self.collected is not None:
            sent.count += 1
            self.collected.append(sent)

    def _sent(self) -> None:
        """Outputs have arrived where they were sent, and no longer belong to the schedule."""
        for storage in self.latest:
            self.rank.drop(storage)
        self.latest = []

    def ended(self, micro_batch: int) -> None:
        """The backward of a micro-batch has ended."""
        for received, buffers in ((self.receives, self.inputs), (self.frees, self.gradients)):
            if received and (storage := buffers.pop(micro_batch, None)) is not None:
                self.rank.drop(storage)

    def _give(self, buffers: dict[int, Storage], micro_batch: int, given: Storage) -> None:
        """A chunk of this stage gives this one something: it takes the place of a buffer."""
        given.count += 1
        before, buffers[micro_batch] = buffers.get(micro_batch), given
        if before is not None:
            self.rank.drop(before)

    def send_back(self, gradient: Storage | None, micro_batch: int = 0) -> None:
        """The gradient of the input is held until the next one is on its way."""
        self._collect(gradient, self.sends_back)
        if self.before is not None and gradient is not None:
            self.before._give(self.before.gradients, micro_batch, gradient)
        if self.sent is not None:
            self.rank.drop(self.sent)
        self.sent = gradient

    def close(self) -> None:
        """The schedule has ended."""
        self.send_back(None)
        self._sent()
        self.rank.drop_all(self.collected or ())
        if self.received is not None:
            self.rank.drop(self.received)


def _held(buffers: Mapping[int, Storage], micro_batch: int) -> Storage | None:
    storage = buffers.get(micro_batch)
    if storage is not None:
        storage.count += 1
    return storage


def boundary_bytes(part: Part, name: str) -> int:
    """The bytes of a value that a part names; a gradient is as large as its value."""
    value = getattr(part, name)
    if value is None and name == "output_gradient":
        value = part.output
    return part.values[value].size if value is not None else 0
