"""What a part does under its decisions, worked out once: which saved tensors stay, leave, or are rebuilt from what.

This follows the runtime rule by rule. What the runtime finds out by identity while a layer runs is known here from the
Trace: which call made a storage, and which calls were given it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple, TypeAlias

from lowtide.planner.casts import cast_gradients
from lowtide.planner.codes import ADD, CALL, DONE, END, FREE, LET, MAKE, RUN, SAVE, SYNC, USE, Code
from lowtide.planner.halves import Halves, halves_of
from lowtide.policy import Decision, Keep, Recompute, Swap
from lowtide.runtime.limits import MINIMUM_BYTES
from lowtide.trace.trace import Event, Part

__all__ = ["MINIMUM_BYTES", "Action", "CapturedCall", "Program", "codes_of", "compile_part"]

How: TypeAlias = Literal["nothing", "keep", "swap", "output", "inside", "cast"]
"""What becomes of a saved tensor. ``nothing``: it takes no memory, or its layer is recomputed as a whole. ``output``
and ``inside``: of a call that is replayed. ``cast``: of such an output."""

_CODES = {
    "make": MAKE,
    "free": FREE,
    "run": RUN,
    "save": SAVE,
    "call": CALL,
    "end": END,
    "use": USE,
    "done": DONE,
    "let": LET,
    "sync": SYNC,
}


class Action(NamedTuple):
    """What becomes of one saved tensor."""

    how: How
    value: int = -1
    call: int = -1
    """The call that it is rebuilt from."""
    swap: Swap | None = None
    position: int = 0
    last: bool = False
    """Whether it is the last of its storage, and so the first that backward asks for."""
    notices: bool = False
    """Whether the runtime notices here that this operator is reached."""
    source: int = -1
    """For ``cast``: the storage that is cast."""
    kernel: int = -1
    """For ``cast``: the kernel that casts."""


class CapturedCall(NamedTuple):
    """A call that is replayed in backward."""

    arguments: tuple[tuple[int, int], ...]
    """The storages that it was given, in order, each with the captured call that made it and that it is rebuilt from;
    with -1 if it is held."""
    wanted: frozenset[int]
    """The storages that come out of the repetition."""
    body: tuple[Code, ...]
    """What it does."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """A part and what becomes of what it saves."""

    part: Part
    whole: bool
    """Whether it is recomputed as a whole."""
    boundary: Keep | Swap
    """For a part that is recomputed as a whole: what becomes of its input."""
    idle: bool
    """Whether it keeps everything."""
    actions: tuple[Action, ...]
    captured: Mapping[int, CapturedCall]
    forward: tuple[Code, ...]
    backward: tuple[Code, ...]
    again: tuple[Code, ...]
    """What is recomputed of a layer that is as a whole: forward, until the last tensor is saved."""
    due: frozenset[int]
    """How many operators after the part's first something is due."""

    @cached_property
    def sums(self) -> frozenset[int]:
        """The kernels that add to a gradient in its place."""
        return frozenset(number for number, kernel in enumerate(self.part.kernels) if kernel.kind == "aten::add_")

    @cached_property
    def halves(self) -> Halves:
        """Its backward in two halves; see [Note: two halves]."""
        return halves_of(self.part, self.backward)

    @cached_property
    def late(self) -> Mapping[int, tuple[int, int]]:
        """The kernels that come late where a micro-batch finds its weights cast; see [Note: late gradients]."""
        return cast_gradients(self.part)

    @cached_property
    def operators(self) -> int:
        """What a prefetch counts in."""
        return len(self.part.operators)

    @cached_property
    def named(self) -> Mapping[str, tuple[str, ...]]:
        """For each event of ``forward``, ``backward`` or one of its halves, and ``again``, the operator that runs."""
        codes = {name: getattr(self, name) for name in ("forward", "backward", "again")}
        codes |= {"first half": self.halves.first, "second half": self.halves.second}
        return {name: _named(one, self.part) for name, one in codes.items()}


