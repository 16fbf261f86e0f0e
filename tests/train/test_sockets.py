"""The ranks of a run connect to those that they talk to, and not each to each."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from support.ranks import _free_port

WORLD = 12
PROGRAM = """
import json, multiprocessing, os, sys
from datetime import timedelta
import torch
import torch.distributed as dist
from lowtide.adaptive.agreement import Agreement
from lowtide.train.mesh import process_group

def count():
    links = (os.path.join("/proc/self/fd", name) for name in os.listdir("/proc/self/fd"))
    return sum(os.path.islink(link) and os.readlink(link).startswith("socket:") for link in links)

def rank(number, world, barrier, answers):
    os.environ.update(RANK=str(number), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[2])
    with process_group(timedelta(seconds=200)):
        ranks = Agreement(timedelta(seconds=200))
        agreed = ranks.all(True), ranks.largest([number]), ranks.from_first("first")
        answers.put((count(), agreed))
        barrier.wait(200)
        ranks.close()

if __name__ == "__main__":
    torch.set_num_threads(1)
    world = int(sys.argv[1])
    context = multiprocessing.get_context("fork")
    barrier, answers = context.Barrier(world), context.Queue()
    ranks = [context.Process(target=rank, args=(one, world, barrier, answers)) for one in range(world)]
    for one in ranks:
        one.start()
    print(json.dumps([answers.get(timeout=200) for _ in ranks]))
    for one in ranks:
        one.join()
"""


def test_a_rank_has_fewer_sockets_than_there_are_ranks(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, str(tmp_path / "program.py"), str(WORLD), str(_free_port())]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert all(agreed == [True, [WORLD - 1.0], "first"] for _, agreed in found)
    sockets = sorted(count for count, _ in found)
    # Each to each, two groups have 2 * (WORLD - 1) and more; rank 0 also has the store that all are connected to.
    assert sockets[-2] < WORLD, sockets
