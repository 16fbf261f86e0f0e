"""Modes and settings that are on around a forward and off in its backward, where a replay runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from attacks.harness import BOTH, CPU, TIDE, Found, Side, attack, train
from attacks.parts import WIDTH, Around, Block, Net, Scaled, around, calls, stack
from attacks.treatments import ADAPTED, APPLIED, EVERY, RECOMPUTED
from lowtide.policy import Keep

__all__: list[str] = []

REPLAYED = (*RECOMPUTED, *ADAPTED)


class Attention(nn.Module):
    """Norm, scaled dot product attention, and a residual."""

    def __init__(self, dropout: float = 0.0, *, masked: bool = False, biased: bool = False) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.dropout, self.masked = dropout, masked
        self.bias = nn.Parameter(torch.zeros(1, 4, 6, 6)) if biased else None

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        parts = self.qkv(self.norm(x)).chunk(3, -1)
        q, k, v = (part.view(batch, length, 4, -1).transpose(1, 2) for part in parts)
        mask = None
        if self.masked:
            mask = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
        if self.bias is not None:
            mask = self.bias + torch.randn(length, length, device=x.device).triu(1) * 0.1
        mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=self.dropout)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


def sentences(side: Side) -> Callable[[int], Tensor]:
    return lambda step: side.batch(step, 4, 6, WIDTH)


def within(context: Callable[[], AbstractContextManager[Any]]) -> Callable[[nn.Module, Tensor], Tensor]:
    """A loss whose forward is inside a context and whose backward is not."""

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        with context():
            value: Tensor = model(x).square().mean()
        return value

    return loss


@attack("sdpa_kernel(MATH) around forward only: the replay took another kernel", treatments=EVERY, devices=BOTH)
def attention_backend(side: Side) -> None:
    train(side, stack(Attention), batch=sentences(side), loss=within(lambda: sdpa_kernel(SDPBackend.MATH)))


@attack("attention with a boolean mask and dropout", treatments=EVERY, devices=BOTH)
def attention_mask_dropout(side: Side) -> None:
    train(side, stack(lambda: Attention(0.2, masked=True)), batch=sentences(side))


@attack("attention with a learnt bias", treatments=EVERY, devices=BOTH)
def attention_bias(side: Side) -> None:
    train(side, stack(lambda: Attention(biased=True)), batch=sentences(side))


@contextmanager
def changed(get: Callable[[], Any], put: Callable[[Any], None], value: Any) -> Iterator[None]:
    """A setting of the process, for a while."""
    before = get()
    put(value)
    try:
        yield
    finally:
        put(before)


@attack("set_float32_matmul_precision('medium') around forward only", treatments=REPLAYED)
def matmul_precision(side: Side) -> None:
    def lower() -> AbstractContextManager[None]:
        return changed(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "medium")

    train(side, stack(), loss=within(lower), batch=lambda step: side.batch(step, 64, WIDTH))


@attack("deterministic algorithms around forward only", treatments=REPLAYED, devices=BOTH)
def deterministic_forward(side: Side) -> None:
    def on() -> AbstractContextManager[None]:
        return changed(torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True)

    def scattered(x: Tensor) -> Tensor:
        rows = torch.arange(x.shape[0], device=x.device) // 2
        return functional.gelu(torch.zeros_like(x).index_add(0, rows, x))

    train(side, calls(scattered), loss=within(on))


class MakesConstant(Scaled):
    """Makes a tensor of the default dtype in its forward."""

    def forward(self, x: Tensor) -> Tensor:
        wide = torch.linspace(0.1, 1.3, WIDTH, device=x.device)
        return functional.gelu(x * self.weight * (wide / 3).sin().to(x.dtype))


@attack("set_default_dtype(float64) around forward only", treatments=REPLAYED)
def default_dtype(side: Side) -> None:
    def wide() -> AbstractContextManager[None]:
        return changed(torch.get_default_dtype, torch.set_default_dtype, torch.float64)

    train(side, around(MakesConstant), loss=within(wide))


class DrawsScalar(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        return functional.gelu(x * self.weight) * (1 + torch.rand(()).to(x.device))


@attack("with torch.device('tide') around forward only: the replay drew on the host", treatments=EVERY, devices=TIDE)
def device_around_forward(side: Side) -> None:
    train(side, around(DrawsScalar), loss=within(lambda: side.device))


@attack("torch.set_default_device: boundary swaps did nothing, with a wrong reason", treatments=EVERY, devices=TIDE)
def default_device(side: Side) -> None:
    torch.set_default_device(side.device)
    try:
        train(side, stack(), batch=lambda step: torch.randn(8, 16, WIDTH))
        for handle in side.handles:
            moved = sum(setting.moved_bytes for setting in handle.receipt().settings)
            if side.treatment is not None and side.treatment.layer.boundary != Keep() and not moved:
                raise Found("crashed", "nothing was swapped")
    finally:
        torch.set_default_device(None)


@attack("layers on the host while the default device is another", treatments=APPLIED, devices=TIDE)
def default_device_host_layers(side: Side) -> None:
    torch.set_default_device(side.device)
    try:
        model = stack().to("cpu")
        run = side.start(model)
        for step in range(3):

            def one(step: int = step) -> None:
                loss = model(side.batch(step, 64, 16, WIDTH).cpu()).square().mean()
                loss.backward()
                side.record(f"loss {step}", loss)
                side.record_gradients(step, model)
                model.zero_grad()

            run.step(one)
    finally:
        torch.set_default_device(None)


class Rounds(TorchDispatchMode):
    """Rounds what some operators give, as a simulation of lower precision does."""

    ROUNDED = (torch.ops.aten.mul.Tensor, torch.ops.aten.gelu.default, torch.ops.aten.silu.default)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in self.ROUNDED:
            result.copy_(result.to(torch.bfloat16))
        return result


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.silu(self.gate(x)) * self.up(x))


@attack("the user's dispatch mode around forward only: the replay ran without it", treatments=EVERY)
def dispatch_mode(side: Side) -> None:
    train(side, stack(Gated), loss=within(Rounds), batch=sentences(side))


class Doubles(TorchFunctionMode):
    """Makes silu another function."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is functional.silu else result


