"""Refuse what would be wrong or without effect, where it is first noticed."""

from __future__ import annotations

import warnings

from lowtide._torch_private.compiled import under_compilation
from lowtide.errors import PolicyError
from lowtide.operators.saved import foreign_pack_hook

__all__ = ["is_left_alone", "refuse_compilation", "refuse_compiled_function"]


def refuse_compilation(index: int) -> None:
    """Raise if the layer is being compiled, or runs as a part of something that is."""
    if under_compilation():
        raise PolicyError(
            f"layer {index} runs inside torch.compile, where nothing can be swapped, and nothing decided that is not"
            " compiled; compile the layers first, as by layer.compile(), and apply the Policy afterwards"
        )


def refuse_compiled_function(index: int) -> None:
    """Raise if a function runs, somewhere in the layer, that was compiled by itself.

    While the layer is profiled, modes keep such a function from being compiled, so that it shows operators which are
    not there later.
    """
    if under_compilation():
        raise PolicyError(
            f"layer {index} calls torch.cond, or a function that torch.compile has compiled: its operators cannot be"
            " decided and its tensors cannot be swapped; recompute the layer as a whole with lowtide.apply, or do not"
            " compile that function"
        )


def is_left_alone() -> bool:
    """Whether a layer that begins now is left to hooks of others; said once. See [Note: other code's hooks]."""
    pack = foreign_pack_hook()
    if pack is None:
        return False
    whose = getattr(pack, "__module__", "?")
    if not whose.startswith("torch."):
        whose += f".{getattr(pack, '__qualname__', type(pack).__name__)}"
    remedy = "; take the checkpoint out of the model's code" if whose == "torch.utils.checkpoint" else ""
    warnings.warn(
        f"lowtide: layers that run inside saved-tensor hooks of {whose} are left to those: nothing in them is"
        f" recomputed or swapped by lowtide{remedy}",
        UserWarning,
        stacklevel=2,
    )
    return True
