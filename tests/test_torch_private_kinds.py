"""Kinds of tensors, modes and collectives as torch's private names tell them apart."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import tide  # noqa: F401  registers the device
from lowtide._torch_private.autocast import AutocastState, autocast_state
from lowtide._torch_private.backward import backward_node_number, in_forward_mode
from lowtide._torch_private.collectives import COLLECTIVE_NAMESPACES, finish_collective, group_named
from lowtide._torch_private.compiled import is_dynamo_compiling
from lowtide._torch_private.memory import MemoryStats, memory_stats
from lowtide._torch_private.modes import (
    DeviceContext,
    DisableTorchFunction,
    TorchDispatchMode,
    current_dispatch_mode,
    dispatch_modes,
    dispatch_modes_on,
    function_modes,
    function_modes_on,
    remove_function_mode,
    unseen_by_modes,
)
from lowtide._torch_private.modules import buffers_of, parameters_of, submodules_of
from lowtide._torch_private.nodes import is_cast, is_own_output, node_sequence
from lowtide._torch_private.operators import is_operator, schema_of
from lowtide._torch_private.saved_tensor_hooks import saved_by_selective_checkpoint
from lowtide._torch_private.settings import PRECISIONS, SETTINGS, Setting
from lowtide._torch_private.storages import has_storage, storage_address, storage_key, storage_of, stored_tensor
from lowtide._torch_private.subclasses import PLAIN, Subclass, taken_apart
from lowtide._torch_private.training.meshes import imagined_process_group
from lowtide._torch_private.versions import WRITES_UNCOUNTED, own_version, written_arguments
from lowtide._torch_private.views import negated_view, view_base


class _Functions(TorchFunctionMode):
    """Counts the torch functions that it sees."""

    def __init__(self) -> None:
        self.seen = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += 1
        return func(*args, **(kwargs or {}))


class _Kernels(TorchDispatchMode):
    """Counts the kernels that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += 1
        return func(*args, **(kwargs or {}))


def test_the_modes_that_are_on_are_counted_and_listed() -> None:
    assert (dispatch_modes(), current_dispatch_mode()) == (0, None)
    with _Kernels() as outer, _Kernels() as inner, torch.device("meta"), _Functions() as functions:
        assert dispatch_modes() == 2
        assert dispatch_modes_on() == [outer, inner]
        assert current_dispatch_mode() is inner
        assert function_modes() == 2
        device, ours = function_modes_on()
        assert isinstance(device, DeviceContext)
        assert device.device == torch.device("meta")
        assert ours is functions


def test_a_function_mode_is_taken_off_from_wherever_it_is() -> None:
    below, above = _Functions(), _Functions()
    below.__enter__()
    above.__enter__()
    remove_function_mode(below)
    remove_function_mode(below)  # nothing happens
    assert function_modes_on() == [above]
    torch.ones(1) + 1
    above.__exit__(None, None, None)
    assert below.seen == 0
    assert above.seen > 0


def test_function_modes_are_not_asked_where_they_are_turned_off() -> None:
    with _Functions() as mode:
        with DisableTorchFunction():
            torch.ones(1) + 1
        assert mode.seen == 0
        torch.ones(1)
    assert mode.seen == 1


def test_dispatch_modes_do_not_see_what_is_hidden_from_them() -> None:
    tensor = torch.ones(2)
    with _Kernels() as mode:
        with unseen_by_modes():
            doubled = tensor * 2
        assert mode.seen == 0
        tensor * 2
    assert mode.seen == 1
    assert doubled.tolist() == [2, 2]


def test_the_state_of_autocast_says_what_each_device_casts_to() -> None:
    assert autocast_state() == ()
    with torch.autocast("cpu", torch.float16):
        state: AutocastState = autocast_state()
    assert dict(state)["cpu"] is torch.float16


def test_the_node_that_backward_runs_has_the_number_it_got_in_forward() -> None:
    seen: list[int] = []
    squared = torch.ones(2, requires_grad=True).square()
    squared.grad_fn.register_prehook(lambda _: seen.append(backward_node_number()))
    assert backward_node_number() == -1
    squared.sum().backward()
    assert seen == [node_sequence(squared.grad_fn)]


