"""Replay parts on an imagined device: what they allocate, compute, move and rebuild, in the order the runtime does it.

[Note: holding]
A storage is held by the program until its ``free`` event, and by everything that refers to it in autograd's graph: a
pack that keeps it, a copy out that is not complete, a captured call that was given it. It is released with the last of
these. So each is one count, and nothing else decides when memory is free.

What a replayed call returns is other memory than what the call returned in forward. It is held by the call until
nothing outstanding needs it, and by the node that unpacked it until that node is done.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import repeat

from lowtide.cost.device import Device
from lowtide.cost.kernel import kernel_seconds
from lowtide.planner.allocator import Limit
from lowtide.planner.casts import CastCache
from lowtide.planner.codes import (
    ADD,
    CALL,
    DONE,
    FREE,
    HOLD,
    LET,
    MAKE,
    RETAIN,
    RUN,
    SAVE,
    SYNC,
    UNPACKED,
    USE,
    Code,
)
from lowtide.planner.instance import Instance
from lowtide.planner.program import Program
from lowtide.planner.rank import Rank, Storage, Timed
from lowtide.planner.rebuild import Rebuilding
from lowtide.planner.sharded import Accumulating
from lowtide.planner.swapping import Swapping
from lowtide.policy import Swap
from lowtide.trace.trace import Kernel, Part

__all__ = ["Player"]


class Player:
    """Runs parts on one device."""

    def __init__(self, device: Device, *, details: bool = False, stop_at: int = -1, limit: Limit | None = None) -> None:
        self.rank = Rank(device, details=details, stop_at=stop_at, limit=limit)
        self.swapping = Swapping(self.rank)
        self.rebuilding = Rebuilding(self.rank, self.swapping)
        self.casts = CastCache(self.rank)
        self.accumulating = Accumulating(self.rank)
        self.gradients: dict[tuple[int | None, str, int], Storage] = {}
        self._adding: dict[int, float] = {}
        self.defers = False
        """Whether weights are cast once for all micro-batches; see [Note: late gradients]."""
        self.lingering: Storage | None = None
        """The last gradient that a second half has added: it is there until the next one has been computed."""
        self.late: list[tuple[Instance, int, Storage]] = []
        """Kernels that are to come when a micro-batch's backward ends, and what each reads."""

    # Forward.

    def forward(
        self, instance: Instance, given: Storage | None, taken: Sequence[Storage | None] = ()
    ) -> Storage | None:
        """Run a part's forward and return what it hands to the next."""
        program, schedule = instance.program, self.swapping.schedule
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
        if instance.sharing is not None:
            self.accumulating.keep((instance.layer, part.name), instance.sharing, slots)
        if program.captured:
            self.rebuilding.end_capture(instance)
        if decided or swapped_input or instance.passes:
            instance.due = schedule.end(instance.first + program.operators, instance.last)
        instance.handed = [slots.pop(number, None) for number in part.handed]
        if part.output is None:
            return None
        output = slots.pop(part.output, None)
        if output is not None and part.values[part.output].until:  # other code holds it for longer
            output.count += 1
            slots[part.output] = output
        return output

    def _take(self, slots: dict[int, Storage], numbers: Sequence[int], taken: Sequence[Storage | None]) -> None:
        """What the part before handed on; what this one does not use is freed."""
        for place, storage in enumerate(taken):
            if storage is not None and place < len(numbers):
                slots[numbers[place]] = storage
            elif storage is not None:
                self.rank.drop(storage)

    def _play_forward(self, instance: Instance) -> None:
        program = instance.program
        part, slots = program.part, instance.slots
        values, timed = part.values, self.rank.timed(part)
        self.rank.where = (instance.layer, "", instance.micro_batch, "forward")
        for (code, number), name in zip(program.forward, self._names(program, "forward"), strict=False):
            if name:
                self.rank.where = (instance.layer, name, instance.micro_batch, "forward")
            if code == MAKE:
                slots[number] = storage = self.rank.make(values[number].size)
                if number == instance.keeps:
                    storage.count += 1
                    instance.kept = storage
            elif code == RUN:
                self.rank.run(timed[number])
            elif code == FREE:
                freed = slots.pop(number, None)
                if freed is not None:
                    self.rank.drop(freed)
            elif code == SAVE:
                self._save(instance, number)
            elif code == CALL:
                self.rebuilding.capture(instance, number)
            elif code == LET:
                self.rank.drop_all(instance.frees)
                instance.frees = []
            elif code == DONE:  # its graph led nowhere
                self._done(instance, number)
            elif code == SYNC:
                self.rank.lanes.sync(part.syncs[number])

    def _save(self, instance: Instance, number: int) -> None:
        """Autograd saves a tensor."""
        program, schedule = instance.program, self.swapping.schedule
        action, place = program.actions[number], instance.first + program.actions[number].position
        storage = instance.slots.get(action.value)
        if action.how == "keep":
            if storage is None and self.casts.shared:
                storage = (self.casts.of(instance.layer, program.part) or {}).get(action.value)
            if storage is not None:
                storage.count += 1
                storage.is_saved(program.part.packs[number].owner)
                instance.held[number] = storage
        elif action.how == "swap":
            assert action.swap is not None
            self._send(instance, number, storage, place + action.swap.prefetch)
        elif action.how != "nothing":
            self.rebuilding.refer(instance, number)
        if action.notices and schedule.next <= place:
            due = schedule.reach(place)
            if due:
                instance.starts[number] = due

    def _send(self, instance: Instance, number: int, storage: Storage | None, due: int) -> None:
        """A saved tensor is swapped: its storage is offloaded once, however often it is saved."""
        action, schedule = instance.program.actions[number], self.swapping.schedule
        swapped = instance.departed.get(action.value)
        if swapped is not None:
            swapped.references += 1
        elif storage is not None:
            owner = instance.program.part.packs[number].owner or "input"
            swapped = self.swapping.send(storage, (instance.layer, owner, instance.micro_batch))
            instance.departed[action.value] = swapped
            schedule.leave(swapped, due)
        else:
            return
        instance.packs[number] = swapped
        if action.last:
            schedule.reload_at(swapped, due)

    # Backward.

    def backward(
        self, instance: Instance, given: Storage | None, taken: Sequence[Storage | None] = ()
    ) -> Storage | None:
        """Run a part's backward and return the gradient that it hands to the next."""
        slots = self._begin_backward(instance, given, taken)
        self._play_backward(instance, instance.program.backward, "backward", slots)
        if instance.sharing is not None:
            self.accumulating.add((instance.layer, instance.program.part.name), instance.sharing, slots)
        return self._hand_back(instance, slots)

    def _begin_backward(
        self, instance: Instance, given: Storage | None, taken: Sequence[Storage | None]
    ) -> dict[int, Storage]:
        """What a part's backward is given."""
        part = instance.program.part
        slots: dict[int, Storage] = {}
        self._take(slots, part.taken_back, taken)
        if part.output_gradient is not None and given is not None:
            slots[part.output_gradient] = given
        self.rank.where = (instance.layer, "", instance.micro_batch, "backward")
        self.swapping.start(instance.due)
        return slots

    def _play_backward(
        self,
        instance: Instance,
        codes: Sequence[Code],
        stream: str,
        slots: dict[int, Storage],
        *,
        second: bool = False,
    ) -> None:
        """Run ``codes``, which are a part's backward or one of its halves; ``stream`` names it."""
        program, part = instance.program, instance.program.part
        values, timed = part.values, self.rank.timed(part)
        late = program.late if self.defers and instance.micro_batch else {}
        made_late = {made for _, made in late.values()}
        for (code, number), name in zip(codes, self._names(program, stream), strict=False):
            if name:
                self.rank.where = (instance.layer, name, instance.micro_batch, "backward")
            if code in (MAKE, ADD) and number in made_late:
                continue
            if code == RUN and number in late and (read := slots.get(late[number][0])) is not None:
                read.count += 1
                self.late.append((instance, number, read))
                continue
            if code == MAKE:
                slots[number] = self.rank.make(values[number].size)
            elif code == RUN:
                if number in program.sums:
                    self._add_apart_if_held(slots, number, part)
                self.rank.run(timed[number])
                if second:
                    self._read_again(instance, number)
            elif code == FREE:
                storage = slots.pop(number, None)
                if storage is not None:
                    self.rank.drop(storage)
            elif code == USE:
                self._use(instance, number)
            elif code == DONE:
                self._done(instance, number)
            elif code == ADD:
                self._add(instance, number, slots, lingers=second)
            elif code == SYNC:
                self.rank.lanes.sync(part.syncs[number])
            elif code == HOLD:
                self._hold_reads(instance, number, slots)
            elif code == RETAIN:
                self._retain(instance, number)
            elif code == UNPACKED:
                self._unpacked(instance, number)

    def _hand_back(self, instance: Instance, slots: dict[int, Storage]) -> Storage | None:
        """A part's backward has ended; the gradient of its input."""
        part = instance.program.part
        instance.handed = [slots.pop(number, None) for number in part.handed_back]
        result = slots.pop(part.input_gradient, None) if part.input_gradient is not None else None
        self._leave(instance, slots)
        return result

    def end_backward(self) -> None:
        """The nodes of a micro-batch's backward are done: now come the late ones, see [Note: late gradients]."""
        for instance, kernel, read in self.late:
            part, made = instance.program.part, instance.program.late[kernel][1]
            self.rank.where = (instance.layer, "", instance.micro_batch, "backward")
            slots = {made: self.rank.make(part.values[made].size)}
            self.rank.run(self.rank.timed(part)[kernel])
            self.rank.drop(read)
            self._add(instance, made, slots)
        self.late = []

    def first_half(
        self, instance: Instance, given: Storage | None, taken: Sequence[Storage | None] = ()
    ) -> Storage | None:
        """The half of a part's backward that computes the gradient of its input; see [Note: two halves]."""
        slots = self._begin_backward(instance, given, taken)
        self._play_backward(instance, instance.program.halves.first, "first half", slots)
        return self._hand_back(instance, slots)

    def _hold_reads(self, instance: Instance, kernel: int, slots: dict[int, Storage]) -> None:
        """What a kernel of the second half will read."""
        for value in instance.program.part.kernels[kernel].reads:
            if value in slots and (kernel, value) not in instance.read_again:
                slots[value].count += 1
                instance.read_again[kernel, value] = slots[value]

    def _read_again(self, instance: Instance, kernel: int) -> None:
        """A kernel of the second half has run."""
        for value in instance.program.part.kernels[kernel].reads:
            read = instance.read_again.pop((kernel, value), None)
            if read is not None:
                self.rank.drop(read)

    def _retain(self, instance: Instance, number: int) -> None:
        """What was reloaded for a node that both halves run stays."""
        swapped = instance.packs.get(number)
        if swapped is not None and number not in instance.held:
            storage = swapped.source or swapped.target
            if storage is not None:
                storage.count += 1
                instance.held[number] = storage

    def _unpacked(self, instance: Instance, number: int) -> None:
        """A node is done in the first half, and the second does not run it: what was made for it again is freed."""
        held = instance.held if instance.program.whole else instance.used
        storage = held.pop(number, None)
        if storage is not None:
            self.rank.drop(storage)

    def end_first_half(self, instances: Sequence[Instance]) -> None:
        """The graph task is over, and the graph below the last parameter is kept.

        What was reloaded goes, but for what is held.
        """
        for number in instances[-1].program.halves.above:
            self._done(instances[-1], number)
        for instance in instances:
            for swapped in instance.packs.values():
                self.swapping.forget(swapped)
            for call in instance.calls.values():
                for swapped in call.swapped.values():
                    self.swapping.forget(swapped)
            if instance.input_swapped is not None:
                self.swapping.forget(instance.input_swapped)

    def second_half(self, instance: Instance) -> None:
        """The half of a part's backward that computes the gradients of its parameters."""
        slots: dict[int, Storage] = {}
        self.rank.where = (instance.layer, "", instance.micro_batch, "backward")
        self._play_backward(instance, instance.program.halves.second, "second half", slots, second=True)
        if instance.sharing is not None:
            self.accumulating.add((instance.layer, instance.program.part.name), instance.sharing, slots)
        self._leave(instance, slots)

    def end_second_half(self, instances: Sequence[Instance]) -> None:
        """The graph is dropped."""
        if self.lingering is not None:
            self.rank.drop(self.lingering)
            self.lingering = None
        for instance in instances:
            halves = instance.program.halves
            gone = halves.above if instance is instances[-1] else ()
            for number in halves.left:
                if number not in gone:
                    self._done(instance, number)

    def _leave(self, instance: Instance, slots: dict[int, Storage]) -> None:
        """A part's backward has ended: what a later part frees stays, such as whole gradients that ranks share."""
        for number, storage in slots.items():
            if instance.program.part.values[number].until:
                instance.left.append(storage)
            else:
                self.rank.drop(storage)

    def _add_apart_if_held(self, slots: dict[int, Storage], kernel: int, part: Part) -> None:
        """Autograd adds in place only to what nothing else holds: else the sum gets memory of its own."""
        for number in part.kernels[kernel].writes:
            before = slots.get(number)
            if before is not None and before.count > 1:
                slots[number] = self.rank.make(part.values[number].size)
                self.rank.drop(before)

    def _add(self, instance: Instance, number: int, slots: dict[int, Storage], *, lingers: bool = False) -> None:
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
            self._adding[size] = kernel_seconds(self.rank.device, Kernel("aten::add_", touched=3 * size))
        self.rank.run(Timed(self._adding[size]))
        if lingers:
            storage, self.lingering = self.lingering, storage
        if storage is not None:
            self.rank.drop(storage)

    def _use(self, instance: Instance, number: int) -> None:
        if number in instance.starts:
            self.swapping.start(instance.starts[number])
        action = instance.program.actions[number]
        if instance.program.whole:
            if not instance.rebuilt:
                instance.rebuilt = True
                self._recompute_all(instance)
        elif action.how == "swap":
            swapped = instance.packs.get(number)
            if swapped is not None:
                self.swapping.use(swapped)
        elif action.how != "keep" and action.how != "nothing":
            storage = self.rebuilding.rebuild(instance, number)
            if storage is not None:
                instance.used[number] = storage

    def _done(self, instance: Instance, number: int) -> None:
        action = instance.program.actions[number]
        storage = instance.held.pop(number, None) or instance.used.pop(number, None)
        if storage is not None:
            self.rank.drop(storage)
        if instance.program.whole:
            instance.outstanding -= 1
            if not instance.outstanding:
                self._leave_input(instance)
        elif action.how == "swap":
            swapped = instance.packs.pop(number, None)
            if swapped is not None:
                self.swapping.leave(swapped)
        elif action.how in ("output", "inside", "cast"):
            self.rebuilding.leave(instance, action.call)

    # Whole layers.

    def _hold_input(self, instance: Instance, given: Storage | None) -> None:
        """What is held of a layer that is recomputed: its input, or, if that is swapped, the copy on the host."""
        boundary = instance.program.boundary
        if given is None:
            return
        if isinstance(boundary, Swap):
            label = (instance.layer, "input", instance.micro_batch)
            swapped = instance.input_swapped = self.swapping.send(given, label)
            self.swapping.schedule.leave(swapped, instance.first + boundary.prefetch)
            last = instance.first + instance.program.operators - 1
            self.swapping.schedule.reload_at(swapped, last + boundary.prefetch)
        else:
            given.count += 1
            instance.input = given

    def _recompute_all(self, instance: Instance) -> None:
        """Recompute the layer until its last tensor has been saved, and free the rest."""
        program = instance.program
        part, values, timed = program.part, program.part.values, self.rank.timed(program.part)
        slots: dict[int, Storage] = {}
        given = instance.input
        if instance.input_swapped is not None:
            given = self.swapping.use(instance.input_swapped)
        if given is not None and part.input is not None:
            given.count += 1
            slots[part.input] = given
        where = self.rank.where
        casts = self.casts.of(instance.layer, part) or {}
        for (code, number), name in zip(program.again, self._names(program, "again"), strict=False):
            if name:
                self.rank.where = (instance.layer, name, instance.micro_batch, "recompute")
            if code == MAKE:
                slots[number] = self.rank.make(values[number].size)
            elif code == RUN:
                self.rank.run_again(timed[number])
            elif code == SYNC:
                self.rank.lanes.sync(part.syncs[number])
            elif code == FREE:
                storage = slots.pop(number, None)
                if storage is not None:
                    self.rank.drop(storage)
            elif code == SAVE:
                value = part.packs[number].value
                storage = slots.get(value) or casts.get(value)
                if storage is not None:
                    storage.count += 1
                    instance.held[number] = storage
                    storage.is_saved(part.packs[number].owner)
        self.rank.drop_all(slots.values())
        self.rank.where = where

    def _leave_input(self, instance: Instance) -> None:
        if instance.input is not None:
            self.rank.drop(instance.input)
            instance.input = None
        if instance.input_swapped is not None:
            self.swapping.leave(instance.input_swapped)
            instance.input_swapped = None

    # The optimizer.

    def optimize(self, part: Part, codes: Sequence[Code]) -> None:
        """The optimizer's step."""
        slots: dict[int, Storage] = {}
        values, timed = part.values, self.rank.timed(part)
        self.rank.where = (None, "optimizer", 0, "optimizer")
        for code, number in codes:
            if code == MAKE:
                slots[number] = self.rank.make(values[number].size)
            elif code == RUN:
                self.rank.run(timed[number])
            elif code == SYNC:
                self.rank.lanes.sync(part.syncs[number])
            elif code == FREE:
                storage = slots.pop(number, None)
                if storage is not None:
                    self.rank.drop(storage)
        self.rank.drop_all(slots.values())

    def _names(self, program: Program, stream: str) -> Iterable[str]:
        return program.named[stream] if self.rank.live is not None else repeat("")
