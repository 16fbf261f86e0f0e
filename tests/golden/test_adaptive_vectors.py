"""The solver on the contexts that the adaptive reference was recorded on, by the reference's own cost model.

By that model a module that is switched on holds its input in place of its memory and costs its time; a module is
replaced by its children where one of them is on; a layer that is recomputed holds its input and costs its time. What
all layers hold, times the micro-batches in flight, is to fit beside what is static.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from lowtide.planner.linear_program import LinearProgram

_spec = importlib.util.spec_from_file_location("golden_vectors", Path(__file__).with_name("vectors.py"))
assert _spec is not None
assert _spec.loader is not None
golden = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(golden)

VECTORS = [vector for vector in golden.vectors("golden_mindspeed") if vector["device_memory_mb"] > 0]


class Cost(NamedTuple):
    """What all layers of a context hold of one micro-batch, and what they take in addition."""

    memory: float
    time: float


def layers_of(module: dict[str, Any]) -> list[dict[str, Any]]:
    """The layers of a recorded context."""
    for child in module.get("layers", []):
        if child.get("is_module_list"):
            found: list[dict[str, Any]] = child["layers"]
            return found
        if below := layers_of(child):
            return below
    return []


def recorded(vector: dict[str, Any]) -> Cost:
    """The reference's policy by its own model."""
    layer = layers_of(vector["context"])[0]
    memory = time = 0.0
    for names, count in vector["recompute_policy"].items():
        if names == "full_recompute":
            one = Cost(layer["input"], layer["time"])
        elif names == "without_recompute":
            one = Cost(vector["full_activation"], 0.0)
        else:
            one = switched_on(layer, frozenset(names.split(", ")))
        memory += count * one.memory
        time += count * one.time
    return Cost(memory, time)


def switched_on(layer: dict[str, Any], names: frozenset[str]) -> Cost:
    memory = time = 0.0
    for child in layer["layers"]:
        below = {f"{child['name']}.{one['name']}": one for one in child.get("layers", [])}
        modules = below if names & set(below) else {child["name"]: child}
        for name, module in modules.items():
            memory += module["input"] if name in names else module["memory"]
            time += module["time"] if name in names else 0.0
    return Cost(memory, time)


def solved(vector: dict[str, Any]) -> Cost | None:
    """The best counts by that model: of layers, and for each module of layers in which it is on."""
    layers = layers_of(vector["context"])
    layer, count = layers[0], len(layers)
    program = LinearProgram()
    memory: dict[int, float] = {}
    everything = count * float(vector["full_activation"])

    def choice(saved: float, time: float) -> int:
        variable = program.variable(0, count, integer=True, cost=time)
        memory[variable] = -saved
        return variable

    full = choice(layer["memory"] - layer["input"], layer["time"])
    for child in layer["layers"]:
        on = choice(child["memory"] - child["input"], child["time"])
        program.row({full: 1, on: 1}, 0, count)
        for one in child.get("layers", []):
            inside = choice(one["memory"] - one["input"], one["time"])
            program.row({full: 1, on: 1, inside: 1}, 0, count)
    budget = max(vector["device_memory_mb"] - vector["static_memory"], 0) / vector["pp_warmup"]
    program.row(memory, -float("inf"), budget - everything)
    program.cost[program.variable(1, 1)] = count * layer["time"]  # so that the gap is one of a whole recompute
    values = program.solve()
    if values is None:
        return None
    values = [float(round(value)) for value in values]
    return Cost(
        everything + sum(saved * values[variable] for variable, saved in memory.items()),
        sum(program.cost.get(variable, 0.0) * values[variable] for variable in memory),
    )


def test_the_solver_is_never_over_budget_and_never_slower_than_the_reference() -> None:
    better: list[float] = []
    times: list[tuple[float, float]] = []
    reference_over = impossible = 0
    for vector in VECTORS:
        budget = max(vector["device_memory_mb"] - vector["static_memory"], 0) / vector["pp_warmup"]
        theirs, ours = recorded(vector), solved(vector)
        layers = layers_of(vector["context"])
        forward = len(layers) * layers[0]["time"]
        if ours is None:
            impossible += 1
            assert theirs.memory > budget
            continue
        assert ours.memory <= budget + 1e-6, vector["id"]
        if theirs.memory > budget + 1e-6:
            reference_over += 1
            continue
        assert ours.time <= theirs.time + 1e-6, vector["id"]
        times.append((ours.time, theirs.time))
        better.append((theirs.time - ours.time) / (3 * forward + theirs.time))  # a backward takes twice a forward
    mean = sum(better) / len(better)
    less = 1 - sum(ours for ours, _ in times) / sum(theirs for _, theirs in times)
    print(
        f"{len(VECTORS)} contexts: in {impossible} nothing fits, in {reference_over} the reference is over its own"
        f" budget and the solver is not, {len(better)} are compared: {sum(one > 1e-9 for one in better)} are faster,"
        f" the mean step by {mean:.2%}, the best by {max(better):.1%}, all recompute by {less:.1%}"
    )
    assert len(better) + reference_over + impossible == 480
    assert mean > 0


@pytest.mark.parametrize("place", range(0, 480, 60))
def test_the_cost_model_is_the_one_of_the_recorded_report(place: int) -> None:
    """The reference printed the memory of its policy in GiB, with one digit."""
    vector = VECTORS[place]
    printed = vector["info"]["selective"].split("total mem cost: ")[1].split(",")[0]
    gib = float(printed.split(" + ")[1].split()[0])
    assert recorded(vector).memory * vector["pp_warmup"] / 1024 == pytest.approx(gib, abs=0.11)