@attack("the user's function mode around forward only", treatments=EVERY)
def function_mode(side: Side) -> None:
    train(side, stack(Gated), loss=within(Doubles), batch=sentences(side))


@attack("autocast around forward only, with its cache off", treatments=EVERY, devices=BOTH)
def autocast_without_cache(side: Side) -> None:
    def cast() -> AbstractContextManager[Any]:
        return torch.autocast(side.device.type, torch.bfloat16, cache_enabled=False)

    train(side, stack(), loss=within(cast), batch=sentences(side))


@attack("autocast in one layer only, switched off inside another", treatments=EVERY, devices=BOTH)
def autocast_nested(side: Side) -> None:
    class Mixed(Block):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast(x.device.type, enabled=False):
                y = self.norm(x.float())
            return x + self.down(functional.gelu(self.up(y)))

    def cast() -> AbstractContextManager[Any]:
        return torch.autocast(side.device.type, torch.bfloat16)

    train(side, stack(Mixed), loss=within(cast), batch=sentences(side))


@attack("anomaly mode around everything", treatments=EVERY)
def anomaly_mode(side: Side) -> None:
    with torch.autograd.set_detect_anomaly(True):
        train(side, stack())


@attack("torch.autograd.graph.save_on_cpu around forward", treatments=EVERY, devices=BOTH)
def save_on_cpu_around(side: Side) -> None:
    train(side, stack(), loss=within(torch.autograd.graph.save_on_cpu), batch=sentences(side))


class SavesOnHost(Block):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            hidden = functional.gelu(self.up(self.norm(x)))
        return x + self.dropout(self.down(hidden))


@attack("save_on_cpu inside the layers", treatments=EVERY, devices=BOTH)
def save_on_cpu_inside(side: Side) -> None:
    train(side, stack(SavesOnHost), batch=sentences(side))


@attack("the user's saved-tensor hooks around forward, which round what is saved", treatments=EVERY)
def rounding_hooks(side: Side) -> None:
    def rounding() -> AbstractContextManager[Any]:
        def pack(tensor: Tensor) -> Tensor:
            return tensor.to(torch.bfloat16).to(tensor.dtype) if tensor.is_floating_point() else tensor

        return torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)

    train(side, stack(), loss=within(rounding), batch=sentences(side))


@attack("no_grad and inference_mode inside a layer", treatments=EVERY)
def no_grad_inside(side: Side) -> None:
    class Targets(Block):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                target = self.up(self.norm(x)).mean()
            with torch.inference_mode():
                scale = float(x.abs().mean())
            return super().forward(x) - target * scale

    train(side, stack(Targets), batch=sentences(side))


@attack("flags of a backend around forward only", treatments=REPLAYED, devices=CPU)
def backend_flags(side: Side) -> None:
    train(side, stack(), loss=within(lambda: torch.backends.mkldnn.flags(enabled=False)), batch=sentences(side))


@attack("a step of the profiler around each step", treatments=EVERY)
def profiler(side: Side) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        train(side, stack(), before=lambda model, step: profile.step(), steps=8)


@attack("the flop counter, a dispatch mode, around the whole loop", treatments=EVERY)
def flop_counter(side: Side) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False):
        train(side, stack(lambda: Around(nn.GELU())))


@attack("warnings are errors", treatments=EVERY, devices=BOTH)
def warnings_as_errors(side: Side) -> None:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(side, Net(), batch=sentences(side))
