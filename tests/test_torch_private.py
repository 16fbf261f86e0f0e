"""What lowtide relies on in torch's private names. A new torch that breaks one fails here first."""

from __future__ import annotations

from typing import Any

import torch

from lowtide._torch_private import (
    FakeTensorMode,
    StorageWeakRef,
    TorchDispatchMode,
    storage_key,
    tree_leaves,
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
