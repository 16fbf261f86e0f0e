"""What the runner's ranks say to each other, with more and more ranks: seconds, bytes and sockets.

    python benchmarks/protocol_scale.py --json

2, 8, 32 and 64 processes on this machine do what ranks of ``lowtide train`` do besides training, with tensors of a few
bytes: they meet and make their groups (``start``), commit a checkpoint (``checkpoint``), agree on a Trace and a Policy
as an adaptive run does, where all ran the same kernels (``agreement``) and where experts made each rank's Trace another
(``experts``), and continue from the checkpoint (``resume``). Imports are not measured: processes are forked from one
that has imported everything.

Bytes are what the busiest rank sent and received over its sockets, as the system counts them; in ``resume`` also the
checkpoint's metadata, which each rank reads. ``store`` is what the launcher's store, at which ranks meet, sent and
received for all of them. ``*_exponent`` says how they grow: bytes are proportional to ranks to that
power, fitted from 8 ranks on; 0 is no growth. ``worst_exponent`` is the largest and has to be below 1.1: no rank's
work grows faster than the number of ranks. Seconds are of the slowest rank, of many processes on few cores: they are
shown, and no claim is made from them.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import socket
import statistics
import struct
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.fsdp import fully_shard

from lowtide.adaptive.decide import Decided
from lowtide.adaptive.ranks import Ranks
from lowtide.cost.devices import find_device
from lowtide.planner.make import make_plan
from lowtide.planner.pipeline import even_pipeline
from lowtide.trace.trace import Part, Trace
from lowtide.train.checkpoint import Checkpoints
from lowtide.train.mesh import make_meshes, process_group
from lowtide.train.run import Degrees
from lowtide.train.state import TrainState
from lowtide.units import format_bytes
from stamp import stamped

WORLDS = (2, 8, 32, 64)
QUICK = (2, 8)
PHASES = ("start", "checkpoint", "agreement", "experts", "resume")
LIMIT = 1.1
LAYERS = 4
PATIENCE = 900.0
BYTES_ACKED = 120  # in the system's struct tcp_info; the bytes received come next


class Cost(NamedTuple):
    """What a phase was on one rank."""

    seconds: float
    processor: float
    bytes: int
    sockets: int
    """That the rank has open afterwards."""
    store: int
    """Of the bytes, those to and from the store."""


@dataclass
class Rank:
    """One rank, and what its phases were."""

    number: int
    barrier: Any
    port: int
    """Where the store is."""
    costs: dict[str, Cost] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Begin together with all ranks, and note what it was."""
        self.barrier.wait(PATIENCE)
        before, processor, begin = traffic(self.port), time.process_time(), time.perf_counter()
        yield
        seconds, processor = time.perf_counter() - begin, time.process_time() - processor
        self.barrier.wait(PATIENCE)
        after = traffic(self.port)
        self.barrier.wait(PATIENCE)  # no rank goes on, and closes a socket, before all have looked
        moved = {one: total - before.get(one, 0) for one, total in after.items()}
        stored = sum(total for (_, to_store), total in moved.items() if to_store)
        self.costs[name] = Cost(seconds, processor, sum(moved.values()), len(after), stored)


