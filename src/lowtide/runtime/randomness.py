"""The random numbers that a call may draw: torch's, and for code of the user's own also Python's and numpy's."""

from __future__ import annotations

import ctypes
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import get_device_states, set_device_states

from lowtide._torch_private.generators import current_accelerator

__all__ = ["HostRandom", "RandomState", "is_accelerator_used", "is_generator"]


class RandomState:
    """The state of torch's random numbers before a call: the host's, those of the devices of the tensors that it was
    given, or the accelerator's if they are all on the host, and of the generators that it may draw from."""

    __slots__ = ("devices", "generators", "host", "kind", "states")

    def __init__(self, given: list[Tensor], generators: Iterable[Any] = ()) -> None:
        self.host = torch.get_rng_state()
        self.kind = "cuda"
        self.devices: list[int] = []
        self.states: list[Tensor] = []
        if not all(tensor.is_cpu for tensor in given):
            self.devices, self.states = get_device_states(*given)
            self.kind = next(tensor.device.type for tensor in given if not tensor.is_cpu)
        elif (accelerator := _accelerator()) is not None:  # the call may move them there itself
            self.kind, self.devices = accelerator, [torch.accelerator.current_device_index()]
            self.states = self._now()
        self.generators = [(one, _state_of(one)) for one in generators]

    def moved(self) -> bool:
        """Whether random numbers have been drawn since."""
        return not (
            torch.equal(self.host, torch.get_rng_state())
            and all(map(torch.equal, self.states, self._now()))
            and all(_equal(state, _state_of(one)) for one, state in self.generators)
        )

    @contextmanager
    def restored(self) -> Iterator[None]:
        """The random numbers as they were; afterwards they go on from where they are now."""
        undo = self.put_back()
        try:
            yield
        finally:
            undo()

    def put_back(self) -> Callable[[], None]:
        """As :meth:`restored`, which costs more than this where an exception ends it; to be undone by what is given."""
        host, states = torch.get_rng_state(), self._now()
        now = [(one, _state_of(one)) for one, _ in self.generators]

        def undo() -> None:
            self._set(host, states, now)

        try:
            self._set(self.host, self.states, self.generators)
        except BaseException:
            undo()
            raise
        return undo

    def _set(self, host: Tensor, states: list[Tensor], generators: list[tuple[Any, Any]]) -> None:
        torch.set_rng_state(host)
        if self.devices:
            set_device_states(self.devices, states, device_type=self.kind)
        for one, state in generators:
            _set_state(one, state)

    def _now(self) -> list[Tensor]:
        module = torch.get_device_module(self.kind) if self.devices else None
        return [module.get_rng_state(device) for device in self.devices] if module is not None else []


def _accelerator() -> str | None:
    """The kind of the accelerator, if this process has begun to use it; asking it for numbers would begin that."""
    device: torch.device | None = current_accelerator()
    return device.type if device is not None and _begun(device.type)() else None


def is_accelerator_used() -> bool:
    """Whether this process has begun to use an accelerator."""
    return _accelerator() is not None


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


def _state_of(generator: Any) -> Any:
    return generator.get_state() if isinstance(generator, torch.Generator) else generator.bit_generator.state


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    else:
        generator.bit_generator.state = state


def _equal(first: Any, second: Any) -> bool:
    return torch.equal(first, second) if isinstance(first, Tensor) else str(first) == str(second)


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

    @contextmanager
    def restored(self) -> Iterator[None]:
        """The random numbers as they were; afterwards they go on from where they are now."""
        now = HostRandom()
        self.set()
        try:
            yield
        finally:
            now.set()

    def set(self) -> None:
        """Let the random numbers be as they were."""
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
"""Of numpy's usual generator: 624 numbers and the place of the next one."""


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
