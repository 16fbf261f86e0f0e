"""The one call: from a Trace, a budget and a device to the fastest Policy that fits."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from lowtide.cost.device import Device
from lowtide.cost.devices import find_device
from lowtide.cost.kernel import kernel_seconds
from lowtide.errors import PlanError
from lowtide.planner.allocator import Limit, LimitError
from lowtide.planner.bound import least_seconds
from lowtide.planner.budget import Budget
from lowtide.planner.expand import expand
from lowtide.planner.linear_program import GAP, load_solver
from lowtide.planner.node import in_node, sharing_note
from lowtide.planner.pipeline import Pipeline, even_pipeline
from lowtide.planner.plan import Option, Plan
from lowtide.planner.planned import planned_operators
from lowtide.planner.polish import Judged, Polisher
from lowtide.planner.problem import LayerCost, StageProblem, layer_cost, stage_problems
from lowtide.planner.repair import CLOSE, ROUNDS, Fitted, Try, fit_stage
from lowtide.planner.schedule import Action, replay
from lowtide.planner.simple import simple_policies
from lowtide.planner.simulate import Known, simulate
from lowtide.planner.simulation import Simulation, StageSimulation
from lowtide.planner.solve import StageSolution, relaxed_seconds
from lowtide.planner.workload import workload_of
from lowtide.planner.yaml_form import YamlForm, yaml_form
from lowtide.policy import Policy, resolve
from lowtide.trace.trace import Kernel, Trace
from lowtide.units import format_bytes, parse_bytes

__all__ = ["least_step", "make_plan"]

LINK_SHARES = (0.9, 1.0, 0.6)
"""How much of the time that copies can pass in swaps may take. The simulator says which is best; pipelines, which take
longer to simulate, get the first."""
HOW = "the Policy, or the same as MindSpore YAML"
POINTS = 12
"""Points of the curve of memory against time."""
POLISHED = 2
"""How many of the fastest options are polished, besides those of tighter budgets and those that recompute the
cheapest."""
STARTS = 5
"""How many of all these are polished: those that are fastest before."""
TIGHTER = (0.94, 0.86)
"""Shares of the budget that plans are sought for too."""
POLISHED_NAME = "decided operator by operator"
EVALUATIONS = 9600
"""Simulations of a layer that polishing may take: a model of 32 layers is simulated 300 times, half of them from the
best start."""
FEWEST, MOST = 100, 600
"""Simulations of the model, whatever its layers."""
SIMPLE_STAGES = 4
"""A pipeline with more stages is many: it is not compared with simple options, tried fewer times, and shown in full for
one stage only, since each of these takes a simulation."""
CLOSE_OF_MANY = 0.03
STALL_OF_MANY = 0.01
FASTER = 0.98
GAP_OF_MANY = 2e-3
"""The gap at which HiGHS stops for one of many stages: the simulator moves its budget by more than that."""
ROUNDS_OF_MANY = 2


def make_plan(
    trace: Trace,
    budget: int | str | Budget,
    device: Device | str,
    pipeline: Pipeline | None = None,
    *,
    swap: bool = True,
    recompute: bool = True,
    host_memory: int | None = None,
    fixed: Policy | None = None,
    polish: bool = True,
    brief: bool = False,
    kept: Simulation | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Plan:
    """The fastest Policy whose simulated memory is within ``budget`` on every stage's device.

    A :class:`~lowtide.planner.budget.Budget` also says what was assumed for it, which becomes one of the plan's notes.
    ``swap`` and ``recompute`` say what may be used, ``host_memory`` how much of a node's memory swaps may take, and
    ``fixed`` what is decided already. Without ``polish`` what the solver finds is not improved further. A ``brief``
    plan is one of many that are compared: it has no bound, no curve and no details, and the simple options are tried
    only where the solver finds nothing that fits. ``kept`` is the simulated step that keeps everything, if it is known.
    If nothing fits, the Plan says so and how much is needed.

    ``plan = make_plan(Trace.load("trace.json"), "60GiB", "h100")``
    """
    device = find_device(device) if isinstance(device, str) else device
    size = budget.bytes if isinstance(budget, Budget) else parse_bytes(budget)
    if not size:
        raise PlanError('a budget is the memory of a device, such as "60GiB"; found 0')
    if pipeline is None:
        pipeline = trace.pipeline
    if pipeline is None or not pipeline.placement:
        micro_batches = pipeline.micro_batches if pipeline is not None else 1
        pipeline = even_pipeline(len(trace.layers), micro_batches=micro_batches)
    fixed = fixed.for_layers(len(trace.layers)) if fixed is not None else None
    notes = [sharing_note(device, trace, pipeline) if swap else "", budget.note if isinstance(budget, Budget) else ""]
    device = in_node(device, trace, pipeline)
    seconds = _Seconds(device)
    problems = stage_problems(
        trace,
        device,
        pipeline,
        seconds,
        host_memory=host_memory,
        fixed=None if fixed is None else resolve(fixed, trace.catalogue),
    )
    search = _Search(trace, device, pipeline, problems, size, fixed, brief=brief)
    progress("simulating the simple options")
    options = search.simple(kept, swap=swap, recompute=recompute)
    progress("solving")
    first = options[0]
    found, solve_seconds, bound = _Found([], None, []), 0.0, first.simulation.seconds
    if not first.fits or fixed is not None:
        load_solver()
        begin, search.simulating = time.perf_counter(), 0.0
        found = search.fit(first.simulation, swap=swap, recompute=recompute)
        solve_seconds = time.perf_counter() - begin - search.simulating
        bound = 0.0 if brief else search.bound(first, seconds, swap=swap, recompute=recompute)
    options += found.options
    if brief and not any(one.fits for one in options):
        options += search.others(swap=swap, recompute=recompute)
    if polish and pipeline.stages == 1 and fixed is None and recompute and not first.fits:
        progress("polishing")
        costs = [layer_cost(part, seconds) for part in trace.parts]
        options += search.polished(options, costs, options[0].simulation, swap=swap)
    progress("simulating the plan")
    made = search.plan(found, options, bound, solve_seconds)
    return replace(made, notes=(*made.notes, *filter(None, notes)))


def least_step(
    trace: Trace,
    budget: int,
    device: Device,
    pipeline: Pipeline,
    kept: Simulation,
    *,
    swap: bool = True,
    recompute: bool = True,
) -> float:
    """Seconds of a step that no Policy within ``budget`` is below, infinite if surely none is within it; much sooner
    known than a plan. ``kept`` is the step that keeps everything."""
    device = in_node(device, trace, pipeline)
    search = _Search(trace, device, pipeline, (), budget, None, brief=True)
    first = search.simple(kept, swap=swap, recompute=recompute)[0]
    return search.bound(first, _Seconds(device), swap=swap, recompute=recompute)


class _Seconds:
    """The seconds that kernels add to the computation; equal ones are looked up."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.known: dict[Kernel, float] = {}

    def __call__(self, kernel: Kernel) -> float:
        found = self.known.get(kernel)
        if found is None:
            # What another stream does in the meantime is no cost of the layer; the simulation has its waits.
            found = self.known[kernel] = kernel_seconds(self.device, kernel) if kernel.stream == 0 else 0.0
        return found


