"""Random Policies on compiled models: what differs from the same compiled model without one, and what it holds."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

import lowtide
from lowtide.operators.layers import find_layers
from lowtide.operators.survey import survey
from lowtide.policy import Keep, LayerPolicy, Policy, Recompute, Rule
from support.parity_models import VOCABULARY, build, stacks_of

__all__ = ["BACKENDS", "CELLS", "MODELS", "Cell", "Outcome", "run_cell"]

STEPS = 2
LENGTH = 8


class NanoChat(nn.Module):
    """A model as nanochat has it: normalised queries and keys, squared ReLU, capped logits."""

    class Block(nn.Module):
        def __init__(self, width: int = 32, heads: int = 4) -> None:
            super().__init__()
            self.heads = heads
            self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
            self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            h = functional.rms_norm(x, (x.shape[-1],))
            q, k, v = (one(h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for one in (self.q, self.k, self.v))
            q, k = functional.rms_norm(q, (q.shape[-1],)), functional.rms_norm(k, (k.shape[-1],))
            attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(attended.transpose(1, 2).flatten(2))
            return x + self.down(functional.relu(self.up(functional.rms_norm(x, (x.shape[-1],)))).square())

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 32)
        self.blocks = nn.ModuleList(self.Block() for _ in range(2))
        self.head = nn.Linear(32, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return 15 * torch.tanh(self.head(x) / 15)


def nanochat() -> nn.Module:
    torch.manual_seed(0)
    return NanoChat()


MODELS: dict[str, Callable[[], nn.Module]] = {
    name: lambda name=name: build(name)
    for name in ("llama", "gpt2", "qwen3_moe", "deepseek", "vit", "t5", "gemma", "bert", "reference")
} | {"nanochat": nanochat}
"""Two layers of each; qwen3_moe is like Mixtral, whose own loop over experts breaks Dynamo's graph."""
BACKENDS = ("aot_eager", "inductor")
WAYS = ("layer", "model")
PRECISIONS = ("fp32", "bf16")


class Cell(NamedTuple):
    """A model, and how it is compiled."""

    model: str
    backend: str
    precision: str
    way: str


CELLS = [
    Cell(model, backend, precision, way)
    for backend, model, precision, way in product(BACKENDS, MODELS, PRECISIONS, WAYS)
]


class Outcome(NamedTuple):
    """What one Policy did."""

    cell: Cell
    number: int
    policy: str
    different: int
    """How many losses and gradients are not bitwise equal."""
    relative: float
    """The largest difference in any of them, of its largest value."""
    held: int
    """What the compiled layers hold for backward."""
    bound: int
    """What they may hold: what the compiler holds less what is recomputed, and what that is rebuilt from."""
    graphs: int
    """Compiled for it, more than for the same model without a Policy."""
    breaks: int
    """Graph breaks, likewise."""
    error: str = ""


def run_cell(cell: Cell, policies: int) -> list[Outcome]:
    """The outcomes of ``policies`` random Policies in one cell."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    names, layers = _operators(cell.model)
    expected, graphs, breaks = _run(cell, None, layers)[:3]
    found = []
    for number in range(policies):
        policy = _policy(names, random.Random(f"{cell}{number}"))
        try:
            values, made, broken, held, bound = _run(cell, policy, layers)
        except Exception as error:
            text = f"{type(error).__name__}: {error}".splitlines()[0]
            found.append(Outcome(cell, number, str(policy), 0, 0.0, 0, 0, 0, 0, text))
            continue
        pairs = list(zip(values, expected, strict=True))
        relative = max(float((one - other).abs().max() / other.abs().max().clamp(min=1e-30)) for one, other in pairs)
        different = sum(not torch.equal(one, other) for one, other in pairs)
        found.append(
            Outcome(cell, number, str(policy), different, relative, held, bound, made - graphs, broken - breaks)
        )
    return found


def _operators(name: str) -> tuple[list[str], str | None]:
    """The names of a model's operators, and where its layers are."""
    model, layers = MODELS[name](), _layers_of(name)
    found = survey(model, lambda: model(_tokens(0)), layers=layers)
    return list(dict.fromkeys(one.name for kind in found.kinds for one in kind.operators)), layers


def _layers_of(name: str) -> str | None:
    return stacks_of(name)[-1] if name != "nanochat" else "blocks"


def _tokens(step: int) -> Tensor:
    return torch.randint(0, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(step))


def _policy(names: list[str], chance: random.Random) -> Policy:
    """Some operators recomputed, or all but some, or all."""
    kind = chance.random()
    if kind < 0.1:
        return Policy.uniform(default=Recompute(), origin="solver")
    some = [name for name in names if chance.random() < chance.choice((0.1, 0.3, 0.6))] or [chance.choice(names)]
    decision = Keep() if kind < 0.3 else Recompute()
    layer = LayerPolicy(Recompute() if kind < 0.3 else Keep(), tuple(Rule(_quoted(name), decision) for name in some))
    return Policy((layer,), "solver", any_depth=True)


def _quoted(name: str) -> str:
    return name.replace("[*]", r"\[\*\]")


def _run(cell: Cell, policy: Policy | None, layers: str | None) -> tuple[list[Tensor], int, int, int, int]:
    """Losses and gradients, graphs and graph breaks, and the bytes held and allowed."""
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    model = MODELS[cell.model]()
    handle = None
    if policy is not None:
        handle = lowtide.apply(model, policy, layers=layers, allow_unmatched=True)
    compiled: Any = model
    if cell.way == "layer":
        for layer in find_layers(model, layers).modules:
            layer.compile(backend=cell.backend)
    else:
        compiled = torch.compile(model, backend=cell.backend)
    values: list[Tensor] = []
    for step in range(STEPS):
        with torch.autocast("cpu", torch.bfloat16, enabled=cell.precision == "bf16"):
            output = compiled(_tokens(step))
            loss = (output if isinstance(output, Tensor) else output[0]).float().square().mean()
        loss.backward()
        values += [loss.detach(), *(one.grad.clone() for one in model.parameters() if one.grad is not None)]
        model.zero_grad()
    held, bound = _bytes(handle) if handle is not None else (0, 0)
    return values, counters["stats"]["unique_graphs"], sum(counters["graph_break"].values()), held, bound


def _bytes(handle: lowtide.Handle) -> tuple[int, int]:
    held = bound = 0
    for index, one in handle.compiled_bytes().items():
        graph = handle.followers[index].graph
        assert graph is not None
        held += sum(one.held.values())
        bound += sum(size for name, size in one.undecided.items() if not graph.recomputes(name)) + one.inputs
    return held, bound
