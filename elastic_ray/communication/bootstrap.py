"""Bootstrap data that members of a generation exchange through their controller before they connect (pure).

The controller replaces a rendezvous server, so no extra port is opened. Members reach it through Ray actor calls, so
Ray controls who can call it. In addition, each call proves that its sender is a worker of this job.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Mapping

from elastic_ray.authentication import sign, verify

_GENERATIONS_KEPT = 4  # the present one, the one that is being formed, and those that are being given up
_LONGEST_KEY = 256
_LARGEST_VALUE_BYTES = 1 << 16
_KEYS_PER_MEMBER = 1024  # NCCL has one for each peer that a rank sends to
_LONGEST_WAIT_S = 60.0


class BootstrapRefusedError(Exception):
    """Error raised if the caller is not a member of a current or announced generation (group), or exceeds a limit."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BootstrapCall:
    """One member's request while a generation forms: values that it publishes, and keys that it waits for."""

    generation: int
    worker: str
    mac: bytes = dataclasses.field(repr=False)  # that it knows the job's secret (:func:`call_mac`)
    # what the others are to know, by key
    tells: Mapping[str, bytes] = dataclasses.field(default_factory=dict, repr=False)
    wants: tuple[str, ...] = ()  # keys that it waits for
    wait_s: float = 0.0  # how long [s]


def call_mac(secret: str, generation: int, worker: str) -> bytes:
    """Return the message authentication code for a worker's calls in a generation; ``secret`` is the job's secret."""
    return sign(secret, "bootstrap", generation, worker)


class _Table:
    """Values that the members of one generation have published."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.owners: dict[str, str] = {}
        self.news = asyncio.Event()
        self.dropped = False

    def notify(self, worker: str, values: Mapping[str, bytes]) -> None:
        for key, value in values.items():
            if len(key) > _LONGEST_KEY or len(value) > _LARGEST_VALUE_BYTES:
                raise BootstrapRefusedError(f"a key of {len(key)} characters, or {len(value)} bytes under it: too long")
            owner = self.owners.get(key, worker)
            if owner != worker:
                raise BootstrapRefusedError(f"{worker} may not write what {owner} has written")
            if key not in self.owners and sum(each == worker for each in self.owners.values()) >= _KEYS_PER_MEMBER:
                raise BootstrapRefusedError(f"{worker} writes more than {_KEYS_PER_MEMBER} keys")
            self.owners[key] = worker
            self.values[key] = value
        if values:
            self.wake()

    def drop(self) -> None:
        """Drop the values of an abandoned generation and wake its callers."""
        self.dropped = True
        self.wake()

    def wake(self) -> None:
        """Wake all waiting callers."""
        self.news.set()
        self.news = asyncio.Event()


class Bootstrap:
    """Rendezvous server that lets the members of a job's generations (groups of workers) find each other.

    The server runs in a single event loop. If the server's data is lost, the generation that is forming fails.

    Args:
        is_member: Returns True if a worker belongs to the given generation, which is current or announced. Generation 0
            is the group formed by the worker's own unit.
    """

    def __init__(self, secret: str, is_member: Callable[[int, str], bool]) -> None:
        self._secret, self._is_member = secret, is_member
        self._tables: dict[int, _Table] = {}
        self._units: dict[str, _Table] = {}

    async def meet(self, call: BootstrapCall) -> dict[str, bytes]:
        """Store a member's values, wait for the keys it requests (for a limited time), and return all members' values.

        Raises BootstrapRefusedError if the caller is not a member, or the generation was abandoned in the meantime.
        """
        if not verify(call.mac, self._secret, "bootstrap", call.generation, call.worker):
            raise BootstrapRefusedError("a call that proves nothing")
        if not self._is_member(call.generation, call.worker):
            raise BootstrapRefusedError(f"{call.worker} is no member of generation {call.generation}")
        table = self._table(call.generation) if call.generation else self._table_of_unit(call.worker)
        table.notify(call.worker, call.tells)
        loop = asyncio.get_running_loop()
        until_s = loop.time() + min(call.wait_s, _LONGEST_WAIT_S)
        while not all(key in table.values for key in call.wants) and (left_s := until_s - loop.time()) > 0:
            try:
                await asyncio.wait_for(table.news.wait(), left_s)
            except asyncio.TimeoutError:
                break
            if table.dropped:
                raise BootstrapRefusedError(f"generation {call.generation} was abandoned")
        return dict(table.values)

    def _table_of_unit(self, worker: str) -> _Table:
        """Return the table of a unit that spans nodes, for its own processes only; remove units that are gone."""
        for gone in [each for each in self._units if not self._is_member(0, each)]:
            self._units.pop(gone).drop()
        return self._units.setdefault(worker, _Table())

    def _table(self, generation: int) -> _Table:
        """Return a generation's table, creating it if needed; raises BootstrapRefusedError if it is too old."""
        if generation not in self._tables:
            self._tables[generation] = _Table()
            for old in sorted(self._tables)[:-_GENERATIONS_KEPT]:
                self._tables.pop(old).drop()
        if generation not in self._tables:
            raise BootstrapRefusedError(f"generation {generation} is over")
        return self._tables[generation]
