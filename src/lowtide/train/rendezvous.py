"""How the launchers of a job find each other, and find each other again after a failure.

torch's ``c10d`` rendezvous lets the launchers of all nodes restart together. Two things about it are different here.
Each node takes the rank it was given, where c10d goes by the nodes' names. And each round has a store of its own: torch
2.13 hands the processes of a restart the store of the attempt before, where they find, and call, ranks that are dead.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # documented, not re-exported
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

from lowtide.errors import LaunchError
from lowtide.train.options import ROUND

__all__ = ["BACKEND", "local_address", "register"]

BACKEND = "lowtide"
"""The name under which torch finds this way of meeting."""


def register() -> None:
    """Make the way of meeting known to torch; asking twice does no harm."""
    rendezvous_handler_registry.register(BACKEND, _create)


def local_address(master_address: str, node_rank: int) -> str:
    """This node's address as the others can reach it: the one its packets to the first node come from."""
    if node_rank == 0:
        return master_address  # its own name for itself may mean nothing to the others
    family, _, _, _, place = _resolve(master_address)
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(place)  # sends nothing, only chooses the way
            return str(probe.getsockname()[0])
        except OSError:
            return socket.getfqdn()


def _resolve(address: str) -> Any:
    try:
        return socket.getaddrinfo(address, 1, type=socket.SOCK_DGRAM)[0]
    except OSError as error:
        raise LaunchError(
            f"the first node's address {address!r} is not known on this node ({error.strerror or error});"
            " give --master-addr a name or a number that every node can reach"
        ) from error


def _create(parameters: RendezvousParameters) -> RendezvousHandler:
    settings = dict(parameters.config)
    rank = int(settings.pop("node_rank"))
    met: Callable[[], None] = settings.pop("met")
    inner = RendezvousParameters(
        backend="c10d",
        endpoint=parameters.endpoint,
        run_id=parameters.run_id,
        min_nodes=parameters.min_nodes,
        max_nodes=parameters.max_nodes,
        local_addr=parameters.local_addr,
        **settings,
    )
    timeout = timedelta(seconds=float(settings["timeout"]))
    handler = rendezvous_handler_registry.create_handler(inner)
    if rank > 0:
        _fail_when_silent(int(parameters.endpoint.rsplit(":", 1)[1]), timeout / 2)
    return _Ranked(handler, rank, parameters.local_addr or "", timeout, met)


def _fail_when_silent(port: int, patience: timedelta) -> None:
    """Let the connections to the first node's store fail if there is no answer for so long.

    torch waits for the store's answer without a limit. If the link to the first node is lost, the launcher would hang,
    its ranks' ends unseen, until the system gives the connection up: a quarter of an hour, or never.
    """
    if not hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux has it
        return
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # not a socket, or not connected
            one = socket.socket(fileno=int(number))
            try:
                if one.family in (socket.AF_INET, socket.AF_INET6) and one.getpeername()[1] == port:
                    _limit_silence(one, max(1, round(patience.total_seconds())))
            finally:
                one.detach()  # it is torch's


def _limit_silence(one: socket.socket, seconds: int) -> None:
    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * seconds)  # for what was sent
    one.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # and ask while an answer is awaited
    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, seconds // 2))
    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, seconds // 8))


class _Ranked(RendezvousHandler):
    """Meets as c10d does; the rank is the one that was given, and the processes' store is new in each round."""

    def __init__(
        self, inner: RendezvousHandler, rank: int, address: str, timeout: timedelta, met: Callable[[], None]
    ) -> None:
        self._inner = inner
        self._rank = rank
        self._address = address
        self._timeout = timeout
        self._met = met  # called when all nodes are there
        self._round = 0
        self._server: TCPStore | None = None

    def next_rendezvous(self) -> RendezvousInfo:
        found = self._inner.next_rendezvous()
        self._round += 1
        os.environ[ROUND] = str(self._round)  # torch's count of restarts is another on each node
        store = PrefixStore("lowtide", found.store)  # of this round
        if store.add(f"node_{self._rank}", 1) > 1:
            raise LaunchError(
                f"two nodes were started with --node-rank {self._rank}; give each its own, from 0 to"
                f" {found.world_size - 1}"
            )
        port = 0
        if self._rank == 0:
            self._server = TCPStore(self._address, 0, is_master=True, wait_for_workers=False, timeout=self._timeout)
            port = self._server.port
        place = RendezvousStoreInfo.build(self._rank, store, self._address, server_port=port)
        self._met()
        return RendezvousInfo(found.store, self._rank, found.world_size, place)

    @property
    def use_agent_store(self) -> bool:
        """Ranks find the store running; none of them serves it."""
        return True

    def get_backend(self) -> str:
        return BACKEND

    def is_closed(self) -> bool:
        return self._inner.is_closed()

    def set_closed(self) -> None:
        self._inner.set_closed()

    def num_nodes_waiting(self) -> int:
        return self._inner.num_nodes_waiting()

    def get_run_id(self) -> str:
        return self._inner.get_run_id()

    def shutdown(self) -> bool:
        return self._inner.shutdown()
