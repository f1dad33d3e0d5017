"""SHELL: a rank of a group without a trainer leaves a word in the group's store when its process ends.

All that gloo tells the others is that a connection was closed.
"""

from __future__ import annotations

import atexit
import os
import sys
from datetime import timedelta
from typing import Any

from placement.text import printable

_STORE_S = timedelta(seconds=2)  # neither a process that ends nor one that fails waits long for a store that is gone
_LONGEST = 1000  # anybody who reaches the store may write there
_CLOSED = ("closed by peer", "reset by peer", "Broken pipe")


class Departures:
    """Who was the first to leave the group.

    Args:
        prefix: name of the group in the store.
        rank: of this process.
        world_size: number of ranks.
    """

    def __init__(self, prefix: str, rank: int, world_size: int) -> None:
        self._key = f"{prefix}/left"
        self._rank = rank
        self._world_size = world_size
        self._store: Any = None
        self._process = os.getpid()

    def use(self, store: Any) -> None:
        """The group is about to form, through this store."""
        self._store = store
        atexit.register(self._leave)

    def explain(self, cause: str) -> str:
        """Why a collective has failed, which says so itself in ``cause``: who has left, as far as that is known."""
        atexit.unregister(self._leave)  # this rank's end follows from the other's, and is not to be told in its place
        if self._store is None:
            return cause
        try:
            self._store.set_timeout(_STORE_S)
            told = bytes(self._store.get(self._key)) if self._store.check([self._key]) else b""
        except RuntimeError:
            return (
                f"the group's store at {_address()} is gone: rank 0, or the launcher that held it, has left ({cause})"
            )
        if told or not any(words in cause for words in _CLOSED):
            return printable(told.decode(errors="replace")[:_LONGEST]) or cause
        who = f"rank {1 - self._rank}" if self._world_size == 2 else "a rank"
        return f"{who} has left without a word: its process was killed, or its machine is gone"

    def _leave(self) -> None:
        """Say in the store why this rank ends, unless another one has said so before."""
        if os.getpid() != self._process:
            return  # a child that was forked
        error = getattr(sys, "last_value", None)
        why = f"its process ends with {type(error).__name__}: {error}" if error is not None else "its process ends"
        told = f"rank {self._rank} has left: {why}"
        if error is None:
            told += ". Every rank must make the same calls (continue, break, return) in the same steps"
        try:
            self._store.set_timeout(_STORE_S)
            self._store.compare_set(self._key, "", told)
        except RuntimeError:
            return  # the store is gone before this rank


def _address() -> str:
    return f"MASTER_ADDR={os.environ.get('MASTER_ADDR')}, MASTER_PORT={os.environ.get('MASTER_PORT')}"
