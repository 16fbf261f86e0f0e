from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lowtide.planner.simulation import Moment, Span
from lowtide.report.thin import blocks, late_copies, thin_memory, thin_points

moments = st.lists(st.tuples(st.floats(0, 1e3), st.integers(0, 1 << 40)), min_size=1, max_size=200).map(
    lambda points: [Moment(time, size, place, f"operator {place}") for place, (time, size) in enumerate(sorted(points))]
)
spans = st.lists(
    st.builds(
        Span,
        lane=st.just("compute"),
        start=st.floats(0, 1),
        seconds=st.floats(0, 0.2),
        kind=st.sampled_from(["forward", "backward", "recompute", "stall"]),
        layer=st.none() | st.integers(0, 9),
        operator=st.sampled_from(["a", "b"]),
        bytes=st.integers(0, 1 << 30),
    ),
    max_size=60,
)


@given(moments, st.integers(1, 20))
def test_thinning_keeps_the_peak_with_its_name_and_invents_nothing(found: list[Moment], slices: int) -> None:
    thin = thin_memory(found, slices)
    assert len(thin) <= 3 * slices + 1 or len(thin) == len(found)
    assert max(one.allocated for one in thin) == max(one.allocated for one in found)
    places = [one.layer for one in thin]
    assert places == sorted(places, key=lambda place: -1 if place is None else place)
    assert set(thin) <= set(found)
    assert (thin[0], thin[-1]) == (found[0], found[-1])


def test_a_short_timeline_stays_as_it_is() -> None:
    points = [(0.0, 1), (1.0, 2), (2.0, 1)]
    assert thin_points(points, 10) == points


@given(spans, st.integers(1, 50))
def test_joined_spans_are_as_busy_as_they_were(found: list[Span], most: int) -> None:
    joined = blocks(found, 1.0, most)
    for kind in ("forward", "backward", "recompute", "stall"):
        mine = [span for span in found if span.kind == kind]
        assert abs(sum(span.seconds for span in mine) - sum(b.busy for b in joined if b.kind == kind)) < 1e-9
        assert sum(span.bytes for span in mine) == sum(block.bytes for block in joined if block.kind == kind)
        assert len(mine) == sum(block.spans for block in joined if block.kind == kind)


def test_many_spans_become_as_few_blocks_as_a_page_can_hold() -> None:
    found = [Span("compute", place / 10_000, 5e-5, "forward", place // 100, "w1") for place in range(10_000)]
    assert len(blocks(found, 1.0, 500)) <= 500
    assert blocks(found[:300], 1.0, 1)[0].layers == "0-2"


def test_a_copy_back_is_late_if_compute_waited_for_it() -> None:
    early = Span("link in", 0.0, 0.1, "copy back", 3, "w1", 0, 100)
    late = Span("link in", 0.1, 0.4, "copy back", 2, "w1", 0, 100)
    other = Span("link in", 0.1, 0.4, "copy back", 2, "w1", 1, 100)
    stall = Span("compute", 0.3, 0.2, "stall", 2, "w1", 0)
    assert late_copies([early, late, other, stall]) == {late}
    kinds = {block.kind: block.bytes for block in blocks([early, late, other, stall], 1.0)}
    assert kinds == {"copy back": 200, "late": 100, "stall": 0}
