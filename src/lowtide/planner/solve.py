"""Find the counts of layers for each operator and decision that take least time within a stage's memory.

[Note: counts]
The unknowns are counts, not layers: of a group of N layers that are alike, how many recompute an operator, how many
swap it, how many are recomputed as a whole. That loses nothing. Of the layers that are decided by operator, let those
that come first recompute: layer i recomputes an operator if i is below the operator's count. A storage that must be
held because operator X is recomputed and its owner O is not is then held in ``max(0, count(X) - count(O))`` layers,
the fewest that those two counts allow, and exactly what the model charges. So counts that the solver finds can always
be expanded into layers with the same memory and time, and a bound on counts bounds every choice of layers.

[Note: one stage at a time]
A stage's memory and its links are its own, and a step is never shorter when one of its stages is slower. So each stage
is solved alone for the least time, which is the least for the step, and stages that are alike are solved once. Only
host memory is shared; each rank gets an equal share.

[Note: the bound]
The bound is HiGHS's own dual bound for the model in :mod:`lowtide.planner.problem`, times the micro-batches. It holds
for every Policy with these layers in these stages, by the model's bytes and seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from lowtide.planner.linear_program import GAP, LinearProgram
from lowtide.planner.problem import Case, Group, StageProblem
from lowtide.planner.swapping import IN_FLIGHT_BYTES
from lowtide.policy import Recompute, Swap

__all__ = ["GroupCounts", "StageSolution", "relaxed_seconds", "solve_least", "solve_stage"]

_MIB = 1 << 20
_MILLI = 1e-3
_PREFER_KEEP = 1e-3
"""A swap is charged this share of its link time: of two choices that take the same time, the one that moves less."""


class GroupCounts(NamedTuple):
    """What the layers of a group do."""

    group: Group
    whole: int
    """Layers that are recomputed as a whole and keep their input."""
    whole_swapped: int
    """Layers that are recomputed as a whole and swap their input."""
    recomputed: Mapping[str, int]
    """For operators: in how many of the other layers they are recomputed."""
    swapped: Mapping[str, int]
    """For operators: in how many of the other layers they are swapped."""
    boundary_swapped: int
    """In how many of the other layers the input is swapped."""


@dataclass(frozen=True, kw_only=True)
class StageSolution:
    """The best counts of a stage."""

    groups: tuple[GroupCounts, ...]
    seconds: float
    """One micro-batch, by the model."""
    bound: float
    """No counts that fit take less, by the model."""
    memory: int
    """The most that is in use, by the model."""
    moved: int
    """Bytes that one micro-batch copies out."""


def solve_stage(
    problem: StageProblem,
    budget: int,
    *,
    swap: bool = True,
    recompute: bool = True,
    link_share: float = 1.0,
    gap: float = GAP,
) -> StageSolution | None:
    """The fastest counts within ``budget`` bytes, or None if nothing fits.

    Swaps may take ``link_share`` of the time that copies can pass in; for what takes longer the computation waits.
    The solver stops when its bound is nearer than ``gap``, as a share of the whole time.
    """
    model = LinearProgram()
    most = model.variable(0, budget / _MIB)
    stage = _Stage(problem, model, most, swap=swap, recompute=recompute, link_share=link_share)
    for variable, cost in stage.extra_seconds():
        model.cost[variable] = model.cost.get(variable, 0.0) + cost / _MILLI
    constant = problem.seconds / _MILLI
    model.cost[model.variable(1, 1)] = constant  # so that the gap is one of the whole time
    values = model.solve(gap)
    if values is None:
        return None
    return stage.solution(values, max(problem.seconds, model.bound * _MILLI - _charged(problem)))


def solve_least(problem: StageProblem, *, swap: bool = True, recompute: bool = True) -> StageSolution:
    """The counts that need least memory; of those, nearly the fastest."""
    model = LinearProgram()
    most = model.variable(0, float("inf"), cost=1.0)
    stage = _Stage(problem, model, most, swap=swap, recompute=recompute)
    for variable, cost in stage.extra_seconds():
        model.cost[variable] = 1e-6 * cost / max(problem.seconds, 1e-12)
    values = model.solve()
    assert values is not None  # the budget is free
    return stage.solution(values, problem.seconds)


def relaxed_seconds(problem: StageProblem, budget: int, *, swap: bool = True, recompute: bool = True) -> float | None:
    """One micro-batch's seconds within ``budget`` if counts could be fractions: quick, and never too high."""
    model = LinearProgram()
    most = model.variable(0, budget / _MIB)
    stage = _Stage(problem, model, most, swap=swap, recompute=recompute)
    for variable, cost in stage.extra_seconds():
        model.cost[variable] = model.cost.get(variable, 0.0) + cost / _MILLI
    model.integer = [0] * len(model.integer)
    if model.solve() is None:
        return None
    return max(problem.seconds, problem.seconds + model.bound * _MILLI - _charged(problem))


