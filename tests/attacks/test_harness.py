"""The harness tells each outcome from the others: an attack that breaks something is seen to do so."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from attacks.harness import Attack, Found, Side, attack, train
from attacks.outcome import examine
from attacks.parts import stack
from attacks.runner import Runner
from lowtide.errors import RebuildError

pytestmark = pytest.mark.xdist_group("attacks")
KEPT: list[Tensor] = []


@attack("nothing", treatments=("operators", "swap"))
def harmless(side: Side) -> None:
    train(side, stack(), steps=2)


@attack("a loss that is another with lowtide", treatments=("swap",))
def different(side: Side) -> None:
    side.record("loss", 1.0 + side.treated)


@attack("an error of lowtide", treatments=("swap",))
def typed_error(side: Side) -> None:
    if side.treated:
        raise RebuildError("mul in layer 1 cannot be rebuilt")


@attack("a message of torch that is documented", treatments=("swap",), documented=("modified by an inplace operation",))
def documented_error(side: Side) -> None:
    if side.treated:
        raise RuntimeError("one of the variables has been modified by an inplace operation")


@attack("an error that is not lowtide's", treatments=("swap",))
def untyped_error(side: Side) -> None:
    if side.treated:
        raise AttributeError("'NoneType' object has no attribute 'shape'")


@attack("a hook that stays on a module", treatments=("swap",))
def module_hook(side: Side) -> None:
    model = stack()
    train(side, model, steps=1)
    if side.treated:
        model.register_forward_hook(lambda *_: None)


class Idle(TorchFunctionMode):
    """Does nothing."""


@attack("a mode that stays on", treatments=("swap",))
def function_mode(side: Side) -> None:
    if side.treated:
        Idle().__enter__()


@attack("a patched function of torch", treatments=("swap",))
def patched_function(side: Side) -> None:
    plain = torch.UntypedStorage.resize_
    if side.treated:
        torch.UntypedStorage.resize_ = lambda storage, size: plain(storage, size)  # type: ignore[method-assign]


@attack("a tensor that is still held", treatments=("swap",))
def unpack(side: Side) -> None:
    if side.treated:
        KEPT.append(torch.zeros(3))


@attack("what the program itself finds", treatments=("swap",))
def own_finding(side: Side) -> None:
    if side.treated:
        raise Found("left_behind", "the signature of forward")


@pytest.mark.parametrize(
    ("chosen", "kind"),
    [
        (harmless, "exact"),
        (different, "silently_wrong"),
        (typed_error, "refused"),
        (documented_error, "refused"),
        (untyped_error, "crashed"),
        (module_hook, "left_behind"),
        (function_mode, "left_behind"),
        (patched_function, "left_behind"),
        (unpack, "leaked"),
        (own_finding, "left_behind"),
    ],
    ids=lambda value: value.name if isinstance(value, Attack) else value,
)
def test_an_outcome_is_told(chosen: Attack, kind: str) -> None:
    plain = torch.UntypedStorage.resize_
    try:
        outcome = examine(chosen)
    finally:
        torch.UntypedStorage.resize_ = plain  # type: ignore[method-assign]
        if chosen is function_mode:
            torch._C._pop_torch_function_stack()
        KEPT.clear()
    assert outcome.kind == kind, outcome.findings


def test_a_child_that_hangs_is_killed_and_says_where() -> None:
    outcome = Runner().run("hangs")
    assert outcome.kind == "hung"
    assert "in hangs" in outcome.text


def test_a_child_that_aborts_has_crashed() -> None:
    outcome = Runner().run("aborts")
    assert outcome.kind == "crashed"
    assert "Aborted" in outcome.text
