"""One rank of a process group that sums its ranks: what the launcher starts in its tests.

python -m support.stand_in_rank LOG_DIR sum|fail|fail_once|die|wait
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from lowtide.errors import RunDirectoryError
from lowtide.train.launch import launched, tie_to_launcher
from lowtide.train.logs import OF_EACH_RANK, start_logging
from lowtide.train.mesh import process_group
from lowtide.train.options import restarted
from lowtide.train.run_directory import RunDirectory, on_first_rank, open_run_directory


def open_it(path: Path) -> RunDirectory:
    return open_run_directory(path, settings={}, config="", checkpoint=None)


def refuse() -> RunDirectory:
    raise RunDirectoryError("refused by rank 0")


def work(log_dir: Path, deed: str, rank: int) -> None:
    log = logging.getLogger("lowtide.stand_in")
    total = torch.tensor([rank + 1.0])
    dist.all_reduce(total)
    log.info("sum %g of %d ranks, process %d", total.item(), dist.get_world_size(), os.getpid(), extra=OF_EACH_RANK)
    run = on_first_rank(lambda: open_it(log_dir / "run"))
    log.info("run directory %s", run.path.name, extra=OF_EACH_RANK)
    try:
        on_first_rank(refuse)
    except RunDirectoryError as error:
        log.info("every rank knows: %s", error, extra=OF_EACH_RANK)
    print(f"printed by {rank}", flush=True)
    if deed == "wait":
        (log_dir / f"waiting_{rank}").write_text(str(os.getpid()))
        time.sleep(120)
    if rank == 1 and (deed == "fail" or (deed == "fail_once" and not restarted())):
        raise RuntimeError("this rank was made to fail")
    if rank == 1 and deed == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def main(log_dir: Path, deed: str) -> None:
    tie_to_launcher()
    rank = int(os.environ["RANK"])
    logs = start_logging(rank, log_dir, continued=restarted(), redirect=launched())
    with process_group(timedelta(seconds=60)):
        work(log_dir, deed, rank)
    logs.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