def main() -> None:
    """Measure, and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--quick", action="store_true", help="2 and 8 ranks, for a first look")
    parser.add_argument("--most", type=int, default=WORLDS[-1], metavar="RANKS", help="stop at so many ranks")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    worlds = QUICK if arguments.quick else tuple(world for world in WORLDS if world <= arguments.most)
    trace = model_trace()
    decided = decision(trace)
    found: dict[int, dict[str, Cost]] = {}
    for world in worlds:
        found[world] = measured(world, trace, decided)
        print(f"{world} ranks: " + shown(found[world]), file=sys.stderr, flush=True)
    result = figures(found)
    show(found, result)
    if arguments.json:
        print(json.dumps(stamped(result)))


def figures(found: dict[int, dict[str, Cost]]) -> dict[str, Any]:
    """What grows how fast."""
    exponents = {phase: exponent({world: one[phase].bytes for world, one in found.items()}) for phase in PHASES}
    stored = {world: sum(cost.store for cost in one.values()) for world, one in found.items()}
    exponents["store"] = exponent(stored)
    worst = max(exponents, key=lambda phase: exponents[phase])
    most = max(found)
    return {
        "worst_exponent": round(exponents[worst], 3),
        "worst_phase": worst,
        "limit": LIMIT,
        "ranks": most,
        **{f"{phase}_exponent": round(one, 3) for phase, one in exponents.items()},
        **{f"{phase}_bytes": found[most][phase].bytes for phase in PHASES},
        "store_bytes": stored[most],
        **{f"{phase}_s": round(found[most][phase].seconds, 3) for phase in PHASES},
        "sockets": found[most]["start"].sockets,
        "sockets_exponent": round(exponent({world: one["start"].sockets for world, one in found.items()}), 3),
        "load": round(os.getloadavg()[0], 1),
        "worlds": {str(world): {phase: one[phase]._asdict() for phase in PHASES} for world, one in found.items()},
    }


def exponent(values: dict[int, float]) -> float:
    """The power of the number of ranks that values are proportional to, from 8 ranks on where there are two such."""
    large = {world: value for world, value in values.items() if world >= 8}
    used = large if len(large) > 1 else values
    if len(used) < 2:
        return math.nan
    fit = statistics.linear_regression(
        [math.log(one) for one in used], [math.log(max(1, one)) for one in used.values()]
    )
    return fit.slope


def measured(world: int, trace: Trace, decided: Decided) -> dict[str, Cost]:
    """Each phase with so many ranks: of the busiest rank the bytes and sockets, of the slowest the seconds."""
    context = multiprocessing.get_context("fork")
    barrier, answers = context.Barrier(world), context.Queue()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # as the launcher has one
    with tempfile.TemporaryDirectory() as scratch:
        ranks = [
            context.Process(target=serve, args=(one, world, Path(scratch), trace, decided, answers))
            for one in (Rank(number, barrier, store.port) for number in range(world))
        ]
        for rank in ranks:
            rank.start()
        try:
            costs = [answers.get(timeout=PATIENCE) for _ in ranks]
        finally:
            for rank in ranks:
                rank.join(30)
                rank.kill()
    failed = [one for one in costs if isinstance(one, str)]
    if failed:
        raise SystemExit(failed[0])
    largest = {phase: Cost(*map(max, zip(*(one[phase] for one in costs), strict=True))) for phase in PHASES}
    return {phase: one._replace(store=sum(cost[phase].store for cost in costs)) for phase, one in largest.items()}


def serve(rank: Rank, world: int, scratch: Path, trace: Trace, decided: Decided, answers: Any) -> None:
    """What one process does."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(rank.port), TORCHELASTIC_USE_AGENT_STORE="True")
    os.environ.update(RANK=str(rank.number), WORLD_SIZE=str(world))
    torch.set_num_threads(1)
    try:
        run(rank, world, scratch, trace, decided)
        answers.put(rank.costs)
    except BaseException as error:  # the parent would wait for an answer
        rank.barrier.abort()
        answers.put(f"rank {rank.number} of {world}: {type(error).__name__}: {error}")


