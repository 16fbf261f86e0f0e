"""Every operator of torch's own database as a model's layers, run with and without something around the steps.

``cases()`` gives the operators that can be trained through, each with a few of torch's samples. ``run(case, around)``
trains a small model whose layers call the operator, and gives every loss, output and gradient; ``around`` says what is
applied to the model meanwhile, and ``plain`` is nothing. What ``run`` gives with something around it must be bitwise
what it gives without::

    expected = reference(case)
    assert expected is None or different(expected, case, around) == []
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

__all__ = ["Around", "Case", "Model", "Step", "Values", "case_named", "cases", "different", "plain", "reference", "run"]

LAYERS = 2
STEPS = 3

Step: TypeAlias = Callable[[], Tensor]
"""One step of training: forward, backward, and the loss."""
Around: TypeAlias = Callable[[nn.Module], AbstractContextManager[Callable[[Step], Tensor]]]
"""Attaches something to a model; what is yielded runs a step."""
Values: TypeAlias = dict[str, Tensor | None]


@dataclass(frozen=True)
class Case:
    """One operator with one of torch's samples for it."""

    name: str
    """The operator, and the variant of its samples if it has several: ``norm.fro``."""
    sample: int
    device: str

    def __str__(self) -> str:
        return f"{self.name}[{self.sample}] on {self.device}"


@cache
def _database() -> dict[str, Any]:
    from torch.testing._internal.common_methods_invocations import op_db  # takes seconds

    return {
        ".".join(filter(None, (one.name, one.variant_test_name))): one
        for one in op_db
        if one.supports_autograd and torch.float32 in one.dtypes
    }


@cache
def _samples(name: str, count: int) -> tuple[Any, ...]:
    torch.manual_seed(0)
    try:
        return tuple(islice(_database()[name].sample_inputs("cpu", torch.float32, requires_grad=True), count))
    except Exception:  # a few need packages that are not here
        return ()


def cases(
    *, names: tuple[str, ...] | None = None, devices: tuple[str, ...] = ("cpu", "tide"), samples: int = 4
) -> Iterator[Case]:
    """The operators that a gradient passes through, or those of them that are named, on each device."""
    for name in _database() if names is None else names:
        for number, sample in enumerate(_samples(name, samples)):
            if any(_trained(leaf) for leaf in tree_leaves((sample.input, sample.args, sample.kwargs))):
                yield from (Case(name, number, device) for device in devices)


def case_named(name: str, sample: int = 0, device: str = "cpu") -> Case:
    """One case, by what :class:`Case` prints."""
    return Case(name, sample, device)


class Layer(nn.Module):
    """Calls an operator on its sample, and saves what comes out for backward."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        sample = _samples(case.name, case.sample + 1)[case.sample]
        self.operator = _database()[case.name]
        values, self.structure = tree_flatten(((sample.input, *sample.args), sample.kwargs))
        self.scale = nn.Parameter(torch.ones(()))
        """One: the samples are in the operator's domain, and have to stay there."""
        self.values: list[Any] = []
        """What the operator is given; the name of a parameter or buffer in place of a tensor."""
        for value in values:
            if not isinstance(value, Tensor):
                self.values.append(value)
                continue
            name = _Name(f"given_{len(self.values)}")
            self.values.append(name)
            own = value.detach().clone(memory_format=torch.preserve_format)
            if _trained(value):
                self.register_parameter(name, nn.Parameter(own))
            else:
                self.register_buffer(name, own)  # the operator may write into it, such as running statistics

    def forward(self, x: Tensor) -> Tensor:
        given = [self._given(value) if isinstance(value, _Name) else value for value in self.values]
        args, kwargs = tree_unflatten(given, self.structure)
        outputs = [output for output in tree_leaves(self.operator(*args, **kwargs)) if _trained(output)]
        for output in outputs:
            x = x + (output.sin() * output).abs().sum()  # which save what came out, twice
        return x

    def _given(self, name: str) -> Tensor:
        tensor: Tensor = getattr(self, name)
        return tensor * self.scale if isinstance(tensor, nn.Parameter) else tensor


class _Name(str):
    """The name of a tensor, unlike a word that the operator is given."""


class Model(nn.Module):
    """A few such layers."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.ones(()))
        self.layers = nn.ModuleList(Layer(case) for _ in range(LAYERS))

    def forward(self) -> Tensor:
        x = self.start * 1.0
        for layer in self.layers:
            x = layer(x)
        return x


def run(case: Case, around: Around, *, steps: int = STEPS) -> Values:
    """Train through the operator: the loss and every gradient of each step."""
    model = Model(case).to(case.device)
    values: Values = {}

    def step() -> Tensor:
        loss: Tensor = model()
        loss.backward()
        return loss.detach()

    with around(model) as carry_out:
        for number in range(steps):
            torch.manual_seed(number)
            values[f"the loss in step {number}"] = carry_out(step).cpu()
            for name, parameter in model.named_parameters():
                gradient = parameter.grad
                values[f"the gradient of {name} in step {number}"] = None if gradient is None else gradient.cpu()
                parameter.grad = None
    values |= {f"the buffer {name}": buffer.cpu() for name, buffer in model.named_buffers()}
    return values


@contextmanager
def plain(model: nn.Module) -> Iterator[Callable[[Step], Tensor]]:
    """Nothing."""
    yield lambda step: step()


def reference(case: Case, *, steps: int = STEPS) -> Values | None:
    """What the operator gives by itself; None if it does not run there, or gives something else each time."""
    try:
        first, second = run(case, plain, steps=steps), run(case, plain, steps=steps)
    except (RuntimeError, NotImplementedError, ValueError, TypeError, AttributeError, IndexError):
        return None
    return first if not _unlike(first, second) else None


def different(expected: Values, case: Case, around: Around, *, steps: int = STEPS) -> list[str]:
    """What is not bitwise the same with something around the model."""
    return _unlike(expected, run(case, around, steps=steps))


def _unlike(first: Values, second: Values) -> list[str]:
    return [name for name in first | second if not _same(first.get(name), second.get(name))]


def _same(first: Tensor | None, second: Tensor | None) -> bool:
    if first is None or second is None:
        return first is second
    alike = first.shape == second.shape and first.dtype == second.dtype and first.layout == second.layout
    return alike and torch.equal(_bits(first), _bits(second))


def _bits(tensor: Tensor) -> Tensor:
    """The bytes of the values: NaN is equal to itself, and zero has a sign."""
    dense = tensor.detach().to_dense() if tensor.layout is not torch.strided else tensor.detach()
    return dense.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def _trained(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad and (value.is_floating_point() or value.is_complex())
