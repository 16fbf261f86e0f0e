"""The settings of :func:`lowtide.attach`."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from lowtide.errors import PolicyError

if TYPE_CHECKING:
    from lowtide.planner.plan import Plan
    from lowtide.policy import Policy

__all__ = ["Settings"]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What to do: apply a Policy, or adapt."""

    policy: Policy | Plan | str | Path | None = None
    """The Policy to apply; None: adapt. The others but ``layers`` are those of :func:`lowtide.adapt`."""
    budget: int | str = "auto"
    profiling_steps: int | None = None
    rescue: bool = True
    watch: Literal["suspicion", "always"] = "suspicion"
    swap: bool = True
    layers: str | None = None
    directory: str | Path | None = None
    verbose: bool = True

    def check(self) -> None:
        """PolicyError where a fixed Policy is given together with settings of the adaptive mode."""
        if self.policy is None:
            return
        plain = Settings(policy=self.policy, layers=self.layers, verbose=self.verbose)
        given = [one.name for one in fields(self) if getattr(self, one.name) != getattr(plain, one.name)]
        if given:
            raise PolicyError(
                f"attach(policy=…) applies that Policy and measures nothing, so {', '.join(given)} would have no"
                " effect; leave out one or the other"
            )
