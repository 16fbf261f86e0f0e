"""Start one process a rank on this node, as torchrun does, and say what went wrong with which.

Nothing here imports torch before :func:`launch` runs, so that the command line stays light.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lowtide.errors import LaunchError
from lowtide.train.logs import level_of, log_file
from lowtide.train.stop import STOPPED, StopForwarder

__all__ = ["Launch", "import_torch_quietly", "launch", "launched", "tie_to_launcher"]

LAUNCHER = "LOWTIDE_LAUNCHER"
"""Holds the launcher's process id in the ranks it starts."""
TAIL = 20
"""Lines of a failed rank's log that are shown; more if an error is as long."""

_ENDING = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
"""Signals on which torch's agent ends the ranks, unless they mean something else."""
_ERROR = re.compile(r"(\[rank\d+\]: )?(Traceback \(|error: )|watchdog: (\d+ ranks hang|rank \d+ has not moved)")
"""Where the last lines that are worth showing begin; torch marks a rank's traceback with the rank."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """Which processes to start on this node, and how they find the others."""

    processes: int
    """Ranks on this node."""
    nodes: int = 1
    """Nodes of the job."""
    node_rank: int = 0
    """This node's place among them, from 0; rank r of the node is rank `node_rank * processes + r` of the job."""
    master_address: str | None = None
    """The first node's address; needed with several nodes."""
    master_port: int | None = None
    """A free port on the first node; needed with several nodes. One node finds a port by itself."""
    timeout: float = 1800.0
    """Seconds to wait until all nodes are there."""
    max_restarts: int = 0
    """How often all ranks are started again after one failed."""
    log_dir: Path | None = None
    """Where ranks write their `worker_N.log`; its last lines are shown when a rank fails."""
    stop_signals: tuple[signal.Signals, ...] = ()
    """Signals on which the ranks save and stop; empty for ranks that do not know how."""

    def __post_init__(self) -> None:
        for name, value, least in (("processes", self.processes, 1), ("nodes", self.nodes, 1)):
            if value < least:
                raise LaunchError(f"{name} is {value}; at least {least} is needed")
        if not 0 <= self.node_rank < self.nodes:
            raise LaunchError(
                f"node rank {self.node_rank} of {self.nodes} nodes; it counts from 0, so the last is {self.nodes - 1}"
            )
        if self.nodes > 1 and (self.master_address is None or self.master_port is None):
            raise LaunchError(
                f"{self.nodes} nodes need a place to meet: give --master-addr, the first node's address,"
                " and --master-port, a free port on it, the same on every node"
            )


def launch(module: str, arguments: Sequence[str], settings: Launch, say: Callable[[str], None] | None = None) -> int:
    """Run ``python -m module arguments`` as every rank of this node, and return the exit code.

    0 if all ranks ended well; 85 if they saved and stopped on one of ``stop_signals``; the first failed rank's exit
    code (128 + signal where a signal ended it, as a shell has it); 130 after Ctrl-C. ``say`` gets what there is to say
    about a failure, standard error unless given.

    ``launch("lowtide", ["train", "run.yaml"], Launch(processes=8, log_dir=Path("output/msrun")))``
    """
    import logging
    import tempfile

    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousConnectionError, RendezvousError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    say = say or _to_stderr
    if level_of() > logging.DEBUG:  # a failure is reported below, with the rank's own message
        logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    before = dict(os.environ)
    os.environ[LAUNCHER] = str(os.getpid())
    if settings.processes > 1:  # each rank would otherwise take all cores
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, _cores() // settings.processes)))
    with tempfile.TemporaryDirectory(prefix="lowtide-launch-") as scratch:
        forwarder = StopForwarder(settings.stop_signals, Path(scratch))
        os.environ |= forwarder.environment()

        all_met = False

        def end(number: signal.Signals) -> None:
            raise SignalException(f"got {number.name} twice", sigval=number)

        def met() -> None:
            nonlocal all_met
            all_met = True
            forwarder.start(end)

        config = LaunchConfig(
            min_nodes=settings.nodes,
            max_nodes=settings.nodes,
            nproc_per_node=settings.processes,
            run_id="lowtide" if settings.nodes > 1 else f"lowtide-{os.getpid()}",
            role="rank",
            max_restarts=settings.max_restarts,
            logs_specs=DefaultLogsSpecs(log_dir=scratch),
            signals_to_handle=",".join(one for one in _ENDING if signal.Signals[one] not in settings.stop_signals),
            **_rendezvous(settings, met),
        )
        try:
            elastic_launch(config, sys.executable)("-m", module, *arguments)
        except ChildFailedError as error:
            rank = _first(error.failures)
            code = error.failures[rank].exitcode
            if code == -signal.SIGTERM and os.path.exists(error.failures[rank].error_file):
                code = 1  # it was ending with its error, and another had failed for that, when the launcher ended both
            say(_failure(settings, rank, code, sorted(set(error.failures) - {rank})))
            return code if code > 0 else 128 - code
        except SignalException as error:
            say(f"ended by {error.sigval.name}; every rank was ended with it")
            return 128 + int(error.sigval)
        except RendezvousClosedError:
            say("error: another node failed, and this one stops with it; the other's output says why")
            return 1
        except (RendezvousError, RuntimeError, OSError) as error:
            if settings.nodes == 1:
                raise
            lost = all_met and isinstance(error, RendezvousConnectionError)  # else they did not meet again
            raise LaunchError(_lost(settings, error) if lost else _not_met(settings, error)) from error
        finally:  # what was set for the ranks is not for the caller
            forwarder.close()
            os.environ.clear()
            os.environ.update(before)
        return STOPPED if forwarder.stopped() else 0


