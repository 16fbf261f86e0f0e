"""What becomes of the tensors an operator saves for backward: keep, recompute, or swap."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from lowtide.errors import PolicyError

__all__ = ["Decision", "Keep", "Recompute", "Swap", "decision_as_json", "decision_from_json"]

MAX_PREFETCH = 1_000_000


@dataclass(frozen=True, slots=True)
class Keep:
    """The tensors stay on the device until backward has used them."""

    def __str__(self) -> str:
        return "keep"


@dataclass(frozen=True, slots=True)
class Recompute:
    """Nothing that the operator produced is held; its call is replayed in backward when it is first needed."""

    def __str__(self) -> str:
        return "recompute"


@dataclass(frozen=True, slots=True)
class Swap:
    """What the operator produced is offloaded to the host or to disk between forward and backward."""

    prefetch: int = 1
    """In backward the copy back starts this many operators before the first user; in forward the
    device memory is freed after this many further operators at the latest."""
    tier: Literal["host", "disk"] = "host"
    """Where the bytes go."""
    unit: Literal["operators", "layers"] = "operators"
    """What ``prefetch`` counts. Resolving a Policy turns layers into operators."""

    def __post_init__(self) -> None:
        if type(self.prefetch) is not int or not 1 <= self.prefetch <= MAX_PREFETCH:
            raise PolicyError(f"a prefetch is a whole number from 1 to {MAX_PREFETCH:,}; found {self.prefetch!r}")
        if self.tier not in ("host", "disk"):
            raise PolicyError(f'a tier is "host" or "disk"; found {self.tier!r}')
        if self.unit not in ("operators", "layers"):
            raise PolicyError(f'a prefetch counts "operators" or "layers"; found {self.unit!r}')

    def __str__(self) -> str:
        layers = " layers" if self.unit == "layers" else ""
        disk = ", disk" if self.tier == "disk" else ""
        return f"swap({self.prefetch}{layers}{disk})"


Decision: TypeAlias = Keep | Recompute | Swap


def decision_as_json(decision: Decision) -> str | dict[str, Any]:
    """The decision in its JSON form: ``"keep"``, ``"recompute"``, ``{"swap": {"prefetch": 10}}``."""
    if not isinstance(decision, Swap):
        return str(decision)
    fields: dict[str, Any] = {"prefetch": decision.prefetch}
    if decision.tier != "host":
        fields["tier"] = decision.tier
    if decision.unit != "operators":
        fields["unit"] = decision.unit
    return {"swap": fields}


def decision_from_json(value: object) -> Decision:
    """The reverse of :func:`decision_as_json`."""
    if value == "keep":
        return Keep()
    if value == "recompute":
        return Recompute()
    if isinstance(value, dict) and set(value) == {"swap"} and isinstance(value["swap"], dict):
        unknown = set(value["swap"]) - {"prefetch", "tier", "unit"}
        if not unknown:
            return Swap(**value["swap"])
        raise PolicyError(f"a swap has prefetch, tier and unit; found also {', '.join(sorted(map(repr, unknown)))}")
    raise PolicyError(f'a decision is "keep", "recompute" or {{"swap": {{"prefetch": 10}}}}; found {value!r}')
