"""FLOPs follow from shapes, and are those that torch's own counter finds where it has the kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from lowtide._torch_private.modes import TorchDispatchMode
from lowtide.cost.kernels import kernel_flops, kind_of


class Counted(TorchDispatchMode):
    """Counts what a block does."""

    def __init__(self) -> None:
        super().__init__()
        self.flops: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if found := kernel_flops(str(func), args, kwargs or {}, result):
            kind = kind_of(str(func))
            self.flops[kind] = self.flops.get(kind, 0) + found
        return result


def tensor(*sizes: int) -> Tensor:
    return torch.randn(sizes, requires_grad=True)


PRODUCTS: dict[str, Callable[[], Tensor]] = {
    "mm": lambda: tensor(3, 4) @ tensor(4, 5),
    "bmm": lambda: torch.bmm(tensor(2, 3, 4), tensor(2, 4, 5)),
    "addmm": lambda: functional.linear(tensor(3, 4), tensor(5, 4), tensor(5)),
    "baddbmm": lambda: torch.baddbmm(tensor(2, 3, 5), tensor(2, 3, 4), tensor(2, 4, 5)),
    "convolution": lambda: functional.conv2d(tensor(2, 4, 9, 7), tensor(6, 4, 3, 3), stride=2, padding=1),
    "transposed": lambda: functional.conv_transpose1d(tensor(2, 4, 9), tensor(4, 3, 3), stride=2),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_have_the_flops_that_torch_counts_both_ways(name: str) -> None:
    with FlopCounterMode(display=False) as torchs, Counted() as ours:
        PRODUCTS[name]().sum().backward()
    assert sum(ours.flops.values()) == torchs.get_total_flops() > 0


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("groups", [1, 2])
def test_attention_has_two_products_forward_and_five_backward_and_half_of_them_if_causal(
    causal: bool, groups: int
) -> None:
    batch, heads, rows, width = 2, 4, 16, 8
    query, key, value = tensor(batch, heads, rows, width), *(tensor(batch, heads // groups, rows, width) for _ in "kv")
    with Counted() as found:
        out = functional.scaled_dot_product_attention(query, key, value, is_causal=causal, enable_gqa=groups > 1)
        out.sum().backward()
    product = 2 * batch * heads * rows * rows * width // (2 if causal else 1)
    kind = "aten::_scaled_dot_product_flash_attention_for_cpu"
    assert found.flops == {kind: 2 * product, f"{kind}_backward": 5 * product}


def test_values_of_another_width_count_with_their_own() -> None:
    meta = [torch.empty(1, 2, 16, width, device="meta") for width in (12, 12, 8)]
    flops = kernel_flops("aten::_scaled_dot_product_flash_attention", meta, {"is_causal": False}, None)
    assert flops == 2 * 2 * 16 * 16 * (12 + 8)


def test_a_grouped_product_sends_each_row_to_one_group() -> None:
    tokens, weight = tensor(32, 16), tensor(4, 16, 8)
    ends = torch.tensor([8, 16, 24, 32], dtype=torch.int32)
    with Counted() as found:
        functional.grouped_mm(tokens, weight, offs=ends).square().sum().backward()
    assert found.flops == {"aten::_grouped_mm": 3 * 2 * 32 * 16 * 8}


def test_what_no_flops_bound_has_none() -> None:
    assert kernel_flops("aten.add.Tensor", (torch.ones(3), torch.ones(3)), {}, torch.ones(3)) == 0


def test_a_convolution_in_groups_has_the_flops_of_its_filters() -> None:
    with Counted() as found:
        functional.conv1d(tensor(2, 4, 9), tensor(6, 2, 3), groups=2).sum().backward()
    assert found.flops == {"aten::convolution": (one := 2 * 2 * 7 * 6 * 2 * 3), "aten::convolution_backward": 2 * one}
