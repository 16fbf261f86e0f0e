"""What is saved for backward, held so that it can be offloaded at any moment."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lowtide.adaptive.counts import Counts
from lowtide.adaptive.offload import SavedStorages
from lowtide.operators.saved import unpack
from tide.testing import fresh_tide  # noqa: F401


@pytest.fixture
def storages() -> Iterator[SavedStorages]:
    storages = SavedStorages(1024, Counts())
    with saved_tensors_hooks(storages.pack, unpack):
        yield storages


def allocated() -> int:
    return int(torch.accelerator.memory_allocated())


def leaf(rows: int = 64) -> Tensor:
    return torch.randn(rows, 32, device="tide", requires_grad=True)


def test_an_offloaded_storage_is_freed_and_reloaded_bitwise(storages: SavedStorages) -> None:
    x = leaf()
    middle = x.exp()
    saved = middle.detach().cpu()
    y = middle.sum()
    del middle
    before = allocated()
    assert storages.evict(1) == saved.nbytes
    assert allocated() == before - saved.nbytes
    y.backward()
    assert x.grad is not None
    assert torch.equal(x.grad.cpu(), saved)
    assert not storages.known


def test_a_storage_that_other_code_holds_is_not_offloaded(storages: SavedStorages) -> None:
    x = leaf()
    middle = x.exp()
    y = middle.sum()
    assert storages.evict(1) == 0
    del middle
    assert storages.evict(1) > 0
    y.backward()


def test_the_oldest_are_offloaded_first_and_no_more_than_are_asked_for(storages: SavedStorages) -> None:
    x = leaf()
    y = x
    for _ in range(4):
        y = y.exp()
    size = x.untyped_storage().nbytes()
    assert storages.evict(1.5 * size) == 2 * size
    here = sorted(reference().number for reference in storages.known.values())  # type: ignore[union-attr]
    assert here == [3, 4]


def test_views_of_one_storage_are_offloaded_and_reloaded_together(storages: SavedStorages) -> None:
    x = leaf()
    rows = x.exp()
    product = (rows.t()[3:9] * rows.view(32, 64)[:6]).sum()
    del rows
    assert storages.evict(1 << 40) > 0
    product.backward()
    found = x.grad
    x.grad = None
    rows = x.exp()
    (rows.t()[3:9] * rows.view(32, 64)[:6]).sum().backward()
    assert x.grad is not None
    assert found is not None
    assert torch.equal(found, x.grad)


@pytest.mark.parametrize("offloaded", [False, True])
def test_what_was_changed_in_place_is_refused_as_autograd_does(storages: SavedStorages, offloaded: bool) -> None:
    x = leaf()
    middle = x.exp()
    y = middle.sum()
    middle.detach().add_(1)
    del middle
    if offloaded:
        assert storages.evict(1) > 0
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_parameters_small_tensors_and_host_tensors_are_not_offloaded(storages: SavedStorages) -> None:
    layer = nn.Linear(64, 64, device="tide")
    output = layer(2 * torch.randn(64, 64, device="tide", requires_grad=True))  # saves its input and its weight
    assert storages.evict(1 << 30) == 64 * 64 * 4  # the input
    del output
    small = torch.randn(4, device="tide", requires_grad=True).exp()
    on_host = torch.randn(4096, requires_grad=True).exp()
    assert not storages.known
    del small, on_host


def test_a_dropped_graph_frees_its_copies(storages: SavedStorages) -> None:
    before = allocated()
    x = leaf()
    y = torch.softmax(x.exp(), -1)  # saves its own output
    storages.evict(1)
    del x, y
    assert not storages.known
    assert allocated() == before


def test_a_graph_with_offloaded_tensors_can_be_run_twice(storages: SavedStorages) -> None:
    x = leaf()
    y = x.exp().sum()
    storages.evict(1 << 40)
    (first,) = torch.autograd.grad(y, x, retain_graph=True)
    storages.evict(1 << 40)
    (second,) = torch.autograd.grad(y, x)
    assert torch.equal(first, second)
