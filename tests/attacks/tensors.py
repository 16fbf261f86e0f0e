"""Tensors that are not plain: sparse, nested, complex, of eight bits, subclasses, batched and dual ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_map

from attacks.harness import BOTH, Attack, Side, attack, train
from attacks.parts import WIDTH, calls, compiling, stack
from attacks.treatments import ADAPTED, EVERY

__all__: list[str] = []


def sentences(side: Side) -> Callable[[int], Tensor]:
    return lambda step: side.batch(step, 4, 6, WIDTH)


class Graph(nn.Module):
    """A graph convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        return x + functional.gelu(torch.sparse.mm(edges, self.linear(x)))


class Graphs(nn.Module):
    def __init__(self, edges: Tensor) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(Graph() for _ in range(3)), nn.Linear(WIDTH, 1)
        self.edges = edges

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, self.edges)
        return self.head(x)


def edges() -> Tensor:
    indices = torch.randint(0, 16, (2, 40))
    return torch.sparse_coo_tensor(indices, torch.rand(40), (16, 16)).coalesce()


@attack("graph layers with a sparse COO adjacency: NotImplementedError", treatments=EVERY)
def sparse_coo(side: Side) -> None:
    train(side, Graphs(edges()), batch=lambda step: side.batch(step, 16, WIDTH))


@attack("graph layers with a sparse CSR adjacency: NotImplementedError", treatments=EVERY)
def sparse_csr(side: Side) -> None:
    train(side, Graphs(edges().to_sparse_csr()), batch=lambda step: side.batch(step, 16, WIDTH))


class SparseRows(nn.Module):
    """An embedding with sparse gradients in every layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.linear = nn.Embedding(50, WIDTH, sparse=True), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return functional.gelu(self.linear(x + self.table(torch.arange(8, device=x.device) * 3 % 50)))


@attack("sparse gradients", treatments=EVERY)
def sparse_gradients(side: Side) -> None:
    train(side, stack(SparseRows))


class Batched(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.weights = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(4, WIDTH, WIDTH) / 6)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(x)
        return x + torch.vmap(lambda weight: functional.gelu(hidden @ weight))(self.weights).mean(0)


@attack("vmap inside a layer: an untyped error", treatments=EVERY, devices=BOTH)
def vmap(side: Side) -> None:
    train(side, stack(Batched))


class Dual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        value, tangent = torch.func.jvp(lambda z: torch.tanh(self.linear(z)), (x,), (torch.ones_like(x),))
        return x + value + 0.1 * tangent


@attack("torch.func.jvp inside a layer: hooks and modes stayed on after remove()", treatments=EVERY)
def jvp(side: Side) -> None:
    train(side, stack(Dual))


@attack("torch.cond in a layer: an untyped error", treatments=("layers", "operators", "swap", *ADAPTED))
def cond(side: Side) -> None:
    def either(x: Tensor) -> Tensor:
        chosen: Tensor = torch.cond(x.mean() > 0, torch.sin, torch.cos, (x,))
        return chosen

    with compiling():  # each is compiled
        train(side, calls(either), steps=3)


class Jagged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


@attack("jagged nested tensors: swap failed", treatments=EVERY)
def jagged(side: Side) -> None:
    def loss(model: nn.Module, step: Any) -> Tensor:
        rows = [side.batch(10 * step + size, size, WIDTH) for size in (3, 5, 2)]
        value: Tensor = model(torch.nested.nested_tensor(rows, layout=torch.jagged)).values().square().mean()
        return value

    train(side, stack(Jagged), loss=loss, batch=lambda step: step)  # type: ignore[arg-type,return-value]


class Quantized(Tensor):
    """A wrapper subclass: eight-bit values and their scales."""

    values: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, values: Tensor, scale: Tensor) -> Quantized:
        return Tensor._make_wrapper_subclass(  # type: ignore[attr-defined,no-any-return]
            cls, values.shape, dtype=scale.dtype, device=values.device, requires_grad=False
        )

    def __init__(self, values: Tensor, scale: Tensor) -> None:
        self.values, self.scale = values, scale  # type: ignore[assignment]

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["values", "scale"], None

    @staticmethod
    def __tensor_unflatten__(parts: dict[str, Tensor], context: Any, shape: Any, stride: Any) -> Quantized:
        return Quantized(parts["values"], parts["scale"])

    @classmethod
    def of(cls, x: Tensor) -> Quantized:
        scale = x.detach().abs().amax(-1, keepdim=True) / 127 + 1e-9
        return cls((x.detach() / scale).round().to(torch.int8), scale)

    def plain(self) -> Tensor:
        return self.values.to(self.scale.dtype) * self.scale  # type: ignore[operator]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].values.detach(), args[0].scale.detach())
        if func is torch.ops.aten._to_copy.default:
            device = (kwargs or {}).get("device")
            return cls(args[0].values.to(device), args[0].scale.to(device))
        args, kwargs = tree_map(lambda x: x.plain() if isinstance(x, cls) else x, (args, kwargs or {}))
        return func(*args, **kwargs)


class LowRank(nn.Module):
    """A quantized weight that is not trained, and two small ones that are."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(Quantized.of(torch.randn(WIDTH, WIDTH) / 6), requires_grad=False)
        self.down, self.up = nn.Parameter(torch.randn(4, WIDTH) / 6), nn.Parameter(torch.randn(WIDTH, 4) / 6)

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight) + x @ self.down.t() @ self.up.t()


class QuantizedLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first, self.second = nn.LayerNorm(WIDTH), LowRank(), LowRank()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(functional.gelu(self.first(self.norm(x))))


@attack("quantized weights that are a wrapper subclass, as QLoRA", treatments=EVERY, devices=BOTH)
def quantized_weights(side: Side) -> None:
    model = stack(QuantizedLayer).to(side.device)
    optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.05)
    run = side.start(model, optimizer)
    side.models.remove(model)  # its quantized weights have no bits to read
    for step in range(8):

        def one(step: int = step) -> None:
            optimizer.zero_grad()
            loss = model(side.batch(step, 4, 6, WIDTH)).square().mean()
            loss.backward()
            optimizer.step()
            side.record(f"loss {step}", loss)
            side.record_gradients(step, model)

        run.step(one)


class QuantizedProduct(torch.autograd.Function):
    """Saves a wrapper subclass for its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(Quantized.of(x), weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        saved, weight = ctx.saved_tensors
        return gradient @ weight.t(), saved.plain().flatten(0, -2).t() @ gradient.flatten(0, -2)


class Eights(torch.autograd.Function):
    """Saves float8."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        scale = x.abs().amax() / 448
        small = (x / scale).to(torch.float8_e4m3fn)
        ctx.save_for_backward(small, scale, weight)
        return (small.to(x.dtype) * scale) @ weight

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        small, scale, weight = ctx.saved_tensors
        wide = small.to(gradient.dtype) * scale
        return gradient @ weight.t(), wide.flatten(0, -2).t() @ gradient.flatten(0, -2)


class Product(nn.Module):
    def __init__(self, function: type[torch.autograd.Function]) -> None:
        super().__init__()
        self.weight, self.function = nn.Parameter(torch.randn(WIDTH, WIDTH) / 6), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function.apply(x, self.weight)  # type: ignore[no-any-return]


class ProductLayer(nn.Module):
    """The function in a leaf, and called directly."""

    def __init__(self, function: type[torch.autograd.Function]) -> None:
        super().__init__()
        self.norm, self.leaf = nn.LayerNorm(WIDTH), Product(function)
        self.weight, self.function = nn.Parameter(torch.randn(WIDTH, WIDTH) / 6), function

    def forward(self, x: Tensor) -> Tensor:
        return x + self.function.apply(functional.gelu(self.leaf(self.norm(x))), self.weight)


@attack("a wrapper subclass that is saved for backward: eight-bit activations", treatments=EVERY, devices=BOTH)
def quantized_activations(side: Side) -> None:
    train(side, stack(lambda: ProductLayer(QuantizedProduct)), batch=sentences(side))


@attack("float8 saved by a custom Function", treatments=EVERY, devices=BOTH)
def float8(side: Side) -> None:
    train(side, stack(lambda: ProductLayer(Eights)), batch=sentences(side))