def compile_part(
    part: Part,
    decisions: Mapping[str, Decision],
    boundary: Keep | Swap,
    *,
    whole: bool = False,
    due_before: frozenset[int] = frozenset(),
    noticed: bool = False,
) -> Program:
    """Work out what ``part`` does.

    ``due_before`` is what earlier layers have due in it; ``noticed`` says that swaps anywhere may start at its packs.
    """
    if whole:
        return _recomputed(part, boundary)
    facts = {operator.name: operator for operator in part.operators}
    recomputed = frozenset(
        name
        for name, decision in decisions.items()
        if isinstance(decision, Recompute) and name in facts and facts[name].repeatable
    )
    makers, savers, bodies = _places(part.forward)
    captured = _captured(part, recomputed, makers)

    def decide(number: int) -> Decision:
        pack = part.packs[number]
        if not pack.movable:
            return Keep()
        if pack.source == "boundary":
            return boundary
        decision = decisions.get(pack.owner, Keep()) if pack.source == "operator" else Keep()
        return Keep() if isinstance(decision, Recompute) and pack.owner not in recomputed else decision

    decided = [decide(number) for number in range(len(part.packs))]
    due = set(due_before)
    for pack, decision in zip(part.packs, decided, strict=True):
        if isinstance(decision, Swap):
            due.add(pack.position + decision.prefetch)
    waiting = sorted(due)
    last = {pack.value: number for number, pack in enumerate(part.packs)}
    actions: list[Action] = []
    for number, (pack, decision) in enumerate(zip(part.packs, decided, strict=True)):
        reached = bool(waiting) and waiting[0] <= pack.position
        while waiting and waiting[0] <= pack.position:
            waiting.pop(0)
        plain = Action("keep" if pack.value >= 0 else "nothing", pack.value)
        action = plain
        if isinstance(decision, Swap) and pack.value >= 0 and part.values[pack.value].size >= MINIMUM_BYTES:
            action = Action("swap", pack.value, swap=decision, last=last[pack.value] == number)
        elif isinstance(decision, Recompute) and pack.value >= 0:
            action = _rebuilt(part, number, makers, savers, captured) or plain
        notices = reached or not isinstance(decision, Keep)
        actions.append(action._replace(position=pack.position, notices=notices))
    idle = all(isinstance(decision, Keep) for decision in decided)
    if idle:  # its saved tensors are not intercepted: the runtime notices only where the layer ends
        actions = [action._replace(notices=False) for action in actions]
    wanted = _wanted(part, actions, captured, makers)
    calls = {
        number: CapturedCall(
            tuple((maker if (maker := makers.get(value, -1)) in captured else -1, value) for value in call.inputs),
            wanted[number],
            bodies[number],
        )
        for number, call in enumerate(part.calls)
        if number in captured
    }
    return Program(
        part=part,
        whole=False,
        boundary=boundary,
        idle=idle,
        actions=tuple(actions),
        captured=calls,
        forward=_trimmed(part, _with_frees(part), actions, captured, noticed),
        backward=_trimmed(part, _accumulating(part), actions, captured, noticed),
        again=(),
        due=frozenset(due),
    )


def _with_frees(part: Part) -> list[tuple[str, int]]:
    """Forward, with ``let`` where what lives until the end of forward is freed."""
    events: list[tuple[str, int]] = list(part.forward)
    if part.frees_at is not None:
        events.insert(part.frees_at, ("let", 0))
    return events


def codes_of(part: Part) -> tuple[Code, ...]:
    """The forward of a part that nothing is decided for, such as the optimizer."""
    return _codes(part, part.forward)


def _recomputed(part: Part, boundary: Keep | Swap) -> Program:
    """A layer that is recomputed as a whole: it stops where the last tensor has been saved.

    What comes before its first operator is not the layer's own: FSDP gathers parameters there. When the layer is
    recomputed its backward has gathered them already.
    """
    actions = tuple(
        Action("keep" if pack.value >= 0 else "nothing", pack.value, position=pack.position) for pack in part.packs
    )
    saves = [place for place, (what, _) in enumerate(part.forward) if what == "save"]
    first = next((place for place, (what, _) in enumerate(part.forward) if what == "call"), 0)
    again = part.forward[first : saves[-1] + 1] if saves else ()
    forward = tuple(event for event in part.forward if event[0] not in ("save", "done"))
    return Program(
        part=part,
        whole=True,
        boundary=boundary,
        idle=False,
        actions=actions,
        captured={},
        forward=_trimmed(part, forward, actions, frozenset(), False),
        backward=_codes(part, _accumulating(part)),
        again=_trimmed(part, again, actions, frozenset(), False),
        due=frozenset(
            (boundary.prefetch, len(part.operators) - 1 + boundary.prefetch) if isinstance(boundary, Swap) else ()
        ),
    )


def _places(forward: Sequence[Event]) -> tuple[dict[int, int], dict[int, int], dict[int, tuple[Code, ...]]]:
    """Which call made each storage, which call ran when each tensor was saved, and what each call did."""
    makers: dict[int, int] = {}
    savers: dict[int, int] = {}
    bodies: dict[int, tuple[Code, ...]] = {}
    running, begun = -1, 0
    for place, (what, number) in enumerate(forward):
        if what == "call":
            running, begun = number, place + 1
        elif what == "end":
            bodies[number] = tuple((_CODES[one], which) for one, which in forward[begun:place])
            running = -1
        elif what == "make":
            makers[number] = running
        elif what == "save":
            savers[number] = running
    return makers, savers, bodies