def run(rank: Rank, world: int, scratch: Path, trace: Trace, decided: Decided) -> None:
    """The phases, one after the other."""
    group = process_group(timedelta(seconds=PATIENCE))
    with rank.phase("start"):
        device = group.__enter__()
        meshes = make_meshes(Degrees(shard=world), device)
        checkpoints, ranks = Checkpoints(scratch / "checkpoints"), Ranks()
        loss = torch.ones(4)
        dist.all_reduce(loss)
    state = tiny_state(meshes.sharded, world)
    with rank.phase("checkpoint"):
        path = checkpoints.save(1, state)
    pipeline = even_pipeline(LAYERS)
    with rank.phase("agreement"):
        agreed = ranks.trace([trace], pipeline)
        ranks.decided(decided if rank.number == 0 else None)
    assert agreed.digest == trace.digest
    with rank.phase("experts"):
        ranks.trace([of_rank(trace, rank.number)], pipeline)
        ranks.decided(decided if rank.number == 0 else None)
    other = tiny_state(meshes.sharded, world)
    with rank.phase("resume"):
        assert checkpoints.resume(other) == path
    cost = rank.costs["resume"]
    read = (path / ".metadata").stat().st_size
    rank.costs["resume"] = cost._replace(bytes=cost.bytes + read)
    ranks.close()
    checkpoints.close()
    rank.barrier.wait(PATIENCE)  # what serves the others' store ends last
    group.__exit__(None, None, None)


def tiny_state(mesh: Any, world: int) -> TrainState:
    """A model of a few numbers, its parameters sharded over all ranks, after a step."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, world, bias=False) for _ in range(LAYERS)))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return TrainState(parts=[model], optimizers=[optimizer], progress={"step": 1})


def model_trace() -> Trace:
    """The Trace of a small model with measured seconds, as ranks have it."""
    from lowtide.cli.traced import LayoutOptions, trace_of

    trace = trace_of("llama3-8b", LayoutOptions(sequence=512, samples=1)).trace
    return replace(trace.changed(timed), layers=trace.layers[:LAYERS])


def timed(part: Part) -> Part:
    return replace(part, kernels=tuple(kernel._replace(seconds=1e-3) for kernel in part.kernels))


def of_rank(trace: Trace, rank: int) -> Trace:
    """As experts make it: the same kernels on each rank, for other numbers of tokens."""

    def routed(part: Part) -> Part:
        return replace(part, values=tuple(value._replace(size=value.size + 512 * rank) for value in part.values))

    return trace.changed(routed)


def decision(trace: Trace) -> Decided:
    plan = make_plan(trace, "60GiB", find_device("h100"), even_pipeline(LAYERS))
    return Decided(plan=plan, policy=plan.policy, budget=plan.budget, reason="")


def traffic(store: int) -> dict[tuple[str, bool], int]:
    """The bytes that went through each open TCP socket of this process so far, both ways; and if it is the store's."""
    found: dict[tuple[str, bool], int] = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            inode = os.readlink(f"/proc/self/fd/{name}")
            if not inode.startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as one:
                if one.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, BYTES_ACKED + 16)
                to_store = one.getpeername()[1] == store
        except OSError:  # gone, or one that listens
            continue
        found[inode, to_store] = sum(struct.unpack_from("QQ", info, BYTES_ACKED))
    return found


def shown(costs: dict[str, Cost]) -> str:
    return ", ".join(f"{phase} {one.seconds:.2f} s {format_bytes(one.bytes)}" for phase, one in costs.items())


def show(found: dict[int, dict[str, Cost]], result: dict[str, Any]) -> None:
    table = Table(title="The busiest rank")
    for title in ("", *(f"{world} ranks" for world in found), "bytes grow as ranks to the power of"):
        table.add_column(title, justify="right")
    for phase in PHASES:
        cells = [f"{format_bytes(one[phase].bytes)}, {one[phase].seconds:.2f} s" for one in found.values()]
        table.add_row(phase, *cells, f"{result[f'{phase}_exponent']:.2f}")
    stored = [format_bytes(sum(cost.store for cost in one.values())) for one in found.values()]
    table.add_row("store, all ranks", *stored, f"{result['store_exponent']:.2f}")
    table.add_row(
        "sockets", *(str(one["start"].sockets) for one in found.values()), f"{result['sockets_exponent']:.2f}"
    )
    Console(stderr=True, width=160).print(table)
    print(f"worst exponent {result['worst_exponent']} ({result['worst_phase']}), limit {LIMIT}", file=sys.stderr)


if __name__ == "__main__":
    main()
