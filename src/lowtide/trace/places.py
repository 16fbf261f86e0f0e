"""Report to a recorder where a model is: which layer runs, which operator, and which gradient backward has reached."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lowtide._torch_private.modes import DisableTorchFunction
from lowtide.operators.calls import CallTracker, tensors_of
from lowtide.operators.wrappers import Hook, take_back
from lowtide.trace.recorder import Recorder

__all__ = ["device_of", "places"]


def device_of(model: nn.Module) -> str:
    """The kind of device that a model is on: the accelerator's, even if a part of it, such as embeddings, is not."""
    kinds = [tensor.device.type for tensor in model.parameters()]
    return next((kind for kind in kinds if kind != "cpu"), "cpu")


@contextmanager
def places(model: nn.Module, layers: Sequence[nn.Module], recorder: Recorder) -> Iterator[None]:
    """Follow the model while it runs inside this context."""
    root = CallTracker(model, _Operators(recorder))
    trackers = [CallTracker(layer, _Operators(recorder)) for layer in layers]
    for layer in layers:
        for module in layer.modules():
            root.paths.pop(module, None)  # the layer's own tracker follows it
    hooks: list[Any] = []
    on_layers = False

    def model_begins(model: nn.Module, args: Any) -> None:
        nonlocal on_layers
        if on_layers or not torch.is_grad_enabled():  # some layers evaluate otherwise with hooks on
            return
        on_layers = True
        for index, layer in enumerate(layers):
            begin, end = Hook(_Begin(recorder, root, index, hooks)), Hook(_End(recorder, root, index, hooks))
            hooks.append(layer.register_forward_pre_hook(begin, prepend=True, with_kwargs=True))
            hooks.append(layer.register_forward_hook(end))

    try:
        for tracker in [*trackers, root]:
            tracker.attach()
        hooks.append(model.register_forward_pre_hook(Hook(model_begins), prepend=True))
        hooks.append(model.register_forward_hook(Hook(_Result(recorder))))
        yield
    finally:
        take_back([*(one.detach for one in (*trackers, root)), *(hook.remove for hook in hooks)])


class _Operators:
    """Reports to the recorder which operator runs."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def layer_begins(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        pass

    def call_begins(self, name: str, site: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.recorder.in_forward:
            self.recorder.call_begins(name, (args, kwargs))

    def collective_begins(self, name: str) -> None:
        pass

    def call_ends(self, output: Any) -> None:
        if self.recorder.open is not None:
            self.recorder.call_ends()

    def layer_ends(self, *, completed: bool) -> None:
        pass


class _Begin:
    """A layer is about to run."""

    def __init__(self, recorder: Recorder, root: CallTracker, index: int, hooks: list[Any]) -> None:
        self.recorder, self.root, self.index = recorder, root, index
        self.hooks = hooks
        """Where hooks of tensors are kept: some tensors outlive the step, such as what a pipeline receives into."""

    def __call__(self, layer: nn.Module, args: Any, kwargs: Any) -> None:
        recorder, index = self.recorder, self.index
        if self.root.stack and self.root.running is None:
            self.root.running = layer  # so that functions called in the layer are not the root's
        if not recorder.in_forward:
            return
        given = tensors_of((args, kwargs))
        with DisableTorchFunction():  # or the root's tracker would see it
            if given:
                recorder.passed[index - 1] = recorder.number(given[0])
                if index == 0 and given[0].requires_grad:
                    self.hooks.append(given[0].register_hook(_Gradient(recorder, -1)))
        recorder.move("forward", index)


class _End:
    """A layer has run: what comes between it and the next belongs to the next."""

    def __init__(self, recorder: Recorder, root: CallTracker, index: int, hooks: list[Any]) -> None:
        self.recorder, self.root, self.index = recorder, root, index
        self.hooks = hooks
        """Where hooks of tensors are kept: some tensors outlive the step, such as what a pipeline receives into."""

    def __call__(self, layer: nn.Module, args: Any, output: Any) -> None:
        if self.root.running is layer:
            self.root.running = None
        if not self.recorder.in_forward:
            return
        with DisableTorchFunction():
            made = [tensor for tensor in tensors_of(output) if tensor.requires_grad]
            if made:
                self.recorder.passed[self.index] = self.recorder.number(made[0])
                self.hooks.append(made[0].register_hook(_Gradient(self.recorder, self.index)))
        self.recorder.leave("forward", self.index + 1)


class _Result:
    """The model has run: the largest tensor that it returns is taken to be its logits."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def __call__(self, model: nn.Module, args: Any, output: Any) -> None:
        if not self.recorder.in_forward:
            return
        with DisableTorchFunction():
            largest = max(tensors_of(output), key=Tensor.numel, default=None)
            if largest is not None and largest.requires_grad:
                self.recorder.result = self.recorder.number(largest)


class _Gradient:
    """Backward reaches a part with the gradient of its output."""

    def __init__(self, recorder: Recorder, part: int) -> None:
        self.recorder, self.part = recorder, part

    def __call__(self, gradient: Tensor) -> None:
        self.recorder.attend("gradient")
        self.recorder.passed_back[self.part] = self.recorder.see(gradient)
        self.recorder.move("backward", self.part)
