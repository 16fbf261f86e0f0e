"""The simulator does with memory and time what the runtime does, rule by rule."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.cost.device import Device
from lowtide.errors import PlanError
from lowtide.planner.allocator import Limit, LimitError
from lowtide.planner.pipeline import Pipeline, ScheduleName, even_pipeline
from lowtide.planner.program import MINIMUM_BYTES
from lowtide.planner.schedule import Action, actions, held_together, in_flight, shortened
from lowtide.planner.simulate import simulate
from lowtide.planner.simulation import StageSimulation
from lowtide.planner.stage import Stage
from lowtide.planner.swapping import IN_FLIGHT_BYTES
from lowtide.policy import Decision, Keep, LayerPolicy, Pattern, Policy, Recompute, Rule, Swap, resolve
from lowtide.trace.trace import Trace
from support.traced_cases import DEVICE, PARAMETER, SIZE, hand_made_trace

MS = 1e-3


def policy_of(layers: int = 2, boundary: Keep | Swap = Keep(), **decisions: Decision) -> Policy:  # noqa: B008
    rules = tuple(Rule(Pattern(name), decision) for name, decision in decisions.items())
    return Policy((LayerPolicy(rules=rules, boundary=boundary),) * layers, origin="solver")


def whole(layers: int = 2, boundary: Keep | Swap = Keep()) -> Policy:  # noqa: B008
    return Policy((LayerPolicy(default=Recompute(), boundary=boundary),) * layers)


def stage_of(policy: Policy, layers: int = 2, micro_batches: int = 1) -> StageSimulation:
    trace = hand_made_trace(layers)
    pipeline = even_pipeline(layers, micro_batches=micro_batches)
    return simulate(trace, policy, DEVICE, pipeline, details=True).stages[0]


def above_parameters(stage: StageSimulation, layers: int = 2) -> float:
    """The peak, counted in tensors."""
    return (stage.peak - layers * PARAMETER) / SIZE


def with_links(rate: float) -> Device:
    return replace(DEVICE, link_out=rate, link_in=rate)


def test_kept_layers_hold_what_they_save_until_backward_has_used_it() -> None:
    # Both layers hold x, linear and silu; then the second one's backward has three gradients at a time.
    stage = stage_of(policy_of())
    assert above_parameters(stage) == 6 + 3
    assert stage.peak_at is not None
    assert stage.peak_at.layer == 1


def test_what_is_recomputed_from_its_node_is_not_held_and_is_there_when_it_is_used() -> None:
    kept, stage = stage_of(policy_of()), stage_of(policy_of(silu=Recompute()))
    assert kept.peak - stage.peak == SIZE  # the other layer's; this one's is there again
    assert stage.recompute == pytest.approx(2 * MS)


def test_a_captured_call_holds_its_argument_and_is_replayed_once() -> None:
    kept, stage = stage_of(policy_of()), stage_of(policy_of(linear=Recompute()))
    assert kept.peak - stage.peak >= SIZE
    assert stage.recompute == pytest.approx(2 * MS)


def test_a_chain_is_rebuilt_from_its_start_each_call_once() -> None:
    # mul asks for silu's value, which needs linear's; silu's backward then asks for linear's: it is still there.
    stage = stage_of(policy_of(linear=Recompute(), silu=Recompute()))
    assert stage.recompute == pytest.approx(4 * MS)


def test_a_layer_recomputed_as_a_whole_holds_its_input_and_stops_at_the_last_tensor_it_saves() -> None:
    stage = stage_of(whole())
    assert stage.recompute == pytest.approx(4 * MS)  # linear and silu of both layers; mul saves before it runs
    assert stage.peak < stage_of(policy_of(linear=Recompute(), silu=Recompute())).peak + SIZE
    assert stage.seconds == pytest.approx(stage_of(policy_of()).seconds + 4 * MS)


def test_a_swapped_tensor_is_on_the_host_between_forward_and_backward() -> None:
    stage = stage_of(policy_of(layers=4, linear=Swap(1)), layers=4)
    assert stage.moved == stage.host_peak == 4 * SIZE
    assert stage.peak <= stage_of(policy_of(layers=4), layers=4).peak - 2 * SIZE


def test_device_memory_is_freed_only_when_its_copy_out_is_complete() -> None:
    stage = stage_of(policy_of(layers=4, linear=Swap(1)), layers=4)
    copies = {(span.layer, span.kind): span for span in stage.spans if span.kind in ("copy out", "stall")}
    # linear's value leaves while silu runs, and mul comes right after: with links this slow nothing has to wait,
    assert (0, "stall") not in copies or copies[0, "stall"].start >= copies[0, "copy out"].start
    # and with links ten times slower everything does.
    slow = simulate(
        hand_made_trace(4), policy_of(layers=4, linear=Swap(1)), with_links(SIZE / 1e-2), details=True
    ).stages[0]
    assert slow.stall > 10 * MS


def test_a_longer_prefetch_hides_the_copy_back() -> None:
    trace, device = hand_made_trace(4), with_links(SIZE / 2e-3)  # two kernels long
    near, far = (simulate(trace, policy_of(layers=4, linear=Swap(prefetch)), device) for prefetch in (1, 5))
    assert far.seconds < near.seconds
    assert far.seconds == pytest.approx(simulate(trace, policy_of(layers=4), device).seconds)


def test_a_copy_back_that_is_due_inside_a_kept_layer_starts_when_backward_comes_to_it() -> None:
    # Each layer has three operators: what the first layer's linear made is due inside the second, which keeps all.
    device = with_links(SIZE / 2e-3)
    swapping = policy_of(linear=Swap(3)).layers[0]
    policy = Policy((swapping, *(LayerPolicy(),) * 3))
    stage = simulate(hand_made_trace(4), policy, device, details=True).stages[0]
    (back,) = (span for span in stage.spans if span.kind == "copy back")
    begins = min(span.start for span in stage.spans if span.kind == "backward" and span.layer == 1)
    assert back.start == pytest.approx(begins)
    assert stage.stall == 0


def test_the_input_of_a_recomputed_layer_can_be_swapped() -> None:
    kept = stage_of(whole(layers=6), layers=6)
    swapped = stage_of(whole(layers=6, boundary=Swap(1)), layers=6)
    assert swapped.moved == 6 * SIZE
    assert swapped.peak < kept.peak


def test_a_longer_prefetch_hides_the_copy_back_of_a_recomputed_layers_input() -> None:
    device = with_links(SIZE / 2e-3)
    near, far = (
        simulate(hand_made_trace(4), whole(layers=4, boundary=Swap(prefetch)), device).stages[0] for prefetch in (1, 3)
    )
    assert near.stall > 3 * MS
    assert far.stall < 0.5 * near.stall


def test_small_tensors_stay_and_the_limits_are_the_runtimes() -> None:
    limits = pytest.importorskip("lowtide.runtime.limits").Limits()
    assert limits.minimum_bytes == MINIMUM_BYTES
    assert limits.in_flight_bytes == IN_FLIGHT_BYTES


def test_gradients_are_made_in_the_first_micro_batch_and_added_to_in_the_others() -> None:
    one, three = stage_of(policy_of()), stage_of(policy_of(), micro_batches=3)
    assert three.peak - one.peak <= 2 * PARAMETER  # both gradients are there while the last layer's next one is made
    adding = 2 * 2 * 3 * PARAMETER / DEVICE.memory_bandwidth
    assert three.seconds == pytest.approx(3 * one.seconds + adding)


def test_memory_and_time_do_not_depend_on_whether_details_are_asked_for() -> None:
    trace, policy = hand_made_trace(3), policy_of(layers=3, linear=Swap(2), silu=Recompute())
    plain, detailed = simulate(trace, policy, DEVICE), simulate(trace, policy, DEVICE, details=True)
    assert (plain.peak, plain.reserved, plain.seconds) == (detailed.peak, detailed.reserved, detailed.seconds)
    stage = detailed.stages[0]
    assert max(moment.allocated for moment in stage.memory) == stage.peak
    assert sum(share.bytes for share in stage.shares) == stage.peak
    assert plain.stages[0].memory == plain.stages[0].spans == ()


def test_a_limit_changes_nothing_for_what_fits_and_ends_what_does_not() -> None:
    trace, policy = hand_made_trace(3), policy_of(layers=3, linear=Swap(2))
    plain = simulate(trace, policy, DEVICE)
    for gives_back in (False, True):
        assert simulate(trace, policy, DEVICE, limit=Limit(plain.reserved, gives_back)) == plain
    with pytest.raises(LimitError):
        simulate(trace, policy, DEVICE, limit=Limit(plain.reserved - 1, gives_back=False))


def test_a_resolution_and_its_policy_are_simulated_alike() -> None:
    trace, policy = hand_made_trace(2), policy_of(linear=Swap(2), silu=Recompute())
    assert simulate(trace, resolve(policy, trace.catalogue), DEVICE) == simulate(trace, policy, DEVICE)


def test_earlier_stages_of_a_pipeline_hold_more_micro_batches() -> None:
    trace = hand_made_trace(4)
    pipeline = even_pipeline(4, stages=4, micro_batches=8)
    found = simulate(trace, policy_of(layers=4), DEVICE, pipeline)
    assert [stage.in_flight for stage in found.stages] == [4, 3, 2, 1]


def test_leaving_out_micro_batches_that_repeat_changes_nothing() -> None:
    trace, policy = hand_made_trace(4), policy_of(layers=4, linear=Recompute())
    few = simulate(trace, policy, DEVICE, even_pipeline(4, stages=2, micro_batches=4))
    many = simulate(trace, policy, DEVICE, even_pipeline(4, stages=2, micro_batches=32))
    buffers = 28 * SIZE  # torch's pipelining has a receive buffer for each micro-batch
    assert [stage.peak + buffers for stage in few.stages] == [stage.peak for stage in many.stages]
    alone = max(stage.seconds for stage in simulate(trace, policy, DEVICE, even_pipeline(4, micro_batches=32)).stages)
    assert alone / 2 < many.seconds < alone


def test_boundaries_that_are_freed_cost_the_first_stages_nothing_for_further_micro_batches() -> None:
    policy = policy_of(layers=4, linear=Recompute())
    kept = hand_made_trace(4)
    freed = replace(kept, frees_boundaries=True)
    assert Trace.from_json(freed.as_json()) == freed

    def peaks(trace: Trace, micro_batches: int, schedule: ScheduleName = "1f1b") -> list[int]:
        pipeline = even_pipeline(4, stages=4, micro_batches=micro_batches, schedule=schedule)
        return [stage.peak for stage in simulate(trace, policy, DEVICE, pipeline).stages]

    few, many = peaks(freed, 8), peaks(freed, 32)
    assert many[:-1] == few[:-1]
    assert many[-1] == few[-1] + 24 * SIZE  # the losses hold the last stage's inputs until the step has ended
    assert peaks(kept, 32)[-1] == many[-1]
    # At the peak, a backward: of eight gradients' buffers there is one, and of four micro-batches' outputs none.
    assert peaks(kept, 8)[0] - few[0] == (7 + 4) * SIZE
    # Under GPipe all outputs live until the last forward has ended, which then is the peak.
    assert 7 * SIZE < peaks(kept, 8, "gpipe")[0] - peaks(freed, 8, "gpipe")[0] < (7 + 8) * SIZE


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zero_bubble", "zero_bubble_v", "dualpipe_v"])
def test_the_micro_batches_that_are_left_out_would_hold_no_more_at_one_time(schedule: ScheduleName) -> None:
    chunks = 1 if schedule in ("1f1b", "zero_bubble") else 2
    for micro_batches in (16, 24, 32, 64):
        pipeline = even_pipeline(8, 4, chunks, micro_batches, schedule)
        short = shortened(pipeline)
        assert in_flight(actions(short)) == in_flight(actions(pipeline))
        assert [held_together(one) for one in actions(short)] == [held_together(one) for one in actions(pipeline)]


def test_a_pipeline_is_faster_than_one_device_and_slower_than_without_its_bubble() -> None:
    trace, policy = hand_made_trace(4), policy_of(layers=4)
    alone = simulate(trace, policy, DEVICE, even_pipeline(4, micro_batches=8)).seconds
    both = simulate(trace, policy, DEVICE, even_pipeline(4, stages=2, micro_batches=8))
    assert alone / 2 < both.seconds < alone
    assert 0 < both.bubble < 0.5


def test_a_policy_for_other_layers_is_refused() -> None:
    with pytest.raises(PlanError, match="decides 3 layers and the trace has 2"):
        simulate(hand_made_trace(2), policy_of(layers=3), DEVICE)
    with pytest.raises(PlanError, match="places 1 layers and the trace has 2"):
        simulate(hand_made_trace(2), policy_of(), DEVICE, Pipeline(placement=(((0,),),)))


decisions = st.one_of(st.just(Keep()), st.just(Recompute()), st.integers(1, 12).map(Swap))
layer_policies = st.one_of(
    st.builds(lambda boundary: (True, {}, boundary), st.one_of(st.just(Keep()), st.integers(1, 12).map(Swap))),
    st.builds(
        lambda chosen, boundary: (False, chosen, boundary),
        st.dictionaries(st.sampled_from(["linear", "silu", "mul"]), decisions),
        st.one_of(st.just(Keep()), st.integers(1, 12).map(Swap)),
    ),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(layer_policies, min_size=1, max_size=4), st.integers(1, 3))
def test_after_a_step_nothing_is_left_but_parameters_and_gradients(
    chosen: list[tuple[bool, dict[str, Decision], Keep | Swap]], micro_batches: int
) -> None:
    layers = [(names, boundary, all_of_it) for all_of_it, names, boundary in chosen]
    pipeline = even_pipeline(len(layers), micro_batches=micro_batches)
    stage = Stage(hand_made_trace(len(layers)), layers, DEVICE, pipeline, 0)
    for number in range(micro_batches):
        stage.act(Action("forward", 0, number))
        stage.act(Action("backward", 0, number))
    found = stage.finish(optimizer=False)
    assert stage.rank.allocator.allocated == 2 * PARAMETER * len(layers)
    assert stage.player.swapping.host_bytes == 0
    assert found.peak >= stage.rank.allocator.allocated


def test_a_uniform_policy_is_simulated_on_every_layer() -> None:
    uniform = Policy.uniform(default=Recompute())
    trace = hand_made_trace(3)
    assert simulate(trace, uniform, DEVICE) == simulate(trace, uniform.for_layers(3), DEVICE)


def test_the_first_and_the_last_chunk_may_have_no_layers() -> None:
    pipeline = Pipeline(placement=(((),), ((0, 1),), ((),)), micro_batches=3)
    found = simulate(hand_made_trace(2), policy_of(), DEVICE, pipeline)
    assert len(found.stages) == 3
    assert all(stage.peak > 0 for stage in found.stages)
