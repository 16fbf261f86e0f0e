"""lowtide in each framework: the same losses and weights as without it, whatever the framework does meanwhile.

Those that are not installed are skipped; ``pip install .[integrations] -c constraints-integrations.txt`` has them all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import tide
from lowtide import LowtideError, Policy, Recompute, Swap
from support.framework_cases import CASES, Case, Job, tight
from support.garbage import collect_garbage
from tide.testing import fresh_tide  # noqa: F401

POLICY = Policy.uniform({"mlp.*": Recompute()}, default=Swap(2))
WHOLE = Policy.uniform(default=Recompute())
PACKAGES = {
    "peft": "peft",
    "trl": "trl",
    "accelerate": "accelerate",
    "transformers": "accelerate",
    "fabric": "lightning",
}


def package(name: str) -> str:
    return PACKAGES.get(name, name.split()[0])


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(params=CASES)
def name(request: pytest.FixtureRequest) -> str:
    pytest.importorskip(package(request.param))
    return str(request.param)


@pytest.fixture
def case(name: str) -> Case:
    return CASES[name]


def test_a_policy_changes_nothing(name: str, case: Case) -> None:
    policy = WHOLE if name == "deepspeed zero-3" else POLICY
    plain = case(Job())
    assert plain.losses
    found = case(Job(attach={"policy": policy}))
    assert not found.differs(plain)
    if name != "peft":
        assert found.attachment.handle.receipt().settings


def test_an_adaptive_run_changes_nothing(name: str, case: Case) -> None:
    if name == "deepspeed zero-3":
        with pytest.raises(LowtideError, match="ZeRO-3 partitions parameters"):
            case(Job(attach={}))
        return
    job = Job(accumulate=2, evaluate=True)
    found = case(replace(job, attach={}))
    assert not found.differs(case(job))
    run = found.attachment if name == "peft" else found.attachment.run
    assert [event.kind for event in run.events if event.kind != "warned"] == ["measured", "switched"]
    assert run.number == job.steps


def test_a_trainer_that_compiles_its_model_gives_the_same(fresh_dynamo: None) -> None:
    pytest.importorskip("accelerate")
    job, case = Job(compiled=True, accumulate=2, evaluate=True), CASES["transformers"]
    plain = case(job)
    recompute = Policy.uniform({"mlp.*": Recompute()})
    found = case(replace(job, attach={"policy": recompute}))
    assert not found.differs(plain)
    assert found.attachment.handle.compiled_bytes()
    adapted = case(replace(job, attach={}))
    assert not adapted.differs(plain)
    events = adapted.attachment.run.events
    assert any("compiled as a whole" in event.text for event in events)
    assert [event.kind for event in events][-1] == "switched"


def test_saving_and_resuming_are_as_without_it(name: str, case: Case, tmp_path: Path) -> None:
    settings = {"policy": WHOLE} if name == "deepspeed zero-3" else {}
    job, states = Job(accumulate=2), []
    for attach, folder in ((None, tmp_path / "plain"), (settings, tmp_path / "attached")):
        folder.mkdir()
        saved = case(replace(job, attach=attach, save=folder)).saved
        where = folder / "checkpoint-4" if package(name) in ("accelerate", "trl") and name != "accelerate" else folder
        states.append((saved, case(replace(job, attach=attach, resume=where))))
    (names, plain), (found_names, found) = states
    assert names
    assert found_names == names
    assert not found.differs(plain)


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_bf16_and_adapters(name: str, case: Case, lora: bool) -> None:
    if lora:
        pytest.importorskip("peft")
    if name == "deepspeed zero-3":
        pytest.skip("refused")
    job = Job(bf16=True, lora=lora)
    assert not case(replace(job, attach={})).differs(case(job))


def test_gradient_checkpointing_that_is_on_beforehand_changes_nothing(name: str, case: Case) -> None:
    settings = {"policy": WHOLE} if name == "deepspeed zero-3" else {}
    assert not case(Job(checkpointing=True, attach=settings)).differs(case(Job()))


def test_a_training_that_dies_without_it_survives(name: str, case: Case, fresh_tide: None) -> None:  # noqa: F811
    if name == "deepspeed zero-3":
        pytest.skip("refused")
    job, share = tight(name)
    tide.configure(capacity=1 << 30)
    torch.accelerator.reset_peak_memory_stats()
    plain = case(job)
    capacity = int(share * torch.accelerator.max_memory_allocated())
    collect_garbage()
    torch.accelerator.empty_cache()
    tide.configure(capacity=capacity)
    with pytest.raises(torch.OutOfMemoryError):
        case(job)
    collect_garbage()
    torch.accelerator.empty_cache()
    assert not case(replace(job, attach={})).differs(plain)
