"""``lowtide.attach``: what it takes, what it refuses, and that it leaves nothing behind."""

from __future__ import annotations

import inspect
import subprocess
import sys
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lowtide
from lowtide import Policy, PolicyError, Recompute, RescueError
from lowtide.errors import LaunchError
from lowtide.integrations.every_rank import wait_for_every_rank
from lowtide.integrations.plain_state import PlainState
from support.framework_cases import Job, batches, llama
from support.ranks import Ranks

WHOLE = Policy.uniform(default=Recompute())


def trainer_of(job: Job, tmp_path: Any, **arguments: Any) -> Any:
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    data = [{"input_ids": row, "labels": row} for batch in batches(job) for row in batch]
    settings = {"max_steps": job.steps, "per_device_train_batch_size": job.rows, "save_strategy": "no"}
    kept = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[], disable_tqdm=True, **{**settings, **arguments})
    return Trainer(llama(job), kept, train_dataset=data)  # type: ignore[arg-type]


@pytest.mark.parametrize("target", [nn.Linear(2, 2), torch.optim.SGD(nn.Linear(2, 2).parameters()), 3, None])
def test_what_is_no_framework_is_a_type_error_that_says_what_is(target: Any) -> None:
    with pytest.raises(TypeError, match="takes a Trainer of transformers or TRL, an Accelerator") as error:
        lowtide.attach(target)
    assert ("use lowtide.adapt(model, optimizer)" in str(error.value)) == isinstance(target, nn.Module)


def test_a_policy_with_settings_of_the_adaptive_mode_is_refused(tmp_path: Any) -> None:
    with pytest.raises(PolicyError, match="so budget, watch would have no effect"):
        lowtide.attach(trainer_of(Job(), tmp_path), policy=WHOLE, budget="1GiB", watch="always")


def test_no_framework_is_imported_by_attaching_to_another() -> None:
    program = "import sys, lowtide; lowtide.attach; print([one for one in sys.modules if one in {names}])"
    names = {"transformers", "accelerate", "lightning", "deepspeed", "trl", "peft"}
    printed = subprocess.run([sys.executable, "-c", program.format(names=names)], capture_output=True, text=True)
    assert printed.stdout.strip() == "[]", printed.stderr


@pytest.mark.parametrize("settings", [{"policy": WHOLE}, {}], ids=["policy", "adapt"])
def test_trainer_and_model_are_restored(tmp_path: Any, settings: dict[str, Any]) -> None:
    trainer = trainer_of(Job(), tmp_path)
    hooks = [len(one._forward_pre_hooks) for one in trainer.model.modules()]
    attachment = lowtide.attach(trainer, verbose=False, **settings)
    assert next(iter(inspect.signature(trainer._inner_training_loop).parameters)) == "batch_size"
    trainer.train()
    assert [len(one._forward_pre_hooks) for one in trainer.model.modules()] == hooks
    assert not any("forward" in vars(one) for one in trainer.model.modules())
    trainer.train()  # and again
    attachment.remove()
    assert not {"training_step", "_wrap_model", "_inner_training_loop"} & set(vars(trainer))


def test_a_trainer_that_trains_already_is_refused(tmp_path: Any) -> None:
    from transformers import TrainerCallback

    trainer = trainer_of(Job(), tmp_path)

    class Late(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            lowtide.attach(trainer, verbose=False)

    trainer.add_callback(Late())
    with pytest.raises(PolicyError, match=r"attach before trainer.train\(\)"):
        trainer.train()


def test_auto_find_batch_size_halves_a_batch_that_cannot_be_rescued(tmp_path: Any) -> None:
    job = Job(rows=8, steps=2)
    trainer = trainer_of(job, tmp_path, auto_find_batch_size=True)
    compute, sizes = trainer.compute_loss, []

    def compute_loss(model: Any, inputs: Any, **kwargs: Any) -> Any:
        sizes.append(len(inputs["input_ids"]))
        if sizes[-1] == job.rows:
            raise RescueError("a step was begun 4 times and did not fit into the device's memory")
        return compute(model, inputs, **kwargs)

    trainer.compute_loss = compute_loss
    lowtide.attach(trainer, verbose=False)
    trainer.train()
    assert sizes[0] == job.rows
    assert set(sizes[1:]) == {7}  # accelerate takes nine tenths


def test_activation_offloading_of_trl_is_refused(tmp_path: Any) -> None:
    trainer = trainer_of(Job(), tmp_path)
    trainer.args.activation_offloading = True
    with pytest.raises(PolicyError, match="activation_offloading=False and let lowtide decide"):
        lowtide.attach(trainer)


def test_models_that_model_init_makes_are_attached_to(tmp_path: Any) -> None:
    trainer = trainer_of(Job(), tmp_path)
    trainer.model_init = lambda: llama(Job(steps=3))
    attachment = lowtide.attach(trainer, policy=WHOLE)
    trainer.train()
    assert attachment.handle is not None
    assert set(attachment.handle.layers.modules) == set(trainer.model.model.layers)


class Counting:
    def __init__(self) -> None:
        self.tokens, self.metrics, self.other = 3, {"train": {"loss": [1.0]}}, object()


def test_what_a_trainer_counts_is_restored_as_often_as_it_is_retried() -> None:
    counting = Counting()
    state, other = PlainState(counting), counting.other
    for _ in range(2):
        counting.tokens += 1
        counting.metrics["train"]["loss"].append(2.0)
        counting.other = None  # type: ignore[assignment]
        state.restore()
        assert (counting.tokens, counting.metrics) == (3, {"train": {"loss": [1.0]}})
    assert counting.other is not other


def attached_on_one_rank(first: str, second: str) -> str:
    verb = (first, second)[dist.get_rank()]
    try:
        if verb:
            wait_for_every_rank(verb, timedelta(minutes=1) if first and second else timedelta(seconds=2))
    except LaunchError as error:
        return str(error)
    return ""


def test_a_rank_that_does_not_attach_is_named(ranks: Ranks) -> None:
    assert ranks.run(attached_on_one_rank, "adapt", "adapt") == ["", ""]
    found = ranks.run(attached_on_one_rank, "adapt", "apply")
    assert all("different settings: adapt, apply" in one for one in found)
    found = ranks.run(attached_on_one_rank, "adapt", "")
    assert "rank 0 has attached lowtide and rank 1 has not" in found[0]
    ranks.stop()  # their counts differ now
