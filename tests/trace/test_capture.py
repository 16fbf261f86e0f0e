"""The capture records what a model does, all of it, and leaves the model unchanged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from lowtide._torch_private.fake import FakeTensorMode
from lowtide.errors import TraceError
from lowtide.models.build import build_model
from lowtide.models.decoder import Decoder
from lowtide.models.initialise import initialise
from lowtide.models.shape import DecoderShape
from lowtide.operators.survey import survey
from lowtide.trace.capture import capture
from lowtide.trace.trace import Event, Part, Trace
from lowtide.train.run import Degrees, Precision
from lowtide.train.traced import TracedRank, mean_loss, trace_rank
from support.stacks import Stack, gated

SINGLE = Precision(parameters="float32", compute="float32")


def shape(layers: int = 3) -> DecoderShape:
    return DecoderShape(
        vocab_size=48, hidden_size=32, num_layers=layers, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        intermediate_size=64, max_position_embeddings=16,
    )  # fmt: skip


def model_and_run(layers: int = 3) -> tuple[Decoder, Callable[[], Tensor]]:
    model = build_model(shape(layers))
    tokens = torch.arange(32).reshape(2, 16)
    return model, lambda: mean_loss(model(tokens), tokens)


def live_model() -> tuple[Decoder, Callable[[], Tensor]]:
    model, run = model_and_run()
    initialise(model, seed=0)
    return model, run


@cache
def live_trace() -> Trace:
    return capture(*live_model())


@cache
def fake_trace(layers: int = 3) -> Trace:
    with FakeTensorMode(allow_non_fake_inputs=True):
        return capture(*model_and_run(layers))


@cache
def traced(layers: int = 3, **degrees: int) -> Trace:
    rank = TracedRank(shape=shape(layers), degrees=Degrees(**degrees), precision=SINGLE, samples=2, sequence=16)
    return trace_rank(rank)


def parts_of(trace: Trace) -> list[Part]:
    """Parts in the order they run, layers as often as the model has them."""
    return [trace.before, *(trace.parts[place] for place in trace.layers), trace.after]


def kernels(trace: Trace) -> list[list[str]]:
    return [[part.kernels[number].kind for what, number in part.forward if what == "run"] for part in parts_of(trace)]


def saved(part: Part) -> Counter[int]:
    return Counter(part.values[value].size for value in {pack.value for pack in part.packs} if value >= 0)


def balance(trace: Trace) -> dict[str, int]:
    """What is there after a step by what it is: every part replayed, forward and then backward."""
    parts = parts_of(trace)
    left: Counter[str] = Counter()
    for number, part in enumerate(parts):
        made = _after(part, part.forward, {part.input, *part.taken, *part.across} if number else set())
        ends = {part.output, *part.handed} | (set(part.across) if part is trace.before else set())
        for value in made - ends:
            left["until " + part.values[value].until] += 1
    for part in reversed(parts):
        made = _after(part, part.backward, {part.output_gradient, *part.taken_back})
        for value in made - {part.input_gradient, *part.handed_back, part.input, part.output}:
            kind = "gradient" if part.values[value].gradient else "until " + part.values[value].until
            left[kind] += 1
    return dict(left)


def _after(part: Part, events: tuple[Event, ...], given: set[int | None]) -> set[int]:
    live = {value for value in given if value is not None}
    for what, number in events:
        if what == "make":
            assert number not in live, f"{part.name} makes {number} twice"
            live.add(number)
        elif what == "free":
            live.discard(number)
    return live


def test_a_fake_trace_has_the_kernels_and_the_saved_bytes_of_a_live_one() -> None:
    fake, live = fake_trace(), live_trace()
    assert kernels(fake) == kernels(live)
    assert list(map(saved, parts_of(fake))) == list(map(saved, parts_of(live)))
    assert (live.measured, fake.measured) == (True, False)


def test_a_whole_step_leaves_nothing_but_gradients_and_what_says_how_long_it_lives() -> None:
    trace = fake_trace()
    left = balance(trace)
    assert left.pop("gradient") == sum(1 for _ in live_model()[0].parameters())
    assert "until " not in left


def test_every_saved_tensor_is_unpacked_and_freed_once() -> None:
    for part in fake_trace().parts:
        for what in ("save", "done"):
            found = Counter(number for kind, number in (*part.forward, *part.backward) if kind == what)
            assert found == Counter(range(len(part.packs)))


def test_owned_bytes_are_those_of_the_survey() -> None:
    model, run = live_model()
    found = survey(model, run)
    trace = capture(model, run)
    for layer, place in enumerate(trace.layers):
        expected = {one.name: one.owned for one in found.kinds[found.kind_of[layer]].operators}
        assert {one.name: one.owned for one in trace.parts[place].operators} == expected
        assert sum(expected.values()) > 0


def test_layers_that_do_the_same_share_a_part() -> None:
    trace = fake_trace()
    assert len(trace.layers) == 3
    assert len(trace.parts) < 3
    assert trace.layers[0] == trace.layers[1]


def test_gradients_that_meet_are_added_as_autograd_adds_them() -> None:
    """In place, but not into a view: the gradient that a linear layer gives for a batch of sequences is one."""
    _, run = live_model()
    loss = run()
    with torch.profiler.profile() as profile:
        loss.backward()
    found = [
        part.kernels[number].kind
        for part in reversed(parts_of(fake_trace()))
        for what, number in part.backward
        if what == "run"
    ]
    kinds = Counter(one for one in found if one in ("aten::add", "aten::add_"))
    assert kinds == Counter(one.name for one in profile.events() if one.name in ("aten::add", "aten::add_"))
    assert len(kinds) == 2


def test_a_node_fills_zeros_in_place() -> None:
    index = torch.arange(32).reshape(32, 1)

    def chosen(layer: nn.Module, x: Tensor) -> Tensor:
        return gated(layer, x).gather(1, index.expand(32, 32) // 2)

    model, x = Stack(chosen, 2), torch.randn(32, 32)
    backward = [kernel.kind for kernel in capture(model, lambda: model(x).sum()).parts[0].kernels]
    assert "aten::scatter_add_" in backward
    assert "aten::scatter_add" not in backward


def test_the_batch_is_part_of_what_stays_over_the_step() -> None:
    model, x = Stack(gated, 2), torch.randn(32, 32)
    assert capture(model, lambda: model(x).sum()).before.static.buffers == (x.nbytes,)
    assert capture(model, lambda: model(torch.ones(32, 32)).sum()).before.static.buffers == ()


def test_looking_at_a_model_changes_nothing_of_it() -> None:
    torch.manual_seed(3)
    model = Stack(lambda layer, x: functional.dropout(gated(layer, x), 0.1), 2)
    x = torch.randn(32, 32)
    state, weights = torch.get_rng_state(), {name: value.clone() for name, value in model.state_dict().items()}
    before, resize = [_outside(module) for module in model.modules()], torch.UntypedStorage.resize_
    capture(model, lambda: model(x).sum())
    assert torch.equal(torch.get_rng_state(), state)
    assert [_outside(module) for module in model.modules()] == before
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.UntypedStorage.resize_ is resize


def _outside(module: nn.Module) -> tuple[int, int, int, object]:
    return (
        len(module._forward_hooks), len(module._forward_pre_hooks), len(module._backward_hooks),
        module.__dict__.get("forward"),
    )  # fmt: skip


def test_a_model_whose_way_depends_on_chance_is_refused() -> None:
    ways = iter(range(100))

    def wanders(layer: Any, x: Tensor) -> Tensor:
        return gated(layer, x).relu() if next(ways) % 3 else gated(layer, x).tanh().exp()

    model = Stack(wanders, 1)
    with pytest.raises(TraceError, match="depends on values or on chance"):
        capture(model, lambda: model(torch.ones(32, 32)).sum(), layers="layers")


def test_an_optimizers_step_on_real_parameters_is_refused() -> None:
    model, run = live_model()
    with pytest.raises(TraceError, match="fake tensors"):
        capture(model, run, optimizer=torch.optim.AdamW(model.parameters()))


def test_tensor_parallel_has_its_collectives_with_ranks_and_bytes() -> None:
    for part in traced(tensor=2).parts:
        found = [part.kernels[number] for what, number in part.forward if what == "run" if part.kernels[number].ranks]
        assert [kernel.kind for kernel in found] == ["_c10d_functional::all_reduce"] * 2
        assert {(kernel.ranks, kernel.message) for kernel in found} == {(2, 2 * 16 * 32 * 4)}


def test_parameters_that_fsdp_gathers_are_freed_after_forward() -> None:
    trace = traced(shard=2)
    for part in trace.parts:
        gathered = [
            value
            for what, number in part.forward
            if what == "run" and part.kernels[number].kind == "fsdp::split_with_sizes_copy"
            for value in part.kernels[number].writes
        ]
        assert sum(part.values[value].size for value in gathered) == 2 * sum(part.static.parameters)
        freed = {number for what, number in part.forward if what == "free"}
        assert freed.issuperset(gathered)
    assert balance(trace).get("until ", 0) == 0


def test_a_deep_model_is_traced_from_few_of_its_layers_and_each_is_as_in_a_shallow_one() -> None:
    whole, deep = traced(4), traced(32)
    assert len(deep.layers) == 32
    assert {deep.parts[place].digest for place in deep.layers} == {whole.parts[place].digest for place in whole.layers}
    assert (deep.before.digest, deep.after.digest) == (whole.before.digest, whole.after.digest)


def test_few_layers_give_what_all_of_a_model_gives() -> None:
    everything, few = fake_trace(6), traced(6)
    assert [few.parts[place].forward for place in few.layers] == [
        everything.parts[place].forward for place in everything.layers
    ]
    assert [saved(part) for part in parts_of(few)] == [saved(part) for part in parts_of(everything)]
