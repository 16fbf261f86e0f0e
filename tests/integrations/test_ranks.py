"""Trainers on two ranks: the same losses and weights on each as without lowtide."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from torch.nn.parallel import DistributedDataParallel

from lowtide import Policy, Recompute, Swap
from support.framework_cases import CASES, Job
from support.ranks import Ranks

POLICY = Policy.uniform({"mlp.*": Recompute()}, default=Swap(2))
WHOLE = Policy.uniform(default=Recompute())
SWAPPED = Policy.uniform(default=Swap(2))
JOB = Job(accumulate=2, evaluate=True, steps=7)


def train(name: str, attach: dict[str, Any] | None, checkpointing: bool = False) -> tuple[Any, list[bool], list[str]]:
    """What a rank trained, ``find_unused_parameters`` of each DDP that was made, and the kinds of events."""
    wrapped: list[bool] = []
    initialise = DistributedDataParallel.__init__

    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        wrapped.append(bool(kwargs.get("find_unused_parameters")))
        initialise(self, *args, **kwargs)

    DistributedDataParallel.__init__ = made  # type: ignore[method-assign]
    try:
        found = CASES[name](replace(JOB, attach=attach, checkpointing=checkpointing))
    finally:
        DistributedDataParallel.__init__ = initialise  # type: ignore[method-assign]
    run = found.attachment.run if found.attachment is not None else None
    kinds = [event.kind for event in run.events] if run is not None else []
    found.attachment = None
    return found, wrapped, kinds


def on_fresh(ranks: Ranks, *args: Any) -> list[Any]:
    """On processes of its own: when a training ends accelerate destroys the process group."""
    ranks.stop()
    try:
        return ranks.run(train, *args)
    finally:
        ranks.stop()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["transformers", "accelerate"])
@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointed"])
def test_ddp_is_exact_on_both_ranks(name: str, checkpointing: bool, ranks: Ranks) -> None:
    pytest.importorskip("accelerate")
    plain = on_fresh(ranks, name, None, checkpointing)
    assert [len(wrapped) for _, wrapped, _ in plain] == [1, 1]
    for settings in ({"policy": POLICY}, {}):
        found = on_fresh(ranks, name, settings, checkpointing)
        assert not found[0][0].differs(plain[0][0])
        assert not found[1][0].differs(plain[1][0])
        assert [wrapped for _, wrapped, _ in found] == [wrapped for _, wrapped, _ in plain]
        assert settings or all("switched" in kinds for _, _, kinds in found)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed_is_exact_on_both_ranks(stage: int, ranks: Ranks) -> None:
    pytest.importorskip("deepspeed")
    name = f"deepspeed zero-{stage}"
    plain = on_fresh(ranks, name, None)
    assert plain[0][0].losses != plain[1][0].losses  # each has its own batches
    settings: list[dict[str, Any]] = [{"policy": SWAPPED}] if stage == 3 else [{"policy": POLICY}, {}]
    for one in settings:
        found = on_fresh(ranks, name, one)
        assert not found[0][0].differs(plain[0][0])
        assert not found[1][0].differs(plain[1][0])
        assert one or all("switched" in kinds for _, _, kinds in found)
    if stage == 3:
        with pytest.raises(AssertionError, match="frees a recomputed layer's parameters"):
            on_fresh(ranks, name, {"policy": WHOLE})
