"""Programs for several processes, and a way to run them.

Each runs once on the device over its own backend and once on the CPU over gloo.
"""

from __future__ import annotations

import os
import socket
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from llama import Llama, Shape, build, loss_of

import tide

SHAPE = Shape(layers=4)
STEPS = 3


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def _rank(rank: int, size: int, port: int, device: str, mode: str, programs, queue) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    try:
        dist.init_process_group("cpu:gloo,tide:tide" if device == "tide" else "gloo")
        answers = {}
        for program in programs:
            tide.reset()
            tide.configure(mode=mode)
            answers[program.__name__] = program(device)
            if program is not unwaited:
                tide.check_races()
            dist.barrier()
        queue.put((rank, answers, None))
        dist.destroy_process_group()
    except BaseException:
        queue.put((rank, None, traceback.format_exc()))
        raise


def run(programs: list[Callable], device: str, mode: str = "virtual", size: int = 2):
    """Runs the programs one after the other in `size` processes.

    Returns, for the name of each program, the answers of all ranks in order.
    """
    context = multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    port = free_port()
    processes = [
        context.Process(target=_rank, args=(rank, size, port, device, mode, programs, queue))
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    answers: dict[int, Any] = {}
    errors = []
    for _ in processes:
        rank, answer, error = queue.get()
        answers[rank] = answer
        if error:
            errors.append(f"rank {rank}:\n{error}")
            break  # the others may wait for it for ever
    for process in processes:
        if errors:
            process.kill()
        process.join(60)
    assert not errors, "\n".join(errors)
    return {
        program.__name__: [answers[rank][program.__name__] for rank in range(size)]
        for program in programs
    }


def tokens_of(rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 + rank)
    return torch.randint(SHAPE.vocabulary, (SHAPE.batch, SHAPE.sequence), generator=generator)


def _train(model, device: str) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = tokens_of(dist.get_rank()).to(device)
    losses = []
    for _ in range(STEPS):
        loss = loss_of(model(tokens), tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
    return losses


def collectives(device: str) -> list[Any]:
    """Every collective once; plain values, to be equal on both devices."""
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = torch.arange(4.0, device=device) + 10 * rank
    seen = []

    x = mine.clone()
    dist.all_reduce(x)
    seen.append(x.tolist())
    x = mine.clone()
    dist.all_reduce(x, op=dist.ReduceOp.MAX)
    seen.append(x.tolist())
    x = mine.clone()
    dist.broadcast(x, src=1)
    seen.append(x.tolist())
    lists = [torch.empty_like(mine) for _ in range(size)]
    dist.all_gather(lists, mine)
    seen.append([t.tolist() for t in lists])
    flat = torch.empty(4 * size, device=device)
    dist.all_gather_into_tensor(flat, mine)
    seen.append(flat.tolist())
    part = torch.empty(2, device=device)
    dist.reduce_scatter_tensor(part, mine)
    seen.append(part.tolist())
    dist.reduce_scatter(part, list(mine.chunk(size)))
    seen.append(part.tolist())
    out = torch.empty_like(mine)
    dist.all_to_all_single(out, mine)
    seen.append(out.tolist())
    dist.all_to_all_single(out, mine, [2, 2], [2, 2])
    seen.append(out.tolist())
    if device == "tide":  # gloo has no list form; this is what it would give
        pieces = [torch.empty(2, device=device) for _ in range(size)]
        dist.all_to_all(pieces, list(mine.chunk(size)))
        seen.append(torch.cat(pieces).tolist())
    else:
        seen.append(out.tolist())
    x = mine.clone()
    dist.reduce(x, dst=0)
    seen.append(x.tolist() if rank == 0 else None)
    lists = [torch.empty_like(mine) for _ in range(size)] if rank == 0 else None
    dist.gather(mine, lists, dst=0)
    seen.append([t.tolist() for t in lists] if lists else None)
    x = torch.empty(4, device=device)
    dist.scatter(x, [mine, mine + 1] if rank == 0 else None, src=0)
    seen.append(x.tolist())
    if rank == 0:
        dist.send(mine, 1)
    else:
        dist.recv(x, 0)
        seen.append(x.tolist())
    peer = 1 - rank
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, mine, peer), dist.P2POp(dist.irecv, x, peer)]
    )
    for work in works:
        work.wait()
    seen.append(x.tolist())
    x = mine.clone()
    first = dist.all_reduce(x, async_op=True)
    second = dist.all_reduce(x, async_op=True)  # in the group's order, without a wait between
    second.wait()
    first.wait()
    seen.append(x.tolist())
    dist.barrier()
    objects = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    seen.append(objects)
    return seen


def average(device: str) -> list[float]:
    x = torch.arange(4.0, device=device) + 10 * dist.get_rank()
    dist.all_reduce(x, op=dist.ReduceOp.AVG)
    return x.tolist()


def ddp(device: str) -> list[float]:
    model, _ = build(SHAPE, device)
    return _train(torch.nn.parallel.DistributedDataParallel(model), device)


def fsdp(device: str) -> tuple[list[float], float]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, _ = build(SHAPE, device)
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    losses = _train(model, device)
    whole = next(model.parameters())
    return losses, whole.to_local().numel() / whole.numel()