class _Found(NamedTuple):
    """What the solver and the simulator agreed on."""

    options: list[Option]
    least: Policy | None
    """What takes least memory of all that was simulated, stage by stage."""
    least_reserved: list[int]
    """How much that is."""


class _Search:
    """One search for a plan."""

    def __init__(
        self,
        trace: Trace,
        device: Device,
        pipeline: Pipeline,
        problems: Sequence[StageProblem],
        budget: int,
        fixed: Policy | None,
        *,
        brief: bool,
    ) -> None:
        self.trace, self.device, self.pipeline = trace, device, pipeline
        self.brief = brief
        self.problems, self.budget, self.fixed = problems, budget, fixed
        self.layers = len(trace.layers)
        self.swap = self.recompute = True
        self.many = pipeline.stages > SIMPLE_STAGES
        self.simulating = 0.0
        self.known: Known | None = {} if pipeline.stages > 1 else None
        """Stages that were replayed."""
        self.offset: int | None = None
        """How much more than the solver's bytes the simulator found for the stage before."""
        self.slowest = 0.0
        """The seconds of the slowest stage so far."""
        self.missed: list[Try] = []
        """What came near to the budget and did not fit."""

    def simulate(
        self,
        policy: Policy,
        *,
        stages: Sequence[int] | None = None,
        details: bool = False,
        limit: Limit | None = None,
    ) -> Simulation:
        begin = time.perf_counter()
        result = simulate(
            self.trace,
            policy,
            self.device,
            self.pipeline,
            stages=stages,
            details=details,
            known=self.known,
            limit=limit,
        )
        self.simulating += time.perf_counter() - begin
        return result

    def option(self, name: str, policy: Policy, how: str = "") -> Option:
        simulation = self.simulate(policy)
        return Option(name=name, policy=policy, simulation=simulation, fits=simulation.reserved <= self.budget, how=how)

    def simple(self, kept: Simulation | None, *, swap: bool, recompute: bool) -> list[Option]:
        """The simple options, simulated; the first keeps everything that is not fixed."""
        if self.fixed is not None:
            return [self.option("what is fixed", replace(self.fixed, origin="solver"))]
        nothing = next(simple_policies(self.layers))
        simulation = kept or self.simulate(nothing.policy)
        fits = simulation.reserved <= self.budget
        first = Option(name=nothing.name, policy=nothing.policy, simulation=simulation, fits=fits, how=nothing.how)
        return [first] if self.brief else [first, *self.others(swap=swap, recompute=recompute)]

    def others(self, *, swap: bool, recompute: bool) -> list[Option]:
        """The simple options that do not keep everything; none of a pipeline of many stages."""
        if self.many or self.fixed is not None:
            return []
        _, *policies = simple_policies(self.layers, swap=swap, recompute=recompute)
        return [self.option(one.name, one.policy, one.how) for one in policies]

    def fit(self, kept: Simulation, *, swap: bool, recompute: bool) -> _Found:
        """The plans with and without swap."""
        self.swap, self.recompute = swap, recompute
        both = "swap and recompute" if recompute else "swap some operators"
        candidates = [(both, True, share) for share in LINK_SHARES if swap]
        if self.many:
            candidates = candidates[:1]
        if recompute and not (self.many and swap):
            candidates.insert(0, ("recompute some operators", False, 1.0))
        if not candidates:
            return _Found([], None, [])
        fitted = []
        for _, with_swap, share in candidates:
            self.offset, self.slowest = None, 0.0
            # The slowest stage first: what is faster than that does not have to be improved.
            order = sorted(self.problems, key=lambda problem: (-kept.stages[problem.stage].busy, problem.stage))
            found = {problem.stage: self._fit(problem, kept, with_swap, recompute, share) for problem in order}
            fitted.append([found[problem.stage] for problem in self.problems])
        options: dict[str, Option] = {}
        for (name, *_), stages in zip(candidates, fitted, strict=True):
            option = self.option(name, self._policy([one.best or one.least for one in stages]), HOW)
            if name not in options or _worse(options[name], option):
                options[name] = option
        best = [min(found, key=_violation) for found in zip(*fitted, strict=True)]
        mixed = self._policy([one.best or one.least for one in best])
        if all(mixed != one.policy for one in options.values()):
            options["swap where it pays"] = self.option("swap where it pays", mixed, HOW)
        least = [min((one.least for one in found), key=_reserved) for found in zip(*fitted, strict=True)]
        return _Found(list(options.values()), self._policy(least), [max(map(_reserved, least))])

    def bound(self, kept: Option, seconds: Callable[[Kernel], float], *, swap: bool, recompute: bool) -> float:
        """No Policy within the budget is faster: see [Note: why it is a bound] in :mod:`lowtide.planner.bound`."""
        detailed = self._details(kept, *(("reserved", "busy") if self.many else ()))
        return least_seconds(
            self.trace, self.pipeline, self.device, detailed, self.budget, seconds, swap=swap, recompute=recompute
        )

    def _fit(
        self,
        problem: StageProblem,
        kept: Simulation,
        swap: bool,
        recompute: bool,
        share: float,
        budget: int | None = None,
    ) -> Fitted:
        """The fastest for one stage. Of many stages, one starts from what was found for the stage before."""
        offset = self._offset(problem, kept)
        if self.many:
            # The allocator loses about the same share of what is held.
            offset = offset * self.budget // kept.stages[problem.stage].reserved if self.offset is None else self.offset
        fit = partial(
            fit_stage,
            problem,
            budget or self.budget,
            partial(self._stage, problem),
            offset=offset,
            recompute=recompute,
            close=CLOSE_OF_MANY if self.many else CLOSE,
            rounds=ROUNDS_OF_MANY if self.many else ROUNDS,
            good_enough=FASTER * self.slowest if self.many else 0.0,
            gap=GAP_OF_MANY if self.many else GAP,
        )
        found: Fitted = fit(swap=swap, link_share=share)
        if self.many and swap and recompute and self._poor(found.best):
            found = min(found, fit(swap=False), key=_violation)
        if found.missed is not None:
            self.missed.append(found.missed)
        one = found.best or found.least
        self.slowest = max(self.slowest, one.simulated.seconds)
        self.offset = one.simulated.reserved - one.solution.memory
        return found

    def polished(
        self, options: Sequence[Option], costs: Sequence[LayerCost], kept: Simulation, *, swap: bool
    ) -> list[Option]:
        """The fastest options that fit, made faster with the simulator: see :mod:`lowtide.planner.polish`."""

        def judge(policy: Policy) -> Judged:
            try:
                simulation = self.simulate(policy, limit=Limit(self.budget, gives_back=False))
            except LimitError:
                return Judged(float("inf"), self.budget + 1, 0.0)
            return Judged(simulation.seconds, simulation.reserved, simulation.stages[0].stall)

        polisher = Polisher(self.trace, costs, judge, self.budget, swap=swap)
        fitting = sorted((one for one in options if one.fits), key=lambda one: one.simulation.seconds)
        starts = list({one.policy.digest: one.policy for one in fitting}.values())[:POLISHED]
        for share in TIGHTER if swap else ():
            # What fits a tighter budget fits this one, and may be the better place to start from.
            found = self._fit(self.problems[0], kept, True, True, LINK_SHARES[0], int(share * self.budget))
            starts += [self._policy([found.best])] if found.best is not None else []
        cheapest = [polisher.cheapest_first(alone=alone) for alone in (False, True)]
        # What came near to the budget fits if it also recomputes what is cheap.
        near = sorted(self.missed, key=lambda one: one.simulated.seconds)[:POLISHED]
        cheapest += [polisher.cheapest_first(self._policy([one])) for one in near]
        starts += [one for one in cheapest if one is not None]
        starts = sorted(starts, key=lambda one: polisher.seconds(one))[:STARTS]
        evaluations = min(max(FEWEST, EVALUATIONS // self.layers), MOST)
        tried = [polisher.polish(start, evaluations // (2 * len(starts))) for start in starts]
        promising = sorted(tried, key=lambda one: (one[1].reserved > self.budget, one[1].seconds))[:1]
        tried += [polisher.polish(start, evaluations // 2) for start, _ in promising]
        fit = [(judged.seconds, policy) for policy, judged in tried if judged.reserved <= self.budget]
        if not fit:
            return []
        best = min(fit, key=lambda one: one[0])[1]
        return [self.option(POLISHED_NAME, best, HOW)] if all(best != one.policy for one in options) else []

    def _poor(self, one: Try | None) -> bool:
        """Whether a stage of many should be tried without swap."""
        if one is None:
            return True
        seconds = one.simulated.seconds
        return one.simulated.stall > STALL_OF_MANY * seconds and seconds > FASTER * self.slowest

    def plan(self, found: _Found, options: list[Option], bound: float, solve_seconds: float) -> Plan:
        """The fastest option that fits, and everything around it."""
        fitting = [one for one in options if one.fits]
        smallest: list[Option] = []
        if not fitting and found.least is not None:
            smallest = [self.option("least memory", found.least)]
            fitting = [one for one in smallest if one.fits]
        if not fitting:
            fitting = self._within([*options, *smallest])
            options = [next((one for one in fitting if one.name == other.name), other) for other in options]
        feasible = bool(fitting)
        candidates = fitting or [*options, *smallest]
        least = min([one.simulation.reserved for one in (*options, *smallest)] + found.least_reserved)
        chosen = min(candidates, key=lambda one: one.simulation.seconds if feasible else one.simulation.reserved)
        simulation = chosen.simulation if self.brief else self._details(chosen, "reserved")
        written = yaml_form(chosen.policy, self.trace.catalogue, self.pipeline)
        return Plan(
            model=self.trace.model,
            device=self.device.name,
            budget=self.budget,
            pipeline=self.pipeline,
            policy=chosen.policy,
            simulation=simulation,
            bound=bound if feasible and not self.brief else None,
            feasible=feasible,
            least=least,
            options=tuple(options),
            curve=() if self.brief else self._curve(options[0].simulation, least),
            yaml="" if written.lost else written.text,
            notes=self._notes(simulation, feasible, least) + _not_in_yaml(written),
            solve_seconds=solve_seconds,
            operators=planned_operators(self.trace, chosen.policy),
            workload=workload_of(self.trace, self.device, self.pipeline),
        )

    def _within(self, options: Sequence[Option]) -> list[Option]:
        """The options that fit if cached memory is given back before the device is out of memory, as torch does. That
        makes steps slower by more than is simulated: it is asked only where nothing fits without."""
        found = []
        for one in options:
            if one.simulation.peak <= self.budget:
                try:
                    within = self.simulate(one.policy, limit=Limit(self.budget))
                except LimitError:
                    continue
                found.append(replace(one, simulation=within, fits=True))
        return found

    def _details(self, chosen: Option, *most: str) -> Simulation:
        """What an option does in full; of many stages, in those with the most of ``most``."""
        limit = Limit(self.budget) if chosen.simulation.retries else None
        if not self.many:
            return self.simulate(chosen.policy, details=True, limit=limit)
        stages = list(chosen.simulation.stages)
        for worst in {max(range(len(stages)), key=lambda one: getattr(stages[one], name)) for name in most}:
            detailed = self.simulate(chosen.policy, stages=[worst], details=True, limit=limit).stages[0]
            stages[worst] = replace(detailed, seconds=stages[worst].seconds)
        return replace(chosen.simulation, stages=tuple(stages))

    def _policy(self, tries: Sequence[Try]) -> Policy:
        return expand(self.problems, [one.solution for one in tries], self.layers)

    def _stage(self, problem: StageProblem, solution: StageSolution) -> StageSimulation:
        policy = expand([problem], [solution], self.layers)
        return self.simulate(policy, stages=[problem.stage]).stages[0]

    def _offset(self, problem: StageProblem, kept: Simulation) -> int:
        """How much more the simulator finds than the solver's bytes where everything is kept."""
        modelled = max(
            case.base
            + case.passing
            + sum(case.in_flight[group.chunk] * len(group.layers) * group.cost.saved for group in problem.groups)
            for case in problem.cases
        )
        return kept.stages[problem.stage].reserved - modelled if self.fixed is None else 0

    def _step(self, seconds: Sequence[float]) -> float:
        """The step's time, by the schedule, where each stage takes so long for a micro-batch."""

        def action_seconds(stage: int, action: Action) -> float:
            problem = self.problems[stage]
            backward = seconds[stage] - problem.forward
            share = {"forward": problem.forward, "backward": backward, "input": backward / 2, "weight": backward / 2}
            return share[action.kind] / self.pipeline.chunks

        return replay(self.pipeline, action_seconds).seconds

    def _longer(self, kept: Simulation, seconds: Sequence[float]) -> float:
        """The same in the simulator's seconds: its step without any recompute, and what these stages take longer."""
        base = self._step([problem.seconds for problem in self.problems])
        return kept.seconds + max(0.0, self._step(seconds) - base)

    def _curve(self, kept: Simulation, least: int) -> tuple[tuple[int, float], ...]:
        points = []
        points_wanted = POINTS // 2 if self.many else POINTS
        for number in range(points_wanted):
            budget = least + (kept.reserved - least) * number // (points_wanted - 1)
            seconds = [
                relaxed_seconds(problem, budget - self._offset(problem, kept), swap=self.swap, recompute=self.recompute)
                for problem in self.problems
            ]
            found = [one for one in seconds if one is not None]
            if len(found) == len(seconds):
                points.append((budget, self._longer(kept, found)))
        return tuple(points)

    def _notes(self, simulation: Simulation, feasible: bool, least: int) -> tuple[str, ...]:
        notes = list(self.trace.notes) + list(simulation.notes)
        worst = max(simulation.stages, key=lambda stage: stage.reserved)
        if not feasible:
            largest = ", ".join(
                f"{format_bytes(share.bytes)} {share.operator or share.what}"
                + (f" of layer {share.layer}" if share.layer is not None else "")
                for share in worst.shares[:4]
            )
            notes.insert(
                0,
                f"nothing fits {format_bytes(self.budget)}: the least that works is {format_bytes(least)}, short by"
                f" {format_bytes(least - self.budget)}"
                + (f"; at its peak the largest are {largest}" if largest else ""),
            )
        if simulation.retries:
            notes.insert(
                0,
                f"it fits only because cached memory is given back to the device {simulation.retries} times in a step,"
                " as torch does before it is out of memory; the host then waits for the device, and what the driver"
                " takes for it is not simulated",
            )
        if self.device.expandable_segments:
            notes.append(
                "segments are expandable: set PYTORCH_ALLOC_CONF=expandable_segments:True in the run, or it may reserve"
                " more"
            )
        moment = worst.peak_at
        after = {kernel.operator for kernel in self.trace.after.kernels}
        if moment is not None and moment.layer is None and moment.operator in after:
            notes.append(
                f"the peak is at {moment.operator or 'the loss'}, after the layers: no decision for layers lowers what"
                " the head and the loss need; both in pieces: model_config.head_loss: chunked in a training file, or"
                " lowtide.models.chunked_cross_entropy"
            )
        notes.append(
            "no Policy that fits can be faster than the bound, as the simulator counts bytes and seconds, for these"
            " layers in these stages; the fastest that there is may be slower than that"
        )
        return tuple(dict.fromkeys(notes))


def _not_in_yaml(written: YamlForm) -> tuple[str, ...]:
    if not written.lost:
        return ()
    more = f" and {len(written.lost) - 3} more" if len(written.lost) > 3 else ""
    return (f"this Policy cannot be written as MindSpore YAML: {'; '.join(written.lost[:3])}{more}",)


def _worse(one: Option, other: Option) -> bool:
    return (not one.fits, one.simulation.seconds) > (not other.fits, other.simulation.seconds)


def _violation(one: Fitted) -> tuple[bool, float]:
    found = one.best or one.least
    return one.best is None, found.simulated.seconds


def _reserved(one: Try) -> int:
    return one.simulated.reserved
