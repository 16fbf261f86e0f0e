"""Replay parts on an imagined device: what they allocate, compute, move and rebuild, in the order the runtime does it.

[Note: holding]
A storage is held by the program until its ``free`` event, and by everything that stands for it in autograd's graph: a
pack that keeps it, a copy out that is not let go, a captured call that was given it. It is released with the last of
these. So each is one count, and nothing else decides when memory is free.

What a repeated call gives is other memory than what the call gave in forward. It is held by the call until nothing
outstanding wants it, and by the node that asked for it until that node is done.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import repeat
from typing import Literal, NamedTuple

from lowtide.cost.device import Device
from lowtide.cost.kernel import kernel_seconds
from lowtide.plan.allocator import Allocator, Block
from lowtide.plan.lanes import Lanes
from lowtide.plan.program import ADD, CALL, DONE, FREE, MAKE, RUN, SAVE, USE, Code, Program
from lowtide.plan.simulation import Moment, Span
from lowtide.plan.swapping import IN_FLIGHT_BYTES, Schedule, Swapped
from lowtide.policy import Swap
from lowtide.trace.trace import Kernel, Part

__all__ = ["Instance", "Rank", "Storage"]

WAITING = frozenset(
    f"aten::{name}" for name in ("_local_scalar_dense", "item", "nonzero", "masked_select", "_unique2", "equal")
)
"""Kernels whose result the host waits for."""

Phase = Literal["forward", "backward", "recompute", "optimizer"]


class Storage:
    """Memory and who holds it. See [Note: holding]."""

    __slots__ = ("block", "count", "layer", "operator", "size", "what")

    def __init__(self, block: Block | None, size: int) -> None:
        self.block, self.size = block, size
        self.count = 1
        self.what, self.operator = "transients", ""
        self.layer: int | None = None


class _Call:
    """A captured call of one instance."""

    __slots__ = ("held", "pending", "references", "results", "swapped")

    def __init__(self) -> None:
        self.held: list[tuple[int, Storage]] = []
        self.swapped: list[Swapped] = []
        self.pending = 0
        """How many outstanding tensors come out of its repetition."""
        self.references = 1
        """Who holds the call: the layer while it runs, packs, and calls that were given what it made."""
        self.results: dict[int, Storage] | None = None


class _Repeated:
    """A call that is repeated from its node."""

    __slots__ = ("pending", "result")

    def __init__(self) -> None:
        self.pending = 0
        self.result: Storage | None = None


class Instance:
    """One run of a part: a layer and a micro batch."""

    __slots__ = (
        "calls", "departed", "due", "first", "handed", "held", "input", "input_swapped", "keeps", "kept", "last",
        "layer", "left", "micro_batch", "offset", "outstanding", "packs", "passes", "program", "rebuilt", "repeated", "slots",
        "starts", "used",
    )  # fmt: skip

    def __init__(
        self,
        program: Program,
        layer: int | None,
        micro_batch: int,
        offset: int = 0,
        *,
        passes: bool = False,
        last: bool = False,
        keeps: int | None = None,
    ) -> None:
        self.program, self.layer, self.micro_batch, self.offset = program, layer, micro_batch, offset
        self.last = last
        """Whether it is the last layer: after it, all that has to come back does so when backward begins."""
        self.passes = passes
        """Whether it keeps everything or nothing, and something of another layer is due in it."""
        self.keeps = keeps
        """A value that somebody else holds from when it is made: a pipeline, its last stage's logits."""
        self.kept: Storage | None = None
        self.first = 0
        self.slots: dict[int, Storage] = {}
        """What the program holds."""
        self.handed: list[Storage | None] = []
        """What it hands to the next beside its output or its gradient."""
        self.left: list[Storage] = []
        """What its backward made and leaves until the whole backward has ended."""
        self.held: dict[int, Storage] = {}
        """What packs keep."""
        self.packs: dict[int, Swapped] = {}
        self.departed: dict[int, Swapped] = {}
        self.starts: dict[int, list[Swapped]] = {}
        """Packs that start copies back when they are asked for."""
        self.due: list[Swapped] = []
        """What starts to come back with the gradient of the part's output."""
        self.calls: dict[int, _Call] = {}
        self.repeated: dict[int, _Repeated] = {}
        self.used: dict[int, Storage] = {}
        """What was rebuilt for a node that is not done yet."""
        self.input: Storage | None = None
        self.input_swapped: Swapped | None = None
        self.rebuilt = False
        self.outstanding = sum(code == DONE for code, _ in program.backward) if program.whole else 0


