"""A kernel can be rerun from its kind and its shape text."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import tide
from lowtide._torch_private.modes import TorchDispatchMode
from lowtide.cost.kernel import is_free
from lowtide.cost.kernels import kind_of
from lowtide.cost.rerun import CannotRerunError, arguments_of, rerun
from lowtide.cost.shape import shape_text
from lowtide.cost.standard import standard_kernels
from lowtide.models.build import build_model
from models.shapes import deepseek, llama, loss_of, tokens
from tide.testing import fresh_tide  # noqa: F401

CPU, TIDE = torch.device("cpu"), torch.device("tide")


class Written(TorchDispatchMode):
    """Writes down what runs."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: dict[tuple[str, str], list[tuple[torch.dtype, torch.Size]]] = {}
        self.views: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        text = shape_text(args, kwargs)  # before the kernel may resize something
        result = func(*args, **(kwargs or {}))
        kind = kind_of(str(func))
        if func.is_view:
            self.views.add(kind)
        elif not is_free(kind):
            self.kernels[kind, text] = shapes_of(result)
        return result


def shapes_of(result: Any) -> list[tuple[torch.dtype, torch.Size]]:
    found = [result] if isinstance(result, Tensor) else list(result or ())
    return [(one.dtype, one.shape) for one in found if isinstance(one, Tensor)]


@pytest.mark.parametrize("shape", [llama(), deepseek()], ids=["llama", "deepseek"])
@pytest.mark.parametrize("autocast", [False, True])
def test_every_kernel_of_a_training_step_can_be_run_again_and_gives_the_same_shapes(shape: Any, autocast: bool) -> None:
    model, given = build_model(shape), tokens()
    with Written() as written, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss_of(model(given), given).backward()
    assert len(written.kernels) > 30
    assert all(map(is_free, written.views))
    for (kind, text), expected in written.kernels.items():
        with torch.no_grad():
            assert shapes_of(rerun(kind, text, CPU)()) == expected, (kind, text)


def test_arguments_have_the_sizes_strides_and_dtypes_of_the_text() -> None:
    text = "bf16[8,4;1,8],i64[3],bool[2,2;0,1],(f32[2],None),2.5,dtype=<torch.float16>"
    args, kwargs = arguments_of("aten::spam", text, CPU)
    assert shape_text(args, kwargs) == text


def test_a_grouped_product_gets_rows_for_every_group() -> None:
    args, _ = arguments_of("aten::_grouped_mm", "f32[32,16],f32[4,16,8],i32[4]", CPU)
    assert args[2].tolist() == [8, 16, 24, 32]
    args, _ = arguments_of("aten::_grouped_mm", "f32[16,32],f32[32,8],i32[4]", CPU)
    assert args[2].tolist() == [8, 16, 24, 32]


def test_attention_of_the_cpu_is_run_as_the_devices_own_both_ways() -> None:
    query, key, value = (torch.randn(2, heads, 16, 8, requires_grad=True) for heads in (4, 2, 2))
    with Written() as written:
        functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True).sum().backward()
    calls = [rerun(kind, text, TIDE) for kind, text in written.kernels if "attention" in kind]
    with tide.record() as timeline:
        for call in calls:
            call()
    assert [span["name"] for span in timeline.spans] == ["tide::attention", "tide::attention_backward"]


def test_what_cannot_be_made_again_says_why() -> None:
    with pytest.raises(CannotRerunError, match="it was not written down"):
        rerun("aten::rand", "(3),group=<>", CPU)
    with pytest.raises(CannotRerunError, match="aten::no_such_thing"):
        rerun("aten::no_such_thing", "f32[3]", CPU)


def test_every_kernel_of_the_standard_set_runs() -> None:
    for one in standard_kernels():
        fused_norm = "_fused_rms_norm" in one.kind  # a CPU has no kernel for it
        for device in () if one.growth else (TIDE,) if fused_norm else (CPU, TIDE):
            with torch.no_grad():
                rerun(one.kind, one.shape, device)()
