"""Traces of ranks become one that holds for all of them, and those of stages one of the whole model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from lowtide.adaptive.merge import joined, kind_of, merge, slowest, unmerged
from lowtide.errors import TraceError
from lowtide.planner.pipeline import even_pipeline
from lowtide.planner.simulate import simulate
from lowtide.policy import LayerPolicy, Policy, Recompute
from lowtide.trace.trace import Call, Kernel, Pack, Part, Static, Trace, TracedOperator, Value
from support.agreeing_ranks import unlike_trace
from support.traced_cases import DEVICE, PARAMETER, SIZE, hand_made_trace, kernel

OPTIMIZER = Part(
    name="optimizer",
    values=(Value(1 << 20),),
    kernels=(Kernel("aten::_fused_adamw_", touched=1 << 20, seconds=1e-3),),
    forward=(("make", 0), ("run", 0), ("free", 0)),
)


def timed(trace: Trace, seconds: Callable[[int], float]) -> Trace:
    """The same with other seconds in its layers."""

    def part(one: Part) -> Part:
        kernels = tuple(kernel._replace(seconds=seconds(place)) for place, kernel in enumerate(one.kernels))
        return replace(one, kernels=kernels)

    return replace(trace, parts=tuple(map(part, trace.parts)))


def test_the_slowest_rank_of_each_kernel_is_used() -> None:
    trace = hand_made_trace()
    ranks = [timed(trace, lambda place: 1.0 + place % 2), timed(trace, lambda place: 2.0 - place % 2)]
    assert {kernel.seconds for kernel in slowest(ranks).parts[0].kernels} == {2.0}
    assert slowest(ranks).notes == ()
    assert slowest([trace]) == trace


def test_static_memory_is_that_of_the_rank_that_has_most() -> None:
    trace = hand_made_trace()
    more = Static(parameters=(PARAMETER, PARAMETER))
    other = replace(trace, before=replace(trace.before, static=more))
    assert slowest([trace, other]).before.static == more == slowest([other, trace]).before.static


def test_ranks_that_diverged_are_noted_and_the_largest_is_used_for_all() -> None:
    trace = hand_made_trace()
    part = trace.parts[0]
    fewer = replace(trace, parts=(replace(part, backward=part.backward[:-2], static=Static()),))
    merged = slowest([fewer, trace, fewer])
    assert merged.parts == trace.parts
    assert any("2 of 3 ranks" in note for note in merged.notes)


def test_merging_in_pairs_is_merging_one_after_the_other() -> None:
    traces = [unlike_trace(rank) for rank in range(7)]
    kinds = [kind_of(one) for one in traces]
    shares = [unmerged(one, place, kinds) for place, one in enumerate(traces)]
    while len(shares) > 1:
        shares = [
            merge(*pair) if len(pair) == 2 else pair[0]
            for pair in (shares[n : n + 2] for n in range(0, len(shares), 2))
        ]
    expected = slowest(traces)
    assert shares[0].result() == expected
    largest = max(traces, key=lambda one: kind_of(one).held)
    assert expected.batch == largest.batch
    assert expected.layers == largest.layers


def stages() -> list[Trace]:
    """Two stages of two layers, with nothing between them."""
    whole = replace(hand_made_trace(2), optimizer=OPTIMIZER)
    first = replace(whole, after=Part(name="after"))
    second = replace(timed(whole, lambda place: 2e-3), before=Part(name="before"))
    return [first, second]


def test_stages_are_joined_in_their_order_and_layers_alike_are_one() -> None:
    first, second = stages()
    before, after = replace(first.before, name="before of the first"), replace(second.after, name="after of the last")
    whole = joined([replace(first, before=before), replace(second, after=after)])
    assert whole.layers == (0, 0, 0, 0)
    assert {kernel.seconds for kernel in whole.parts[0].kernels} == {2e-3}
    assert (whole.before, whole.after) == (before, after)
    assert whole.optimizer.kernels[0].touched == 2 << 20  # each stage has half of the parameters


def test_layers_that_differ_stay_apart() -> None:
    first, second = stages()
    part = first.parts[0]
    wider = replace(second, parts=(replace(part, values=(Value(2 * SIZE), *part.values[1:])),))
    whole = joined([first, wider])
    assert whole.layers == (0, 0, 1, 1)
    assert whole.parts == (first.parts[0], wider.parts[0])


@pytest.mark.parametrize("layer", [LayerPolicy(), LayerPolicy(default=Recompute())])
def test_a_joined_trace_has_the_memory_of_one_of_the_whole_model(layer: LayerPolicy) -> None:
    whole = replace(hand_made_trace(4), optimizer=OPTIMIZER)
    pipeline, policy = even_pipeline(4, stages=2, micro_batches=3), Policy((layer,) * 4)
    expected, found = (simulate(one, policy, DEVICE, pipeline, optimizer=False) for one in (whole, joined(stages())))
    assert [stage.peak for stage in found.stages] == [stage.peak for stage in expected.stages]


TABLE = 1 << 20


def table(name: str, saved: bool) -> Part:
    """What a stage computes around its layers, and holds until backward has ended: in one of two ways."""
    value = Value(TABLE, "table", until="" if saved else "backward")
    gradient = kernel("table")._replace(seconds=3e-3)
    return Part(
        name=name,
        operators=(TracedOperator("table", owned=TABLE),),
        values=(Value(SIZE, source="boundary"), value),
        kernels=(kernel("table", writes=(1,))._replace(seconds=5e-3), gradient),
        calls=(Call("table", (0,)),),
        packs=(Pack(1, "table", "table", "operator", 0),) if saved else (),
        forward=(("call", 0), ("make", 1), ("run", 0), *((("save", 0), ("free", 1)) if saved else ()), ("end", 0)),
        backward=(("use", 0), ("run", 1), ("done", 0)) if saved else (("run", 1),),
        input=0 if name == "after" else None,
        output=0 if name == "before" else None,
    )


@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize("end", ["before", "after"])
@pytest.mark.parametrize("layer", [LayerPolicy(), LayerPolicy(default=Recompute())], ids=["kept", "recomputed"])
def test_what_a_stage_does_between_others_takes_its_memory_and_time_there(
    layer: LayerPolicy, end: str, saved: bool
) -> None:
    first, second = stages()
    second = replace(second, parts=first.parts)  # as quick as the other
    place = 1 if end == "before" else 0
    both = [first, second]
    both[place] = replace(both[place], **{end: table(end, saved)})
    pipeline, policy = even_pipeline(4, stages=2, micro_batches=3), Policy((layer,) * 4)
    plain, more = (simulate(joined(one), policy, DEVICE, pipeline).stages for one in ([first, second], both))
    assert more[place].peak == plain[place].peak + plain[place].in_flight * TABLE
    assert more[place].busy == pytest.approx(plain[place].busy + 3 * 8e-3)
    assert more[place].recompute == pytest.approx(plain[place].recompute)
    assert more[1 - place].peak == plain[1 - place].peak
    assert [one.name for one in joined(both).parts[0].operators] == [one.name for one in first.parts[0].operators]


def test_what_a_stage_gathers_before_its_first_layer_is_freed_by_it() -> None:
    first, second = stages()
    part = second.parts[0]
    buffer = len(part.values)
    taking = replace(
        part, values=(*part.values, Value(TABLE)), forward=(("free", buffer), *part.forward), taken=(buffer,)
    )
    gathering = Part(
        name="before",
        values=(Value(SIZE), Value(TABLE)),
        kernels=(kernel("", writes=(1,)),),
        forward=(("make", 1), ("run", 0)),
        output=0,
        handed=(1,),
        static=Static(parameters=(PARAMETER,)),
    )
    second = replace(second, parts=(taking, part), layers=(0, 1), before=gathering)
    whole = joined([first, second])
    found = whole.parts[whole.layers[2]]
    assert found.taken == ()
    assert found.forward[:3] == (("make", buffer), ("run", len(part.kernels)), ("free", buffer))
    assert found.static.parameters == (*part.static.parameters, PARAMETER)


def test_nothing_cannot_be_merged() -> None:
    for function in (slowest, joined):
        with pytest.raises(TraceError, match="no Traces"):
            function([])
