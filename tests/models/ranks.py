"""Four processes that stay up and run programs together, over gloo."""

from __future__ import annotations

import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

SIZE = 4
PATIENCE = 240  # seconds; the machine is shared, and four processes start


class Ranks:
    """The processes. They start with the first program, and anew after one that failed."""

    def __init__(self) -> None:
        self.processes: list[Any] = []
        self.pipes: list[Any] = []

    def run(self, program: Callable[..., Any], *args: Any) -> list[Any]:
        """What ``program(*args)`` gives on each rank."""
        if not self.processes:
            self._start()
        for pipe in self.pipes:
            pipe.send((program, args))
        answers, errors = [], []
        for rank, pipe in enumerate(self.pipes):
            answer, error = pipe.recv() if pipe.poll(5 if errors else PATIENCE) else (None, "no answer")
            answers.append(answer)
            if error:
                errors.append(f"rank {rank}: {error}")
        if errors:
            self.stop()
            raise AssertionError("\n".join(errors))
        return answers

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        self.processes, self.pipes = [], []

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        store = Path(tempfile.mkdtemp()) / "store"
        for rank in range(SIZE):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, str(store), theirs), daemon=True)
            process.start()
            self.processes.append(process)
            self.pipes.append(ours)


def _serve(rank: int, store: str, pipe: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=SIZE, timeout=timedelta(seconds=PATIENCE)
    )
    while True:
        program, args = pipe.recv()
        try:
            pipe.send((program(*args), None))
        except BaseException:
            pipe.send((None, traceback.format_exc()))
            return
