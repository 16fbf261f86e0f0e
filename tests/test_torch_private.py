"""What lowtide relies on in torch's private names. A new torch that breaks one fails here first."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable import checkpoint as composable_checkpoint
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.utils.checkpoint import checkpoint

import lowtide
from lowtide._torch_private.autocast import autocast_contexts, autocast_state, is_any_autocast_enabled
from lowtide._torch_private.backward import (
    at_end_of_backward,
    current_backward,
    current_node,
    keeps_graph,
    leaves_out,
    set_grad_enabled,
)
from lowtide._torch_private.checkpointing import (
    CHECKPOINT_FUNCTION,
    composable_state,
    is_checkpoint_wrapper,
    runs_in_checkpoint,
)
from lowtide._torch_private.collectives import exchange_rows, group_name_of, is_collective
from lowtide._torch_private.compiled import (
    ATTRIBUTES_ARE_COUNTED,
    NothingCompiled,
    compiled_call,
    dict_version,
    is_compiled,
    runs_compiled,
    uncompiled,
    under_compilation,
)
from lowtide._torch_private.fake import (
    FakeTensor,
    FakeTensorMode,
    converting_fake_parameters,
    unset_fake_temporarily,
)
from lowtide._torch_private.generators import generator_key
from lowtide._torch_private.modes import (
    TorchDispatchMode,
    dispatch_modes_on,
    function_modes,
    hide_dispatch_mode,
    insert_dispatch_mode,
    python_dispatch,
    remove_dispatch_mode,
)
from lowtide._torch_private.nodes import (
    node_number,
    node_sequence,
    without_graph,
)
from lowtide._torch_private.operators import resolved_operator, scoped_library, tree_leaves, tree_map
from lowtide._torch_private.placements import held_indices
from lowtide._torch_private.profiler import profiler_range
from lowtide._torch_private.saved_tensor_hooks import (
    hooks_on_top,
    insert_saved_tensors_hooks,
    make_saved_tensor,
    pop_saved_tensors_hooks,
    push_saved_tensors_hooks,
    remove_saved_tensors_hooks,
    top_saved_tensors_hooks,
)
from lowtide._torch_private.scaler import calling_scaler, forget_unscaling
from lowtide._torch_private.storages import (
    StorageWeakRef,
    resize_watchers,
    storage_bytes,
    storage_key,
    storage_users,
    weak_storage,
)
from lowtide._torch_private.subclasses import inner_tensor, landed_tensor, subclass_wrapper, taken_apart
from lowtide._torch_private.training.foreach import multiply_all, norms_of
from lowtide._torch_private.training.resets import reset_pipeline
from lowtide._torch_private.versions import count_of_writes, version_of, versions_of, written_arguments


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
        assert isinstance(tensor, FakeTensor)
        assert tensor.device.type == "cpu"


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


@pytest.fixture(scope="module")
def mesh() -> Iterator[Any]:
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


def test_a_dtensor_is_taken_apart_and_put_together(mesh: Any) -> None:
    from torch.distributed.tensor import DTensor, Shard

    local = torch.ones(2, 3)
    tensor = DTensor.from_local(local, mesh, [Shard(0)])
    parts = taken_apart(tensor)
    assert parts is not None
    assert list(parts.tensors) == ["_local_tensor"]  # the mesh is none
    again = parts.rebuilt({"_local_tensor": local})
    wrap = subclass_wrapper(tensor)
    assert wrap is not None
    for found in (again, wrap(local)):
        assert isinstance(found, DTensor)
        assert (found.shape, found.placements) == (tensor.shape, tensor.placements)
    assert storage_key(tensor) == storage_key(landed_tensor(tensor)) == storage_key(local)
    assert inner_tensor(tensor) is tensor._local_tensor
    assert storage_bytes(tensor) == 24
    assert not weak_storage(tensor).expired()
    assert subclass_wrapper(local) is None
    assert taken_apart(local) is None


def test_a_write_to_a_dtensor_is_counted(mesh: Any) -> None:
    from torch.distributed.tensor import DTensor, Shard

    tensor = DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0)])
    before = version_of(tensor)
    tensor.add_(1)
    assert version_of(tensor) != before


def test_versions_of_many_are_those_of_each() -> None:
    written, parameter = torch.zeros(2), nn.Parameter(torch.zeros(2))
    written.add_(1)
    assert versions_of([written, parameter]) == [version_of(written), version_of(parameter)] == [1, 0]
    with torch.inference_mode():
        unversioned = torch.zeros(2)
    assert versions_of([written, unversioned]) == [1, 0]
    assert versions_of([]) == []


def test_a_count_of_writes_outlives_its_tensor_and_holds_none_of_its_bytes() -> None:
    tensor = torch.zeros(1000)
    view, count = tensor.view(10, 100), count_of_writes(tensor)
    assert storage_bytes(count) == 0
    before = count._version
    del tensor
    view.add_(1)
    assert count._version == before + 1


def test_a_functional_collective_is_given_the_name_of_its_group_last() -> None:
    space = torch.ops._c10d_functional
    names = {one.name for one in torch._C._jit_get_all_schemas() if one.name.startswith("_c10d_functional::")}
    operators = [getattr(space, name.removeprefix("_c10d_functional::")) for name in names]
    known = {one for one in operators if is_collective(one)}
    assert known >= {space.all_reduce, space.all_gather_into_tensor, space.all_to_all_single, space.broadcast}
    for one in operators:
        given = [argument.name for argument in one.default._schema.arguments if not argument.kwarg_only]
        named = given[-1] == "group_name"
        assert named == (one in known), one  # what only waits is given none
    assert group_name_of((torch.ones(1), "sum", "7"), {}) == "7"
    assert group_name_of((torch.ones(1), "sum"), {"group_name": "7"}) == "7"
    assert group_name_of((torch.ones(1), 2), {}) is None


def test_functional_collectives_are_known_by_their_namespace() -> None:
    space = torch.ops._c10d_functional
    assert is_collective(space.all_gather_into_tensor)
    assert is_collective(space.all_reduce.default)
    assert not is_collective(space.wait_tensor)
    assert not is_collective(torch.cat)


def test_checkpointed_modules_are_known() -> None:
    plain, composed = nn.Linear(2, 2), nn.Linear(2, 2)
    around = checkpoint_wrapper(nn.Linear(2, 2))
    composable_checkpoint(composed)
    assert [is_checkpoint_wrapper(one) for one in (plain, around, composed)] == [False, True, False]
    assert callable(getattr(around, CHECKPOINT_FUNCTION))
    assert composable_state(plain) is None
    assert composable_state(around) is None
    assert composable_state(composed).enable_hook is True


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_what_runs_in_a_checkpoint_is_known(use_reentrant: bool) -> None:
    found: list[bool] = []

    def run(x: Tensor) -> Tensor:
        found.append(runs_in_checkpoint())
        return x.sin()

    x = torch.ones(2, requires_grad=True)
    run(x)
    checkpoint(run, x, use_reentrant=use_reentrant)
    assert found == [False, True]


def test_compiled_modules_are_known_and_so_is_code_that_runs_in_them() -> None:
    seen: list[bool] = []

    class Module(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            torch._dynamo.graph_break()
            seen.append(under_compilation())
            return x + 1

    module = Module()
    assert not is_compiled(module)
    module(torch.ones(1))
    outside = torch.compile(module, backend="eager")
    assert is_compiled(outside)
    assert compiled_call(outside) == "forward"
    assert uncompiled(outside) is module
    assert uncompiled(module) is module
    outside(torch.ones(1))
    module.compile(backend="eager")
    assert is_compiled(module)
    assert compiled_call(module) == "_compiled_call_impl"
    assert seen[0] is False
    assert seen[1] is True


def test_nothing_is_compiled_for_a_while_and_what_torch_compile_called_is_known() -> None:
    seen: list[tuple[bool, bool]] = []

    class Module(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append((runs_compiled(), under_compilation()))
            return x + 1

    compiled = torch.compile(Module(), backend="aot_eager")
    Module()(torch.ones(1))
    with NothingCompiled():
        compiled(torch.ones(1))
    one, other = NothingCompiled(), NothingCompiled()
    one.on()
    other.on()
    other.on()
    one.off()
    compiled(torch.ones(1))
    other.off()
    other.off()
    assert seen == [(False, False), (True, False), (True, False)]
    assert torch._dynamo.eval_frame._stance.stance == "default"
    checkpoint(lambda x: seen.append((runs_compiled(), False)) or x, torch.ones(1), use_reentrant=False)
    assert seen[-1] == (False, False)


def test_a_node_that_saves_its_output_without_the_graph_does_not_hold_itself() -> None:
    with torch.autograd.graph.saved_tensors_hooks(without_graph, lambda tensor: tensor):
        output = torch.ones(3, requires_grad=True).exp()
    reference = StorageWeakRef(output.untyped_storage())
    del output
    assert reference.expired()


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


def test_the_node_that_runs_is_known_while_its_gradient_is_added_to_another() -> None:
    seen: list[Any] = []

    class Sums(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func._schema.name == "aten::add":
                seen.append(current_node())
            return func(*args, **(kwargs or {}))

    x = torch.ones(2, requires_grad=True)
    first, second = x.sin(), x.cos()
    loss = (first * second).sum()
    with Sums():
        loss.backward()
    assert len(seen) == 1  # between two nodes, and yet the one before is named
    assert seen[0] in (first.grad_fn, second.grad_fn)
    assert current_node() is None


def test_a_backward_says_whether_it_keeps_the_graph_and_what_it_leaves_out() -> None:
    seen: list[tuple[str, bool, bool]] = []

    def unpack(tensor: Tensor) -> Tensor:
        node = current_node()
        seen.append((node.name(), keeps_graph(), leaves_out(node)))
        return tensor

    x, weight = torch.randn(3, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.detach(), unpack):
        loss = (x @ weight).sin().sum()
    torch.autograd.grad(loss, [x], retain_graph=True)
    assert set(seen) == {("SinBackward0", True, False), ("MmBackward0", True, True)}
    seen.clear()
    torch.autograd.grad(loss, [x, weight], retain_graph=True)
    assert set(seen) == {("SinBackward0", True, False), ("MmBackward0", True, False)}
    seen.clear()
    loss.backward()
    assert set(seen) == {("SinBackward0", False, False), ("MmBackward0", False, False)}


def test_autocast_can_be_set_as_it_was() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        inside = autocast_state()
        (left_alone,) = autocast_contexts(inside)
        with left_alone:
            assert autocast_state() == inside
    assert autocast_state() != inside
    assert autocast_contexts(autocast_state()) == []
    with ExitStack() as stack:
        for context in autocast_contexts(inside):
            stack.enter_context(context)
        assert autocast_state() == inside


def test_autocast_set_in_backward_leaves_the_cast_weights_of_the_forward() -> None:
    layer, x = torch.nn.Linear(4, 4), torch.ones(2, 4)

    def another_thread() -> None:
        with ExitStack() as stack:
            for context in autocast_contexts(inside):
                stack.enter_context(context)
            with torch.no_grad():
                layer(x)

    with torch.autocast("cpu", torch.bfloat16):
        inside = autocast_state()
        first = layer(x)
        thread = Thread(target=another_thread)
        thread.start()
        thread.join()
        second = layer(x)
    bias = [output.grad_fn.next_functions[0][0] for output in (first, second)]
    assert "ToCopy" in type(bias[0]).__name__
    assert bias[0] is bias[1]


def test_nested_values_can_be_mapped() -> None:
    assert tree_map(lambda leaf: leaf + 1, {"a": [1, (2,)]}) == {"a": [2, (3,)]}


def test_gradients_can_be_turned_on_and_off() -> None:
    set_grad_enabled(False)
    assert not torch.is_grad_enabled()
    set_grad_enabled(True)
    assert torch.is_grad_enabled()


def test_many_tensors_are_measured_and_multiplied_at_once() -> None:
    tensors = [torch.full((9,), 2.0, dtype=torch.bfloat16), torch.tensor([3.0, 4.0]), torch.empty(0)]
    norms = norms_of(tensors)
    assert [norm.item() for norm in norms] == [6.0, 5.0, 0.0]
    assert {norm.dtype for norm in norms} == {torch.float32}
    multiply_all(tensors, torch.tensor(0.5))
    assert tensors[1].tolist() == [1.5, 2.0]
    assert tensors[0].dtype == torch.bfloat16


def test_the_places_that_a_rank_holds_are_those_of_its_part(mesh: Any) -> None:
    from torch.distributed.tensor import DTensor, Replicate, Shard

    whole = torch.arange(15).view(5, 3)
    parts = [(Shard(0), whole[:3]), (Shard(1), whole[:, :2]), (Shard(-1), whole[:, :2]), (Replicate(), whole)]
    for placement, part in parts:
        rows, columns = held_indices(DTensor.from_local(part, mesh, [placement], shape=(5, 3), stride=(3, 1)))
        assert torch.equal(whole[rows][:, columns], part)


def test_rows_that_are_exchanged_are_as_many_as_were_announced(mesh: Any) -> None:
    """What they hold is shown by two ranks with experts of their own, in ``tests/models``."""
    assert exchange_rows(torch.ones(3, 2), [1, 4], [2, 1], mesh.get_group()).shape == (5, 2)


def test_nodes_are_numbered_in_the_order_in_which_they_are_made() -> None:
    assert top_saved_tensors_hooks(False) is None
    x = torch.ones(3, requires_grad=True)
    number = node_number()
    first, second = x * 2.0, x * 3.0
    product = first * second
    assert node_sequence(product.grad_fn) == number + 2 == node_number() - 1
    push_saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
    try:
        assert top_saved_tensors_hooks(False) is not None
    finally:
        pop_saved_tensors_hooks()


def test_a_range_is_seen_by_the_profiler_and_by_no_mode() -> None:
    seen: list[Any] = []

    class Seeing(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with torch.profiler.profile() as profile, Seeing(), profiler_range("lowtide::a range"):
        pass
    assert seen == []
    assert "lowtide::a range" in {event.name for event in profile.events()}


def test_modes_and_autocast_are_noticed() -> None:
    assert not function_modes()
    assert not is_any_autocast_enabled()
    with torch.device("cpu"), torch.autocast("cpu"):
        assert function_modes()
        assert is_any_autocast_enabled()


def test_an_operators_overload_follows_from_its_arguments() -> None:
    ones = torch.ones(3, 4)
    assert resolved_operator("aten::mul", [ones, 2.0], {}) is torch.ops.aten.mul.Tensor
    assert resolved_operator("aten::sum", [ones, [0], True], {}) is torch.ops.aten.sum.dim_IntList
    assert resolved_operator("aten::_foreach_add_", [[ones], [ones]], {}) is torch.ops.aten._foreach_add_.List
    assert resolved_operator("aten::mm", [ones, ones.t()], {}) is torch.ops.aten.mm.default


def test_a_kernel_is_registered_for_as_long_as_its_library_is_open() -> None:
    ones = torch.ones(2, 4, requires_grad=True)
    plain = type(torch.nn.functional.rms_norm(ones, (4,)).grad_fn)
    with scoped_library("aten", "IMPL") as library:
        library.impl("_fused_rms_norm", lambda given, *_: (given.clone(), given[:, :1].clone()), "CPU")
        assert type(torch.nn.functional.rms_norm(ones, (4,)).grad_fn).__name__ == "FusedRmsNormBackward0"
    assert type(torch.nn.functional.rms_norm(ones, (4,)).grad_fn) is plain


def test_the_tensors_that_see_a_storage_are_counted() -> None:
    tensor = torch.ones(4)
    assert storage_users(tensor) == 1
    view, detached = tensor[:2], tensor.detach()
    assert storage_users(tensor) == storage_users(view) == 3
    del view, detached
    assert storage_users(tensor) == 1
    saved = torch.ones(4, requires_grad=True).exp()  # by its own node
    assert storage_users(saved) == 2


def test_a_pipelines_schedule_forgets_the_losses_of_a_step_that_was_broken_off(mesh: Any) -> None:
    layer, failing = torch.nn.Linear(2, 2), [True]

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if failing[0] and bool(target.any()):
            raise torch.OutOfMemoryError
        return (output - target).square().sum()

    stage = PipelineStage(layer, 0, 1, torch.device("cpu"), group=dist.new_group([0]))
    schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=loss)
    given, target = torch.ones(2, 2), torch.tensor([[0.0, 0.0], [1.0, 1.0]])
    losses: list[torch.Tensor] = []
    with pytest.raises(torch.OutOfMemoryError):
        schedule.step(given, target=target, losses=losses)
    failing[0] = False
    with pytest.raises(RuntimeError, match="Expecting 2 losses but got 3"):
        schedule.step(given, target=target, losses=losses)
    reset_pipeline(schedule)
    schedule.step(given, target=target, losses=losses)
    assert len(losses) == 2


def test_whoever_asks_for_the_accelerator_asks_whether_it_is_there() -> None:
    """A build for a device on a machine without one names it all the same."""
    package = Path(lowtide.__file__).parent
    calls = [line for file in package.rglob("*.py") for line in file.read_text().splitlines()]
    assert [line for line in calls if "torch.accelerator.current_accelerator()" in line] == []


class _Looking(TorchDispatchMode):
    """Counts what it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += 1
        return func(*args, **(kwargs or {}))


