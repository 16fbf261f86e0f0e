"""axolotl's plugin, loaded by axolotl, on a Trainer of transformers."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from lowtide import Policy, Recompute
from support.framework_cases import VOCABULARY, Job, llama, quiet, state_of

pytest.importorskip("axolotl")
pytest.importorskip("accelerate")

PLUGIN = "lowtide.integrations.axolotl.LowtidePlugin"


@pytest.fixture
def manager() -> Any:
    from axolotl.integrations.base import PluginManager

    found = PluginManager.get_instance()
    found.plugins.clear()
    found.register(PLUGIN)
    yield found
    found.plugins.clear()


def trained(folder: Path, manager: Any = None, **settings: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    """What a Trainer trains, after axolotl has shown it to its plugins."""
    from axolotl.utils.dict import DictDefault
    from transformers import Trainer, TrainingArguments

    generator = torch.Generator().manual_seed(2)
    rows = torch.randint(3, VOCABULARY, (14, 16), generator=generator)
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=7,
        per_device_train_batch_size=2,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    with quiet():
        data = [{"input_ids": row, "labels": row} for row in rows]
        trainer = Trainer(llama(Job()), arguments, train_dataset=data)  # type: ignore[arg-type]
        if manager is not None:
            manager.post_trainer_create(DictDefault(settings), trainer)
        trainer.train()
    return [one["loss"] for one in trainer.state.log_history if "loss" in one], state_of(trainer.model)


@pytest.mark.parametrize("fixed", [False, True], ids=["adapt", "policy"])
def test_the_plugin_attaches_to_the_trainer(
    fixed: bool, manager: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    losses, weights = trained(tmp_path)
    settings: dict[str, Any] = {"lowtide_budget": "1GiB"}
    if fixed:
        Policy.uniform(default=Recompute()).save(tmp_path / "policy.json")
        settings = {"lowtide_policy": str(tmp_path / "policy.json")}
    capfd.readouterr()
    found_losses, found_weights = trained(tmp_path, manager, **settings)
    assert found_losses == losses
    assert all(torch.equal(value, weights[name]) for name, value in found_weights.items())
    assert fixed or "ADAPTIVE-RECOMPUTE" in capfd.readouterr().err


def test_axolotl_reads_the_settings(manager: Any) -> None:
    (name,) = manager.get_input_args()
    module, _, kind = name.rpartition(".")
    settings = getattr(import_module(module), kind)(lowtide_budget="22GiB")
    assert settings.model_dump() == {"lowtide_budget": "22GiB", "lowtide_policy": None}