class Fourier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(WIDTH // 2 + 1, dtype=torch.cfloat) / 3)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(self.first(x)) * self.filter
        spectrum = spectrum * spectrum.conj()
        y = torch.fft.irfft(spectrum.conj(), n=WIDTH)
        z = torch.view_as_complex(y.view(*y.shape[:-1], WIDTH // 2, 2).contiguous())
        return x + self.second(torch.view_as_real(torch.polar(z.abs() + 0.1, z.angle())).flatten(-2))


@attack("complex tensors and their conjugates", treatments=EVERY, devices=BOTH)
def fourier(side: Side) -> None:
    train(side, stack(Fourier), batch=sentences(side))


class Recurrent(nn.Module):
    def __init__(self, inner: nn.Module, width: int) -> None:
        super().__init__()
        self.norm, self.inner, self.out = nn.LayerNorm(WIDTH), inner, nn.Linear(width, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(self.inner(self.norm(x))[0])


@attack("LSTM layers with dropout", treatments=EVERY)
def lstm(side: Side) -> None:
    made = stack(lambda: Recurrent(nn.LSTM(WIDTH, WIDTH, 2, dropout=0.1, batch_first=True), WIDTH))
    train(side, made, batch=sentences(side))


@attack("bidirectional GRU layers", treatments=EVERY)
def gru(side: Side) -> None:
    made = stack(lambda: Recurrent(nn.GRU(WIDTH, WIDTH, batch_first=True, bidirectional=True), 2 * WIDTH))
    train(side, made, batch=sentences(side))


@attack("functional_call with computed weights, as MAML", treatments=EVERY, devices=BOTH)
def functional_call(side: Side) -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        scale = 1 + 0.01 * float(x.mean())
        weights = {name: parameter * scale for name, parameter in model.named_parameters()}
        value: Tensor = torch.func.functional_call(model, weights, (x,)).square().mean()
        return value

    train(side, stack(Jagged), loss=loss, batch=sentences(side))


@torch.library.custom_op("attacks::gate", mutates_args=())
def gate(x: Tensor, y: Tensor, scale: float) -> Tensor:
    return torch.tanh(x * scale) * y


def _keep(ctx: Any, inputs: Any, output: Tensor) -> None:
    ctx.save_for_backward(inputs[0], inputs[1], output)
    ctx.scale = inputs[2]


def _gradients(ctx: Any, gradient: Tensor) -> Any:
    x, y, _ = ctx.saved_tensors
    bent = torch.tanh(x * ctx.scale)
    return gradient * y * (1 - bent * bent) * ctx.scale, gradient * bent, None


gate.register_autograd(_gradients, setup_context=_keep)


class CustomGate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.third(gate(self.first(x), self.second(x), 2.0))


@attack("torch.library.custom_op with an autograd formula", treatments=EVERY, devices=BOTH)
def custom_op(side: Side) -> None:
    train(side, stack(CustomGate), batch=sentences(side))


# Formulas: some of torch's kernels have another one where a mode is on.

FORMULAS: dict[str, Callable[[Tensor], Tensor]] = {
    "rrelu": lambda x: functional.rrelu(x, training=True),
    "prod": lambda x: x * torch.prod(1 + 0.1 * torch.tanh(x), -1, keepdim=True),
    "cumprod": lambda x: torch.cumprod(torch.sigmoid(x) + 0.5, -1) * 0.1,
    "logcumsumexp": lambda x: torch.logcumsumexp(x, -1),
    "cummax": lambda x: torch.cummax(x, -1)[0],
    "median": lambda x: x - x.median(-1, keepdim=True)[0],
    "min": lambda x: x - x.min(-1, keepdim=True)[0],
    "nanmedian": lambda x: x - x.nanmedian(-1, keepdim=True)[0],
    "masked_fill": lambda x: x.masked_fill(x < 0, 0.0),
    "quantile": lambda x: x - torch.quantile(x, 0.3, dim=-1, keepdim=True),
    "sort": lambda x: torch.sort(x, -1)[0],
    "norm_of_order_3": lambda x: x / torch.linalg.vector_norm(x, 3, -1, keepdim=True),
    "standard_deviation": lambda x: x / (x.std(-1, keepdim=True) + 1e-3),
    "einsum": lambda x: torch.einsum("bd,bd,be->be", x, x, x) * 0.01,
    "distances": lambda x: torch.cdist(x, x) @ x * 0.01,
    "cholesky": lambda x: torch.linalg.cholesky(x @ x.t() * 0.01 + torch.eye(len(x), device=x.device)) @ x,
    "singular_values": lambda x: x * torch.linalg.svdvals(x[:4]).sum() * 0.1,
    "cross_entropy": lambda x: x * functional.binary_cross_entropy_with_logits(x, torch.sigmoid(x.detach())),
    "group_norm": lambda x: functional.group_norm(x, 8),
    "rms_norm": lambda x: functional.rms_norm(x, (WIDTH,)),
    "gumbel": lambda x: functional.gumbel_softmax(x, hard=True) * x,
    "prelu": lambda x: functional.prelu(x, torch.tensor([0.1], device=x.device)),
    "index_add": lambda x: torch.zeros_like(x).index_add(0, torch.arange(len(x), device=x.device) // 2, x),
    "renorm": lambda x: torch.renorm(x, 2, 0, 1.0),
    "cosine": lambda x: x * functional.cosine_similarity(x, x.flip(0), dim=-1)[..., None],
    "unfold": lambda x: x.unfold(-1, 8, 8).mean(-1).repeat(1, 8),
}


def formula(name: str) -> Attack:
    def program(side: Side) -> None:
        train(side, calls(FORMULAS[name]))

    tries = f"{name}: a mode or a copy at pack time must not make it another formula"
    return attack(
        tries, name=f"formula_{name}", treatments=("adapt steps", "swap", "operators", "layers"), devices=BOTH
    )(program)


FORMULA_ATTACKS = tuple(formula(name) for name in FORMULAS)
