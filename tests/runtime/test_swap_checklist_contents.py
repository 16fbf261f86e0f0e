"""Swapping safely: one test for each mistake that has corrupted somebody's gradients. Here: host memory, what moves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard, init_device_mesh

import tide
from lowtide._torch_private.storages import storage_key
from lowtide.errors import SwapError
from lowtide.operators.saved import kept_apart, unpack
from lowtide.policy import LayerPolicy, Pattern, Recompute, Rule, Swap
from lowtide.runtime.host import HostPool
from lowtide.runtime.ledger import Ledger, Line
from lowtide.runtime.limits import Limits
from lowtide.runtime.swap import Offloads, SwapManager
from support.stacks import ROWS, WIDTH, gated, lines, same, swap, train
from tide.testing import fresh_tide  # noqa: F401

HIDDEN = ROWS * 2 * WIDTH * 4
"""The bytes of what ``up``, ``silu``, ``sigmoid`` and ``mul`` of a layer make."""
DEVICES = ["cpu", "tide"]


def batch(device: str = "tide") -> Tensor:
    return torch.randn(ROWS, WIDTH, device=device)


class Scene:
    """What one layer offloads, and a line to count it in."""

    def __init__(self, **limits: Any) -> None:
        self.manager = SwapManager(Limits(**{"minimum_bytes": 1, **limits}), Ledger())
        self.offloads = Offloads(self.manager)
        self.line: Line = self.manager.ledger.line(0, "x")

    def pack(self, tensor: Tensor, tier: Any = "host") -> Any:
        return self.offloads.pack(tensor, Swap(1, tier), self.line, 1) or kept_apart(tensor)

    def free(self) -> None:
        self.manager.schedule.reach(1 << 40)


@pytest.fixture
def scene() -> Scene:
    return Scene()


# Host memory


def test_pinned_buffers_are_used_again() -> None:
    found = train(gated, swap("silu", "mul"), steps=3)
    pool = found.attached.manager.pinned_pool
    taken, pinned = pool.taken, tide.pinned_memory_stats()
    assert taken == 6 * HIDDEN
    for _ in range(3):
        found.model(batch()).sum().backward()
    assert (pool.taken, tide.pinned_memory_stats()) == (taken, pinned)


def test_changing_shapes_of_one_size_class_share_buffers() -> None:
    trained = train(gated, swap("mul"))
    for rows in (ROWS + 1, ROWS + 9, ROWS - 5, 2 * ROWS - 3, 2 * ROWS, ROWS):
        trained.model(torch.randn(rows, WIDTH, device="tide")).sum().backward()
    assert trained.attached.manager.pinned_pool.taken == 3 * HIDDEN + 3 * 2 * HIDDEN  # two classes


def test_a_buffer_is_written_again_only_after_the_copy_that_read_it(scene: Scene) -> None:
    """The second tensor leaves on a stream that knows nothing of the first one's copy back."""
    tide.configure(preset="h100", host_to_device_bandwidth=10**6)
    first = scene.pack(torch.ones(4096, device="tide"))
    scene.free()
    back = first.tensor()
    scene.offloads = Offloads(scene.manager)
    del first  # its buffer is free, its copy back under way
    with torch.Stream("tide"):
        second = scene.pack(torch.zeros(4096, device="tide"))
    assert scene.manager.pinned_pool.taken == 4096 * 4
    assert torch.equal(back.cpu(), torch.ones(4096))
    torch.accelerator.synchronize()
    assert torch.equal(second.tensor().cpu(), torch.zeros(4096))


@pytest.mark.parametrize("device", DEVICES)
def test_a_cap_on_host_memory_keeps_and_says_so(device: str) -> None:
    expected = train(gated, None, device=device)
    limits = Limits(minimum_bytes=1, host_bytes=2 * HIDDEN)
    found = train(gated, swap("silu", "mul"), device=device, limits=limits)
    assert same(expected.values, found.values)
    pool = found.attached.manager.pinned_pool if device == "tide" else found.attached.manager.host_pool
    assert pool.taken <= 2 * HIDDEN
    notes = [line.notes for line in lines(found.attached) if line.kept_bytes]
    assert notes
    assert all("the limit of host memory is reached" in note for note in notes)


def test_pinned_memory_that_the_machine_has_not_keeps_and_says_so() -> None:
    expected = train(gated, None)
    tide.faults.exhaust_pinned_memory()
    found = train(gated, swap("mul"))
    assert same(expected.values, found.values)
    assert all(line.kept_bytes and line.notes for line in lines(found.attached, "mul"))


