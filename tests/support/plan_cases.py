"""Believable Plans made by hand: a Llama on one device or over a pipeline, with everything that a report shows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from lowtide.planner.pipeline import even_pipeline
from lowtide.planner.plan import Option, Plan, PlannedOperator
from lowtide.planner.simulation import Moment, Share, Simulation, Span, StageSimulation
from lowtide.planner.workload import Workload
from lowtide.policy import Decision, Keep, LayerPolicy, Pattern, Policy, Recompute, Rule, Swap
from lowtide.trace.layout import Layout

__all__ = ["GIB", "MIB", "llama_plan"]

MIB, GIB = 1 << 20, 1 << 30
LINK = 50e9
HEADROOM = 700 * MIB


class Row(NamedTuple):
    name: str
    size: int
    seconds: float
    """Of forward; backward takes twice as long."""


ROWS = (
    Row("attention_norm", 32 * MIB, 40e-6),
    Row("attention.wq", 32 * MIB, 420e-6),
    Row("attention.wk", 8 * MIB, 60e-6),
    Row("attention.wv", 8 * MIB, 60e-6),
    Row("attention.rotary", 40 * MIB, 90e-6),
    Row("attention.flash_attention", 33 * MIB, 700e-6),
    Row("attention.wo", 0, 420e-6),
    Row("ffn_norm", 32 * MIB, 40e-6),
    Row("feed_forward.w1", 112 * MIB, 900e-6),
    Row("feed_forward.w1.activation.silu", 112 * MIB, 120e-6),
    Row("feed_forward.w3", 112 * MIB, 900e-6),
    Row("feed_forward.mul", 112 * MIB, 130e-6),
    Row("feed_forward.w2", 0, 900e-6),
)
INPUT = 64 * MIB


def llama_plan(
    layers: int = 32, stages: int = 1, micro_batches: int = 4, *, model: str = "llama3-8b", feasible: bool = True
) -> Plan:
    """A plan that recomputes some operators of all layers, and swaps others of most."""
    pipeline = even_pipeline(layers, stages, micro_batches=micro_batches)
    decisions = [_decisions(layer, layers) for layer in range(layers)]
    policy = Policy(tuple(map(_layer_policy, decisions)), origin="solver")
    simulation = _simulate(pipeline.placement, micro_batches, decisions)
    whole = [{row.name: Recompute() for row in ROWS}] * layers
    nothing = [{row.name: Keep() for row in ROWS}] * layers
    full = _simulate(pipeline.placement, micro_batches, whole)
    kept = _simulate(pipeline.placement, micro_batches, nothing)
    budget = -(-simulation.reserved // GIB) * GIB if feasible else full.reserved - GIB
    shown = policy if feasible else Policy((LayerPolicy(Recompute()),) * layers, origin="solver")
    mine = simulation if feasible else full
    only = _blend(mine, full, 0.3)
    return Plan(
        model=model,
        device="h100",
        budget=budget,
        pipeline=pipeline,
        policy=shown,
        simulation=mine,
        bound=mine.seconds / 1.0042,
        feasible=feasible,
        least=full.reserved,
        options=(
            Option(name="keep everything", policy=Policy((LayerPolicy(),) * layers), simulation=kept, fits=False),
            Option(
                name="recompute every layer",
                policy=Policy((LayerPolicy(Recompute()),) * layers),
                simulation=full,
                fits=feasible,
                how="recompute_config: {recompute: true}",
            ),
            Option(name="recompute only", policy=policy, simulation=only, fits=feasible),
            Option(name="the plan", policy=shown, simulation=mine, fits=feasible, how="lowtide plan -o policy.json"),
        ),
        curve=tuple(_curve(full, kept)),
        yaml=YAML,
        notes=(
            "Seconds are a roofline of h100 with stated efficiencies; no device has measured them.",
            "Attention is counted as the flash kernel.",
        ),
        solve_seconds=0.84,
        operators=tuple(_planned(decision) for decision in (decisions if feasible else whole)),
        workload=Workload(
            samples=1,
            tokens=8192,
            layout=Layout(shard=8, tensor=2, pipeline=stages),
            dtype="float32",
            compute_dtype="bfloat16",
            optimizer="AdamW",
            flops=0.4 * 989e12 * mine.seconds,
            peak_flops=989e12,
        ),
    )


YAML = r"""recompute_config:
  recompute: false
  select_recompute:
    feed_forward\.mul: true
    feed_forward\.w1\.activation\.silu: true
    .*norm: true
