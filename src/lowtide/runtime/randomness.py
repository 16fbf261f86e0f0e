"""Snapshots of random state: torch's generators, and Python's and numpy's."""

from __future__ import annotations

import ctypes
import random
import sys
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from lowtide._torch_private.generators import current_accelerator
from lowtide._torch_private.subclasses import PLAIN

__all__ = [
    "HostRandom",
    "ProcessRandom",
    "RandomState",
    "default_generators",
    "device_generators",
    "draws_nothing",
    "is_generator",
]


class RandomState:
    """The states of some generators."""

    __slots__ = ("states",)

    def __init__(self, generators: Iterable[Any]) -> None:
        self.states = [(one, _state_of(one)) for one in generators]

    def moved(self) -> bool:
        """Whether random numbers have been drawn since."""
        return not all(_equal(state, _state_of(one)) for one, state in self.states)

    def restore(self) -> None:
        """Set the generators back."""
        for one, state in self.states:
            _set_state(one, state)

    def put_back(self) -> Callable[[], None]:
        """Set the generators back; what is returned sets them to where they are now."""
        now = RandomState(one for one, _ in self.states)
        try:
            self.restore()
        except BaseException:
            now.restore()
            raise
        return now.restore


def default_generators(given: Iterable[Any] = ()) -> list[torch.Generator]:
    """Torch's own generators: the host's and :func:`device_generators`."""
    return [torch.default_generator, *device_generators(given)]


def device_generators(given: Iterable[Any] = ()) -> list[torch.Generator]:
    """Torch's own generators of the current device, and of the tensors and devices ``given``.

    None of a device that this process has not begun to use: asking for its generator would begin that.
    """
    kind = _accelerator()
    if kind is None:
        return []
    of_devices = getattr(torch.get_device_module(kind), "default_generators", ())
    devices = [one if type(one) is torch.device else one.device for one in given]
    indices = {one.index for one in devices if one.type == kind and one.index is not None}
    indices.add(torch.accelerator.current_device_index())
    return [of_devices[index] for index in sorted(indices) if index < len(of_devices)]


def _accelerator() -> str | None:
    """The kind of the accelerator, if this process has begun to use it."""
    device: torch.device | None = current_accelerator()
    return device.type if device is not None and _begun(device.type)() else None


@cache
def _begun(kind: str) -> Callable[[], bool]:
    """How to ask whether a kind of device is in use."""
    if torch.accelerator.current_accelerator(check_available=True) is None:
        return bool  # a build for a device that is not here: never
    return getattr(torch.get_device_module(kind), "is_initialized", lambda: True)


def is_generator(value: Any) -> bool:
    """Whether random numbers are drawn from a value: a generator of torch's or of numpy's."""
    kind = type(value)
    return kind is torch.Generator or (kind.__name__ == "Generator" and hasattr(value, "bit_generator"))


def draws_nothing(function: Callable[..., Any], module: nn.Module | None, given: Iterable[Tensor]) -> bool:
    """Whether a call, of a function or of a module's forward, is known to draw no random numbers.

    Known are torch's own arithmetic and its usual modules, on plain tensors and where nothing of theirs is patched.
    Taking and comparing the states of generators takes longer than such a call.
    """
    if any(type(one) not in PLAIN for one in given):
        return False
    if module is None:
        return _is_arithmetic(function)
    name, functional, forward = _MODULES.get(type(module), ("", None, None))
    return (
        forward is not None
        and getattr(function, "__func__", None) is forward
        and getattr(function, "__self__", None) is module
        and getattr(nn.functional, name) is functional
    )


@cache
def _is_arithmetic(function: Callable[..., Any]) -> bool:
    if getattr(function, "__name__", "") not in _ARITHMETIC:
        return False
    return getattr(function, "__objclass__", None) is torch.Tensor.__base__ or any(
        getattr(place, function.__name__, None) is function for place in (torch, torch.Tensor, nn.functional)
    )


_ARITHMETIC = {
    "__add__", "__matmul__", "__mul__", "__neg__", "__radd__", "__rmul__", "__rsub__", "__sub__", "__truediv__",
    "add", "addmm", "baddbmm", "bmm", "cat", "div", "exp", "float", "gelu", "layer_norm", "linear", "log_softmax",
    "matmul", "mean", "mm", "mul", "neg", "pow", "relu", "rms_norm", "rsqrt", "sigmoid", "silu", "softmax", "sqrt",
    "square", "sub", "sum", "tanh", "to",
}  # fmt: skip
_MODULES: dict[type[nn.Module], tuple[str, Any, Any]] = {
    kind: (name, getattr(nn.functional, name), kind.forward)
    for kind, name in (
        (nn.GELU, "gelu"),
        (nn.LayerNorm, "layer_norm"),
        (nn.Linear, "linear"),
        (nn.RMSNorm, "rms_norm"),
        (nn.ReLU, "relu"),
        (nn.SiLU, "silu"),
    )
}
"""Each with the function that its forward calls, and that forward."""


