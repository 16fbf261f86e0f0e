"""The Policy's settings of communication: bitwise, with the collectives and bytes that each is there for."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from lowtide.policy import CollectiveRule, Communication, Keep, LayerPolicy, Pattern, Policy, Recompute, Swap
from lowtide.runtime.apply import apply
from numerics import communication
from numerics.communication import LAYERS, Seen
from numerics.model import LENGTH, WIDTH, build
from support.ranks import Ranks

WHOLE = (LayerPolicy(Recompute()),) * LAYERS
KEPT = (LayerPolicy(),) * LAYERS
INPUT = 2 * LENGTH * WIDTH * 4
"""The bytes of a layer's input on one rank: batch, length, width, fp32."""


@pytest.fixture(scope="module")
def seen(ranks: Ranks) -> Any:
    """What the first rank sees of a layout under a Policy; both ranks must be exact."""
    known: dict[str, list[Seen]] = {}

    def run(layout: str, policy: Policy | None) -> Seen:
        if layout not in known:
            known[layout] = ranks.run(communication.run, layout, None, "tide")
        found = ranks.run(communication.run, layout, policy, "tide") if policy is not None else known[layout]
        for one, other in zip(known[layout], found, strict=True):
            assert one.values == other.values
        assert found[0].warnings == found[1].warnings
        return found[0]

    return run


@pytest.mark.parametrize("layout", ["tensor parallel", "sequence parallel"])
def test_collectives_of_recomputed_layers_are_repeated_or_kept(seen: Any, layout: str) -> None:
    plain = seen(layout, None)
    repeated = seen(layout, Policy(WHOLE))
    kept = seen(layout, Policy(WHOLE, communication=Communication(reissue_collectives=False)))
    assert kept.collectives == plain.collectives
    again = {name: repeated.collectives[name] - plain.collectives[name] for name in plain.collectives}
    if layout == "tensor parallel":  # of two in a layer, nothing in backward needs the last one
        assert again["all_reduce"] == LAYERS
    else:
        assert again["all_gather_into_tensor"] == 2 * LAYERS
        assert again["reduce_scatter_tensor"] == LAYERS
    assert repeated.held < kept.held < plain.held
    assert not kept.warnings


def test_sharded_parameters_are_gathered_again_in_backward(seen: Any) -> None:
    before = seen("sharded, kept gathered", None)
    after = seen("sharded, kept gathered", Policy(KEPT, communication=Communication(reshard_after_forward=True)))
    assert "_allgather_base_" not in before.collectives
    assert after.collectives["_allgather_base_"] == LAYERS
    assert after.held < before.held
    assert not after.warnings
    untouched = seen("sharded, kept gathered", Policy(KEPT))
    assert untouched.collectives == before.collectives


def test_each_rank_holds_its_slice_of_a_recomputed_layers_input(seen: Any) -> None:
    whole = seen("tensor parallel", Policy(WHOLE))
    sliced = seen("tensor parallel", Policy(WHOLE, communication=Communication(slice_inputs=True)))
    assert whole.held - sliced.held == LAYERS * INPUT // 2
    assert sliced.collectives["_allgather_base_"] == LAYERS
    assert not sliced.warnings


def test_an_input_that_is_split_already_is_not_sliced(seen: Any) -> None:
    found = seen("sequence parallel", Policy(WHOLE, communication=Communication(slice_inputs=True)))
    assert len(found.warnings) == LAYERS
    assert "its input is not the same on all tensor-parallel ranks" in found.warnings[0]


@pytest.mark.parametrize("default", [Keep(), Swap(4)], ids=["kept", "swapped"])
def test_the_gather_after_a_norm_is_issued_again(seen: Any, default: Keep | Swap) -> None:
    rules = tuple(CollectiveRule(Pattern(name)) for name in ("attention_norm", "feed_forward_norm"))
    before = seen("sequence parallel", None)
    found = seen("sequence parallel", Policy((LayerPolicy(collectives=rules),) * LAYERS))
    more = found.collectives["all_gather_into_tensor"] - before.collectives["all_gather_into_tensor"]
    assert more == 2 * LAYERS
    # Each gathered input goes, and this rank's half of it, which nothing else needs, is held instead.
    assert before.held - found.held == 2 * LAYERS * INPUT // 2
    assert not found.warnings
    if isinstance(default, Swap):
        swapped = seen("sequence parallel", Policy((LayerPolicy(default, collectives=rules),) * LAYERS))
        assert len(swapped.warnings) == 2 * LAYERS  # what is swapped is not on the device: nothing to repeat


def test_settings_without_effect_say_so(seen: Any) -> None:
    for setting in ({"reissue_collectives": False}, {"slice_inputs": True}):
        found = seen("sharded", Policy(WHOLE, communication=Communication(**setting)))
        assert [next(iter(setting)) in said for said in found.warnings] == [True] * LAYERS
    found = seen("tensor parallel", Policy(KEPT, communication=Communication(reshard_after_forward=True)))
    assert len(found.warnings) == LAYERS
    assert "not sharded by fully_shard" in found.warnings[0]
    rule = CollectiveRule(Pattern("attention_norm"))
    found = seen("tensor parallel", Policy((LayerPolicy(collectives=(rule,)),) * LAYERS))
    assert "the collective at attention_norm of layer 0 is not re-issued" in found.warnings[0]


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (Policy(KEPT, communication=Communication(slice_inputs=True)), "no layer is recomputed as a whole"),
        (Policy(KEPT, communication=Communication(reissue_collectives=False)), "no layer is recomputed as a whole"),
        (
            Policy((LayerPolicy(Recompute(), boundary=Swap(2)),) * 3, communication=Communication(slice_inputs=True)),
            "input is swapped",
        ),
        (
            Policy((LayerPolicy(Recompute(), collectives=(CollectiveRule(Pattern("attention"), reissue=False),)),) * 3),
            "decides, for all collectives",
        ),
    ],
)
def test_what_can_have_no_effect_is_said_when_it_is_applied(policy: Policy, message: str) -> None:
    with pytest.warns(UserWarning, match=message):
        apply(build(), policy, layers="layers")


def test_the_settings_leave_no_trace_when_removed() -> None:
    model = build()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        handle = apply(
            model,
            Policy(WHOLE, communication=Communication(reshard_after_forward=True, slice_inputs=True)),
            layers="layers",
        )
    handle.remove()
    assert not any(module._forward_pre_hooks or "forward" in vars(module) for module in model.modules())
