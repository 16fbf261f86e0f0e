"""torchtitan: a Policy in place of its activation checkpointing.

    --override.imports 'lowtide.integrations.torchtitan.policy={"file": "policy.json"}'

torchtitan applies activation checkpointing after tensor parallelism and before it compiles and shards the blocks, which
is where a Policy belongs. Its loop is not ours, so a run is planned beforehand, with ``lowtide plan``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from torchtitan.config import override
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointing

from lowtide.errors import PolicyError
from lowtide.policy import Policy
from lowtide.runtime.apply import apply, policy_of

__all__ = ["PolicyCheckpointing", "policy"]


class PolicyCheckpointing(ActivationCheckpointing):  # type: ignore[misc]
    """Applies a Policy to a model, or to the part of it that a pipeline stage has."""

    @dataclass(kw_only=True, slots=True)
    class Config(ActivationCheckpointing.Config):  # type: ignore[misc]
        """The file of a Policy or of a plan, in addition to torchtitan's own settings, which have no effect."""

        file: str = ""

    def apply(self, model: nn.Module) -> None:
        """Apply the Policy; torchtitan calls this."""
        names = [name for name, _ in model.get_submodule("layers").named_children()]
        apply(model, part_of(policy_of(self.config.file), names), layers="layers")


@override(
    target=ActivationCheckpointing.Config, description="A lowtide Policy decides what is kept, recomputed or swapped"
)  # type: ignore[untyped-decorator]
def policy(config: Any, *, file: str = "") -> Any:
    """What ``--override.imports`` names; ``file`` is that of a Policy or a plan."""
    if not file:
        raise PolicyError(
            "which Policy? Give its file, as in --override.imports"
            """ 'lowtide.integrations.torchtitan.policy={"file": "policy.json"}'"""
        )
    policy_of(file)  # what is wrong with it is said before a model is built
    return PolicyCheckpointing.Config(file=file)


def part_of(whole: Policy, names: Sequence[str]) -> Policy:
    """The decisions for the layers with these names, which are their numbers in the whole model."""
    if len(whole.layers) <= max(map(int, names), default=0):
        return whole  # a uniform one, or one of another model: apply() says so
    return replace(whole, layers=tuple(whole.layers[int(name)] for name in names))