def test_a_mode_at_the_bottom_ends_when_it_likes_and_so_do_others() -> None:
    ours, before, after = _Looking(), _Looking(), _Looking()
    before.__enter__()
    insert_dispatch_mode(ours)
    assert dispatch_modes_on() == [ours, before]
    before.__exit__(None, None, None)
    assert dispatch_modes_on() == [ours]
    assert python_dispatch.is_in_torch_dispatch_mode()
    after.__enter__()
    torch.ones(1)
    remove_dispatch_mode(ours)
    remove_dispatch_mode(ours)  # nothing happens
    assert dispatch_modes_on() == [after]
    torch.ones(1)
    after.__exit__(None, None, None)
    assert (before.seen, ours.seen, after.seen) == (0, 1, 2)
    assert not python_dispatch.is_in_torch_dispatch_mode(include_infra_modes=False)
    assert not python_dispatch.is_in_torch_dispatch_mode()
    assert not python_dispatch.is_in_any_mode_without_ignore_compile_internals()


def test_torchs_own_modes_stay_below() -> None:
    ours = _Looking()
    with FakeTensorMode() as fake:
        insert_dispatch_mode(ours)
        assert dispatch_modes_on() == [fake, ours]
        torch.ones(1)
        remove_dispatch_mode(ours)
        assert dispatch_modes_on() == [fake]
    assert ours.seen > 0


