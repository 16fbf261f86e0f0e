"""LoRA adapters on the matrices of a model's layers, as PEFT adds them."""

from __future__ import annotations

from torch import nn

from lowtide.errors import ModelError
from lowtide.operators.layers import find_layers

__all__ = ["add_lora"]


def add_lora(model: nn.Module, rank: int, layers: str | None = None) -> nn.Module:
    """The model with adapters of ``rank`` on every linear module of its layers, and all else frozen."""
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise ModelError("--lora adds adapters with peft, which is not installed: pip install peft") from None
    names = {
        name.rpartition(".")[2]
        for layer in find_layers(model, layers).modules
        for name, module in layer.named_modules()
        if isinstance(module, nn.Linear)
    }
    if not names:
        raise ModelError("--lora: the layers of the model have no torch.nn.Linear to put an adapter on")
    adapted: nn.Module = get_peft_model(model, LoraConfig(r=rank, target_modules=sorted(names)))
    return adapted
