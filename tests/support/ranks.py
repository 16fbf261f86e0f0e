"""Processes that stay up and run programs together, over gloo on loopback."""

from __future__ import annotations

import os
import socket
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from support.forked import forking

MOST_GROUPS = 16
"""Each process group of gloo has a thread that wakes up all the time: with more of them, other processes take over."""
MET = "met"
ATTEMPTS = 3
PATIENCE = 600  # seconds; the machine is shared, and up to four processes start at once


class Ranks:
    """The processes. They start with the first program, and again after one that failed."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.processes: list[Any] = []
        self.pipes: list[Any] = []

    def run(self, program: Callable[..., Any], *args: Any) -> list[Any]:
        """What ``program(*args)`` gives on each rank."""
        for _ in range(ATTEMPTS):
            if self.processes or self._start():
                break
        else:
            raise AssertionError(f"{self.size} processes did not meet, {ATTEMPTS} times")
        for pipe in self.pipes:
            pipe.send((program, args))
        answers, errors, tired = [], [], False
        for rank, pipe in enumerate(self.pipes):
            # If one rank fails the other may wait for it for ever.
            answer, error, groups = _answer(pipe, 5 if errors else PATIENCE)
            answers.append(answer)
            tired |= groups > MOST_GROUPS
            if error:
                errors.append(f"rank {rank}: {error}")
        if errors:
            self.stop()
            raise AssertionError("\n".join(errors))
        if tired:
            self.stop()
        return answers

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        self.processes, self.pipes = [], []

    def _start(self) -> bool:
        """Whether they met: another program may have taken the port meanwhile."""
        context = forking()
        port = _free_port()
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.size, port, theirs), daemon=True)
            process.start()
            self.processes.append(process)
            theirs.close()  # else a process that is gone is waited for
            self.pipes.append(ours)
        met = [_answer(pipe, PATIENCE)[0] == MET for pipe in self.pipes]
        if not all(met):
            self.stop()
        return all(met)


def _answer(pipe: Any, patience: float) -> tuple[Any, str | None, int]:
    if not pipe.poll(patience):
        return None, "no answer", 0
    try:
        found: tuple[Any, str | None, int] = pipe.recv()
    except EOFError:
        return None, "the process is gone", 0
    return found


def _serve(rank: int, size: int, port: int, pipe: Any) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(size))
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size))
    torch.set_num_threads(1)
    import tide

    dist.init_process_group("cpu:gloo,tide:tide", timeout=timedelta(seconds=PATIENCE))
    pipe.send((MET, None, 0))
    while True:
        program, args = pipe.recv()
        tide.reset()
        try:
            answer = program(*args)
            tide.check_races()
            pipe.send((answer, None, dist.get_pg_count()))
        except BaseException:
            pipe.send((None, traceback.format_exc(), 0))
            return


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