def test_hooks_at_the_bottom_end_when_they_like_and_so_do_others() -> None:
    asked: list[str] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        asked.append("ours")
        return tensor

    def save() -> None:
        torch.ones(1, requires_grad=True).exp()

    theirs = torch.autograd.graph.saved_tensors_hooks(lambda one: (asked.append("theirs"), one)[1], lambda one: one)
    theirs.__enter__()
    insert_saved_tensors_hooks(pack, lambda one: one)
    save()
    assert not hooks_on_top(pack)
    theirs.__exit__()
    save()
    assert hooks_on_top(pack)
    theirs.__enter__()
    remove_saved_tensors_hooks(pack)
    remove_saved_tensors_hooks(pack)  # nothing happens
    save()
    theirs.__exit__()
    save()
    assert asked == ["theirs", "ours", "theirs"]
    assert top_saved_tensors_hooks(True) is None


def test_a_tensor_is_saved_through_hooks_and_checked_for_writes_as_by_a_node() -> None:
    tensor = torch.ones(3, requires_grad=True) * 2
    with torch.autograd.graph.saved_tensors_hooks(lambda one: one.numpy(force=True), torch.from_numpy):
        packed = make_saved_tensor(tensor)
    unpacked = packed.unpack()
    assert unpacked is not tensor
    assert torch.equal(unpacked, tensor)
    saved = make_saved_tensor(tensor)
    with torch.no_grad():
        tensor.add_(1)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation: .* is at version 1; expected version 0"):
        saved.unpack()


