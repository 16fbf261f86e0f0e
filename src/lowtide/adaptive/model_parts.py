"""This rank's parts of a model, and the layers of the whole model that each of them holds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import nn
from torch.optim import Optimizer

from lowtide._torch_private.compiled import uncompiled
from lowtide._torch_private.storages import has_storage, storage_bytes, storage_key
from lowtide._torch_private.subclasses import inner_tensor
from lowtide.errors import PolicyError
from lowtide.operators.calls import tensors_of
from lowtide.operators.checkpointing import Checkpointing
from lowtide.operators.layers import find_layers, other_stacks
from lowtide.planner.pipeline import Pipeline, even_pipeline
from lowtide.policy import Policy
from lowtide.runtime.compiled import compiled_in_place
from lowtide.trace.stacks import uncovered_notes
from lowtide.trace.trace import Trace

__all__ = ["ModelParts"]


class ModelParts:
    """The parts of a pipeline stage; one, with every layer, where there is no pipeline.

    PolicyError if the pipeline places other numbers of layers on the stage than the parts have.
    """

    def __init__(self, modules: Sequence[nn.Module], layers: str | None, pipeline: Pipeline | None, stage: int) -> None:
        """``layers`` names the module that holds the layers, where the longest run of equal children is not it."""
        self.modules, self.layers = tuple(modules), layers
        self._found = [find_layers(part, layers) for part in self.modules]
        counts = [len(one.modules) for one in self._found]
        self.first_layer = self._found[0].modules[0]
        pairs = zip(self.modules, self._found, strict=True)
        self._checkpointing = [Checkpointing(part, one) for part, one in pairs]
        self.pipeline = pipeline or even_pipeline(sum(counts))
        self.chunks = self.pipeline.placement[stage]
        """The layers of each part, by their numbers in the whole model."""
        placed = [len(chunk) for chunk in self.chunks]
        if placed != counts:
            raise PolicyError(f"the pipeline places {placed} layers on stage {stage} and the parts there have {counts}")
        self.total = sum(len(chunk) for chunks in self.pipeline.placement for chunk in chunks)
        """Layers of the whole model."""

    @property
    def is_whole(self) -> bool:
        """Whether the one part is the whole model."""
        return len(self.modules) == 1 and self.pipeline.stages == 1

    @property
    def is_one_graph(self) -> bool:
        """Whether more than single layers are compiled, so that nothing in between can be offloaded."""
        return not all(compiled_in_place(part, self.layers) for part in self.modules)

    @property
    def is_called_compiled(self) -> bool:
        """Whether each part is what ``torch.compile`` returned, whose hooks run outside the graph."""
        return all(uncompiled(part) is not part for part in self.modules)

    @property
    def has_last_layer(self) -> list[bool]:
        """For each part, whether the model's last layer is in it, so that the loss follows."""
        return [self.total - 1 in chunk for chunk in self.chunks]

    def complete(self, policy: Policy) -> Policy:
        """A Policy for all layers of the model; PolicyError if it decides another number of them."""
        policy = policy.for_layers(self.total)
        if len(policy.layers) != self.total:
            raise PolicyError(f"the Policy decides {len(policy.layers)} layers and the model has {self.total}")
        return policy

    def split(self, policy: Policy) -> list[Policy]:
        """The decisions for the layers of each part."""
        return [replace(policy, layers=tuple(policy.layers[layer] for layer in chunk)) for chunk in self.chunks]

    def uncovered(self, trace: Trace) -> tuple[str, ...]:
        """A sentence for each other stack of layers in the whole model, for which nothing is planned."""
        if not self.is_whole:
            return ()
        return uncovered_notes(self._found[0], other_stacks(self.modules[0], self._found[0]), trace)

    def disable_checkpointing(self) -> str:
        """Turn off gradient checkpointing that the layers have on; which modules had it, empty if none."""
        return ", ".join(filter(None, (one.turn_off() for one in self._checkpointing)))

    def restore_checkpointing(self) -> None:
        """Turn on again what was turned off."""
        for one in self._checkpointing:
            one.restore()

    def device(self) -> torch.device:
        """The accelerator that the parts are on, though some of them may be on the CPU; the CPU if all are."""
        devices = [one.device for part in self.modules for one in part.parameters()]
        return next((one for one in devices if one.type not in ("cpu", "meta")), torch.device("cpu"))

    def bytes_with(self, optimizers: Iterable[Optimizer]) -> int:
        """What parameters, buffers, gradients and the optimizers' states take of the device now."""
        of_modules = [one for part in self.modules for one in (*part.parameters(), *part.buffers())]
        gradients = [one.grad for one in of_modules if one.grad is not None]
        states = tensors_of([list(optimizer.state.values()) for optimizer in optimizers])
        plain = [inner_tensor(one) for one in (*of_modules, *gradients, *states)]
        storages = {storage_key(one): storage_bytes(one) for one in plain if not one.is_cpu and has_storage(one)}
        return sum(storages.values())
