"""SHELL: the rendezvous store through which the ranks of a generation find each other.

Whoever only holds one or tells its address does not import torch before it has to: that takes two seconds of CPU.
"""

from __future__ import annotations

import dataclasses
from datetime import timedelta
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StoreAddress:
    """Where a rendezvous store listens.

    Attributes:
        host: address of its machine.
        port: its port.
        prefix: what a job's keys begin with, where it shares the store with others.
    """

    host: str
    port: int
    prefix: str = ""


def open_store(host: str) -> Any:
    """A rendezvous store on a free port of this machine; lives as long as the object."""
    import torch.distributed as dist

    # torch.distributed does not export its stores to type checkers
    return dist.TCPStore(host, 0, None, True, timedelta(seconds=30), wait_for_workers=False)  # type: ignore[attr-defined]


def connect_store(address: StoreAddress, timeout_s: float = 30.0) -> Any:
    """A client of the store, for one thread: a client that waits blocks every other call on it."""
    import torch.distributed as dist

    store = dist.TCPStore(  # type: ignore[attr-defined]
        address.host, address.port, None, False, timedelta(seconds=timeout_s)
    )
    return dist.PrefixStore(address.prefix, store) if address.prefix else store  # type: ignore[attr-defined]