class _Timed(NamedTuple):
    """A kernel's seconds, and whether the host waits for it."""

    seconds: float
    waits: bool
    collective: bool


class Rank:
    """One device: its memory, its clocks, and what is on its way."""

    def __init__(self, device: Device, *, details: bool = False) -> None:
        self.device = device
        self.allocator = Allocator()
        self.spans: list[Span] | None = [] if details else None
        self.moments: list[Moment] | None = [] if details else None
        self.live: dict[Storage, None] | None = {} if details else None
        self.peak_at: Moment | None = None
        self.lanes = Lanes(device)
        self.schedule = Schedule(self._let_go)
        self.returning_bytes = 0
        self.host_bytes = self.host_peak = self.moved = 0
        self.bytes = self.most_bytes = 0
        """The tensors' own bytes, and the most of them."""
        self.recompute = 0.0
        self.gradients: dict[tuple[int | None, str, int], Storage] = {}
        self.where: tuple[int | None, str, int, Phase] = (None, "", 0, "forward")
        """What is running: the layer, the operator, the micro batch, the phase."""
        self.allocations = 0
        self.stop_at = -1
        """The allocation at which the live storages are written down."""
        self.snapshot: list[Storage] = []
        self.peak_allocation = 0
        self._timed: dict[int, tuple[Part, tuple[_Timed, ...]]] = {}
        self._adding: dict[int, float] = {}

    # Memory.

    def make(self, size: int) -> Storage:
        """Allocate."""
        allocator = self.allocator
        before = allocator.peak
        storage = Storage(allocator.allocate(size), size)
        self.bytes += size
        if self.bytes > self.most_bytes:
            self.most_bytes = self.bytes
        if self.live is not None:
            self._look(storage, allocator.peak > before)
        return storage

    def drop(self, storage: Storage) -> None:
        """One holder less; with the last one the memory is free."""
        storage.count -= 1
        if storage.count == 0:
            assert storage.block is not None
            self.allocator.release(storage.block)
            self.bytes -= storage.size
            storage.block = None
            if self.live is not None:
                del self.live[storage]
                self._sample()

    def _look(self, storage: Storage, highest: bool) -> None:
        assert self.live is not None
        storage.layer, storage.operator = self.where[0], self.where[1]
        self.live[storage] = None
        self.allocations += 1
        moment = self._sample()
        if highest:
            self.peak_at, self.peak_allocation = moment, self.allocations
        if self.allocations == self.stop_at:
            self.snapshot = [_copy(one) for one in self.live]

    def _sample(self) -> Moment:
        assert self.moments is not None
        now = max(self.lanes.computation, self.lanes.host)
        moment = Moment(now, self.allocator.allocated, self.where[0], self.where[1])
        self.moments.append(moment)
        return moment

    # Time.

    def timed(self, part: Part) -> tuple[_Timed, ...]:
        """The seconds of a part's kernels."""
        known = self._timed.get(id(part))
        if known is None:
            found = tuple(
                _Timed(kernel_seconds(self.device, one), one.kind in WAITING, one.ranks > 0) for one in part.kernels
            )
            known = self._timed[id(part)] = (part, found)
        return known[1]

    def run(self, kernel: _Timed) -> None:
        """Issue a kernel."""
        start = self.lanes.run(kernel.seconds)
        if kernel.waits:
            self.lanes.synchronize()
        if self.spans is not None:
            layer, operator, micro_batch, phase = self.where
            kind: Literal["forward", "backward", "recompute", "optimizer", "collective"]
            kind = "collective" if kernel.collective else phase
            self.spans.append(Span("compute", start, kernel.seconds, kind, layer, operator, micro_batch))

    def _wait(self, until: float, swapped: Swapped) -> None:
        begin = max(self.lanes.computation, self.lanes.host)
        waited = self.lanes.wait(until)
        if waited > 0 and self.spans is not None:
            self.spans.append(Span("compute", begin, waited, "stall", *swapped.label, swapped.micro_batch))

    # Forward.

    def forward(
        self, instance: Instance, given: Storage | None, taken: Sequence[Storage | None] = ()
    ) -> Storage | None:
        """Run a part; what it gives to the next."""
        program, schedule = instance.program, self.schedule
        part, slots = program.part, instance.slots
        self._take(slots, part.taken, taken)
        if part.input is not None and given is not None:
            slots[part.input] = given
            given.what, given.operator = "boundaries", "input"
        decided = not program.idle and not program.whole
        swapped_input = program.whole and isinstance(program.boundary, Swap)
        if decided or swapped_input or instance.passes:
            instance.first = schedule.enter(instance.offset)
        if program.whole:
            self._hold_input(instance, given)
        self._play_forward(instance)
        if program.captured:
            self._end_capture(instance)
        if decided or swapped_input or instance.passes:
            instance.due = schedule.end(instance.first + program.operators, instance.last)
        instance.handed = [slots.pop(number, None) for number in part.handed]
        if part.output is None:
            return None
        output = slots.pop(part.output, None)
        if output is not None and part.values[part.output].until:  # somebody else holds it for longer
            output.count += 1
            slots[part.output] = output
        return output

    def _take(self, slots: dict[int, Storage], numbers: Sequence[int], taken: Sequence[Storage | None]) -> None:
        """What the part before handed on; what this one knows nothing of goes."""
        for place, storage in enumerate(taken):
            if storage is not None and place < len(numbers):
                slots[numbers[place]] = storage
            elif storage is not None:
                self.drop(storage)

    def _play_forward(self, instance: Instance) -> None:
        program = instance.program
        part, slots, actions = program.part, instance.slots, program.actions
        values, timed = part.values, self.timed(part)
        self.where = (instance.layer, "", instance.micro_batch, "forward")
        for (code, number), name in zip(program.forward, self._names(program, "forward"), strict=False):
            if name:
                self.where = (instance.layer, name, instance.micro_batch, "forward")
            if code == MAKE:
                slots[number] = storage = self.make(values[number].size)
                if number == instance.keeps:
                    storage.count += 1
                    instance.kept = storage
            elif code == RUN:
                self.run(timed[number])
            elif code == FREE:
                freed = slots.pop(number, None)
                if freed is not None:
                    self.drop(freed)
            elif code == SAVE:
                self._save(instance, number, actions[number].how)
            elif code == CALL:
                self._capture(instance, number)
            elif code == DONE:  # its graph led nowhere
                self._done(instance, number)

    def _save(self, instance: Instance, number: int, how: str) -> None:
        action = instance.program.actions[number]
        if how == "keep":
            storage = instance.slots.get(action.value)
            if storage is not None:
                storage.count += 1
                instance.held[number] = storage
                self._is_saved(storage, instance.program.part.packs[number].owner)
        elif how == "swap":
            self._send(instance, number)
        elif how == "node":
            repeated = instance.repeated.get(action.call)
            if repeated is None:
                repeated = instance.repeated[action.call] = _Repeated()
                for operand in action.operands:
                    self._want(instance, operand)
            repeated.pending += 1
        elif how in ("output", "inside", "cast"):
            call = instance.calls[action.call]
            call.pending += 1
            call.references += 1
        if action.notices and self.schedule.next <= instance.first + action.position:
            due = self.schedule.reach(instance.first + action.position)
            if due:
                instance.starts[number] = due

    def _is_saved(self, storage: Storage, operator: str) -> None:
        if storage.what == "transients":
            storage.what, storage.operator = "activations", operator or storage.operator

    def _want(self, instance: Instance, number: int) -> None:
        """One more will ask for what stands in place of a saved tensor."""
        action = instance.program.actions[number]
        if action.how == "node":
            instance.repeated[action.call].pending += 1
        elif action.how in ("output", "inside", "cast"):
            instance.calls[action.call].pending += 1

    def _capture(self, instance: Instance, number: int) -> None:
        captured = instance.program.captured[number]
        call = instance.calls[number] = _Call()
        for value in captured.held:
            storage = instance.slots.get(value)
            if storage is not None:
                storage.count += 1
                call.held.append((value, storage))
                self._is_saved(storage, storage.operator)
        for other, _ in captured.referred:
            instance.calls[other].pending += 1
            instance.calls[other].references += 1

    def _end_capture(self, instance: Instance) -> None:
        """The layer has run: arguments that were swapped come back from there, and calls that nothing wants go."""
        for call in instance.calls.values():
            kept = []
            for value, storage in call.held:
                swapped = instance.departed.get(value)
                if swapped is None:
                    kept.append((value, storage))
                    continue
                swapped.references += 1
                call.swapped.append(swapped)
                self.drop(storage)
            call.held = kept
        for number in list(instance.calls):
            self._leave_call(instance, number)

    # Swapping.

    def _send(self, instance: Instance, number: int) -> None:
        program = instance.program
        action = program.actions[number]
        assert action.swap is not None
        due = instance.first + action.position + action.swap.prefetch
        swapped = instance.departed.get(action.value)
        if swapped is None:
            storage = instance.slots.get(action.value)
            if storage is None:
                return
            swapped = self._copy_out(storage, instance, program.part.packs[number].owner)
            instance.departed[action.value] = swapped
            self.schedule.leave(swapped, due)
        else:
            swapped.references += 1
        instance.packs[number] = swapped
        if action.last:
            self.schedule.come_back(swapped, due)

    def _copy_out(self, storage: Storage, instance: Instance, operator: str) -> Swapped:
        storage.count += 1
        self._is_saved(storage, operator)
        start, end = self.lanes.copy(storage.size, "link out")
        swapped = Swapped(storage, storage.size, end, (instance.layer, operator or "input"), instance.micro_batch)
        self._show_copy("copy out", swapped, start, end)
        self.moved += storage.size
        self.host_bytes += storage.size
        self.host_peak = max(self.host_peak, self.host_bytes)
        return swapped

    def _show_copy(self, kind: Literal["copy out", "copy back"], swapped: Swapped, start: float, end: float) -> None:
        if self.spans is not None:
            lane: Literal["link out", "link in"] = "link out" if kind == "copy out" else "link in"
            span = Span(lane, start, end - start, kind, *swapped.label, swapped.micro_batch, swapped.size)
            self.spans.append(span)

    def _let_go(self, swapped: Swapped) -> None:
        source, swapped.source = swapped.source, None
        if isinstance(source, Storage):
            self._wait(swapped.left, swapped)
            self.drop(source)

    def _start(self, due: list[Swapped]) -> None:
        """Start copies back, the one that is needed first before the others."""
        while due:
            swapped = due.pop()
            here = swapped.gone or swapped.source is not None or swapped.target is not None
            if here or self.returning_bytes + swapped.size > IN_FLIGHT_BYTES:
                continue
            self._bring_back(swapped)
            swapped.ahead = True
            self.returning_bytes += swapped.size

    def _bring_back(self, swapped: Swapped) -> None:
        storage = self.make(swapped.size)
        storage.what, (storage.layer, storage.operator) = "activations", swapped.label
        swapped.target = storage
        start, swapped.arrives = self.lanes.copy(swapped.size, "link in", after=swapped.left)
        self._show_copy("copy back", swapped, start, swapped.arrives)

    def _here(self, swapped: Swapped) -> None:
        """The computation is about to use it."""
        if swapped.source is not None:
            return
        if swapped.target is None:
            self._bring_back(swapped)
        self._arrive(swapped)

    def _arrive(self, swapped: Swapped) -> None:
        if swapped.ahead:
            swapped.ahead = False
            self.returning_bytes -= swapped.size
        if not swapped.awaited:
            swapped.awaited = True
            self._wait(swapped.arrives, swapped)

    def _leave_swapped(self, swapped: Swapped) -> None:
        swapped.references -= 1
        if swapped.references:
            return
        swapped.gone = True
        self._let_go(swapped)
        if isinstance(swapped.target, Storage):
            self._arrive(swapped)
            self.drop(swapped.target)
        self.host_bytes -= swapped.size

    # Backward.

    def backward(
        self, instance: Instance, given: Storage | None, taken: Sequence[Storage | None] = ()
    ) -> Storage | None:
        """Run a part's backward; the gradient that it gives to the next."""
        program = instance.program
        part = program.part
        values, timed = part.values, self.timed(part)
        slots: dict[int, Storage] = {}
        self._take(slots, part.taken_back, taken)
        sums: frozenset[int] = frozenset()
        if part.output_gradient is not None and given is not None:
            slots[part.output_gradient] = given
            if given.count > 1:  # autograd adds in place only to what nobody else has
                sums = program.sums
        self.where = (instance.layer, "", instance.micro_batch, "backward")
        self._start(instance.due)
        for (code, number), name in zip(program.backward, self._names(program, "backward"), strict=False):
            if name:
                self.where = (instance.layer, name, instance.micro_batch, "backward")
            if code == MAKE:
                slots[number] = self.make(values[number].size)
            elif code == RUN:
                if number in sums:
                    sums = frozenset()
                    self._add_apart(slots, number, part)
                self.run(timed[number])
            elif code == FREE:
                storage = slots.pop(number, None)
                if storage is not None:
                    self.drop(storage)
            elif code == USE:
                self._use(instance, number)
            elif code == DONE:
                self._done(instance, number)
            elif code == ADD:
                self._add(instance, number, slots)
        instance.handed = [slots.pop(number, None) for number in part.handed_back]
        result = slots.pop(part.input_gradient, None) if part.input_gradient is not None else None
        for number, storage in slots.items():
            if values[number].until:  # a later part frees it: whole gradients and parameters that ranks share
                instance.left.append(storage)
            else:
                self.drop(storage)
        return result

    def _add_apart(self, slots: dict[int, Storage], kernel: int, part: Part) -> None:
        """A sum that would have been made in place gets memory of its own."""
        for number in part.kernels[kernel].writes:
            before = slots.get(number)
            slots[number] = self.make(part.values[number].size)
            if before is not None:
                self.drop(before)

    def _add(self, instance: Instance, number: int, slots: dict[int, Storage]) -> None:
        """A parameter's gradient meets the one that is there."""
        storage = slots.pop(number, None)
        if storage is None:
            return
        key = (instance.layer, instance.program.part.name, number)
        if key not in self.gradients:
            storage.what = "gradients"
            self.gradients[key] = storage
            return
        size = storage.size
        if size not in self._adding:
            self._adding[size] = kernel_seconds(self.device, Kernel("aten::add_", touched=3 * size))
        self.run(_Timed(self._adding[size], False, False))
        self.drop(storage)

    def _use(self, instance: Instance, number: int) -> None:
        if number in instance.starts:
            self._start(instance.starts[number])
        action = instance.program.actions[number]
        if instance.program.whole:
            if not instance.rebuilt:
                instance.rebuilt = True
                self._repeat_all(instance)
        elif action.how == "swap":
            swapped = instance.packs.get(number)
            if swapped is not None:
                self._here(swapped)
        elif action.how != "keep" and action.how != "nothing":
            storage = self._rebuild(instance, number)
            if storage is not None:
                instance.used[number] = storage

    def _done(self, instance: Instance, number: int) -> None:
        action = instance.program.actions[number]
        storage = instance.held.pop(number, None) or instance.used.pop(number, None)
        if storage is not None:
            self.drop(storage)
        if instance.program.whole:
            instance.outstanding -= 1
            if not instance.outstanding:
                self._leave_input(instance)
        elif action.how == "swap":
            swapped = instance.packs.pop(number, None)
            if swapped is not None:
                self._leave_swapped(swapped)
        elif action.how in ("output", "inside", "cast"):
            self._leave_call(instance, action.call)

    # Rebuilding.

    def _rebuild(self, instance: Instance, number: int) -> Storage | None:
        """What was saved, made again if it is not there; held once more, for whoever asked."""
        action = instance.program.actions[number]
        if action.how == "node":
            return self._repeat_node(instance, number)
        if action.how not in ("output", "inside", "cast"):
            return None
        results = self._results(instance, action.call)
        storage = results.get(action.source if action.how == "cast" else action.value)
        if action.how == "cast":
            storage = self.make(instance.program.part.values[action.value].size)
            if action.kernel >= 0:
                self._run_again(self.timed(instance.program.part)[action.kernel])
        elif storage is not None:
            storage.count += 1
        self._release(instance, action.call)
        return storage

    def _results(self, instance: Instance, number: int) -> Mapping[int, Storage]:
        """What a captured call made, repeated if it is not there."""
        call, captured = instance.calls[number], instance.program.captured[number]
        if call.results is None:
            given = []
            for other, value in captured.referred:
                storage = self._results(instance, other).get(value)
                if storage is not None:
                    storage.count += 1
                    given.append(storage)
                self._release(instance, other)
            for swapped in call.swapped:
                self._here(swapped)
            call.results = self._play_body(instance, captured.body, captured.wanted)
            for storage in given:
                self.drop(storage)
        return call.results

    def _release(self, instance: Instance, number: int) -> None:
        """One reference was used; with the last one the results go."""
        call = instance.calls[number]
        call.pending -= 1
        if call.pending <= 0 and call.results is not None:
            self._drop_all(call.results.values())
            call.results = None

    def _leave_call(self, instance: Instance, number: int) -> None:
        """One holder of a call less; with the last one its arguments go."""
        call = instance.calls[number]
        call.references -= 1
        if call.references:
            return
        for _, storage in call.held:
            self.drop(storage)
        for swapped in call.swapped:
            self._leave_swapped(swapped)
        if call.results is not None:
            self._drop_all(call.results.values())
            call.results = None
        call.held, call.swapped = [], []
        for other, _ in instance.program.captured[number].referred:
            self._leave_call(instance, other)

    def _repeat_node(self, instance: Instance, number: int) -> Storage | None:
        action = instance.program.actions[number]
        repeated = instance.repeated[action.call]
        repeated.pending -= 1
        result = repeated.result
        if result is None:
            given = []
            for operand in action.operands:
                if operand in instance.starts:
                    self._start(instance.starts[operand])
                swapped = instance.packs.get(operand)
                if swapped is not None:
                    self._here(swapped)
                storage = self._rebuild(instance, operand)
                if storage is not None:
                    given.append(storage)
            made = self._play_body(instance, instance.program.nodes[action.call], {action.value})
            result = made.get(action.value)
            self._drop_all(given)
            if result is not None and repeated.pending > 0:
                result.count += 1
                repeated.result = result
        elif repeated.pending > 0:
            result.count += 1
        else:
            repeated.result = None
        return result

    def _play_body(self, instance: Instance, body: Sequence[Code], wanted: Iterable[int]) -> dict[int, Storage]:
        """Repeat a call. What it saves on its way lives until it has ended."""
        part = instance.program.part
        values, timed = part.values, self.timed(part)
        made: dict[int, Storage] = {}
        held: list[Storage] = []
        freed: set[int] = set()
        for code, number in body:
            if code == MAKE:
                if values[number].size:
                    made[number] = self.make(values[number].size)
                    freed.discard(number)
            elif code == RUN:
                self._run_again(timed[number])
            elif code == FREE:
                if number in made and number not in freed:
                    freed.add(number)
                    self.drop(made[number])
            elif code == SAVE:
                storage = made.get(part.packs[number].value)
                if storage is not None:
                    storage.count += 1
                    held.append(storage)
        results = {number: made[number] for number in wanted if number in made and made[number].block is not None}
        for storage in results.values():
            storage.count += 1
        self._drop_all([*(storage for number, storage in made.items() if number not in freed), *held])
        return results

    def _run_again(self, kernel: _Timed) -> None:
        layer, operator, micro_batch, phase = self.where
        self.where = (layer, operator, micro_batch, "recompute")
        self.run(kernel)
        self.recompute += kernel.seconds
        self.where = (layer, operator, micro_batch, phase)

    # Whole layers.

    def _hold_input(self, instance: Instance, given: Storage | None) -> None:
        """What a checkpoint holds: the layer's input, or, if that is swapped, its copy on the host."""
        boundary = instance.program.boundary
        if given is None:
            return
        if isinstance(boundary, Swap):
            swapped = instance.input_swapped = self._copy_out(given, instance, "")
            self.schedule.leave(swapped, instance.first + boundary.prefetch)
            self.schedule.come_back(swapped, instance.first + instance.program.operators)
        else:
            given.count += 1
            instance.input = given

    def _repeat_all(self, instance: Instance) -> None:
        """A checkpoint repeats the layer until its last tensor has been saved, and lets go of the rest."""
        program = instance.program
        part, values, timed = program.part, program.part.values, self.timed(program.part)
        slots: dict[int, Storage] = {}
        given = instance.input
        if instance.input_swapped is not None:
            self._here(instance.input_swapped)
            target = instance.input_swapped.source or instance.input_swapped.target
            given = target if isinstance(target, Storage) else None
        if given is not None and part.input is not None:
            given.count += 1
            slots[part.input] = given
        where = self.where
        for (code, number), name in zip(program.again, self._names(program, "again"), strict=False):
            if name:
                self.where = (instance.layer, name, instance.micro_batch, "recompute")
            if code == MAKE:
                slots[number] = self.make(values[number].size)
            elif code == RUN:
                self._run_again(timed[number])
            elif code == FREE:
                storage = slots.pop(number, None)
                if storage is not None:
                    self.drop(storage)
            elif code == SAVE:
                storage = slots.get(part.packs[number].value)
                if storage is not None:
                    storage.count += 1
                    instance.held[number] = storage
                    self._is_saved(storage, part.packs[number].owner)
        self._drop_all(slots.values())
        self.where = where

    def _leave_input(self, instance: Instance) -> None:
        if instance.input is not None:
            self.drop(instance.input)
            instance.input = None
        if instance.input_swapped is not None:
            self._leave_swapped(instance.input_swapped)
            instance.input_swapped = None

    # The optimizer.

    def optimize(self, part: Part, codes: Sequence[Code]) -> None:
        """The optimizer's step."""
        slots: dict[int, Storage] = {}
        values, timed = part.values, self.timed(part)
        self.where = (None, "optimizer", 0, "optimizer")
        for code, number in codes:
            if code == MAKE:
                slots[number] = self.make(values[number].size)
            elif code == RUN:
                self.run(timed[number])
            elif code == FREE:
                storage = slots.pop(number, None)
                if storage is not None:
                    self.drop(storage)
        self._drop_all(slots.values())

    def _drop_all(self, storages: Iterable[Storage]) -> None:
        for storage in list(storages):
            self.drop(storage)

    def _names(self, program: Program, stream: str) -> Iterable[str]:
        return program.named[stream] if self.live is not None else repeat("")


def _copy(storage: Storage) -> Storage:
    copy = Storage(None, storage.size)
    copy.what, copy.layer, copy.operator, copy.count = storage.what, storage.layer, storage.operator, storage.count
    return copy
