"""What lowtide relies on in torch's private names. A new torch that breaks one fails here first."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, init_device_mesh

from lowtide._torch_private import (
    FakeTensorMode,
    StorageWeakRef,
    TorchDispatchMode,
    at_end_of_backward,
    autocast_contexts,
    autocast_state,
    current_backward,
    inner_tensor,
    is_own_output,
    storage_bytes,
    storage_key,
    taken_apart,
    tree_leaves,
    tree_map,
    weak_storage,
    written_arguments,
)


def test_views_share_a_storage_key_and_copies_do_not() -> None:
    tensor = torch.ones(4, 4)
    assert storage_key(tensor) == storage_key(tensor.t()) == storage_key(tensor[1])
    assert storage_key(tensor) != storage_key(tensor.clone())


def test_a_weak_reference_expires_with_its_storage() -> None:
    tensor = torch.ones(4)
    view = tensor[1:]
    reference = StorageWeakRef(tensor.untyped_storage())
    del tensor
    assert not reference.expired()
    del view
    assert reference.expired()


def test_fake_tensors_have_bytes_and_keys_and_take_no_memory() -> None:
    with FakeTensorMode():
        tensor = torch.empty(1 << 40)
        assert tensor.untyped_storage().nbytes() == 4 << 40
        assert storage_key(tensor) == storage_key(tensor[: 1 << 10])


def test_leaves_of_nested_values_come_in_order() -> None:
    assert tree_leaves({"a": [1, (2, 3)], "b": 4}) == [1, 2, 3, 4]


def test_a_dispatch_mode_sees_kernels_with_their_schemas() -> None:
    seen: list[tuple[str, list[Any]]] = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append((func._schema.name, written_arguments(func, args, kwargs or {})))
            return func(*args, **(kwargs or {}))

    tensor = torch.ones(3)
    with Mode():
        tensor.mul_(2)
        tensor.add(1)
        torch.add(tensor, 1, out=tensor)
    names = [name for name, _ in seen]
    assert names == ["aten::mul_", "aten::add", "aten::add"]
    assert [len(written) for _, written in seen] == [1, 0, 1]
    assert seen[0][1][0] is tensor


def test_a_distributed_tensor_is_known_by_its_local_part_and_can_be_taken_apart() -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        local = torch.arange(6.0).view(2, 3)
        tensor = DTensor.from_local(local, mesh, [Replicate()])
        assert inner_tensor(tensor) is tensor._local_tensor
        assert storage_key(tensor) == storage_key(local)
        assert storage_bytes(tensor) == 24
        assert not weak_storage(tensor).expired()
        parts = taken_apart(tensor)
        assert parts is not None
        again = parts.rebuilt({name: part.clone() for name, part in parts.tensors.items()})
        assert isinstance(again, DTensor)
        assert torch.equal(again.to_local(), local)
        assert again.placements == tensor.placements
    finally:
        torch.distributed.destroy_process_group()
    assert taken_apart(local) is None


def test_a_callback_runs_at_the_end_of_the_backward_that_queued_it() -> None:
    seen: list[Any] = []

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            seen.append(current_backward())
            at_end_of_backward(lambda: seen.append("end"))
            return gradient * 2

    x = torch.ones(2, requires_grad=True)
    loss = Double.apply(Double.apply(x)).sum()
    assert current_backward() == -1
    loss.backward()
    assert seen[0] == seen[1] >= 0
    assert seen[2:] == ["end", "end"]


def test_autocast_can_be_set_as_it_was() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        inside = autocast_state()
        assert autocast_contexts(inside) == []
    assert autocast_state() != inside
    (context,) = autocast_contexts(inside)
    with context:
        assert autocast_state() == inside


def test_nested_values_can_be_mapped() -> None:
    assert tree_map(lambda leaf: leaf + 1, {"a": [1, (2,)]}) == {"a": [2, (3,)]}


def test_a_node_that_saves_its_own_output_is_told_from_others() -> None:
    found: list[bool] = []

    def pack(tensor: Tensor) -> Tensor:
        found.append(is_own_output(tensor))
        return tensor.detach()

    x = torch.ones(2, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        x.sin().sigmoid().cos()
    assert found == [False, True, False]
