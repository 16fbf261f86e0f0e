"""Documents that share a sample: positions and attention that begin again with each of them.

As Megatron has it, the token between documents belongs to the one that it ends. Which token is in which document is
read off the tokens, on the device, in every micro-step: nothing has to be sent with a batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lowtide.errors import ConfigError
from lowtide.train.data.source import dataset_of

if TYPE_CHECKING:
    from lowtide.config.schema import Settings
    from lowtide.train.run import Run

__all__ = ["Packing", "packing_of"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Packing:
    """What begins again with each document of a sample."""

    eod: int
    """The token that ends a document."""
    positions: bool
    """Whether positions do (``reset_position_ids``)."""
    attention: bool
    """Whether attention does (``reset_attention_mask``, ``create_compressed_eod_mask``)."""

    def arguments(self, tokens: Tensor) -> dict[str, Tensor]:
        """What the model gets with ``tokens``, ``[batch, sequence]``.

        >>> packing = Packing(eod=0, positions=True, attention=True)
        >>> {name: value.tolist() for name, value in packing.arguments(torch.tensor([[5, 0, 7, 8]])).items()}
        {'positions': [[0, 1, 0, 1]], 'documents': [[0, 0, 1, 1]]}
        """
        ends = (tokens == self.eod).long()
        found: dict[str, Tensor] = {}
        if self.positions:
            places = torch.arange(tokens.shape[-1], device=tokens.device).expand_as(tokens)
            after_end = torch.zeros_like(tokens)
            after_end[:, 1:] = (places * ends)[:, :-1] + ends[:, :-1]
            found["positions"] = places - after_end.cummax(-1).values
        if self.attention:
            found["documents"] = ends.cumsum(-1) - ends
        return found


def packing_of(settings: Settings, run: Run) -> Packing | None:
    """What the file asks for; None for samples taken as one text each. ConfigError where it cannot be done."""
    loader = dataset_of(settings).data_loader
    config = loader.config
    asked = [
        key
        for key in ("reset_position_ids", "reset_attention_mask", "create_compressed_eod_mask")
        if getattr(config, key)
    ]
    if not asked:
        return None
    what, without = " and ".join(asked), f"write {', '.join(f'{key}: false' for key in asked)}"
    if loader.type != "BlendedMegatronDatasetDataLoader":
        raise ConfigError(f"{what}: {loader.type} has no token between documents; {without}")
    if config.eod is None:
        raise ConfigError(f"{what}: which token ends a document? Write data_loader.config.eod, or {without}")
    if run.degrees.pipeline > 1:
        raise ConfigError(f"{what}: later pipeline stages do not see the tokens; {without}, or use no pipeline stages")
    if settings.top_level.pretrained_model_dir:
        raise ConfigError(f"{what}: models of transformers are given whole samples here; {without}")
    if settings.model.num_nextn_predict_layers:
        raise ConfigError(f"{what}: multi-token prediction goes over whole samples; {without}")
    return Packing(
        eod=config.eod,
        positions=config.reset_position_ids,
        attention=config.reset_attention_mask or config.create_compressed_eod_mask,
    )
