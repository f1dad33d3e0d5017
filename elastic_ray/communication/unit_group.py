"""SHELL over torch.distributed: the fixed group of one unit's workers, for user code and for agreement.

A unit is several worker processes that act as one rank. Some facts can reach one worker of a unit before the others, or
only that one: a broken group, a prepared generation, a request from the controller. Such a fact takes effect only once
all workers of the unit know it, at the same point in the program.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
import stat
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from elastic_ray.communication.communicator import CommunicationFailedError, Communicator
from placement.text import first_line

if TYPE_CHECKING:
    from elastic_ray.unit import UnitPlace

_OTHERS_FAILED = "another worker of the unit could not complete a collective"
_INTERFACE = "GLOO_SOCKET_IFNAME"
_GET_ADDRESS = 0x8915  # SIOCGIFADDR
_chosen: set[str] = set()  # interfaces that were chosen here: a process may serve units of both kinds


class UnitLostError(RuntimeError):
    """Error raised if another worker in the unit is gone, which forces this worker to exit too."""


class UnitGroup:
    """Fixed group of the workers of one unit, which together train one replica of the model.

    Args:
        cuda: True if torch's default group should also support CUDA tensors.
        store: Rendezvous store for workers on several nodes. None uses a file that only the workers' user can read.
        host: Address of this worker's node, for workers on several nodes.

    Raises UnitLostError if the other workers did not arrive.
    """

    def __init__(
        self, place: UnitPlace, *, cuda: bool, timeout_s: float, store: Any = None, host: str = "127.0.0.1"
    ) -> None:
        self.place, self._timeout = place, timedelta(seconds=timeout_s)
        self._cuda = cuda
        self._mesh: Any = None
        self._folder = Path(place.store).parent if store is None else None
        if self._folder is not None:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            owner = self._folder.stat()
            if owner.st_uid != os.getuid() or stat.S_IMODE(owner.st_mode) & 0o077:
                raise PermissionError(f"{self._folder} must be this user's alone, for a unit's workers meet there")
            store = dist.FileStore(place.store, place.size)  # type: ignore[attr-defined]
        self._store = store
        if os.environ.get(_INTERFACE) in (None, *_chosen) and (interface := _interface(host)):
            os.environ[_INTERFACE] = interface  # loopback if all are on one node: nobody else is to connect
            _chosen.add(interface)
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = self._timeout
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
        agreeing = dist.PrefixStore("elastic_ray", store)  # type: ignore[attr-defined]
        try:
            self._gloo: Any = dist.ProcessGroupGloo(agreeing, place.position, place.size, options)
        except RuntimeError as error:
            raise UnitLostError(f"the workers of the unit have not found each other: {error}") from error

    def open(self, initialise: Callable[..., None]) -> None:
        """Make the unit's group torch's default group."""
        backend = "cpu:gloo,cuda:nccl" if self._cuda else "gloo"
        if self._cuda:
            os.environ.setdefault("NCCL_RUNTIME_CONNECT", "0")  # NCCL reads it once: it is for the job's groups
        store = dist.PrefixStore("default", self._store)  # type: ignore[attr-defined]
        initialise(backend, store=store, rank=self.place.position, world_size=self.place.size, timeout=self._timeout)

    def close(self) -> None:
        """Close the group when the run ends."""
        self._gloo = self._mesh = None
        if self.place.position == 0 and self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def leads(self) -> bool:
        """True if this worker represents its unit (workers that act as one rank) to the job."""
        return self.place.position == 0

    @property
    def mesh(self) -> Any:
        """DeviceMesh of the unit; all workers of the unit must request it at the same point in the program."""
        if self._mesh is None:
            from torch.distributed.device_mesh import init_device_mesh

            device = "cuda" if self._cuda else "cpu"
            self._mesh = init_device_mesh(device, self.place.sizes, mesh_dim_names=self.place.names)
        return self._mesh

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """Return the values from all of the unit's workers, by position; raises UnitLostError if a worker is gone."""
        rows = torch.zeros(self.place.size, len(values), dtype=torch.float64)
        rows[self.place.position] = torch.tensor(list(values), dtype=torch.float64)
        try:
            self._gloo.allreduce([rows]).wait(self._timeout)
        except RuntimeError as error:
            raise UnitLostError(f"a worker of the unit was lost: {first_line(error)}") from error
        found: list[list[float]] = rows.tolist()
        return found

    def over_shards(self, sums: list[tuple[tuple[int, int], str, float]]) -> list[tuple[tuple[int, int], str, float]]:
        """Return ``sums``, tuples (accumulator, name, value), with each value summed over the unit's workers.

        Workers that process the same samples are counted once. Every worker of the unit must call this.

        Raises:
            UnitLostError: a worker of the unit is gone.
            RuntimeError: the unit's workers have added to different names; raised on all of them.
        """
        if self.place.shards == 1:
            return sums
        names = sorted({name for _, name, _ in sums})
        told = float(zlib.crc32(repr([each[:2] for each in sums]).encode())), float(len(sums))
        if any(tuple(row) != told for row in self.gather(told)):
            raise RuntimeError(
                "all workers of a unit must add to the same names of the same Accumulators in a step, at least 0.0, "
                f"but they differ; this worker has added to {names or 'none'}"
            )
        if not sums:
            return sums
        rows = self.gather([float(self.place.shard), *(value for _, _, value in sums)])
        parts = {row[0]: row[1:] for row in rows}  # workers of one part have the same sums
        return [(key, name, sum(own)) for (key, name, _), *own in zip(sums, *parts.values(), strict=True)]

    def agree(self, well: bool) -> bool:
        """Return True if ``well`` is True on every worker of the unit; every worker must call this."""
        return all(bool(row[0]) for row in self.gather([float(well)]))

    def of_leader(self, content: bytes) -> bytes:
        """Return the leader's ``content`` on every worker of the unit; raises UnitLostError if a worker is gone."""
        size = round(self.gather([float(len(content))])[0][0])
        data = (
            torch.frombuffer(bytearray(content), dtype=torch.uint8)
            if self.leads
            else torch.empty(size, dtype=torch.uint8)
        )
        try:
            self._gloo.broadcast([data], dist.BroadcastOptions()).wait(self._timeout)
        except RuntimeError as error:
            raise UnitLostError(f"a worker of the unit was lost: {first_line(error)}") from error
        return data.numpy().tobytes()


