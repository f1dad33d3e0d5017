"""SHELL over torch.distributed: rendezvous store for gloo and NCCL, backed by calls to the job's controller."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from elastic_ray.communication.background_work import exiting

if TYPE_CHECKING:
    from elastic_ray.worker.actor_controller_client import ControllerCaller

_LOOK_S = 1.0  # between two looks whether the group is still wanted


class BootstrapStore(dist.Store):  # type: ignore[name-defined, misc]  # torch does not export it to type checkers
    """Rendezvous store of one member for forming one group; received values are cached.

    Torch calls the store from C++, in whichever thread forms the group. Keep a reference to the store while the group
    exists.

    Args:
        timeout_s: Maximum total wait, counted from construction [s]. After that, no values are requested, unless
            :meth:`stay_open` was called.
        called_off: Returns True once the group is no longer wanted, which ends all waits.
    """

    def __init__(
        self,
        caller: ControllerCaller,
        timeout_s: float,
        *,
        rank: int,
        world_size: int,
        called_off: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__()
        self._called_off, self._caller, self._rank, self._world_size = called_off, caller, rank, world_size
        self._timeout_s = timeout_s
        self._until_s = time.monotonic() + timeout_s
        self._stays_open = False  # each wait has a timeout of its own
        self._known: dict[str, bytes] = {}
        self.told: dict[str, bytes] = {}  # what this member has set
        self._waits = True  # who sets something waits for something next, as gloo does: then one call does both
        self._untold: dict[str, bytes] = {}

    def publish_at_once(self) -> None:
        """Publish each value set from now on immediately, instead of with the next wait."""
        self._waits = False

    def stay_open(self) -> None:
        """Give each wait from now on its own timeout, because user code forms groups, or sends, whenever it likes."""
        self._stays_open = True

    def set(self, key: str, value: Any) -> None:
        """Publish a value under ``key`` to all members, at once or with the next wait (:meth:`publish_at_once`)."""
        content = value.encode() if isinstance(value, str) else bytes(value)
        self._known[key] = self.told[key] = content
        if self._waits:
            self._untold[key] = content
        else:
            self._caller.notify({key: content})

    def get(self, key: str) -> bytes:
        """Wait until a value for ``key`` exists, and return it; raises like :meth:`wait`."""
        self.wait([key])
        return self._known[key]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until values for all keys exist; a ``timeout`` can only shorten the store's own.

        Raises RuntimeError if a key does not arrive in time, or the controller refuses to answer.
        """
        until_s = time.monotonic() + self._timeout_s if self._stays_open else self._until_s
        if timeout is not None:
            until_s = min(until_s, time.monotonic() + timeout.total_seconds())
        while missing := tuple(key for key in keys if key not in self._known):
            left_s = until_s - time.monotonic()
            if left_s <= 0 or self._called_off() or exiting.is_set():
                raise RuntimeError(f"timed out waiting for {', '.join(missing)}")
            tells, self._untold = self._untold, {}
            self._known.update(self._caller.ask(self._with_others(missing), min(left_s, _LOOK_S), tells))
        if self._untold and not all(key in self.told for key in keys):
            # The others are ahead, and an earlier answer had this of theirs already: no call is due that would tell it.
            tells, self._untold = self._untold, {}
            self._caller.notify(tells)

    def _with_others(self, keys: tuple[str, ...]) -> tuple[str, ...]:
        """Return the keys, plus others that this member will request soon.

        gloo requests one peer's key at a time. If this member has published its own key, the keys of all peers are
        included.
        """
        stems = {key.rpartition("/")[0] for key in keys}
        known = [stem for stem in stems if f"{stem}/{self._rank}" in self.told]
        wanted = [f"{stem}/{peer}" for stem in known for peer in range(self._world_size)]
        return tuple(dict.fromkeys((*keys, *(key for key in wanted if key not in self._known))))

    def check(self, keys: Sequence[str]) -> bool:
        """True if this rank's cache holds all keys; watchdogs call this often, so it does not call the controller."""
        return all(key in self._known for key in keys)

    def delete_key(self, key: str) -> bool:
        """Delete a value from this rank's cache only; return True if the cache held it."""
        return self._known.pop(key, None) is not None

    def set_timeout(self, timeout: timedelta) -> None:
        """Do nothing, because the deadline is fixed."""

    def has_extended_api(self) -> bool:
        """Return False, because append, queues and similar operations are not supported."""
        return False

    def add(self, key: str, amount: int) -> int:
        """Raise NotImplementedError; counters are not supported, because no group here needs them."""
        raise NotImplementedError(
            f"a rendezvous through the controller cannot count, but a count was requested: {key!r}"
        )
