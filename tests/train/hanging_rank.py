"""A job of two processes in which rank 1 stops in the middle of a step. Run by ``test_watchdog.py``."""

from __future__ import annotations

import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from lowtide.train.options import TrainOptions
from lowtide.train.watchdog import Watchdog


def stuck_in_data() -> None:
    time.sleep(600)


def main(directory: Path, rank: int) -> None:
    options = TrainOptions(run_directory=directory, log_dir=directory, timeout=12.0)
    store = dist.FileStore(str(directory / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=options.timeout))
    watchdog = Watchdog(directory / "watchdog", rank=rank, world_size=2, timeout=options.watchdog_seconds, end=True)
    for step in range(1, 100):
        watchdog.at("data", step)
        if rank == 1 and step == 3:
            stuck_in_data()
        watchdog.at("forward", step, 1)
        dist.all_reduce(torch.ones(1))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