def test_hooks_are_refused_where_torch_allows_none() -> None:
    with (
        torch.autograd.graph.disable_saved_tensors_hooks("not here"),
        pytest.raises(RuntimeError, match="not here"),
    ):
        insert_saved_tensors_hooks(lambda one: one, lambda one: one)


def test_storages_that_are_resized_are_seen_by_all_who_watch_in_whatever_order_they_end() -> None:
    plain, seen = torch.UntypedStorage.resize_, []

    def first(resize: Any, storage: Any, size: int) -> Any:
        seen.append(("first", size))
        return resize(storage, size)

    def second(resize: Any, storage: Any, size: int) -> Any:
        seen.append(("second", size))
        return resize(storage, size)

    storage = torch.ones(4).untyped_storage()
    resize_watchers.add(first)
    resize_watchers.add(second)
    storage.resize_(0)
    resize_watchers.remove(first)
    storage.resize_(8)
    resize_watchers.remove(second)
    storage.resize_(4)
    assert seen == [("second", 0), ("first", 0), ("second", 8)]
    assert storage.nbytes() == 4
    assert torch.UntypedStorage.resize_ is plain


def test_a_mode_is_hidden_from_one_node_of_backward() -> None:
    mode, nodes = _Looking(), []
    x = torch.randn(4, requires_grad=True)
    squared = x * x
    result = squared.exp().sum()
    squared.grad_fn.register_prehook(lambda _: hide_dispatch_mode(mode))

    class Noting(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nodes.append((mode.seen, getattr(current_node(), "name", str)()))
            return func(*args, **(kwargs or {}))

    insert_dispatch_mode(mode)
    with Noting():
        result.backward()
    remove_dispatch_mode(mode)
    seen = {node: count for count, node in nodes}
    in_square = [count for count, node in nodes if node == "MulBackward0"]
    assert in_square == [in_square[0]] * len(in_square)  # it saw nothing of that node
    assert seen["MulBackward0"] > 0


def test_the_scaler_that_calls_is_found() -> None:
    found = []
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: found.append(calling_scaler()))
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(parameter.sum()).backward()
    scaler.step(optimizer)
    optimizer.step()
    assert found == [scaler, None]
    assert scaler._per_optimizer_states
    forget_unscaling([scaler, torch.amp.GradScaler("cpu", enabled=False)], [optimizer])
    assert not scaler._per_optimizer_states


