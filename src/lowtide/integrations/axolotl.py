"""axolotl: a plugin that attaches to the trainer it creates.

plugins:
  - lowtide.integrations.axolotl.LowtidePlugin
lowtide_budget: 22GiB
"""

from __future__ import annotations

from typing import Any

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel

from lowtide.integrations.attach import attach

__all__ = ["LowtideArgs", "LowtidePlugin"]


class LowtideArgs(BaseModel):
    """What a configuration file may say."""

    lowtide_budget: int | str = "auto"
    """The memory that the plan may fill."""
    lowtide_policy: str | None = None
    """The file of a Policy or of a plan, which is applied instead of adapting."""


class LowtidePlugin(BasePlugin):  # type: ignore[misc]
    """``lowtide.attach(trainer)``, once axolotl has created its trainer."""

    def get_input_args(self) -> str:
        """The class that axolotl reads this plugin's settings with."""
        return f"{__name__}.{LowtideArgs.__name__}"

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        """The trainer is complete, and has not begun."""
        if cfg.lowtide_policy is not None:
            attach(trainer, policy=cfg.lowtide_policy)
        else:
            attach(trainer, budget=cfg.lowtide_budget or "auto")
