"""What a kernel was given can be written down in short and read again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lowtide.cost.shape import Name, TensorShape, contiguous_strides, read_shape, shape_text
from lowtide.errors import TraceError

tensors = st.builds(
    lambda dtype, pairs: TensorShape(dtype, tuple(size for size, _ in pairs), tuple(stride for _, stride in pairs)),
    st.sampled_from(["float32", "bfloat16", "int64", "bool", "float8_e4m3fn"]),
    st.lists(st.tuples(st.integers(2, 99), st.integers(0, 999)), max_size=4),
)
scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(),
    st.sampled_from([Name("torch.bfloat16"), Name("device"), Name("")]), tensors,
)  # fmt: skip
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3), max_leaves=6)


@given(st.lists(values, max_size=5), st.dictionaries(st.sampled_from(["dim", "scale", "out"]), values))
def test_what_is_written_is_read_again(args: list[Any], kwargs: dict[str, Any]) -> None:
    assert read_shape(shape_text(args, kwargs)) == (tuple(args), kwargs)


def test_a_tensor_is_written_with_strides_only_where_it_is_not_contiguous() -> None:
    whole = torch.zeros(4, 8)
    assert shape_text((whole, whole.t(), whole[:1])) == "f32[4,8],f32[8,4;1,8],f32[1,8]"


def test_an_expanded_tensor_spans_the_elements_that_it_has() -> None:
    ((found,), _) = read_shape(shape_text((torch.zeros(3, 1).expand(3, 1000),)))
    assert (found.extent, found.bytes, found.numel()) == (3, 12, 3000)


def test_dtypes_and_devices_are_named_and_generators_are_not() -> None:
    kwargs = {"dtype": torch.bfloat16, "device": torch.device("cpu"), "generator": torch.Generator()}
    assert shape_text((), kwargs) == "dtype=<torch.bfloat16>,device=<device>,generator=<>"


@given(st.lists(st.integers(1, 5), max_size=4))
def test_contiguous_strides_are_torchs(sizes: list[int]) -> None:
    assert contiguous_strides(sizes) == torch.empty(sizes).stride()


@pytest.mark.parametrize("text", ["f32[2", "f32[2;1,1]", "spam", "(1,2", "1 2", "f32[2]]"])
def test_what_is_no_shape_text_is_refused(text: str) -> None:
    with pytest.raises(TraceError):
        read_shape(text)
