"""Rules of the allocator that hold for every program, looked for by hypothesis."""

import itertools

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tide

SIZES = st.one_of(
    st.integers(1, 5000), st.integers(2**20 - 600, 2**20 + 600), st.integers(1, 12 * 2**20)
)
# Make a block on one of three streams, drop one, or use one on another stream.
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("make"), SIZES, st.integers(0, 2)),
        st.tuples(st.just("drop"), st.integers(0, 30), st.just(0)),
        st.tuples(st.just("use"), st.integers(0, 30), st.integers(0, 2)),
        st.tuples(st.just("pass time"), st.integers(0, 10**6), st.just(0)),
        st.tuples(st.just("empty cache"), st.just(0), st.just(0)),
    ),
    max_size=40,
)
RULES = settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def run(actions) -> list[tuple[int, int, int, int]]:
    """Carries the actions out, checks the rules after each, returns what was observable."""
    tide.reset()
    tide.configure(capacity=96 * 2**20, races=False, poison=False)
    streams = [torch.accelerator.current_stream(), torch.Stream("tide"), torch.Stream("tide")]
    live: list[tuple[torch.Tensor, int]] = []
    expected = 0
    seen = []
    base = None
    for action, first, second in actions:
        if action == "make":
            before = torch.accelerator.memory_allocated()
            with streams[second]:
                try:
                    x = torch.empty(first, dtype=torch.uint8, device="tide")
                except torch.OutOfMemoryError:
                    assert torch.accelerator.memory_allocated() == before
                    continue
            held = torch.accelerator.memory_allocated() - before
            rounded = -(-first // 512) * 512
            # Large blocks keep a rest of up to 1 MiB; small ones are exact.
            assert held == rounded if first <= 2**20 else rounded <= held <= rounded + 2**20
            live.append((x, held))
            expected += held
            base = x.data_ptr() if base is None else base
            seen.append((0, x.data_ptr() - base, held, 0))
        elif action == "drop" and live:
            _, held = live.pop(first % len(live))
            del _
            x = None
            expected -= held
        elif action == "use" and live:
            x, _ = live[first % len(live)]
            x.record_stream(streams[second])
        elif action == "pass time":
            tide.advance(first)
        elif action == "empty cache":
            torch.accelerator.empty_cache()
        allocated, reserved = (
            torch.accelerator.memory_allocated(),
            torch.accelerator.memory_reserved(),
        )
        assert allocated == expected <= reserved <= 96 * 2**20
        ranges = sorted((t.data_ptr(), t.data_ptr() + held) for t, held in live)
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(ranges)), "blocks overlap"
        seen.append((1, allocated, reserved, tide.now()))
    live.clear()
    x = None
    torch.accelerator.empty_cache()
    assert torch.accelerator.memory_allocated() == torch.accelerator.memory_reserved() == 0
    return seen


@RULES
@given(ACTIONS)
def test_blocks_never_overlap_and_every_byte_is_counted(actions):
    run(actions)


@RULES
@given(ACTIONS)
def test_the_same_actions_give_the_same_addresses_and_bytes(actions):
    assert run(actions) == run(actions)
