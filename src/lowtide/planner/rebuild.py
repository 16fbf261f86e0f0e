"""Recompute what was not kept: replay captured calls.

See [Note: rebuilding] in :mod:`lowtide.runtime.captured_call`, which does the same with tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from lowtide.planner.codes import FREE, MAKE, RUN, SAVE, SYNC, Code
from lowtide.planner.instance import Instance, RunningCall
from lowtide.planner.rank import Rank, Storage
from lowtide.planner.swapping import Swapping

__all__ = ["Rebuilding"]


class Rebuilding:
    """The calls that are replayed on one device."""

    def __init__(self, rank: Rank, swapping: Swapping) -> None:
        self.rank, self.swapping = rank, swapping

    def refer(self, instance: Instance, number: int) -> None:
        """A reference is saved in place of a tensor."""
        action = instance.program.actions[number]
        if action.how in ("output", "inside", "cast"):
            call = instance.calls[action.call]
            call.pending += 1
            call.references += 1

    def capture(self, instance: Instance, number: int) -> None:
        captured = instance.program.captured[number]
        call = instance.calls[number] = RunningCall()
        for other, value in captured.arguments:
            storage = instance.slots.get(value)
            if other >= 0:
                instance.calls[other].pending += 1
                instance.calls[other].references += 1
            elif storage is not None:
                storage.count += 1
                storage.is_saved(storage.operator)
                call.held[value] = storage

    def end_capture(self, instance: Instance) -> None:
        """The layer has run: arguments that were swapped are reloaded from there, and calls nothing needs are freed."""
        for call in instance.calls.values():
            for value in [value for value in call.held if value in instance.departed]:
                swapped = call.swapped[value] = instance.departed[value]
                swapped.references += 1
                self.rank.drop(call.held.pop(value))
        for number in list(instance.calls):
            self.leave(instance, number)

    def rebuild(self, instance: Instance, number: int) -> Storage | None:
        """What was saved, rebuilt if it is not there; the caller holds a reference to it."""
        action = instance.program.actions[number]
        if action.how not in ("output", "inside", "cast"):
            return None
        results = self._results(instance, action.call)
        storage = results.get(action.source if action.how == "cast" else action.value)
        if action.how == "cast":
            storage = self.rank.make(instance.program.part.values[action.value].size)
            if action.kernel >= 0:
                self.rank.run_again(self.rank.timed(instance.program.part)[action.kernel])
        elif storage is not None:
            storage.count += 1
        self._release(instance, action.call)
        return storage

    def _results(self, instance: Instance, number: int) -> Mapping[int, Storage]:
        """What a captured call made, replayed if it is not there."""
        call, captured = instance.calls[number], instance.program.captured[number]
        if call.results is None:
            given = []
            for other, value in captured.arguments:
                if value in call.swapped:
                    self.swapping.use(call.swapped[value])
                elif other >= 0:
                    storage = self._results(instance, other).get(value)
                    if storage is not None:
                        storage.count += 1
                        given.append(storage)
                    self._release(instance, other)
            call.results = self._play_body(instance, captured.body, captured.wanted)
            for storage in given:
                self.rank.drop(storage)
        return call.results

    def _release(self, instance: Instance, number: int) -> None:
        """One reference was used; with the last one the results go."""
        call = instance.calls[number]
        call.pending -= 1
        if call.pending <= 0 and call.results is not None:
            self.rank.drop_all(call.results.values())
            call.results = None

    def leave(self, instance: Instance, number: int) -> None:
        """One holder of a call less; with the last one its arguments go."""
        call = instance.calls[number]
        call.references -= 1
        if call.references:
            return
        self.rank.drop_all([*call.held.values(), *(call.results or {}).values()])
        for swapped in call.swapped.values():
            self.swapping.leave(swapped)
        call.held, call.swapped, call.results = {}, {}, None
        for other, _ in instance.program.captured[number].arguments:
            if other >= 0:
                self.leave(instance, other)

    def _play_body(self, instance: Instance, body: Sequence[Code], wanted: Iterable[int]) -> dict[int, Storage]:
        """Replay a call. What it saves meanwhile lives until it has ended."""
        part = instance.program.part
        values, timed = part.values, self.rank.timed(part)
        made: dict[int, Storage] = {}
        held: list[Storage] = []
        freed: set[int] = set()
        for code, number in body:
            if code == MAKE:
                if values[number].size:
                    made[number] = self.rank.make(values[number].size)
                    freed.discard(number)
            elif code == RUN:
                self.rank.run_again(timed[number])
            elif code == SYNC:
                self.rank.lanes.sync(part.syncs[number])
            elif code == FREE:
                if number in made and number not in freed:
                    freed.add(number)
                    self.rank.drop(made[number])
            elif code == SAVE:
                storage = made.get(part.packs[number].value)
                if storage is not None:
                    storage.count += 1
                    held.append(storage)
        results = {number: made[number] for number in wanted if number in made and made[number].block is not None}
        for storage in results.values():
            storage.count += 1
        self.rank.drop_all([*(storage for number, storage in made.items() if number not in freed), *held])
        return results