def test_a_generator_is_known_by_its_address() -> None:
    generator, seen = torch.Generator(), []

    class Seeing(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.extend(one for one in (*args, *(kwargs or {}).values()) if isinstance(one, torch.Generator))
            return func(*args, **(kwargs or {}))

    with Seeing():
        torch.randn(2, generator=generator)
    assert [generator_key(one) for one in seen] == [generator_key(generator)]
    assert generator_key(torch.Generator()) != generator_key(generator)


def test_a_mapping_has_another_version_after_every_change() -> None:
    class Counter:
        def __init__(self) -> None:
            self.count = 0

        def step(self) -> None:
            self.count += 1

    counter = Counter()
    versions = [dict_version(vars(counter))]
    for _ in range(200):  # Python specializes what it runs often
        counter.step()
        versions.append(dict_version(vars(counter)))
    assert len(set(versions)) == 201
    counter.count = counter.count
    assert (dict_version(vars(counter)) == versions[-1]) == ATTRIBUTES_ARE_COUNTED
    del counter.count
    assert dict_version(vars(counter)) not in versions


def test_converting_fake_parameters_keeps_what_is_tied_and_what_has_weak_references() -> None:
    with FakeTensorMode(), converting_fake_parameters():
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
        model[1].weight = model[0].weight
        model[2].requires_grad_(False)
        held = weakref.ref(model[2].weight)  # torch's own conversion refuses to swap such a tensor
        model.to(torch.bfloat16)
    assert held() is not model[2].weight
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert model[1].weight is model[0].weight
    assert [parameter.requires_grad for parameter in model[2].parameters()] == [False, False]
    assert nn.Linear(2, 2).to(torch.float64).weight.dtype == torch.float64


def test_tensors_are_real_where_a_fake_mode_is_unset() -> None:
    with FakeTensorMode():
        with unset_fake_temporarily():
            assert type(torch.empty(2)) is torch.Tensor
        assert isinstance(torch.empty(2), FakeTensor)
