"""What a kernel was given, as a short text: ``bf16[4,8;1,4],(0,1),dim=-1``.

Kernels of one kind and one such text take the same time, and a kernel can be rerun from it: tensors are written as
dtype, sizes and, unless they are contiguous, strides; everything else as itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

from lowtide.errors import TraceError

__all__ = ["Name", "TensorShape", "contiguous_strides", "read_shape", "shape_text"]

SHORT = {
    "float64": "f64", "float32": "f32", "float16": "f16", "bfloat16": "bf16", "int64": "i64", "int32": "i32",
    "int16": "i16", "int8": "i8", "uint8": "u8", "complex64": "c64", "complex128": "c128",
}  # fmt: skip
LONG = {short: long for long, short in SHORT.items()}
ITEM = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1,
    "bool": 1, "complex64": 8, "complex128": 16, "uint16": 2, "uint32": 4, "uint64": 8,
}  # fmt: skip

_TOKEN = re.compile(
    r"(?P<tensor>(?P<dtype>[a-z]\w*)\[(?P<sizes>[\d,]*)(?:;(?P<strides>[\d,]*))?\])"
    r"|(?P<string>\"(?:[^\"\\]|\\.)*\")"
    r"|(?P<number>-?(?:inf|nan|\d+(?:\.\d*)?(?:e[-+]?\d+)?))"
    r"|<(?P<name>[\w.]*)>"
    r"|(?P<word>[A-Za-z_]\w*)"
)


class TensorShape(NamedTuple):
    """A tensor of a shape text. It has ``shape`` and ``dim()`` as tensors do."""

    dtype: str
    """``float32``, ``int64``."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def dim(self) -> int:
        """How many dimensions it has."""
        return len(self.shape)

    def numel(self) -> int:
        """How many elements it has."""
        return prod(self.shape)

    @property
    def extent(self) -> int:
        """How many elements of a storage it spans."""
        if not self.numel():
            return 0
        return 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))

    @property
    def bytes(self) -> int:
        """How many bytes of a storage it spans."""
        return self.extent * ITEM.get(self.dtype, 1)


class Name(NamedTuple):
    """A dtype, a layout, a memory format, the ``device``; or, with no name, what cannot be written as text."""

    name: str


def contiguous_strides(sizes: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor.

    >>> contiguous_strides((2, 3, 4))
    (12, 4, 1)
    """
    strides, step = [], 1
    for size in reversed(sizes):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def shape_text(args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> str:
    """The text of a kernel's arguments. Tensors may be fake; values of tensors are not looked at.

    >>> shape_text((3, True, [0, 1]), {"dim": -1})
    '3,True,(0,1),dim=-1'
    """
    words = [_text(value) for value in args]
    words += [f"{name}={_text(value)}" for name, value in (kwargs or {}).items()]
    return ",".join(words)


def read_shape(text: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a text, tensors as :class:`TensorShape`; TraceError if it is not one.

    >>> read_shape("f32[2,3],1,dim=0")
    ((TensorShape(dtype='float32', shape=(2, 3), strides=(3, 1)), 1), {'dim': 0})
    """
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    place = 0
    while place < len(text):
        name = re.compile(r"([A-Za-z_]\w*)=").match(text, place)
        value, place = _read(text, name.end() if name else place)
        if name:
            kwargs[name[1]] = value
        else:
            args.append(value)
        if place < len(text):
            place = _expect(text, place, ",")
    return tuple(args), kwargs


def _text(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return str(value)
    if isinstance(value, str):
        return json.dumps(value)
    if isinstance(value, float):
        return repr(value)
    if hasattr(value, "dtype") and hasattr(value, "dim") and hasattr(value, "shape"):
        return _tensor_text(value)
    if isinstance(value, Name):
        return f"<{value.name}>"
    if isinstance(value, (list, tuple)):
        return f"({','.join(map(_text, value))})"
    if isinstance(value, int) or hasattr(value, "__index__"):
        return str(int(value))
    kind = type(value).__name__
    if kind == "device":
        return "<device>"
    return f"<{value}>" if kind in ("dtype", "layout", "memory_format") else "<>"  # a storage would write all its bytes


def _tensor_text(tensor: Any) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    sizes = tuple(int(size) for size in tensor.shape)
    expected = contiguous_strides(sizes)
    if isinstance(tensor, TensorShape):
        found = tensor.strides
    else:
        found = tensor.stride() if str(tensor.layout) == "torch.strided" else expected  # a sparse one has none
    strides = tuple(int(stride) for stride in found)
    alike = all(size == 1 or one == other for size, one, other in zip(sizes, strides, expected, strict=True))
    inner = ",".join(map(str, sizes)) + ("" if alike or 0 in sizes else ";" + ",".join(map(str, strides)))
    return f"{SHORT.get(dtype, dtype)}[{inner}]"


def _read(text: str, place: int) -> tuple[Any, int]:
    if text.startswith("(", place):
        values: list[Any] = []
        place += 1
        while not text.startswith(")", place):
            value, place = _read(text, place)
            values.append(value)
            if not text.startswith(")", place):
                place = _expect(text, place, ",")
        return values, place + 1
    match = _TOKEN.match(text, place)
    if match is None:
        raise TraceError(f"{text!r:.200} says no shapes: cannot read {text[place:]!r:.40} at character {place}")
    return _value(match), match.end()


def _value(match: re.Match[str]) -> Any:
    if match["tensor"]:
        sizes = _integers(match["sizes"])
        strides = contiguous_strides(sizes) if match["strides"] is None else _integers(match["strides"])
        if len(sizes) != len(strides):
            raise TraceError(f"{match[0]!r:.100} has {len(sizes)} sizes and {len(strides)} strides")
        return TensorShape(LONG.get(match["dtype"], match["dtype"]), sizes, strides)
    if match["string"]:
        return json.loads(match["string"])
    if match["name"] is not None:
        return Name(match["name"])
    word: str = match[0]
    if word in ("None", "True", "False"):
        return {"None": None, "True": True, "False": False}[word]
    if match["number"]:
        return int(word) if re.fullmatch(r"-?\d+", word) else float(word)
    raise TraceError(f"{word!r:.60} is no value of a shape text; expected a tensor, a number, True, False or None")


def _integers(text: str) -> tuple[int, ...]:
    return tuple(int(one) for one in text.split(",")) if text else ()


def _expect(text: str, place: int, what: str) -> int:
    if not text.startswith(what, place):
        raise TraceError(f"{text!r:.200} says no shapes: expected {what!r} at character {place}")
    return place + len(what)