swap_config:
  swap: true
  op_swap:
    feed_forward\.w1: {backward_prefetch: 6, layers: true}
"""


def _decisions(layer: int, layers: int) -> dict[str, Decision]:
    found: dict[str, Decision] = {row.name: Keep() for row in ROWS}
    for name in ("attention_norm", "ffn_norm", "feed_forward.mul", "feed_forward.w1.activation.silu"):
        found[name] = Recompute()
    if layer < layers * 3 // 4:
        found["feed_forward.w1"] = Swap(prefetch=6)
        if layer % 2 == 0:
            found["feed_forward.w3"] = Swap(prefetch=8)
    if layer % 8 == 7:
        found["attention.rotary"] = Recompute()
    return found


def _layer_policy(decisions: dict[str, Decision]) -> LayerPolicy:
    rules = [Rule(Pattern(name.replace(".", r"\.")), one) for name, one in decisions.items() if one != Keep()]
    return LayerPolicy(rules=tuple(rules))


def _planned(decisions: dict[str, Decision]) -> tuple[PlannedOperator, ...]:
    rows = [PlannedOperator(row.name, row.size, decisions[row.name]) for row in ROWS if row.size]
    return (PlannedOperator("input", INPUT, Keep()), *rows)


def _order(stage: int, stages: int, micro_batches: int) -> Iterator[tuple[str, int]]:
    """1F1B."""
    warm = min(stages - 1 - stage, micro_batches)
    yield from (("forward", one) for one in range(warm))
    for one in range(micro_batches - warm):
        yield "forward", warm + one
        yield "backward", one
    yield from (("backward", one) for one in range(micro_batches - warm, micro_batches))


def _simulate(
    placement: tuple[tuple[tuple[int, ...], ...], ...], micro_batches: int, decisions: list[dict[str, Decision]]
) -> Simulation:
    count = len(placement)
    devices = [
        _Stage(stage, [layer for chunk in placement[stage] for layer in chunk], decisions) for stage in range(count)
    ]
    orders = [list(_order(stage, count, micro_batches)) for stage in range(count)]
    ended: dict[tuple[str, int, int], float] = {}
    while any(orders):
        for stage, order in enumerate(orders):
            while order:
                kind, batch = order[0]
                before = stage - 1 if kind == "forward" else stage + 1
                first = before < 0 or before >= count
                ready = 0.0 if first else ended.get((kind, before, batch))
                if ready is None:
                    break
                order.pop(0)
                ended[kind, stage, batch] = devices[stage].run(kind, batch, ready)
    seconds = max(device.time for device in devices)
    busiest = max(device.busy for device in devices)
    return Simulation(
        seconds=seconds, stages=tuple(device.done(seconds) for device in devices), bubble=1 - busiest / seconds
    )


class _Stage:
    def __init__(self, stage: int, layers: list[int], decisions: list[dict[str, Decision]]) -> None:
        self.stage, self.layers, self.decisions = stage, layers, decisions
        self.time = self.busy = self.stall = self.again = 0.0
        self.out = self.back = 0.0
        self.moved = self.host = self.host_peak = self.flight = self.most = 0
        self.static = len(layers) * 1700 * MIB // 4
        self.now = self.static
        self.memory = [Moment(0.0, self.now, None, "")]
        self.spans: list[Span] = []
        self.arrivals: dict[tuple[int, int, str], tuple[float, float]] = {}

    def run(self, kind: str, batch: int, ready: float) -> float:
        self.time = max(self.time, ready)
        self.flight += 1 if kind == "forward" else 0
        self.most = max(self.most, self.flight)
        if kind == "forward":
            for layer in self.layers:
                self.forward(layer, batch)
        else:
            for layer in reversed(self.layers):
                self.backward(layer, batch)
            self.flight -= 1
        return self.time

    def forward(self, layer: int, batch: int) -> None:
        self.now += INPUT
        for row in ROWS:
            decision = self.decisions[layer][row.name]
            self.work("forward", row.seconds, layer, row.name, batch)
            if isinstance(decision, Swap):
                start = max(self.out, self.time)
                self.out = start + row.size / LINK
                self.spans.append(
                    Span("link out", start, row.size / LINK, "copy out", layer, row.name, batch, row.size)
                )
                self.moved += row.size
                self.host += row.size
                self.host_peak = max(self.host_peak, self.host)
            elif isinstance(decision, Keep):
                self.now += row.size
            self.mark(layer, row.name, 60 * MIB)

    def backward(self, layer: int, batch: int) -> None:
        decisions = self.decisions[layer]
        for row in ROWS:
            if isinstance(decisions[row.name], Swap):
                start = max(self.back, self.time - 0.0015)
                self.back = start + row.size / LINK
                self.spans.append(
                    Span("link in", start, row.size / LINK, "copy back", layer, row.name, batch, row.size)
                )
                self.arrivals[layer, batch, row.name] = (start, self.back)
        for row in reversed(ROWS):
            decision = decisions[row.name]
            if isinstance(decision, Swap):
                arrival = self.arrivals.pop((layer, batch, row.name))[1]
                if arrival > self.time:
                    wait = arrival - self.time
                    self.spans.append(Span("compute", self.time, wait, "stall", layer, row.name, batch, row.size))
                    self.time += wait
                    self.stall += wait
                self.host -= row.size
            if isinstance(decision, Recompute):
                self.work("recompute", row.seconds, layer, row.name, batch)
                self.again += row.seconds
            self.mark(layer, row.name, 60 * MIB + (0 if isinstance(decision, Keep) else row.size))
            self.work("backward", 2 * row.seconds, layer, row.name, batch)
            if isinstance(decision, Keep):
                self.now -= row.size
            self.mark(layer, row.name, 60 * MIB)
        self.now -= INPUT

    def work(self, kind: str, seconds: float, layer: int, name: str, batch: int) -> None:
        self.spans.append(Span("compute", self.time, seconds, kind, layer, name, batch))  # type: ignore[arg-type]
        self.time += seconds
        self.busy += seconds

    def mark(self, layer: int, name: str, transient: int) -> None:
        self.memory.append(Moment(self.time, self.now + transient, layer, name))

    def done(self, seconds: float) -> StageSimulation:
        peak = max(self.memory, key=lambda moment: moment.allocated)
        shares = [
            Share("activations", layer, row.name, row.size * self.most)
            for layer in self.layers
            for row in ROWS
            if row.size and isinstance(self.decisions[layer][row.name], Keep)
        ]
        shares += [Share("boundaries", layer, "", INPUT * self.most) for layer in self.layers]
        shares += [Share("transients", peak.layer, peak.operator, 60 * MIB)]
        for what, part in (("optimizer", 6), ("parameters", 3), ("gradients", 1)):
            shares.append(Share(what, None, "", self.static * part // 10))
        return StageSimulation(
            stage=self.stage,
            peak=peak.allocated,
            reserved=peak.allocated + HEADROOM,
            static=self.static,
            seconds=seconds,
            busy=self.busy,
            stall=self.stall,
            recompute=self.again,
            moved=self.moved,
            host_peak=self.host_peak,
            peak_at=peak,
            shares=tuple(sorted(shares, key=lambda share: -share.bytes)),
            memory=tuple(self.memory),
            spans=tuple(sorted(self.spans, key=lambda span: span.start)),
            in_flight=self.most,
        )


def _blend(one: Simulation, other: Simulation, part: float) -> Simulation:
    """Something between two simulations, by their sums only."""
    size = round(one.reserved * (1 - part) + other.reserved * part)
    seconds = one.seconds * (1 - part) + other.seconds * part
    stage = StageSimulation(stage=0, peak=size, reserved=size, static=0, seconds=seconds, busy=seconds)
    return Simulation(seconds=seconds, stages=(stage,))


def _curve(full: Simulation, kept: Simulation) -> Iterator[tuple[int, float]]:
    for step in range(13):
        part = step / 12
        size = round(full.reserved * (1 - part) + kept.reserved * part)
        yield size, kept.seconds + (full.seconds - kept.seconds) * (1 - part) ** 3
