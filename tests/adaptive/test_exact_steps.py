"""Steps that are measured, or in which every operator is watched, compute what they would: bit by bit."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_leaves

import lowtide
import tide
from lowtide.adaptive.host_copies import HostCopies
from lowtide.adaptive.rescue import Rescue
from lowtide.operators.saved import unpack
from lowtide.trace.recorder import Recorder

WIDTH, STEPS = 16, 7


class Layer(nn.Module):
    def __init__(self, act: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.outer, self.act = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), act

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.outer(self.act(self.inner(x)))
        return y


def filled(x: Tensor) -> Tensor:
    """The value that a mask is filled with has a gradient."""
    return x.masked_fill(x > 0.5, x.mean())


ACTS: dict[str, Callable[[Tensor], Tensor]] = {
    "rrelu": lambda x: functional.rrelu(x, training=True),
    "rrelu_": lambda x: functional.rrelu(x * 1.5, training=True, inplace=True),
    "prod": lambda x: x * torch.prod(1 + 0.1 * torch.tanh(x), -1, keepdim=True),
    "cumprod": lambda x: torch.cumprod(1 + 0.1 * x, -1),
    "masked_fill": filled,
    "median": lambda x: x - x.round(decimals=1).median(),
    "min": lambda x: x - x.round(decimals=1).min() + x.clamp(-0.5, 0.5).max(),
}


@pytest.fixture(autouse=True)
def _fresh() -> None:
    tide.reset()
    tide.configure(preset="h100", capacity=1 << 30)


def trained(name: str, device: str, adapted: bool) -> list[Tensor]:
    """The gradients of every step, and the parameters in the end."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer(ACTS[name]) for _ in range(2))).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found: list[Tensor] = []
    torch.manual_seed(1)

    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        found.extend(one.grad.cpu() for one in model.parameters() if one.grad is not None)
        optimizer.step()

    run = lowtide.adapt(model, optimizer, profiling_steps=5, verbose=False) if adapted else None
    for number in range(STEPS):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(number)).to(device)
        run.step(lambda x=x: step(x)) if run is not None else step(x)  # type: ignore[misc]
    if run is not None:
        assert run.plan is not None
        run.remove()
    return [*found, *(one.detach().cpu() for one in model.parameters())]


@pytest.mark.parametrize("device", ["cpu", "tide"])
@pytest.mark.parametrize("name", ACTS)
def test_every_step_of_an_adaptive_run_is_exact(name: str, device: str) -> None:
    expected, found = trained(name, device, False), trained(name, device, True)
    assert not any(one.isnan().any() for one in expected)
    assert [torch.equal(*pair) for pair in zip(expected, found, strict=True)] == [True] * len(expected)


def watched(run: Callable[[], list[Tensor | None]]) -> list[Tensor | None]:
    """Under the rescue's mode."""
    rescue = Rescue(nn.Module())
    rescue.arm()
    try:
        with rescue.watching():
            return run()
    finally:
        rescue.remove()


def recorded(run: Callable[[], list[Tensor | None]]) -> list[Tensor | None]:
    """Under the mode that measures, with everything on the host that is saved."""
    copies = HostCopies(at_once=True)
    with Recorder(0, hold=copies.hold, written=copies.written).recording():
        return run()


def learnt(run: Callable[[], list[Tensor | None]]) -> list[Tensor | None]:
    """With everything that is saved offloaded, and no mode that sees kernels."""
    with torch.autograd.graph.saved_tensors_hooks(HostCopies(at_once=False).hold, unpack):
        return run()


def samples(operator: Any) -> Iterator[Callable[[], list[Tensor | None]]]:
    """Some calls of an operator: each gives its results and its gradients, the same every time."""
    for sample in itertools.islice(operator.sample_inputs("cpu", torch.float32, requires_grad=True), 6):
        given = (sample.input, sample.args, sample.kwargs)
        leaves = [one for one in tree_leaves(given) if isinstance(one, Tensor) and one.requires_grad]

        def run(sample: Any = sample, leaves: list[Tensor] = leaves) -> list[Tensor | None]:
            torch.manual_seed(0)
            made = tree_leaves(operator(sample.input, *sample.args, **sample.kwargs))
            results = [one for one in made if isinstance(one, Tensor) and one.requires_grad]
            if not results or not leaves:
                return []
            loss = sum((one.abs() * torch.linspace(0.5, 1.5, one.numel()).view(one.shape)).sum() for one in results)
            assert isinstance(loss, Tensor)
            return [*(one.detach() for one in results), *torch.autograd.grad(loss, leaves, allow_unused=True)]

        yield run


def same(first: Tensor | None, second: Tensor | None) -> bool:
    if first is None or second is None:
        return first is second
    flat = [
        one.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8) for one in (first, second)
    ]
    return torch.equal(*flat)


def differing(operator: Any) -> list[str]:
    """Where an operator gives something else than without us, though twice the same without."""
    found = []
    for run in samples(operator):
        try:
            expected = run()
            if not all(map(same, expected, run())):
                continue
        except Exception:  # what torch's database has on a CPU and cannot be run there
            continue
        found += [
            around.__name__ for around in (watched, recorded, learnt) if not all(map(same, expected, around(run)))
        ]
    return found


NAMED = {"cumprod", "masked_fill", "masked_scatter", "max", "median", "min", "nanmedian", "prod", "nn.functional.rrelu"}


@pytest.mark.parametrize("operator", [one for one in op_db if one.name in NAMED], ids=lambda one: one.full_name)
def test_operators_with_two_formulas_are_exact(operator: Any) -> None:
    assert differing(operator) == []


@pytest.mark.slow
def test_all_operators_of_torchs_database_are_exact() -> None:
    """No more of them have two formulas than we know."""
    known = [one for one in op_db if one.supports_autograd and torch.float32 in one.dtypes]
    found = {one.full_name: wrong for one in known if (wrong := differing(one))}
    assert found == {}


def shifted(x: Tensor) -> Tensor:
    """Something that was written to is saved; something that is a conjugate is too."""
    y = x.clone().add_(1).mul_(2)
    spectrum = torch.fft.ifft(torch.complex(y, y)).conj()
    return y.square() + (spectrum * spectrum).abs()


def changed_after(x: Tensor) -> Tensor:
    """What was saved is written to before backward asks for it, which autograd refuses."""
    y = x.exp()
    y.add_(1)
    return y


def gradient(function: Callable[[Tensor], Tensor]) -> list[Tensor | None]:
    x = torch.linspace(-1, 1, 8, requires_grad=True)
    return list(torch.autograd.grad(function(x).sum(), x))


@pytest.mark.parametrize("around", [watched, recorded, learnt])
def test_what_was_written_to_before_it_was_saved_is_held_as_it_is(
    around: Callable[[Callable[[], list[Tensor | None]]], list[Tensor | None]],
) -> None:
    assert all(map(same, around(lambda: gradient(shifted)), gradient(shifted)))


def test_what_is_written_to_after_it_was_saved_is_refused() -> None:
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        watched(lambda: gradient(changed_after))