def test_the_cap_is_the_nodes_shared_by_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    alone = Limits().host_bytes
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert Limits().host_bytes == alone // 8


def test_the_pool_does_not_give_what_is_too_small() -> None:
    pool, stash = HostPool(1 << 20, pinned=False), []
    small = pool.get(stash, torch.Size([100]), torch.float32, 400)
    assert small is not None
    stash.append(small)
    large = pool.get(stash, torch.Size([5000]), torch.float32, 20_000)
    assert large is not None
    assert large.size >= 20_000


# What to move


@pytest.mark.parametrize("device", DEVICES)
def test_parameters_their_views_and_buffers_never_move(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def body(layer: Any, x: Tensor) -> Tensor:
        return x + layer.down(torch.sin(layer.up(x) * layer.table * layer.up.weight.mT[0]))

    moved: list[Tensor] = []
    real = SwapManager.offload

    def noted(self: Any, source: Tensor, *args: Any) -> Any:
        moved.append(source)  # held, so that no other storage gets its address
        return real(self, source, *args)

    monkeypatch.setattr(SwapManager, "offload", noted)
    expected = train(body, None, device=device)
    found = train(body, swap(prefetch=1), device=device)
    assert same(expected.values, found.values)
    own = {storage_key(tensor) for tensor in [*found.model.parameters(), *found.model.buffers()]}
    assert moved
    assert not own & {storage_key(tensor) for tensor in moved}


def test_integers_that_route_never_move() -> None:
    def body(layer: Any, x: Tensor) -> Tensor:
        hidden = layer.up(x)
        return x + layer.down(hidden[torch.argsort(hidden.detach().sum(-1))].sin())

    expected = train(body, None)
    found = train(body, swap(prefetch=1))
    assert same(expected.values, found.values)
    assert not any(line.swaps for line in lines(found.attached, "argsort"))


@pytest.mark.parametrize("device", DEVICES)
def test_a_storage_that_is_saved_several_times_moves_once(device: str) -> None:
    def body(layer: Any, x: Tensor) -> Tensor:
        hidden = layer.up(layer.norm(x))
        return x + layer.down(hidden.sin() + hidden.view(-1).cos().view_as(hidden) + hidden.mT.tanh().exp().mT)

    expected = train(body, None, device=device)
    found = train(body, swap("up"), device=device)
    assert same(expected.values, found.values)
    line = lines(found.attached, "up")[2]
    assert (line.swaps, line.moved_bytes) == (3, 3 * HIDDEN)


def test_a_storage_that_has_died_is_not_taken_for_the_next_at_its_address(scene: Scene) -> None:
    for value in range(20):
        tensor = torch.full((1000,), float(value), device="tide")
        saved = scene.pack(tensor)
        scene.free()
        del tensor
        assert float(saved.tensor()[0]) == value
        del saved


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("prefetch", [1, 50])
def test_a_storage_that_was_written_to_in_between_is_another_value(device: str, prefetch: int) -> None:
    """What was saved first is never asked for, so that autograd has nothing against the write."""

    def body(layer: Any, x: Tensor) -> Tensor:
        hidden = layer.up(layer.norm(x))
        hidden.sin()
        torch.accelerator.synchronize()  # the copy of a value that nobody will use may not race with the write
        hidden.add_(1.0)
        return x + layer.down(hidden.cos())

    expected = train(body, None, device=device)
    assert same(expected.values, train(body, swap(prefetch=prefetch), device=device).values)


def test_freed_and_copied_bytes_of_a_view_are_counted_apart(scene: Scene) -> None:
    base = torch.arange(10_000.0).to("tide")
    saved = scene.pack(base[2000:3000])
    assert scene.line.moved_bytes - scene.line.spared_bytes == 1000 * 4  # copied
    before = torch.accelerator.memory_allocated()
    del base
    scene.free()
    assert before - torch.accelerator.memory_allocated() >= 10_000 * 4  # the view was the last to hold it
    assert torch.equal(saved.tensor().cpu(), torch.arange(2000.0, 3000.0))


VIEWS = {
    "transposed": lambda x: x.mT,
    "a column slice": lambda x: x[:, 3:60],
    "every other column": lambda x: x[:, ::2],
    "few columns": lambda x: x[:, 5:9],
    "few rows": lambda x: x[7:9],
    "no rows of few columns": lambda x: x[4:4, :7],
    "stride nought": lambda x: x[:, :1].expand(-1, 40),
    "stride nought of few": lambda x: x[:2, :1].expand(-1, 40),
    "stride nought in front": lambda x: x[None].expand(3, -1, -1),
    "overlapping": lambda x: x.as_strided((20, 8), (2, 1), 3),
    "another dtype": lambda x: x.view(torch.bfloat16)[:, 1:],
    "permuted": lambda x: x.view(4, 8, 64).permute(2, 0, 1),
    "one number": lambda x: x[3, 4],
    "complex": lambda x: torch.view_as_complex(x.view(32, 32, 2)),
}


@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS.keys())
def test_views_come_back_with_their_size_stride_and_values(device: str, view: Any, tier: Any) -> None:
    scene = Scene()
    base = torch.randn(32, 64).bfloat16().float().to(device)  # no NaN in any dtype
    tensor = view(base)
    layout = (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
    expected = tensor.cpu().clone()
    saved = scene.pack(tensor, tier)
    assert not isinstance(saved, Tensor)
    del tensor, base
    scene.free()
    found = unpack(saved)
    assert (found.shape, found.stride(), found.dtype, found.device) == layout
    assert torch.equal(found.cpu(), expected)


@pytest.fixture
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_a_distributed_tensor_leaves_in_parts(process_group: None, scene: Scene, tier: Any) -> None:
    mesh = init_device_mesh("cpu", (1,))
    tensor = DTensor.from_local(torch.arange(4096.0).view(64, 64), mesh, [Shard(0)])
    saved = scene.pack(tensor, tier)
    assert scene.line.moved_bytes == 4096 * 4
    del tensor
    scene.free()
    found = unpack(saved)
    assert isinstance(found, DTensor)
    assert found.placements == (Shard(0),)
    assert torch.equal(found.to_local(), torch.arange(4096.0).view(64, 64))


@pytest.mark.parametrize("prefetch", [3, 1000], ids=["after it left", "while it is here"])
def test_a_tensor_that_is_changed_in_place_is_refused(prefetch: int) -> None:
    change = False

    def body(layer: Any, x: Tensor) -> Tensor:
        hidden = layer.up(layer.norm(x))
        used = hidden.sin()
        if change:
            torch.accelerator.synchronize()
            hidden.detach().add_(1.0)
        return x + layer.down(used)

    model = train(body, swap("up", prefetch=prefetch)).model
    change = True
    with pytest.raises(SwapError, match="changed in place"):
        model(batch()).sum().backward()


def test_a_rebuild_does_not_take_a_value_that_was_written_later() -> None:
    """An argument of a recomputed call that is changed and then swapped is not the argument any more."""
    change = False

    def body(layer: Any, x: Tensor) -> Tensor:
        base = layer.up(x).detach() * 1.0
        used = layer.up(x) * base
        if change:
            torch.accelerator.synchronize()
            base.add_(1.0)
        return x + layer.down(used.sin() + (layer.up(x) * base).cos())

    rules = (Rule(Pattern("mul_1"), Recompute()), Rule(Pattern("mul"), Swap(1)), Rule(Pattern("add"), Swap(1)))
    model = train(body, LayerPolicy(rules=rules)).model
    change = True
    with pytest.raises(Exception, match=r"in place|inplace|modified"):
        model(batch()).sum().backward()


# Pipelines


@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize("device", DEVICES)
def test_micro_batches_have_state_of_their_own_and_a_pass_without_gradients_consumes_none(
    device: str, tier: Any
) -> None:
    def gradients(policy: Any) -> list[Tensor]:
        model = train(gated, policy, device=device).model
        model.zero_grad()
        torch.manual_seed(7)
        losses = [model(torch.randn(ROWS, WIDTH).to(device)).square().sum() for _ in range(3)]
        with torch.no_grad():
            model(torch.randn(ROWS, WIDTH).to(device))
        for loss in (losses[1], losses[0], losses[2]):
            loss.backward()
        return [parameter.grad.cpu() for parameter in model.parameters() if parameter.grad is not None]

    assert same(gradients(None), gradients(swap(prefetch=3, tier=tier)))


def test_a_pass_without_gradients_moves_nothing() -> None:
    trained = train(gated, swap())
    moved = sum(line.swaps for line in lines(trained.attached))
    with torch.no_grad():
        trained.model(batch())
    assert sum(line.swaps for line in lines(trained.attached)) == moved