def test_forward_mode_is_noticed() -> None:
    assert not in_forward_mode()
    with forward_ad.dual_level():
        assert in_forward_mode()
    seen: list[bool] = []
    torch.func.jvp(lambda x: (seen.append(in_forward_mode()), x * 2)[1], (torch.ones(1),), (torch.ones(1),))
    assert seen == [True]


def test_dynamo_says_when_it_traces() -> None:
    def doubled(tensor: Tensor) -> Tensor:
        return tensor * (2 if is_dynamo_compiling() else 3)

    assert doubled(torch.ones(1)).item() == 3
    assert torch.compile(doubled, backend="eager")(torch.ones(1)).item() == 2


def test_a_node_that_saves_its_own_output_is_told_from_one_that_saves_anothers() -> None:
    own: list[bool] = []

    def pack(tensor: Tensor) -> Tensor:
        own.append(is_own_output(tensor))
        return tensor.detach()

    given = torch.ones(2, requires_grad=True)
    product = given * 2.0
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        product.exp()  # saves what it gives
        product.sin()  # saves what it is given
        given.sin()  # a leaf is nobody's output
    assert own == [True, False, False]


@pytest.mark.skipif(
    "respect_saved_tensors_hooks" not in inspect.signature(checkpoint).parameters,
    reason="this torch does not show a selective checkpoint's tensors to hooks",
)
def test_what_a_selective_checkpoint_saves_is_told_from_what_autograd_does() -> None:
    seen: list[bool] = []

    def pack(tensor: Tensor) -> Tensor:
        seen.append(saved_by_selective_checkpoint())
        return tensor.detach()

    def contexts() -> Any:
        return create_selective_checkpoint_contexts([torch.ops.aten.exp.default])

    given = torch.ones(2, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        settings: Any = {"respect_saved_tensors_hooks": True, "context_fn": contexts}
        checkpoint(lambda one: one.exp().sin(), given, use_reentrant=False, **settings)
        within = list(seen)
        given.exp()
    assert True in within
    assert seen[len(within) :] == [False]


def test_a_cast_is_known_through_views() -> None:
    source = torch.ones(2, 3, requires_grad=True) * 2.0
    cast = source.view(6).to(torch.bfloat16)
    assert is_cast(cast, source)
    assert is_cast(cast.view(3, 2), source)
    assert not is_cast(source.view(6), source)
    assert not is_cast((source * 2.0).to(torch.bfloat16), source)


def test_a_tensor_without_a_storage_of_its_own_has_one_that_holds_its_values() -> None:
    plain = torch.eye(3)
    sparse = plain.to_sparse()
    rows = plain.to_sparse_csr()
    assert has_storage(plain)
    assert stored_tensor(plain) is plain
    assert storage_of(plain).data_ptr() == plain.data_ptr()
    for tensor in (sparse, rows):
        assert not has_storage(tensor)
        assert stored_tensor(tensor).tolist() == [1, 1, 1]
        assert storage_of(tensor).nbytes() == 12
    seen: list[tuple[bool, int]] = []

    def look(tensor: Tensor) -> Tensor:
        seen.append((has_storage(tensor), storage_key(tensor)))
        return tensor * 2

    torch.vmap(look)(plain)
    assert seen == [(False, storage_key(plain))]


def test_parameters_are_plain_and_what_is_not_can_be_taken_apart() -> None:
    assert type(torch.nn.Parameter(torch.ones(1))) in PLAIN
    with imagined_process_group(2):
        from torch.distributed.tensor import Replicate, distribute_tensor

        tensor = distribute_tensor(torch.ones(2), dist.init_device_mesh("cpu", (2,)), [Replicate()])
        assert type(tensor) not in PLAIN
        whole = taken_apart(tensor)
    assert isinstance(whole, Subclass)
    assert whole.kind is type(tensor)


@pytest.mark.parametrize("name", WRITES_UNCOUNTED)
def test_kernels_with_running_statistics_have_them_where_they_are_looked_for(name: str) -> None:
    schema = getattr(torch.ops.aten, name.removeprefix("aten::")).default._schema
    running = schema.arguments[WRITES_UNCOUNTED[name]]
    assert [argument.name for argument in running] == ["running_mean", "running_var"]
    assert all(argument.alias_info is None for argument in running)  # otherwise it need not be listed


def test_running_statistics_are_written_in_training_alone() -> None:
    mean, variance = torch.zeros(2), torch.ones(2)
    kernel = torch.ops.aten.native_batch_norm.default
    given = (torch.randn(4, 2), None, None, mean, variance)
    for training in (True, False):
        written = written_arguments(kernel, (*given, training, 0.1, 1e-5), {})
        assert [id(one) for one in written] == ([id(mean), id(variance)] if training else [])
        before = mean.clone()
        kernel(*given, training, 0.1, 1e-5)
        assert torch.equal(mean, before) is not training


def test_every_namespace_with_collectives_is_known() -> None:
    """What is done by several ranks is told which: by a group, or by its name."""
    groups = {"group_name", "process_group"}
    schemas = torch._C._jit_get_all_schemas()
    found = {one.name.split("::")[0] for one in schemas if groups & {given.name for given in one.arguments}}
    assert found >= {"c10d", "_c10d_functional", "_c10d_functional_autograd"}
    assert found <= COLLECTIVE_NAMESPACES


def test_a_collective_names_its_group_and_is_finished_by_waiting() -> None:
    with imagined_process_group(2):
        group = dist.group.WORLD
        assert group_named(group.group_name) is group
        under_way = torch.ops._c10d_functional.all_gather_into_tensor(torch.ones(2), 2, group.group_name)
        with _Waits() as waits:
            done = finish_collective([under_way, "not a tensor"])
    assert waits.names == ["_c10d_functional::wait_tensor"]
    assert done[0].shape == (4,)
    assert done[1] == "not a tensor"


class _Waits(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def test_a_tensor_counts_its_own_writes_and_knows_what_it_is_a_view_of() -> None:
    tensor = torch.zeros(4)
    view = tensor[:2]
    before = own_version(tensor)
    view.add_(1)
    assert own_version(tensor) == own_version(view) == before + 1
    assert view_base(view) is tensor
    assert view_base(tensor) is None
    negated = negated_view(tensor)
    assert negated.is_neg()
    assert negated.tolist() == [-1, -1, 0, 0]
    assert storage_address(tensor.untyped_storage()) == storage_key(negated)


def test_an_operator_has_a_schema() -> None:
    assert is_operator(torch.ops.aten.add_.Tensor)
    assert not is_operator(torch.ops.higher_order.cond)
    schema = schema_of(torch.ops.aten.add_.Tensor)
    assert (schema.name, schema.arguments[0].alias_info.is_write) == ("aten::add_", True)


def test_a_modules_dictionaries_are_those_that_it_looks_things_up_in() -> None:
    module = torch.nn.Sequential(torch.nn.BatchNorm1d(2))
    assert list(submodules_of(module)) == ["0"]
    norm = module[0]
    assert list(parameters_of(norm)) == ["weight", "bias"]
    buffers_of(norm)["running_mean"] = changed = torch.ones(2)
    assert norm.running_mean is changed


@pytest.mark.parametrize("name", [*SETTINGS, *PRECISIONS])
def test_a_setting_can_be_read_and_set_to_what_it_was(name: str) -> None:
    setting: Setting = (SETTINGS | PRECISIONS)[name]
    before = setting.get()
    other = not before if isinstance(before, bool) else before
    try:
        setting.set(other)
        assert setting.get() == other
    except RuntimeError as error:
        if "not supported by the CPU" not in str(error):
            raise
    finally:
        setting.set(before)
    assert setting.get() == before


def test_memory_statistics_are_torchs_own() -> None:
    held = torch.empty(1000, device="tide")
    found, torchs = memory_stats(held.device), torch.accelerator.memory_stats()
    assert found == MemoryStats(
        torchs["allocated_bytes.all.current"],
        torchs["allocated_bytes.all.peak"],
        torchs["reserved_bytes.all.current"],
        torchs["reserved_bytes.all.peak"],
        torchs["num_alloc_retries"] + torchs["num_ooms"],
    )
    assert found.allocated >= held.nbytes
    assert memory_stats(torch.device("tide")) == found
