"""The bound against every Policy of small models: whatever fits a budget is no faster than the bound for it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from lowtide.cost.device import Device
from lowtide.cost.kernel import kernel_seconds
from lowtide.planner.bound import least_seconds
from lowtide.planner.make import make_plan
from lowtide.planner.pipeline import Pipeline, even_pipeline
from lowtide.planner.simulate import simulate
from lowtide.policy import Decision, Keep, LayerPolicy, Pattern, Policy, Recompute, Rule, Swap
from lowtide.trace.capture import capture
from lowtide.trace.trace import Part, Trace
from support.hand_made_traces import DEVICE, Step, llama_trace, made_part

MIB = 1 << 20
sizes = st.integers(1, 40).map(lambda number: number * MIB)


def every_layer(names: list[str]) -> Iterator[LayerPolicy]:
    """Every decision for these operators of a layer and for its input, with two prefetch distances."""
    for boundary in (Keep(), Swap(1), Swap(4)):
        yield LayerPolicy(default=Recompute(), boundary=boundary)
        ways: tuple[Decision, ...] = (Keep(), Recompute(), Swap(1), Swap(4))
        for decisions in product(ways, repeat=len(names)):
            rules = tuple(Rule(Pattern(name), one) for name, one in zip(names, decisions, strict=True))
            yield LayerPolicy(rules=rules, boundary=boundary)


def check_all(
    trace: Trace, names: list[str], device: Device, pipeline: Pipeline, *, swap: bool = True, alike: bool = False
) -> float:
    """Simulate every Policy, and compare those that fit with the bound at each budget; the most that a bound says."""
    count = len(trace.layers)
    layers = [one for one in every_layer(names) if swap or not _swaps(one)]
    chosen = [(one,) * count for one in layers] if alike else list(product(layers, repeat=count))
    found = []
    for policy in chosen:
        one = simulate(trace, Policy(policy), device, pipeline)
        found.append((one.reserved, one.seconds))
    found.sort()
    kept = simulate(trace, Policy((LayerPolicy(),) * count), device, pipeline, details=True)
    seconds = partial(kernel_seconds, device)
    fastest, most = float("inf"), 0.0
    for reserved, took in found:  # the fastest of all that fit this budget
        fastest = min(fastest, took)
        bound = least_seconds(trace, pipeline, device, kept, reserved, seconds, swap=swap)
        assert bound <= fastest, (reserved, bound, fastest, kept.seconds)
        most = max(most, bound / kept.seconds)
    return most


def _swaps(layer: LayerPolicy) -> bool:
    return any(isinstance(one, Swap) for one in (layer.boundary, *(rule.decision for rule in layer.rules)))


@st.composite
def small_parts(draw: st.DrawFn) -> Part:
    """A layer of three operators, each of which reads one or two values before it and saves some of them."""
    steps: list[Step] = []
    for number in range(3):
        before = ["input", *(step.name for step in steps)]
        reads = tuple(draw(st.lists(st.sampled_from(before), min_size=1, max_size=2, unique=True)))
        if steps and steps[-1].name not in reads:
            reads = (*reads, steps[-1].name)
        saves = tuple(name for name in (*reads, f"op{number}") if draw(st.booleans()))
        steps.append(Step(f"op{number}", reads, draw(sizes), saves, draw(st.integers(0, 50)) * 10**10))
    return made_part("Layer", steps, steps[-1].size)


def around(part: Part, layers: int) -> Trace:
    """A model of such layers."""
    size = part.values[0].size
    return Trace(
        model="small",
        parts=(part,),
        layers=(0,) * layers,
        before=made_part("before", [Step("embedding", ("input",), size, ("input",), 0, size)], MIB),
        after=made_part("after", [Step("loss", ("input",), 4 * size, ("input", "loss"))], size),
    )


@pytest.mark.parametrize("swap", [True, False])
@settings(max_examples=6, deadline=None)
@given(part=small_parts(), link=st.sampled_from([0.02, 1.0, 20.0]), launch=st.sampled_from([0.0, 5e-6, 1e-3]))
def test_no_policy_that_fits_is_below_the_bound(swap: bool, part: Part, link: float, launch: float) -> None:
    device = replace(DEVICE, link_out=link * DEVICE.link_out, link_in=link * DEVICE.link_in, launch=launch)
    check_all(around(part, 1), ["op0", "op1", "op2"], device, Pipeline(placement=(((0,),),)), swap=swap)
    one = Pipeline(placement=(((0, 1, 2),),), micro_batches=2)
    check_all(around(part, 3), ["op0", "op1", "op2"], device, one, swap=swap, alike=True)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved", "zero_bubble"])
@settings(max_examples=4, deadline=None)
@given(part=small_parts(), link=st.sampled_from([0.02, 1.0]))
def test_no_policy_of_a_pipeline_that_fits_is_below_the_bound(schedule: str, part: Part, link: float) -> None:
    device = replace(DEVICE, link_out=link * DEVICE.link_out, link_in=link * DEVICE.link_in)
    chunks = 2 if schedule == "interleaved" else 1
    pipeline = even_pipeline(4, stages=2, chunks=chunks, schedule=schedule, micro_batches=4)  # type: ignore[arg-type]
    check_all(around(part, 4), ["op0", "op1"], device, pipeline, alike=True)


class Block(nn.Module):
    """Norm, two products and an activation, under autocast: what is saved is a cast of what is made."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


@pytest.mark.parametrize("autocast", [False, True])
def test_the_bound_of_a_traced_model(autocast: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(2)))
    x = torch.randn(1 << 17, 32)

    def run() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return model(x).float().square().mean()

    trace = capture(model, run).without_seconds()
    device = replace(DEVICE, launch=0.0, kernel_latency=0.0, copy_latency=0.0, memory_bandwidth=1e9)
    pipeline = Pipeline(placement=((tuple(range(2)),),))
    assert check_all(trace, ["norm", "up", "gelu"], device, pipeline, alike=True) >= 1.0
    names = ["norm", "up", "gelu"]
    assert check_all(trace, names, device, pipeline, swap=False, alike=True) > 1.02  # and it says something


def test_the_bound_of_a_plan_says_more_than_the_step_that_keeps_everything() -> None:
    trace = llama_trace(8)
    kept = simulate(trace, Policy((LayerPolicy(),) * 8), DEVICE)
    full = simulate(trace, Policy((LayerPolicy(default=Recompute()),) * 8), DEVICE)
    budget = (kept.reserved + full.reserved) // 2
    plan = make_plan(trace, budget, DEVICE, swap=False)
    assert plan.bound is not None
    assert plan.gap is not None
    assert kept.seconds < plan.bound <= plan.simulation.seconds
    assert 0 <= plan.gap < 0.05
    assert make_plan(trace, full.reserved // 2, DEVICE).bound is None