def tensor_parallel(device: str) -> list[float]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    model, tokens = build(SHAPE, device)
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    for layer in model.layers:
        plan = {
            "attention.wq": ColwiseParallel(),
            "attention.wk": ColwiseParallel(),
            "attention.wv": ColwiseParallel(),
            "attention.wo": RowwiseParallel(),
            "feed_forward.w1": ColwiseParallel(),
            "feed_forward.w3": ColwiseParallel(),
            "feed_forward.w2": RowwiseParallel(),
        }
        parallelize_module(layer, mesh, plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    losses = []
    for _ in range(STEPS):
        loss = loss_of(model(tokens), tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
    return losses


class Stage(torch.nn.Module):
    """Half of the layers, with the embedding or the head."""

    def __init__(self, model: Llama, rank: int, size: int) -> None:
        super().__init__()
        count = len(model.layers) // size
        self.embedding = model.embedding if rank == 0 else None
        self.layers = model.layers[rank * count : (rank + 1) * count]
        self.norm = model.norm if rank == size - 1 else None
        self.head = model.head if rank == size - 1 else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x) if self.embedding is not None else x
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x)) if self.head is not None else x


def pipeline(device: str) -> list[float]:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank, size = dist.get_rank(), dist.get_world_size()
    model, _ = build(SHAPE, device)
    stage_module = Stage(model, rank, size)
    stage = PipelineStage(stage_module, rank, size, torch.device(device))
    schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=loss_of)
    optimizer = torch.optim.AdamW(stage_module.parameters(), lr=1e-3)
    tokens = torch.cat([tokens_of(i) for i in range(4)]).to(device)
    losses: list[float] = []
    for _ in range(STEPS):
        micro: list[torch.Tensor] = []
        if rank == 0:
            schedule.step(tokens)
        else:
            schedule.step(target=tokens, losses=micro)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(torch.stack(micro).mean().item() if micro else 0.0)
    return losses


def ready_times(device: str) -> dict[str, int]:
    """How long after the latest entry a collective ends, and a receive, on the virtual clock."""
    rank = dist.get_rank()
    x = torch.ones(1000, device=device)
    dist.all_reduce(x)
    torch.accelerator.synchronize()
    dist.barrier()
    tide.reset()  # both ranks at time zero
    tide.configure(launch=0, fabric_latency=500, fabric_bandwidth=10**9)
    found = {}

    tide.advance(100_000 if rank else 0)
    dist.all_reduce(x)  # a ring of two: two steps, the bytes of the tensor
    torch.accelerator.synchronize()
    found["all_reduce"] = tide.now()

    tide.advance(200_000 if rank == 0 else 0)  # the receiver is late
    if rank == 0:
        dist.recv(x, 1)
    else:
        dist.send(x, 0)
    torch.accelerator.synchronize()
    found["recv" if rank == 0 else "send"] = tide.now()
    return found


def overlapped(device: str) -> dict[str, int]:
    """A collective beside a kernel that takes longer."""
    x = torch.ones(1000, device=device)
    y = torch.ones(100_000, device=device)
    torch.accelerator.synchronize()
    dist.barrier()
    tide.reset()
    tide.configure(
        launch=0,
        kernel_latency=0,
        fabric_latency=500,
        fabric_bandwidth=10**9,
        memory_bandwidth=10**9,
    )
    work = dist.all_reduce(x, async_op=True)
    y.add_(1)
    work.wait()
    torch.accelerator.synchronize()
    hidden = tide.now()
    dist.all_reduce(x)
    dist.all_reduce(x)
    torch.accelerator.synchronize()
    return {"hidden": hidden, "exposed": tide.now() - hidden}


def across_nodes(device: str) -> dict[str, int]:
    """How long two ranks take for 4,000 bytes on one node, and on two."""
    x, y = torch.ones(1000, device=device), torch.ones(1000, device=device)
    work: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(x),
        "all_to_all": lambda: dist.all_to_all_single(y, x),
        "recv": lambda: dist.recv(x, 1) if dist.get_rank() == 0 else dist.send(x, 0),
    }
    found = {}
    for devices in (0, 2, 1):
        torch.accelerator.synchronize()
        dist.barrier()
        tide.reset()
        tide.configure(
            launch=0,
            kernel_latency=0,
            fabric_latency=0,
            fabric_bandwidth=10**9,
            network_bandwidth=10**8,
            devices_per_node=devices,
        )
        for name, run in work.items():
            torch.accelerator.synchronize()
            begin = tide.now()
            run()
            torch.accelerator.synchronize()
            found[f"{name} {devices}"] = tide.now() - begin
    return found


def unwaited(device: str) -> tuple[list[float], int]:
    """Uses a result without waiting for it."""
    x = torch.ones(4, device=device)
    work = dist.all_reduce(x, async_op=True)
    stale = (x + 0).tolist()
    reports = len(tide.races())
    work.wait()
    tide.clear_races()
    return stale, reports


def step_time(device: str) -> int:
    """The virtual time of training under FSDP."""
    fsdp(device)
    torch.accelerator.synchronize()
    return tide.now()
