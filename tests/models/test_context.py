"""Context parallel inside a decided layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

import lowtide
from lowtide.models.context import ToHeads, ToTokens
from lowtide.policy import Pattern, Policy, Recompute, Rule
from support.ranks import Ranks

WIDTH, HEADS, TOKENS = 16, 4, 8


class Layer(nn.Module):
    def __init__(self, *, even: bool) -> None:
        super().__init__()
        group = dist.group.WORLD
        assert group is not None
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        heads, tokens = ToHeads(group), ToTokens(group)
        self.to_heads, self.to_tokens = (heads, tokens) if even else (Unknown(heads), Unknown(tokens))

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).unflatten(-1, (3, HEADS, -1)).unbind(-3)
        queries, keys, values = (part.transpose(1, 2) for part in self.to_heads(*parts))
        mixed: Tensor = self.to_tokens(scaled_dot_product_attention(queries, keys, values).transpose(1, 2).flatten(2))
        return x + self.out(mixed)


class Unknown:
    """Other code's exchange, of which nothing is known: no module, so that it is not among the layer's."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, *given: Tensor) -> object:
        return self.module(*given)


def _recomputed(even: bool) -> tuple[list[int], bool]:
    """How often a layer's last module ran to its end in each step, and whether gradients are those without a Policy."""
    torch.manual_seed(0)
    model = nn.Sequential(Layer(even=even), Layer(even=even))
    given = torch.randn(2, TOKENS, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()))
    model(given).square().sum().backward()
    expected = [parameter.grad for parameter in model.parameters()]
    counts, ended = [], 0

    def count(*_: object) -> None:
        nonlocal ended
        ended += 1

    model[0].out.register_forward_hook(count)
    same = True
    with lowtide.apply(model, Policy.uniform(default=Recompute())):
        for _ in range(3):
            model.zero_grad(set_to_none=True)
            before = ended
            model(given).square().sum().backward()
            counts.append(ended - before)
            found = [parameter.grad for parameter in model.parameters()]
            same &= all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))  # type: ignore[arg-type]
    return counts, same


@pytest.mark.parametrize(("even", "calls"), [(True, 1), (False, 2)], ids=["even", "unknown"])
def test_a_recomputed_layer_stops_early_where_ranks_are_known_to_do_the_same(
    even: bool, calls: int, ranks: Ranks
) -> None:
    for counts, same in ranks.run(_recomputed, even):
        assert same
        assert counts[-1] == calls


def _reissued() -> tuple[int, int, list[str], bool]:
    """How many exchanges a step issues alone and with each exchange to be recomputed, what is kept, and whether
    gradients are the same."""
    torch.manual_seed(0)
    model = nn.Sequential(Layer(even=True), Layer(even=True))
    given = torch.randn(2, TOKENS, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()))

    def step() -> tuple[int, list[Tensor | None]]:
        model.zero_grad(set_to_none=True)
        with _Exchanges() as seen:
            model(given).square().sum().backward()
        return seen.count, [parameter.grad for parameter in model.parameters()]

    alone, expected = step()
    rules = [Rule(Pattern(name, "path"), Recompute()) for name in ("to_heads", "to_tokens")]
    with lowtide.apply(model, Policy.uniform(rules)) as handle:
        for _ in range(3):
            with_rules, found = step()
        same = all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))  # type: ignore[arg-type]
        return alone, with_rules, sorted({name for _, name in handle.kept}), same


class _Exchanges(TorchDispatchMode):
    """Counts all-to-alls."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += "all_to_all" in str(func)
        return func(*args, **(kwargs or {}))


def test_an_exchange_that_puts_rows_in_order_is_kept_and_not_reissued_for_nothing(ranks: Ranks) -> None:
    for alone, with_rules, kept, same in ranks.run(_reissued):
        assert same
        assert alone > 0
        assert with_rules == alone
        assert kept == ["to_heads", "to_tokens"]