def _charged(problem: StageProblem) -> float:
    """The most that swaps are charged so that keeping is preferred; it is no time."""
    return _PREFER_KEEP * (problem.seconds if problem.overlap else problem.forward)


class _Unknowns(NamedTuple):
    """The variables of a group."""

    whole: int
    whole_swapped: int
    recomputed: dict[int, int]
    """By the operator's index."""
    swapped: dict[int, int]
    held: dict[int, int]
    """By the input's index: in how many layers it is held for a replay."""
    boundary_swapped: int


class _Stage:
    """The variables and rows of a stage."""

    def __init__(
        self,
        problem: StageProblem,
        model: LinearProgram,
        most: int,
        *,
        swap: bool,
        recompute: bool,
        link_share: float = 1.0,
    ) -> None:
        self.problem, self.model, self.most = problem, model, most
        self.unknowns = [self._group(group, swap, recompute) for group in problem.groups]
        for case in problem.cases:
            self._fits(case)
        self.waits: list[int] = []
        """For each link, how long the computation waits for it."""
        self._links(link_share)

    def extra_seconds(self) -> Iterable[tuple[int, float]]:
        """What each count adds to the time of a micro-batch."""
        rate = _PREFER_KEEP / self.problem.link_out
        yield from ((waiting, _MILLI) for waiting in self.waits)
        for group, unknowns in zip(self.problem.groups, self.unknowns, strict=True):
            cost = group.cost
            yield unknowns.whole, cost.again
            yield unknowns.whole_swapped, cost.again + rate * cost.given
            yield unknowns.boundary_swapped, rate * cost.boundary
            for place, variable in unknowns.recomputed.items():
                yield variable, cost.operators[place].seconds
            for place, variable in unknowns.swapped.items():
                yield variable, rate * cost.operators[place].held

    def solution(self, values: list[float], bound: float) -> StageSolution:
        """The counts that were found."""
        values = self._tight(values)
        found, seconds, moved = [], self.problem.seconds, 0
        for group, unknowns in zip(self.problem.groups, self.unknowns, strict=True):
            operators = group.cost.operators
            counts = GroupCounts(
                group,
                round(values[unknowns.whole]),
                round(values[unknowns.whole_swapped]),
                {operators[place].name: round(values[one]) for place, one in unknowns.recomputed.items()},
                {operators[place].name: round(values[one]) for place, one in unknowns.swapped.items()},
                round(values[unknowns.boundary_swapped]),
            )
            found.append(counts)
            seconds += (counts.whole + counts.whole_swapped) * group.cost.again
            seconds += sum(one.seconds * counts.recomputed.get(one.name, 0) for one in operators)
            moved += counts.whole_swapped * group.cost.given + counts.boundary_swapped * group.cost.boundary
            moved += sum(one.held * counts.swapped.get(one.name, 0) for one in operators)
        seconds += sum(values[waiting] for waiting in self.waits) * _MILLI
        memory = max(self._memory(case, values) for case in self.problem.cases)
        return StageSolution(
            groups=tuple(found), seconds=seconds, bound=min(bound, seconds), memory=round(memory * _MIB), moved=moved
        )

    def _tight(self, values: list[float]) -> list[float]:
        """The same counts, rounded, and the other variables no larger than these need."""
        values = [round(one) if integer else one for one, integer in zip(values, self.model.integer, strict=True)]
        for group, unknowns in zip(self.problem.groups, self.unknowns, strict=True):
            for number, variable in unknowns.held.items():
                storage = group.cost.inputs[number]
                owner = unknowns.recomputed.get(storage.owner) if storage.owner is not None else None
                reading = max(values[unknowns.recomputed[one]] for one in storage.readers if one in unknowns.recomputed)
                values[variable] = max(0.0, reading - (values[owner] if owner is not None else 0.0))
        return values

    def _group(self, group: Group, swap: bool, recompute: bool) -> _Unknowns:
        model, cost, count = self.model, group.cost, len(group.layers)
        by_operator = 0 if group.pinned_whole else count
        whole_at_least = count if group.pinned_whole else 0
        can_whole = (recompute and not group.pinned) or group.pinned_whole
        whole = model.variable(0, count if can_whole else 0, integer=True)
        swap = swap and not group.last
        can_swap_input = swap or group.pinned_boundary
        whole_swapped = model.variable(0, count if can_whole and can_swap_input else 0, integer=True)
        model.row({whole: 1, whole_swapped: 1}, whole_at_least, count)
        boundary = model.variable(0, by_operator if can_swap_input and cost.boundary else 0, integer=True)
        model.row({boundary: 1, whole: 1, whole_swapped: 1}, 0, count)
        if group.pinned_boundary and (cost.boundary or group.pinned_whole):
            model.row({boundary: 1, whole_swapped: 1}, count, count)
        read = {place for one in cost.inputs for place in (*one.readers, one.owner) if place is not None}
        recomputed: dict[int, int] = {}
        swapped: dict[int, int] = {}
        for place, one in enumerate(cost.operators):
            pinned = group.pinned.get(one.name)
            useful = one.repeatable and (one.held > 0 or place in read)
            if isinstance(pinned, Recompute) or (recompute and useful and pinned is None):
                at_least = by_operator if isinstance(pinned, Recompute) else 0
                recomputed[place] = model.variable(at_least, by_operator, integer=True)
            if one.held and (isinstance(pinned, Swap) or (swap and pinned is None)):
                at_least = by_operator if isinstance(pinned, Swap) else 0
                swapped[place] = model.variable(at_least, by_operator, integer=True)
            together = {table[place]: 1.0 for table in (recomputed, swapped) if place in table}
            if together and can_whole:
                model.row({**together, whole: 1, whole_swapped: 1}, 0, count)
            elif len(together) > 1:
                model.row(together, 0, count)
        held: dict[int, int] = {}
        for number, storage in enumerate(cost.inputs):
            reading = [recomputed[place] for place in storage.readers if place in recomputed]
            if not reading:
                continue
            held[number] = model.variable(0, by_operator)
            for reader in reading:
                row = {held[number]: 1.0, reader: -1.0}
                if storage.owner in recomputed:
                    row[recomputed[storage.owner]] = row.get(recomputed[storage.owner], 0.0) + 1.0
                model.row(row, 0, float("inf"))
        return _Unknowns(whole, whole_swapped, recomputed, swapped, held, boundary)

    def _held(self, place: int, *, by_operator_only: bool = False) -> tuple[dict[int, float], float]:
        """What the layers of a group hold of one micro-batch, in MiB: by variable, and the constant."""
        group, unknowns = self.problem.groups[place], self.unknowns[place]
        cost, count = group.cost, len(group.layers)
        alone = cost.given if not by_operator_only else 0
        terms = {unknowns.whole: alone - cost.saved, unknowns.whole_swapped: -cost.saved}
        terms[unknowns.boundary_swapped] = -cost.boundary
        for table in (unknowns.recomputed, unknowns.swapped):
            for operator, variable in table.items():
                terms[variable] = -cost.operators[operator].held
        for number, variable in unknowns.held.items():
            terms[variable] = cost.inputs[number].size
        return {variable: bytes_ / _MIB for variable, bytes_ in terms.items()}, cost.saved * count / _MIB

    def _case(self, case: Case) -> tuple[dict[int, float], float]:
        terms: dict[int, float] = {}
        constant_bytes = (case.base + case.passing) / _MIB
        for place, group in enumerate(self.problem.groups):
            held, constant = self._held(place)
            times = case.in_flight[group.chunk]
            constant_bytes += times * constant
            for variable, bytes_ in held.items():
                terms[variable] = terms.get(variable, 0.0) + times * bytes_
        return terms, constant_bytes

    def _fits(self, case: Case) -> None:
        terms, constant_bytes = self._case(case)
        again = self._there_again(case) if case.rebuilding else {}
        self.model.row({**_sum(terms, again), self.most: -1.0}, -float("inf"), -constant_bytes)
        if not case.rebuilding:
            return
        # Layers that are recomputed as a whole come first in their chunk. When backward reaches them, what the others
        # held is gone and their gradients are there; now a whole layer's activations are there in passing.
        running = [place for place, group in enumerate(self.problem.groups) if group.chunk == case.running]
        for place in running:
            group, unknowns = self.problem.groups[place], self.unknowns[place]
            chosen = self.model.variable(0, 1, integer=True)
            count = len(group.layers)
            self.model.row({unknowns.whole: 1, unknowns.whole_swapped: 1, chosen: -count}, -float("inf"), 0)
            row, constant = dict(terms), constant_bytes - case.passing / _MIB
            row[chosen] = group.cost.passing_whole / _MIB
            for other in running:
                gone, always = self._held(other, by_operator_only=True)
                constant -= always
                for variable, bytes_ in gone.items():
                    row[variable] = row.get(variable, 0.0) - bytes_
            self.model.row({**row, self.most: -1.0}, -float("inf"), -constant)

    def _there_again(self, case: Case) -> dict[int, float]:
        """What the last layer of the running chunk freed is back when its backward begins."""
        terms: dict[int, float] = {}
        for group, unknowns in zip(self.problem.groups, self.unknowns, strict=True):
            if group.last and group.chunk == case.running:
                for table in (unknowns.recomputed, unknowns.swapped):
                    terms |= {variable: group.cost.operators[place].held / _MIB for place, variable in table.items()}
                everything = sum(one.held for one in group.cost.operators) / _MIB
                terms |= {unknowns.whole: everything, unknowns.whole_swapped: everything}
        return terms

    def _memory(self, case: Case, values: list[float]) -> float:
        terms, constant_bytes = self._case(case)
        terms = _sum(terms, self._there_again(case)) if case.rebuilding else terms
        return constant_bytes + sum(bytes_ * values[variable] for variable, bytes_ in terms.items())

    def _links(self, share: float) -> None:
        """Copies out pass in forward, and in the backward of another micro-batch as far as they may be on their way for
        so long; copies back in the backward of their own chunk. For what takes longer the computation waits. And what
        is out is on the host."""
        problem, model = self.problem, self.model
        chunks_out: dict[int, dict[int, float]] = {}
        back: dict[int, dict[int, float]] = {}
        hosts: list[dict[int, float]] = [{} for _ in problem.cases]
        for group, unknowns in zip(problem.groups, self.unknowns, strict=True):
            moved = {unknowns.boundary_swapped: (group.cost.boundary, 1), unknowns.whole_swapped: (group.cost.given, 1)}
            for place, variable in unknowns.swapped.items():
                moved[variable] = (group.cost.operators[place].held, len(group.cost.operators[place].storages))
            # More than may be in flight at one time would be reloaded only when it is needed.
            at_once = {variable: bytes_ / _MIB for variable, (bytes_, _) in moved.items()}
            model.row(at_once, -float("inf"), len(group.layers) * IN_FLIGHT_BYTES / _MIB)
            returning = back.setdefault(group.chunk, {})
            leaving = chunks_out.setdefault(group.chunk, {})
            for variable, (bytes_, copies) in moved.items():
                returning[variable] = (bytes_ / problem.link_in + copies * problem.copy_latency) / _MILLI
                leaving[variable] = (bytes_ / problem.link_out + copies * problem.copy_latency) / _MILLI
                for host, case in zip(hosts, problem.cases, strict=True):
                    host[variable] = case.in_flight[group.chunk] * bytes_ / _MIB
        out = {variable: seconds for leaving in chunks_out.values() for variable, seconds in leaving.items()}
        rows = [(out, problem.seconds if problem.overlap else problem.forward)]
        rows += [(returning, self._hides(chunk)) for chunk, returning in back.items()]
        if problem.overlap:
            late = IN_FLIGHT_BYTES / problem.link_out
            rows += [(leaving, self._forward(chunk) + late) for chunk, leaving in chunks_out.items()]
        for link, window in rows:
            self.waits.append(model.variable(0, float("inf")))
            model.row({**link, self.waits[-1]: -1.0}, -float("inf"), share * window / _MILLI)
        for host in hosts:
            model.row(host, -float("inf"), problem.host / _MIB)

    def _forward(self, chunk: int) -> float:
        return sum(len(group.layers) * group.cost.forward for group in self.problem.groups if group.chunk == chunk)

    def _hides(self, chunk: int) -> float:
        """The time that a chunk's copies back can pass in: its backward, but for the last layer's, which is first."""
        groups = [group for group in self.problem.groups if group.chunk == chunk]
        last = max(groups, key=lambda group: group.layers[-1])
        return sum(len(group.layers) * group.cost.backward for group in groups) - last.cost.backward


def _sum(one: Mapping[int, float], other: Mapping[int, float]) -> dict[int, float]:
    return {variable: one.get(variable, 0.0) + other.get(variable, 0.0) for variable in {**one, **other}}
