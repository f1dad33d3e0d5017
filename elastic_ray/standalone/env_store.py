"""SHELL: the rendezvous store of a group that was started without Ray: the launcher's, or one that rank 0 holds."""

from __future__ import annotations

import errno
import logging
import os
import socket
from datetime import timedelta
from typing import Any

import torch.distributed as dist

logger = logging.getLogger(__name__)

_HELD: dict[tuple[str, int], Any] = {}  # by address: it lasts as long as the process, also for later calls


def env_store(rank: int, timeout_s: float) -> Any:
    """The store that ``MASTER_ADDR`` and ``MASTER_PORT`` name.

    ``torchrun``'s agent holds one and says so in ``TORCHELASTIC_USE_AGENT_STORE``. Under ``srun``, ``mpirun`` and the
    like no agent does, so rank 0 does it, at that address alone.

    Args:
        rank: rank of this process.
        timeout_s: how long to wait for it, and for whatever is asked of it [s].

    Raises:
        RuntimeError: it cannot be reached or held; the message says where.
    """
    host, port, timeout = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timedelta(seconds=timeout_s)
    by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if rank == 0 and not by_agent and (host, port) not in _HELD:
        _HELD[host, port] = _hold(host, port, timeout)
    # torch.distributed does not export its stores to type checkers; a client serves one thread at a time
    return dist.TCPStore(host, port, None, False, timeout)  # type: ignore[attr-defined]


def address_towards(host: str, port: int) -> str:
    """This machine's address that every machine can reach which can reach ``host``."""
    family, kind, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)  # sends nothing
        return str(probe.getsockname()[0])


def _hold(host: str, port: int, timeout: timedelta) -> Any:
    """A store that this process holds at the address; raises RuntimeError where it cannot listen there."""
    options: dict[str, Any] = {"wait_for_workers": False, "multi_tenant": True}  # as torch's own env:// does
    try:
        options["master_listen_fd"] = _bind(host, port).detach()
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            logger.warning("MASTER_ADDR=%s is no address of rank 0's machine, so it listens at all that it has", host)
        elif error.errno != errno.EADDRINUSE:  # torch shares one that this process holds already
            raise RuntimeError(f"rank 0 cannot listen at MASTER_ADDR={host}, MASTER_PORT={port}: {error}") from error
    return dist.TCPStore(host, port, None, True, timeout, **options)  # type: ignore[attr-defined]


def _bind(host: str, port: int) -> socket.socket:
    """A socket that listens at this address alone."""
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except BaseException:
        listener.close()
        raise
    return listener