def _interface(host: str) -> str:
    """Return the name of the network interface with this address; empty if it is not found."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                found = fcntl.ioctl(asked.fileno(), _GET_ADDRESS, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(found[20:24]) == host:
                    return name
    return ""


class UnitCommunicator(Communicator):
    """Collectives between equal positions in all units; they succeed on all workers of this unit or on none.

    During a backward pass, the workers of a unit may be at different points in the program, for example in pipeline
    stages. Each worker then continues by itself, and the unit agrees on the result before the optimizer steps.
    """

    def __init__(self, unit: UnitGroup, *args: Any, **options: Any) -> None:
        self._unit, self._alone = unit, True
        super().__init__(*args, **options)
        self._alone = False

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Make the operations within this context succeed on all workers of the unit or on none."""
        if self._alone or self.world_size == 1 or torch._C._current_graph_task_id() != -1:
            yield
            return
        self._alone, well = True, False
        try:
            yield
            well = True
        finally:
            self._alone = False
            others = self._unit.agree(well)
        if not others:
            self.mark_broken()
            raise CommunicationFailedError(_OTHERS_FAILED)

    def wait(self, work: Any, *, patience_s: float = 0.0, since_s: float | None = None) -> bool:
        """Wait for a started operation, ignoring ``patience_s``: workers of a unit must not depend on the clock."""
        with self.together():
            return super().wait(work, since_s=since_s)

    def wait_all(
        self, works: Sequence[Any], batched: Sequence[Any] = (), speak: Callable[[], None] | None = None
    ) -> None:
        """Wait for sends and receives, without ``speak``; see :meth:`wait`."""
        with self.together():
            super().wait_all(works, batched)

    def waited_briefly(self, work: Any) -> bool:
        """True if a short wait succeeded. Always False if the unit must agree; call :meth:`wait` in that case."""
        return (self._alone or torch._C._current_graph_task_id() != -1) and super().waited_briefly(work)

    def _failure(self, cause: str) -> CommunicationFailedError:
        """Return the error for an operation that could not be started, and report it to the unit's other workers."""
        if not self._alone and torch._C._current_graph_task_id() == -1:
            self._unit.agree(False)  # the others have come to wait for theirs
        return super()._failure(cause)
