"""Tokens a second of ``lowtide train`` against a hand-written loop of torch, on one process group, in turns.

    python benchmarks/runner.py --json

Two processes over gloo build the same Llama twice: once as ``lowtide train`` does from a YAML file, with its data,
monitors, norms and records, and once by hand with the shortest loop that does the same training: batches made before
the clock starts, FSDP2 or DDP, backward, clipping, AdamW, the loss read once a step. The two take turns step by step,
since this machine is not as fast in one second as in the next; a step's time is the slowest rank's, and the ratio is
that of the medians.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from stamp import stamped

ROUNDS, QUICK_ROUNDS, WARM_UP = 100, 16, 4
LIMIT = 0.99
FILE = """
seed: 1
model:
  model_config:
    vocab_size: 1024
    hidden_size: 256
    num_layers: 4
    num_attention_heads: 8
    intermediate_size: 688
    seq_length: 128
    params_dtype: float32
    compute_dtype: float32
runner_config: {epochs: 1, batch_size: 4}
runner_wrapper: {use_clip_grad: true}
optimizer: {type: AdamW, weight_decay: 0.1}
lr_schedule: {type: ConstantWarmUpLR, learning_rate: 1.0e-3}
parallel_config: {data_parallel: 2}
parallel: {enable_parallel_optimizer: SHARD}
train_dataset: {data_loader: {type: SyntheticDataLoader, sizes: [100000, 0, 0]}}
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_ROUNDS} rounds instead of {ROUNDS}")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    parser.add_argument("--layout", choices=("ddp", "fsdp2"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    rounds = QUICK_ROUNDS if arguments.quick else ROUNDS
    if arguments.rank is not None:
        measure(arguments.rank, arguments.store, arguments.layout, rounds)
        return 0
    table = Table("layout", "hand-written, tokens/s", "lowtide train, tokens/s", "ratio")
    ratios = {}
    for layout in ("ddp", "fsdp2"):
        found = start(layout, arguments.quick)
        ratios[layout] = found["bare"] / found["runner"]
        tokens = 2 * 4 * 128
        table.add_row(
            layout, f"{tokens / found['bare']:,.0f}", f"{tokens / found['runner']:,.0f}", f"{ratios[layout]:.3f}"
        )
    Console(stderr=True).print(table)
    if arguments.json:
        print(json.dumps(stamped({"throughput_ratio": min(ratios.values()), "ratios": ratios, "rounds": rounds})))
    return 0 if min(ratios.values()) >= LIMIT else 1


def start(layout: str, quick: bool) -> dict[str, float]:
    """Two processes; what the first prints last."""
    with tempfile.TemporaryDirectory() as directory:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__, "--store", str(Path(directory) / "store"), "--layout", layout]
        command += ["--quick"] if quick else []
        ranks = [
            subprocess.Popen(
                [*command, "--rank", str(rank)], env=environment, cwd=directory, stdout=subprocess.PIPE, text=True
            )
            for rank in range(2)
        ]
        printed = [rank.communicate(timeout=550)[0] for rank in ranks]
        if any(rank.returncode for rank in ranks):
            raise SystemExit(f"a rank failed: {printed}")
        found: dict[str, float] = json.loads(printed[0].splitlines()[-1])
        return found


def measure(rank: int, store: str, layout: str, rounds: int) -> None:
    """One rank: steps of both loops in turns."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    runner, bare = runner_loop(layout), bare_loop(layout)
    times: dict[str, list[float]] = {"bare": [], "runner": []}
    for number in range(-WARM_UP, rounds):
        for name, step in (("bare", bare), ("runner", runner)) if number % 2 else (("runner", runner), ("bare", bare)):
            dist.barrier()
            begin = time.perf_counter()
            step()
            seconds = torch.tensor(time.perf_counter() - begin)
            dist.all_reduce(seconds, dist.ReduceOp.MAX)
            if number >= 0:
                times[name].append(float(seconds))
    if rank == 0:
        print(json.dumps({name: statistics.median(values) for name, values in times.items()}))
    dist.destroy_process_group()


def runner_loop(layout: str) -> Any:
    """One step of ``lowtide train``: its own loop with its monitors, called from here."""
    import torch

    from lowtide.train.main import prepare
    from lowtide.train.options import TrainOptions

    file = Path("run.yaml")
    file.write_text(FILE.replace("SHARD", str(layout == "fsdp2").lower()))
    options = TrainOptions(run_directory=Path("output"), log_dir=Path("output/logs"))
    loop = prepare(file, {}, options, torch.device("cpu"))
    monitors = loop.monitors(0, None)
    done = 0

    def step() -> None:
        nonlocal done
        done += 1
        record = loop.one(done)
        for monitor in monitors:
            monitor.step(record)

    return step


def bare_loop(layout: str) -> Any:
    """The same training by hand."""
    import torch
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn import functional

    from lowtide.config.check import check_text
    from lowtide.models.build import build_model
    from lowtide.models.initialise import initialise
    from lowtide.models.shape import shape_of

    settings = check_text(FILE.replace("SHARD", "false")).settings
    assert settings is not None
    model = build_model(shape_of(settings))
    initialise(model, seed=1)
    called: Any = model
    if layout == "fsdp2":
        mesh = init_device_mesh("cpu", (2,))
        for layer in model.layers.values():
            fully_shard(layer, mesh=mesh, reshard_after_forward=False)
        fully_shard(model, mesh=mesh, reshard_after_forward=False)
    else:
        called = nn.parallel.DistributedDataParallel(model, forward_sync_buffers=False)
    decaying = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    groups = [{"params": decaying, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, fused=True)
    batches = [torch.randint(1024, (4, 129)) for _ in range(16)]
    done = 0

    def step() -> None:
        nonlocal done
        batch = batches[done % 16]
        done += 1
        loss = functional.cross_entropy(called(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()

    return step


if __name__ == "__main__":
    sys.exit(main())
