"""What the reference runner relies on in torch's private names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

from lowtide._torch_private.stores import default_store
from lowtide._torch_private.training.meshes import flattened, imagined_process_group
from lowtide._torch_private.training.resets import reset_pipeline, reset_reducer, reset_sharding, use_group


class BrokenOffError(Exception):
    pass


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def model_of() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))


def step(model: Callable[[Tensor], Tensor], *, broken_by: nn.Module | None = None) -> None:
    """A forward and a backward, which may be broken off where it comes to a module."""

    def fail(*_: Any) -> None:
        raise BrokenOffError

    handle = broken_by.register_full_backward_pre_hook(fail) if broken_by is not None else None
    given = torch.arange(6.0).view(2, 3).requires_grad_()
    try:
        model(given).square().sum().backward()
    finally:
        if handle is not None:
            handle.remove()


def gradients(model: nn.Module) -> list[Tensor]:
    found = [parameter.grad for parameter in model.parameters()]
    assert None not in found
    return [one.full_tensor() if hasattr(one, "full_tensor") else one for one in found if one is not None]


def test_ddp_forgets_a_backward_that_was_broken_off(alone: None) -> None:
    plain, model = model_of(), model_of()
    step(plain)
    parallel = DistributedDataParallel(model)
    with pytest.raises(BrokenOffError):
        step(parallel, broken_by=model[0])
    with pytest.raises(RuntimeError, match="finished reduction"):
        step(parallel)
    model.zero_grad()
    reset_reducer(parallel)
    step(parallel)
    assert all(map(torch.equal, gradients(model), gradients(plain)))


@pytest.mark.parametrize("synchronized", [True, False])
def test_fsdp_forgets_the_gradients_of_a_step_that_was_broken_off(alone: None, synchronized: bool) -> None:
    """Those that were accumulated and not reduced yet are the gathered parameters' own."""
    plain, model = model_of(), model_of()
    step(plain)
    mesh = init_device_mesh("cpu", (1,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.set_requires_gradient_sync(synchronized)  # type: ignore[operator]
    if not synchronized:
        step(model)
    with pytest.raises(BrokenOffError):
        step(model, broken_by=model[0])
    model.zero_grad()
    reset_sharding(model)
    model.set_requires_gradient_sync(True)  # type: ignore[operator]
    step(model)
    assert all(map(torch.equal, gradients(model), gradients(plain)))


def test_a_pipelines_step_that_was_broken_off_leaves_no_buffer_and_no_loss_behind(alone: None) -> None:
    """Two chunks on one rank, whose second fails when there is a loss already."""
    given, target = torch.randn(4, 3), torch.randn(4, 3)
    left = [-1]

    def fail(module: nn.Module, args: Any) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise BrokenOffError

    def losses_of(schedule: Any) -> Tensor:
        losses: list[Tensor] = []
        schedule.step(given, target=target, losses=losses)
        return torch.stack(losses)

    sample = torch.empty(1, 3, device="meta", requires_grad=True)
    layers = model_of()
    layers[1].register_forward_pre_hook(fail)
    stages = [
        PipelineStage(layer, place, 2, torch.device("cpu"), input_args=(sample,), output_args=(sample,))
        for place, layer in enumerate(layers)
    ]
    schedule = ScheduleInterleaved1F1B(stages, n_microbatches=4, loss_fn=nn.functional.mse_loss)
    expected = losses_of(schedule)
    left[0] = 2
    with pytest.raises((BrokenOffError, RuntimeError)):
        losses_of(schedule)
    for info in stages[1].args_recv_info[3]:
        info.buffer = torch.ones(1, 3)  # as of a receive that was posted ahead
    with pytest.raises(RuntimeError, match=r"Failed to run stage backward|still owned"):
        losses_of(schedule)
    reset_pipeline(schedule)
    group = dist.new_group([0])
    use_group(schedule, group)
    assert torch.equal(losses_of(schedule), expected)
    groups = [one for stage in stages for one in vars(stage).values() if isinstance(one, dist.ProcessGroup)]
    assert groups
    assert all(one is group for one in groups)


def test_the_store_of_the_default_group_is_found(alone: None) -> None:
    default_store().set("key", "value")
    assert default_store().get("key") == b"value"


def test_ranks_can_be_imagined_and_their_meshes_flattened() -> None:
    with imagined_process_group(8):
        assert (dist.get_world_size(), dist.get_rank()) == (8, 0)
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pipeline", "replicate", "shard"))
        both = flattened(mesh, ("replicate", "shard"), "data")
        assert both.size() == 4
        assert mesh["data"].mesh.tolist() == [0, 1, 2, 3]
        dist.all_reduce(torch.ones(1))  # nobody answers, and nobody is waited for
    assert not dist.is_initialized()


def sharded_product(world: int, before: int) -> None:
    """A sum over tensor-parallel ranks, in a group whose name depends on how many were made before it."""
    with imagined_process_group(world):
        for _ in range(before):
            dist.new_group([0, 1])
        mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("data", "tensor"))["tensor"]
        left, right = torch.ones(4, 4), torch.ones(4, 4)
        product = DTensor.from_local(left, mesh, [Shard(1)]) @ DTensor.from_local(right, mesh, [Shard(0)])
        product.redistribute(placements=[Shard(0)]).to_local()


def test_nothing_of_an_imagined_group_is_left_in_the_caches_of_tensors() -> None:
    sharded_product(8, before=2)
    sharded_product(8, before=0)  # the same mesh, whose groups have other names