def import_torch_quietly() -> None:
    """For a process that will launch on several nodes: torch's C++ is silent there about lost connections, which
    :func:`launch` reports. Ranks are not changed by it."""
    name = "TORCH_CPP_LOG_LEVEL"
    given = name in os.environ
    os.environ.setdefault(name, "ERROR")
    import torch  # noqa: F401  # reads it

    if not given:
        del os.environ[name]


def launched() -> bool:
    """Whether :func:`launch` started this process."""
    return LAUNCHER in os.environ


def tie_to_launcher() -> None:
    """End this rank when its launcher is gone, however it ended: an unattended rank would train on for nothing.

    Does nothing where :func:`launch` did not start the process, or the system is not Linux.
    """
    launcher = os.environ.get(LAUNCHER)
    if launcher is None or not sys.platform.startswith("linux"):
        return
    import ctypes

    set_parent_death_signal = 1
    ctypes.CDLL(None).prctl(set_parent_death_signal, int(signal.SIGKILL))
    if os.getppid() != int(launcher):  # it went before the line above
        os._exit(1)


def _rendezvous(settings: Launch, met: Callable[[], None]) -> dict[str, Any]:
    """One node meets itself on a port that is free; several meet at the given address, each with its own rank."""
    from lowtide.train.rendezvous import BACKEND, local_address, register

    register()
    alone = settings.nodes == 1
    address = "localhost" if alone else settings.master_address
    assert address is not None  # checked in __post_init__
    return {
        "rdzv_backend": BACKEND,
        "rdzv_endpoint": f"{address}:{0 if alone else settings.master_port}",
        "rdzv_configs": {
            "node_rank": settings.node_rank,
            "is_host": settings.node_rank == 0,
            "met": met,
            "join_timeout": int(settings.timeout),
            "timeout": int(settings.timeout),
        },
        "local_addr": local_address(address, settings.node_rank),
    }


def _not_met(settings: Launch, error: Exception) -> str:
    """torch has several classes for a meeting that did not come about, a bare DistStoreError among them."""
    return (
        f"node {settings.node_rank} of {settings.nodes} did not meet the others at"
        f" {settings.master_address}:{settings.master_port} within {settings.timeout:g} s ({_reason(error)}).\n"
        "Check that the address is the first node's, that the port is free there and open to the others, that"
        " every node was started with the same --nnodes and its own --node-rank; --timeout waits longer"
    )


def _lost(settings: Launch, error: Exception) -> str:
    logs = f"; {settings.log_dir} says how far they were" if settings.log_dir is not None else ""
    return (
        f"node {settings.node_rank} of {settings.nodes} lost the first node, {settings.master_address}: its launcher"
        f" does not answer ({_reason(error)}). The ranks of this node were ended{logs}.\n"
        "Either that node is gone, then its own output says why, or the network between the two is;"
        " start the job again to continue from the newest checkpoint"
    )


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no reason given'}"


def _first(failures: Mapping[int, Any]) -> int:
    """The rank that failed first, which torch knows to the second; the others may have failed for having lost it.

    That is one that ended without a word, or else the one that noted its error first. Those that the launcher ended
    come last.
    """

    def when(rank: int) -> float:
        try:
            return os.stat(failures[rank].error_file).st_mtime_ns
        except FileNotFoundError:
            return float("inf") if failures[rank].exitcode == -signal.SIGTERM else 0

    return min(failures, key=when)


def _failure(settings: Launch, rank: int, code: int, others: list[int]) -> str:
    if code < 0:
        name = signal.Signals(-code).name
        end = f"was ended by {name}" + (" (the system does that when memory runs out)" if name == "SIGKILL" else "")
    else:
        end = f"ended with exit code {code}"
    named = f"{', '.join(map(str, others[:8]))}{' …' if len(others) > 8 else ''}"
    also = f"; {'ranks' if len(others) > 1 else 'rank'} {named} failed too" if others else ""
    if settings.log_dir is None:
        return f"error: rank {rank} {end}{also}"
    file = log_file(settings.log_dir, rank)
    lines = _tail(file)
    if not lines:
        return f"error: rank {rank} {end}{also}; there is nothing in {file}"
    shown = "\n".join(f"  {line}" for line in lines)
    return f"error: rank {rank} {end}{also}; {file} ends with\n{shown}"


def _tail(file: Path) -> list[str]:
    """The last lines of a file that may be large, or not there."""
    try:
        with file.open("rb") as stream:
            stream.seek(0, os.SEEK_END)
            stream.seek(max(0, stream.tell() - 64 * 1024))
            lines = stream.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return []
    # What ended the rank says more than what went before it, if it is there.
    last = [place for place, line in enumerate(lines) if _ERROR.match(line)]
    return lines[last[-1] :][: 3 * TAIL] if last else lines[-TAIL:]


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