def _captured(part: Part, recomputed: frozenset[str], makers: Mapping[int, int]) -> frozenset[int]:
    """The calls that are captured: of recomputed operators, and those that only view or cast what such a call made."""
    known = {operator.name for operator in part.operators}
    found: set[int] = set()
    if recomputed:
        for number, call in enumerate(part.calls):
            follows = call.operator not in known and any(makers.get(value) in found for value in call.inputs)
            if call.operator in recomputed or follows:
                found.add(number)
    return frozenset(found)


def _rebuilt(
    part: Part, number: int, makers: Mapping[int, int], savers: Mapping[int, int], captured: frozenset[int]
) -> Action | None:
    """How a saved tensor is had again from a captured call; None if the runtime would not know for certain."""
    pack = part.packs[number]
    maker, saver = makers.get(pack.value, -1), savers[number]
    if maker in captured and (maker != saver or part.calls[maker].operator == pack.owner):
        return Action("inside" if maker == saver else "output", pack.value, maker)
    if pack.cast and saver >= 0:
        inputs = part.calls[saver].inputs
        sources = [
            value for value in inputs if makers.get(value) in captured and part.values[value].owner == pack.owner
        ]
        kernel = next((place for place, one in enumerate(part.kernels) if pack.value in one.writes), -1)
        if len(sources) == 1:
            return Action("cast", pack.value, makers[sources[0]], source=sources[0], kernel=kernel)
    return None


def _wanted(
    part: Part, actions: Sequence[Action], captured: frozenset[int], makers: Mapping[int, int]
) -> dict[int, frozenset[int]]:
    """What comes out of each repetition: for backward, for casts, and for the calls that were given it."""
    wanted: dict[int, set[int]] = {number: set() for number in captured}
    for action in actions:
        if action.how in ("output", "inside"):
            wanted[action.call].add(action.value)
        elif action.how == "cast":
            wanted[action.call].add(action.source)
    for number in captured:
        for value in part.calls[number].inputs:
            if makers.get(value, -1) in captured:
                wanted[makers[value]].add(value)
    return {number: frozenset(values) for number, values in wanted.items()}


def _accumulating(part: Part) -> list[tuple[str, int]]:
    """Backward, with ``add`` where a parameter's gradient meets the one that is there.

    Autograd does that when the node that computed the gradient has ended, and that is after it freed what the node
    had saved.
    """
    pending: dict[int, int] = {}
    for place, (what, number) in enumerate(part.backward):
        if what == "run":
            for value in part.kernels[number].writes:
                if part.values[value].gradient:
                    pending[value] = place
    after: dict[int, list[int]] = {}
    for value, place in pending.items():
        end = place
        for later in range(place + 1, len(part.backward)):
            what = part.backward[later][0]
            if what == "use":
                break
            if what == "done":
                end = later
            elif end > place:
                break
        after.setdefault(end, []).append(value)
    events: list[tuple[str, int]] = []
    for place, (what, number) in enumerate(part.backward):
        events.append((what, number))
        events += [("add", value) for value in after.get(place, ())]
    return events


def _codes(part: Part, events: Sequence[tuple[str, int]]) -> tuple[Code, ...]:
    empty = {number for number, value in enumerate(part.values) if value.size == 0}
    return tuple(
        (_CODES.get(what, ADD), number) for what, number in events if not (what in ("make", "free") and number in empty)
    )


def _trimmed(
    part: Part,
    events: Sequence[tuple[str, int]],
    actions: Sequence[Action],
    captured: frozenset[int],
    noticed: bool,
) -> tuple[Code, ...]:
    """The events that something follows from."""
    codes = []
    for code, number in _codes(part, events):
        if code in (CALL, END) and number not in captured:
            continue
        if code in (SAVE, USE, DONE) and actions[number].how == "nothing" and not (noticed and actions[number].notices):
            continue
        if code == USE and actions[number].how == "keep" and not (noticed and actions[number].notices):
            continue
        codes.append((code, number))
    return tuple(codes)


def _named(codes: Sequence[Code], part: Part) -> tuple[str, ...]:
    names, name = [], ""
    for code, number in reversed(codes):
        if code == RUN:
            name = part.kernels[number].operator
        names.append(name)
    return tuple(reversed(names))
