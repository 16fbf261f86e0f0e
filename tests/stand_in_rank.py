"""One rank of a process group that sums its ranks: what the launcher starts in its tests.

python -m stand_in_rank LOG_DIR sum|fail|fail_once|wait
"""

from __future__ import annotations

import logging
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from lowtide.train.launch import launched, tie_to_launcher
from lowtide.train.logs import start_logging
from lowtide.train.options import restarted


def main(log_dir: Path, deed: str) -> None:
    tie_to_launcher()
    rank = int(os.environ["RANK"])
    logs = start_logging(rank, log_dir, continued=restarted(), redirect=launched())
    log = logging.getLogger("lowtide.stand_in")
    dist.init_process_group("gloo")
    total = torch.tensor([rank + 1.0])
    dist.all_reduce(total)
    log.info("sum %g of %d ranks, process %d", total.item(), dist.get_world_size(), os.getpid())
    print(f"printed by {rank}", flush=True)
    if deed == "wait":
        (log_dir / f"waiting_{rank}").write_text(str(os.getpid()))
        time.sleep(120)
    if rank == 1 and (deed == "fail" or (deed == "fail_once" and not restarted())):
        raise RuntimeError("this rank was told to fail")
    dist.barrier()
    dist.destroy_process_group()
    logs.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
