"""A small model in several layouts, trained with dropout, saved and loaded on each of two ranks."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional

from lowtide.errors import CheckpointError
from lowtide.train.checkpoint import Checkpoints
from lowtide.train.state import TrainState
from lowtide.train.weights import load_weights

WIDTH, LAYERS, ROWS = 6, 4, 4


class Layer(nn.Module):
    """Two projections, a norm and dropout; the widths do not divide evenly everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return x + functional.dropout(self.down(functional.silu(self.up(self.norm(x)))), 0.2)


class Model(nn.Module):
    """Layers under their global numbers, so that a part keeps its names."""

    def __init__(self, numbers: range) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(number): Layer() for number in numbers})
        self.bias = nn.Parameter(torch.randn(1)) if 0 in numbers else None

    def forward(self, x: Tensor) -> Tensor:
        if self.bias is not None:
            x = x + self.bias
        for layer in self.layers.values():
            x = layer(x)
        return x


def build(layout: str, seed: int) -> TrainState:
    """The model on this rank; every layout begins from the same weights for the same seed."""
    torch.manual_seed(seed)
    whole = Model(range(LAYERS))
    parts: list[nn.Module] = [whole]
    if layout == "ddp":
        parts = [nn.parallel.DistributedDataParallel(whole)]
    elif layout == "fsdp2":
        mesh = init_device_mesh("cpu", (2,))
        for layer in whole.layers.values():
            fully_shard(layer, mesh=mesh)
        fully_shard(whole, mesh=mesh)
    elif layout == "tp2":
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        for layer in whole.layers.values():
            parallelize_module(layer, mesh, plan)
    elif layout == "pp2":  # interleaved: this rank has layers r and r + 2, in two parts
        weights = whole.state_dict()
        parts = []
        for number in (dist.get_rank(), dist.get_rank() + 2):
            part = Model(range(number, number + 1))
            part.load_state_dict({name: weights[name] for name in part.state_dict()})
            parts.append(part)
    optimizers = [torch.optim.AdamW(part.parameters(), lr=1e-2, weight_decay=0.1) for part in parts]
    return TrainState(parts=parts, optimizers=optimizers, progress={"step": 0, "samples": 0}, layout=layout)


def train(state: TrainState, steps: int) -> list[float]:
    """Steps of training; pipeline stages are separate models here, which is the same for what is saved."""
    losses = []
    for _ in range(steps):
        loss = torch.zeros(())
        for part in state.parts:
            loss = loss + part(torch.randn(ROWS, WIDTH)).square().mean()
        loss.backward()
        for optimizer in state.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        state.progress["step"] += 1
        state.progress["samples"] += ROWS
        losses.append(loss.item())
    return losses


def digests(state: TrainState) -> dict[str, str]:
    """Every weight, buffer and optimizer state in full, by name, bit by bit."""
    found = {}
    for name, tensor in state.tensors().items():
        if name.startswith(("model.", "optimizer.")):
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            found[name] = hashlib.sha256(whole.detach().contiguous().numpy().tobytes()).hexdigest()
    return found


def save(layout: str, directory: Path, asynchronous: bool) -> tuple[dict[str, str], list[float]]:
    """Train, save, and train on while the save is under way: what was saved, and the losses after it."""
    state = build(layout, seed=0)
    torch.manual_seed(7 if layout == "tp2" else 7 + _rank())
    train(state, 3)
    saved = digests(state)
    checkpoints = Checkpoints(directory, asynchronous=asynchronous)
    checkpoints.save(3, state)
    losses = train(state, 4)
    checkpoints.close()
    return saved, losses


def load(layout: str, directory: Path) -> tuple[dict[str, str], list[float], dict[str, Any]]:
    """Begin from other weights, resume, and train on: what was loaded, the losses, and the progress."""
    state = build(layout, seed=1)
    torch.manual_seed(99)
    checkpoints = Checkpoints(directory)
    assert checkpoints.resume(state) is not None
    loaded, progress = digests(state), dict(state.progress)
    losses = train(state, 4)
    checkpoints.close()
    return loaded, losses, progress


def weights(layout: str, path: Path) -> dict[str, str]:
    """The weights after loading them alone."""
    state = build(layout, seed=1)
    load_weights(state.parts, path)
    return {name: digest for name, digest in digests(state).items() if name.startswith("model.")}


def save_several(directory: Path, steps: list[int]) -> None:
    state = build("fsdp2", seed=0)
    checkpoints = Checkpoints(directory)
    for step in steps:
        train(state, step - state.progress["step"])
        checkpoints.save(step, state)
    checkpoints.close()


def resumed_from(directory: Path) -> tuple[str, str]:
    """Which is the newest by sizes, and which is resumed from."""
    state = build("fsdp2", seed=1)
    checkpoints = Checkpoints(directory)
    latest, resumed = checkpoints.latest(), checkpoints.resume(state)
    checkpoints.close()
    assert latest is not None
    assert resumed is not None
    return latest.name, resumed.name


def fail_on_rank_1(directory: Path, asynchronous: bool) -> tuple[str, bool]:
    """Rank 1 cannot write its file: what each rank reports, and whether training goes on."""
    state = build("fsdp2", seed=0)
    train(state, 1)
    checkpoints = Checkpoints(directory, asynchronous=asynchronous)
    if _rank() == 1:
        blocked = directory / "step_00000001" / "__1_0.distcp"
        blocked.mkdir(parents=True)  # a directory where the file should be
    dist.barrier()
    said = ""
    try:
        checkpoints.save(1, state)
        train(state, 1)
        checkpoints.wait()
    except CheckpointError as error:
        said = str(error)
    train(state, 1)
    checkpoints.save(3, state)
    checkpoints.wait()
    latest = checkpoints.latest()
    checkpoints.close()
    return said, latest is not None and latest.name == "step_00000003"


def save_experts_of_its_own(directory: Path) -> str:
    """Each rank has another weight under the same name, in a plain tensor: the error that it gets."""
    torch.manual_seed(_rank())
    model = nn.ModuleDict({"norm": nn.LayerNorm(WIDTH), "expert": nn.Linear(WIDTH, WIDTH)})
    optimizer = torch.optim.AdamW(model.parameters())
    checkpoints = Checkpoints(directory)
    try:
        checkpoints.save(1, TrainState(parts=[model], optimizers=[optimizer], progress={}))
    except CheckpointError as error:
        return str(error)
    finally:
        checkpoints.close()
    return ""


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