def _state_of(generator: Any) -> Any:
    return generator.get_state() if isinstance(generator, torch.Generator) else generator.bit_generator.state


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    else:
        generator.bit_generator.state = state


def _equal(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor):  # in a tenth of the time that torch.equal takes
        return bytes(first.numpy()) == bytes(second.numpy())
    return str(first) == str(second)


class ProcessRandom:
    """All random state of a process that a step may draw from: torch's on all devices, Python's and numpy's."""

    __slots__ = ("host", "torch")

    def __init__(self) -> None:
        devices: list[torch.device] = []
        kind = _accelerator()
        if kind is not None:
            devices = [torch.device(kind, index) for index in range(torch.accelerator.device_count())]
        self.torch, self.host = RandomState(default_generators(devices)), HostRandom()

    def restore(self) -> None:
        """Set everything back."""
        self.torch.restore()
        self.host.set()


class HostRandom:
    """The state of Python's and numpy's random numbers.

    [Note: looking before asking]
    Asking Python for its state takes 30 microseconds, asking numpy 100. So both are asked only if the memory of the
    generator is not what it was when they were asked last; that memory is read and compared, never written.
    """

    __slots__ = ("numpy", "python")

    def __init__(self) -> None:
        self.python = _python_state()
        self.numpy = _numpy_state()

    def put_back(self) -> Callable[[], None]:
        """Restore them; what is returned sets them to where they are now."""
        now = HostRandom()
        self.set()
        return now.set

    def set(self) -> None:
        """Restore them."""
        if _python_state() is not self.python:
            random.setstate(self.python)
            _Asked.python = (_python_memory(), self.python)
        if self.numpy is not None and _numpy_state() is not self.numpy:
            sys.modules["numpy"].random.set_state(self.numpy)
            _Asked.numpy = (_numpy_memory(), self.numpy)


class _Asked:
    """The states that were asked for last, and the memory that they were in."""

    python: tuple[Any, Any] = (None, None)
    numpy: tuple[Any, Any] = (None, None)
    generator: Any = None
    """Numpy's, which can be exchanged."""
    memory: Any = None
    """Where that keeps its state."""


_GENERATOR: Any = random._inst


def _memory_of_python() -> Any:
    """The memory that Python's generator keeps its state in, past the head that every object has; to be read only."""
    head = object.__basicsize__
    size = random.Random.__base__.__basicsize__ - head  # type: ignore[union-attr]
    return (ctypes.c_char * size).from_address(id(_GENERATOR) + head)


_MEMORY = _memory_of_python() if sys.implementation.name == "cpython" else None


def _python_memory() -> Any:
    return (_MEMORY.raw, _GENERATOR.gauss_next) if _MEMORY is not None else object()  # unlike any other: ask


def _python_state() -> Any:
    memory = _python_memory()
    if memory != _Asked.python[0]:
        _Asked.python = (memory, random.getstate())
    return _Asked.python[1]


def _numpy_memory() -> Any:
    generator = sys.modules["numpy"].random.mtrand._rand._bit_generator
    if generator is not _Asked.generator:
        _Asked.generator = generator
        _Asked.memory = (ctypes.c_char * _NUMPY_SIZE).from_address(generator.ctypes.state_address)
    return generator, _Asked.memory.raw


_NUMPY_SIZE = 624 * 4 + 4
"""Of numpy's usual generator: 624 numbers and the index of the next one."""


def _numpy_state() -> Any:
    numpy: Any = sys.modules.get("numpy")
    if numpy is None or not hasattr(numpy, "random"):
        return None
    if type(numpy.random.mtrand._rand._bit_generator).__name__ != "MT19937":
        return numpy.random.get_state(legacy=False)
    memory, (before, state) = _numpy_memory(), _Asked.numpy
    # A normal number may be waiting that its draw leaves no trace of in that memory.
    if memory != before or state["has_gauss"]:
        _Asked.numpy = (memory, numpy.random.get_state(legacy=False))
    return _Asked.numpy[1]
