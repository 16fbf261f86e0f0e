"""The job that ``crash.py`` kills: two ranks that train a small model with dropout under FSDP2 and save checkpoints.

Its checkpoints, its state and its resume are those of the runner. Each rank leaves one JSON object a line of what it
did, so that whoever killed it can tell afterwards.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # torch imports it at the first save, which takes seconds: once in the parent is enough
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional

from lowtide.train.checkpoint import Checkpoints
from lowtide.train.commit import checkpoints_in
from lowtide.train.state import TrainState

RANKS, EVERY, KEEP = 2, 4, 3
SAMPLES, BATCH, WIDTH = 160, 8, 32


@dataclass(frozen=True, slots=True)
class Job:
    """One start of the job."""

    directory: Path
    """Where its ranks leave their lines and meet."""
    checkpoints: Path
    """Where its checkpoints are."""
    asynchronous: bool
    """Whether it saves while it trains on."""
    steps: int
    """After how many steps the run is finished."""


class Model(nn.Module):
    """An embedding, two layers with dropout and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(SAMPLES, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for layer in self.layers:
            x = x + functional.dropout(functional.silu(layer(x)), 0.1)
        out: Tensor = self.head(x)
        return out


def build() -> TrainState:
    """The model on this rank, sharded if there are several."""
    torch.manual_seed(0)
    model = Model()
    layout = "one"
    if dist.is_initialized():
        mesh, layout = init_device_mesh("cpu", (RANKS,)), "fsdp2"
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(100 + (dist.get_rank() if dist.is_initialized() else 0))
    return TrainState(
        parts=[model], optimizers=[optimizer], progress={"step": 0, "samples": 0, "epoch": 0}, layout=layout
    )


def next_samples(progress: dict[str, Any]) -> list[int]:
    """The samples of the next step over all ranks, each once in every epoch, in an order that the epoch decides."""
    epoch, place = divmod(progress["samples"], SAMPLES)
    order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(epoch))
    return [epoch * SAMPLES + one for one in order[place : place + BATCH].tolist()]


def train_step(state: TrainState) -> dict[str, Any]:
    """One step, and the line about it."""
    mine = next_samples(state.progress)[dist.get_rank() :: RANKS]
    tokens = torch.tensor(mine) % SAMPLES
    loss = functional.cross_entropy(state.parts[0](tokens), tokens % 5)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(state.parts[0].parameters(), 1.0)
    whole = norm.full_tensor() if isinstance(norm, DTensor) else norm
    state.optimizers[0].step()
    state.optimizers[0].zero_grad()
    state.progress["step"] += 1
    state.progress["samples"] += BATCH
    state.progress["epoch"] = state.progress["samples"] // SAMPLES
    return {
        "step": state.progress["step"],
        "loss": loss.item().hex(),
        "global_norm": whole.item().hex(),
        "sample_ids": mine,
    }


def digest_of(state: TrainState) -> str:
    """All weights and optimizer states in full, and the progress."""
    digest = hashlib.sha256(json.dumps(state.progress, sort_keys=True).encode())
    for name, tensor in sorted(state.tensors().items()):
        if name.startswith(("model.", "optimizer.")):
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            digest.update(name.encode() + whole.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()


def start(job: Job, *, reference: bool = False) -> list[int]:
    """Start the ranks and give their process ids. This process must not have started a thread."""
    job.directory.mkdir(parents=True)
    return [_forked(work, job, rank, reference) for rank in range(RANKS)]


def work(job: Job, rank: int, reference: bool) -> None:
    """What one rank does until it is done or killed."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    with (job.directory / f"rank_{rank}.jsonl").open("w", buffering=1) as lines:

        def say(**line: Any) -> None:
            lines.write(json.dumps(line) + "\n")

        try:
            store = dist.FileStore(str(job.directory / "store"), RANKS)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
            state = build()
            checkpoints = Checkpoints(job.checkpoints, keep=KEEP, asynchronous=job.asynchronous)
            checkpoints.resume(state)
            say(resumed=state.progress["step"])
            under_way: list[int] = []
            while state.progress["step"] < job.steps:
                say(**train_step(state))
                step = state.progress["step"]
                if checkpoints.poll() and under_way:
                    say(committed=under_way.pop())
                if step % EVERY == 0:
                    if reference:
                        say(state=step, digest=digest_of(state))
                    checkpoints.save(step, state)
                    if under_way:  # the save before it was waited for
                        say(committed=under_way.pop())
                    under_way.append(step)
                    if not job.asynchronous:
                        say(committed=under_way.pop())
            checkpoints.close()
            say(done=digest_of(state))
        except BaseException as error:
            say(error=f"{type(error).__name__}: {error}"[:500], time=time.time())
            raise


def inspect(checkpoints: Path, report: Path) -> int:
    """Start a process that loads every committed checkpoint and reports what is in it."""
    return _forked(_inspect, checkpoints, report)


def _inspect(directory: Path, report: Path) -> None:
    found: dict[str, Any] = {}
    state = build()
    with Checkpoints(report.parent / "none") as checkpoints:  # not of the job's directory: it would clean up there
        for path, marker in checkpoints_in(directory):
            try:
                checkpoints.load(state, path)
                found[path.name] = {"step": marker.step, "digest": digest_of(state)}
            except Exception as error:
                found[path.name] = {"step": marker.step, "error": str(error)}
    report.write_text(json.dumps(found))


def _forked(function: Any, *arguments: Any) -> int:
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        torch.set_num_threads(1)
        with open(os.devnull, "w") as nothing:  # what a killed job writes to its terminal is noise
            os.dup2(nothing.fileno(), 2)
        function(*arguments)
        code = 0
    finally:
        os._exit(code)
