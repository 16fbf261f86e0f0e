"""What people try first: it works, or one line says what to do instead."""

from __future__ import annotations

import io
import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._composable import checkpoint as composable_checkpoint
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.functional import gelu
from torch.utils.checkpoint import checkpoint

import lowtide
from lowtide import ModelError, Policy, PolicyError, Recompute, Rule
from lowtide.adaptive.session import Adaptive
from lowtide.trace.capture import capture
from support.tiny_models import tiny
from tide.testing import fresh_tide  # noqa: F401

RECOMPUTED = Policy.uniform([Rule("up", Recompute())])


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        down: Tensor = self.down(gelu(self.up(x)))
        return x + down


class Stack(nn.Module):
    """Four blocks; a checkpoint may be around each of them, in the model's own code."""

    def __init__(self, checkpointed: bool | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.reentrant = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return x


def stack(device: str = "cpu", checkpointed: bool | None = None) -> tuple[Stack, torch.optim.Optimizer, Tensor]:
    torch.manual_seed(0)
    model = Stack(checkpointed).to(device)
    return model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(8, 16, device=device, requires_grad=True)


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Callable[[], Tensor]:
    def step() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def warnings_of(run: Adaptive) -> list[str]:
    return [event.text for event in run.events if event.kind == "warned"]


# Gradient checkpointing that is on already.


def wrapped(model: Stack) -> None:
    for index, block in enumerate(model.blocks):
        model.blocks[index] = checkpoint_wrapper(block)


def composed(model: Stack) -> None:
    for block in model.blocks:
        composable_checkpoint(block)


def flagged(model: Stack) -> None:
    for block in model.blocks:
        block.gradient_checkpointing = True  # type: ignore[assignment]


@pytest.mark.parametrize("turn_on", [wrapped, composed, flagged])
def test_adapt_takes_gradient_checkpointing_over_and_gives_it_back(turn_on: Callable[[Stack], None]) -> None:
    plain = [trained(*stack("tide"))() for _ in range(1)]
    model, optimizer, x = stack("tide")
    turn_on(model)
    run = lowtide.adapt(model, optimizer, verbose=False)
    step = trained(model, optimizer, x)
    losses = [run.step(step) for _ in range(7)]
    assert losses[0] is not None
    assert torch.equal(losses[0].cpu(), plain[0].cpu())
    (warning,) = warnings_of(run)
    assert warning.startswith("gradient checkpointing was on (4 ")
    assert run.plan is not None
    slow = next(one for one in run.plan.options if one.name == "recompute every layer")
    assert slow.simulation.seconds > run.plan.simulation.seconds  # with checkpoints on, all options look the same
    run.remove()
    with pytest.raises(PolicyError, match="gradient checkpointing on"):
        lowtide.apply(model, RECOMPUTED)


def test_checkpointing_that_a_framework_turns_on_after_adapt_is_taken_over() -> None:
    model = tiny("llama").to("tide")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = lowtide.adapt(model, optimizer, verbose=False)
    model.gradient_checkpointing_enable()  # type: ignore[operator]  # as a Trainer does when it begins to train
    tokens = torch.randint(3, 64, (2, 8)).to("tide")

    def step() -> None:
        optimizer.zero_grad()
        model(tokens, labels=tokens).loss.backward()
        optimizer.step()

    run.step(step)
    assert any(text.startswith("gradient checkpointing was on (") for text in warnings_of(run))
    assert not model.is_gradient_checkpointing
    run.remove()
    assert model.is_gradient_checkpointing


def test_apply_refuses_gradient_checkpointing_or_turns_it_off() -> None:
    model = tiny("llama")
    model.gradient_checkpointing_enable()  # type: ignore[operator]
    policy = Policy.uniform([Rule("mlp.act_fn", Recompute())])
    with pytest.raises(PolicyError, match=r"3 LlamaDecoderLayer.*disable_checkpointing=True"):
        lowtide.apply(model, policy)
    assert model.is_gradient_checkpointing
    with lowtide.apply(model, policy, disable_checkpointing=True):
        assert not model.is_gradient_checkpointing
    assert model.is_gradient_checkpointing


def test_other_layers_keep_their_checkpointing() -> None:
    model = nn.ModuleDict({"encoder": Stack(), "decoder": Stack()})
    for part in model.values():
        flagged(part)  # type: ignore[arg-type]
    with lowtide.apply(model, RECOMPUTED, layers="decoder.blocks", disable_checkpointing=True):
        on = {name for name, module in model.named_modules() if getattr(module, "gradient_checkpointing", False)}
        assert on == {f"encoder.blocks.{index}" for index in range(4)}


def test_a_trace_shows_what_is_saved_without_gradient_checkpointing() -> None:
    model, tokens = tiny("llama"), torch.randint(3, 64, (2, 8))
    expected = capture(model, lambda: model(tokens, labels=tokens).loss, rounds=0)
    model.gradient_checkpointing_enable()  # type: ignore[operator]
    with pytest.warns(UserWarning, match="gradient checkpointing on"):
        found = capture(model, lambda: model(tokens, labels=tokens).loss, rounds=0)
    assert [part.operators for part in found.parts] == [part.operators for part in expected.parts]
    assert model.is_gradient_checkpointing


@pytest.mark.parametrize("reentrant", [False, True])
def test_adapt_says_that_a_model_checkpoints_its_layers_itself(reentrant: bool) -> None:
    model, optimizer, x = stack("tide", checkpointed=reentrant)
    with lowtide.adapt(model, optimizer, verbose=False) as run:
        for _ in range(3):
            trained(model, optimizer, x)()
    (warning,) = warnings_of(run)
    assert "own code runs its layers in torch.utils.checkpoint" in warning


# Steps that never end.


def test_adapt_without_with_or_step_says_so_at_the_second_forward() -> None:
    model, optimizer, x = stack("tide")
    run = lowtide.adapt(model, optimizer, verbose=False)
    step = trained(model, optimizer, x)
    step()
    assert warnings_of(run) == []
    step()
    step()
    run.remove()
    (warning,) = warnings_of(run)
    assert "put `with run:` around the loop, or give each step to run.step(...)" in warning


def test_adapt_without_its_optimizer_says_so_at_the_second_forward() -> None:
    model, optimizer, x = stack("tide")
    with lowtide.adapt(model, verbose=False) as run:
        for _ in range(3):
            trained(model, optimizer, x)()
    (warning,) = warnings_of(run)
    assert "pass the optimizer, adapt(model, optimizer)" in warning


def test_adapt_with_an_optimizer_that_never_steps_says_so() -> None:
    model, optimizer, x = stack("tide")
    idle = torch.optim.SGD(model.blocks[0].parameters(), lr=0.1)
    with lowtide.adapt(model, [optimizer, idle], verbose=False) as run:
        trained(model, optimizer, x)()
        trained(model, optimizer, x)()  # now a step ends: one optimizer has stepped twice
    assert [text for text in warnings_of(run) if "have not all stepped" in text]


def test_accumulated_gradients_and_steps_ended_by_hand_are_no_reason_to_warn() -> None:
    model, optimizer, x = stack("tide")
    run = lowtide.adapt(model, optimizer, verbose=False)
    for _ in range(3):
        for _ in range(4):
            model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        run.step()
    run.remove()
    assert warnings_of(run) == []


# What is passed.


def test_adapt_names_what_to_pass_in_place_of_a_scheduler() -> None:
    model, optimizer, _ = stack()
    scheduler: Any = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    with pytest.raises(TypeError, match=r"not its StepLR: pass scheduler\.optimizer"):
        lowtide.adapt(model, scheduler)


def test_adapt_refuses_the_optimizer_of_another_model() -> None:
    model, _, _ = stack()
    _, other, _ = stack()
    with pytest.raises(ValueError, match="none of the 16 parameters of the SGD are the model's"):
        lowtide.adapt(model, other)


class Trainer:
    """What holds a model, in any framework."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model


@pytest.mark.parametrize("verb", ["adapt", "apply"])
def test_what_holds_a_model_is_refused_and_the_model_named(verb: str) -> None:
    trainer: Any = Trainer(stack()[0])
    with pytest.raises(ModelError, match=rf"{verb}\(\) takes a torch.nn.Module; found Trainer: pass its \.model"):
        lowtide.adapt(trainer) if verb == "adapt" else lowtide.apply(trainer, RECOMPUTED)


def test_a_trainer_is_no_optimizer() -> None:
    model, _, _ = stack()
    trainer: Any = Trainer(model)
    with pytest.raises(TypeError, match=r"takes optimizers of torch\.optim, or wrappers of such; found Trainer"):
        lowtide.adapt(model, trainer)


def test_a_second_apply_is_refused_until_the_first_is_removed() -> None:
    model, _, _ = stack()
    handle = lowtide.apply(model, RECOMPUTED)
    with pytest.raises(PolicyError, match=r"a Policy is applied to the layers of blocks already: call remove\(\)"):
        lowtide.apply(model, RECOMPUTED)
    handle.remove()
    lowtide.apply(model, RECOMPUTED).remove()


def test_apply_and_adapt_of_one_model_are_refused_in_either_order() -> None:
    model, optimizer, _ = stack()
    handle = lowtide.apply(model, RECOMPUTED)
    with pytest.raises(PolicyError, match=r"adapt\(policy=\.\.\.\)"):
        lowtide.adapt(model, optimizer)
    handle.remove()
    run = lowtide.adapt(model, optimizer, verbose=False)
    with pytest.raises(PolicyError, match=r"adapt\(policy=\.\.\.\)"):
        lowtide.apply(model, RECOMPUTED)
    run.remove()


def test_a_policy_may_be_given_as_a_plan_or_a_file(tmp_path: Path) -> None:
    model, optimizer, x = stack()
    plan = lowtide.plan(model, lambda: model(x).square().mean(), budget="4GiB", device="h100")
    with lowtide.apply(model, plan) as handle:
        assert handle.policy == plan.policy
    file = tmp_path / "policy.json"
    RECOMPUTED.save(file)
    for given in (file, str(file)):
        with lowtide.apply(model, given) as handle:
            assert handle.policy.layers == RECOMPUTED.for_layers(4).layers
    run = lowtide.adapt(model, optimizer, policy=str(file), verbose=False)
    assert run.planning.fixed is not None
    run.remove()
    wrong: Any = {"up": "recompute"}
    with pytest.raises(PolicyError, match=r"expected a Policy, a Plan or the name of a file .*; found dict"):
        lowtide.apply(model, wrong)


def test_a_rule_takes_its_pattern_as_text_and_names_what_is_no_decision() -> None:
    assert Rule("mlp.act_fn", Recompute()) == Rule(lowtide.Pattern("mlp.act_fn"), Recompute())
    assert lowtide.CollectiveRule("mlp") == lowtide.CollectiveRule(lowtide.Pattern("mlp"))
    a_class: Any = Recompute
    with pytest.raises(PolicyError, match=r"a decision is Keep\(\), Recompute\(\) or Swap\(\.\.\.\); found"):
        Rule("mlp", a_class)
    number: Any = 3
    with pytest.raises(PolicyError, match="a rule's pattern is a Pattern or its text"):
        Rule(number, Recompute())


def test_adapt_says_which_stack_of_layers_it_does_not_plan() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Stack(), Stack()).to("tide")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = lowtide.adapt(model, optimizer, layers="1.blocks", verbose=False)
    x = torch.randn(8, 16, device="tide")
    for _ in range(6):
        run.step(trained(model, optimizer, x))
    run.remove()
    (warning,) = warnings_of(run)
    assert warning.startswith("not covered: the 4 layers in 0.blocks (Block) hold ")
    assert "layers='0.blocks' plans for these instead" in warning


def test_a_budget_of_80_is_taken_for_a_slip() -> None:
    model, optimizer, _ = stack()
    with pytest.raises(lowtide.UnitError, match=r'for 80 GiB write "80GiB"'):
        lowtide.adapt(model, optimizer, budget=80)


# What is saved and printed.


def test_a_missing_directory_is_made(tmp_path: Path) -> None:
    model, optimizer, x = stack("tide")
    directory = tmp_path / "not" / "there"
    run = lowtide.adapt(model, optimizer, directory=directory, verbose=False)
    for _ in range(6):
        run.step(trained(model, optimizer, x))
    run.remove()
    assert {"adaptive.json", "plan.json", "policy.json", "trace.json"} <= {path.name for path in directory.iterdir()}


def test_what_cannot_be_saved_or_printed_does_not_end_a_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError("no space left on device")

    monkeypatch.setattr(sys, "stderr", Closed())
    model, optimizer, x = stack("tide")
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        run = lowtide.adapt(model, optimizer, directory=tmp_path / "file")  # a file is no directory
        for _ in range(6):
            run.step(trained(model, optimizer, x))
        run.remove()
    assert run.plan is not None
    messages = [record.getMessage() for record in caplog.records]
    assert [text for text in messages if text.startswith("nothing more of the adaptive run is saved in")]
    assert [text for text in messages if text.startswith("nothing more of the adaptive run is printed")]


def test_a_reader_that_goes_away_ends_nothing() -> None:
    program = "import sys; from lowtide.report.adapt import say; [say('x' * 99) for _ in range(9999)]; print('alive')"
    process = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stderr is not None
    process.stderr.close()
    assert process.communicate()[0] == b"alive\n"
    assert process.returncode == 0
