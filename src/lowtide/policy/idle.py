"""Settings about communication that can have no effect, whatever the model: found from the Policy alone."""

from __future__ import annotations

from lowtide.policy.decision import Keep, Recompute
from lowtide.policy.policy import Policy

__all__ = ["idle_settings"]


def idle_settings(policy: Policy) -> list[str]:
    """What of a Policy's settings about communication has no effect on any model, in words."""
    found: list[str] = []
    whole = [settings for settings in policy.layers if settings.default == Recompute()]
    if not whole:
        if policy.communication.slice_inputs:
            found.append("slice_inputs (recompute_slice_activation) has no effect: no layer is recomputed as a whole")
        if not policy.communication.reissue_collectives:
            found.append("reissue_collectives (mp_comm_recompute) has no effect: no layer is recomputed as a whole")
    if policy.communication.slice_inputs and any(settings.boundary != Keep() for settings in whole):
        found.append(
            "slice_inputs (recompute_slice_activation) has no effect in layers whose input is swapped: it leaves the"
            " device whole"
        )
    excluding = [index for index, one in enumerate(policy.layers) if one in whole and not one.recomputed_as_a_whole]
    if policy.communication.slice_inputs and excluding:
        found.append(
            f"slice_inputs (recompute_slice_activation) has no effect in layers that keep some of their operators, such"
            f" as layer {excluding[0]}: it acts where a layer is recomputed as a whole"
        )
    kept = [rule for settings in whole for rule in settings.collectives if not rule.reissue]
    if kept and policy.communication.reissue_collectives:
        found.append(
            f"{kept[0].pattern} (keep collective) is not carried out where the whole layer is recomputed: there"
            " reissue_collectives (mp_comm_recompute) decides, for all collectives"
        )
    return found
