"""SHELL over torch.distributed: the fixed group of the workers of one unit, for the user's code and for agreements.

What a worker alone could see, or see sooner than the others of its unit (a group that broke, a generation that is
prepared, a wish of the controller's), counts once all of them know it. They are in one place of the program then, so
that a unit acts as one rank of the job.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from elastic_ray.communication.communicator import CommunicationFailedError, Communicator

if TYPE_CHECKING:
    from elastic_ray.unit import UnitPlace

_OTHERS_FAILED = "another worker of the unit could not complete a collective"
_LOOPBACK = "lo"


class UnitLostError(RuntimeError):
    """Another worker of this one's unit is gone, and this one is of no use any more."""


class UnitGroup:
    """Fixed group of the workers of one unit, on one node; they find each other through a file of their user's.

    Args:
        cuda: whether the default group is for CUDA tensors, too.

    Raises UnitLostError: the others did not come.
    """

    def __init__(self, place: UnitPlace, *, cuda: bool, timeout_s: float) -> None:
        self.place, self._timeout = place, timedelta(seconds=timeout_s)
        self._cuda = cuda
        self._mesh: Any = None
        folder = Path(place.store).parent
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        owner = folder.stat()
        if owner.st_uid != os.getuid() or stat.S_IMODE(owner.st_mode) & 0o077:
            raise PermissionError(f"{folder} must be this user's alone, for a unit's workers meet there")
        self._folder = folder
        os.environ.setdefault("GLOO_SOCKET_IFNAME", _LOOPBACK)  # nobody else is to connect
        store = dist.FileStore(place.store, place.size)  # type: ignore[attr-defined]
        self._store = store
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = self._timeout
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        agreeing = dist.PrefixStore("elastic_ray", store)  # type: ignore[attr-defined]
        try:
            self._gloo: Any = dist.ProcessGroupGloo(agreeing, place.position, place.size, options)
        except RuntimeError as error:
            raise UnitLostError(f"the workers of the unit have not found each other: {error}") from error

    def open(self, initialise: Callable[..., None]) -> None:
        """Make torch's default group that of the unit.

        Args:
            initialise: torch's ``init_process_group``.
        """
        backend = "cpu:gloo,cuda:nccl" if self._cuda else "gloo"
        store = dist.PrefixStore("default", self._store)  # type: ignore[attr-defined]
        initialise(backend, store=store, rank=self.place.position, world_size=self.place.size, timeout=self._timeout)

    def close(self) -> None:
        """The run is over."""
        self._gloo = self._mesh = None
        if self.place.position == 0:
            shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def leads(self) -> bool:
        """True if this worker speaks for its unit."""
        return self.place.position == 0

    @property
    def mesh(self) -> Any:
        """Torch's DeviceMesh over the unit; all of its workers ask for it at the same place."""
        if self._mesh is None:
            from torch.distributed.device_mesh import init_device_mesh

            device = "cuda" if self._cuda else "cpu"
            self._mesh = init_device_mesh(device, self.place.sizes, mesh_dim_names=self.place.names)
        return self._mesh

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """Every worker's values (as many on each), by position. Raises UnitLostError: one of them is gone."""
        rows = torch.zeros(self.place.size, len(values), dtype=torch.float64)
        rows[self.place.position] = torch.tensor(list(values), dtype=torch.float64)
        try:
            self._gloo.allreduce([rows]).wait(self._timeout)
        except RuntimeError as error:
            raise UnitLostError(f"a worker of the unit is gone: {str(error).splitlines()[0]}") from error
        found: list[list[float]] = rows.tolist()
        return found

    def agree(self, well: bool) -> bool:
        """Return True if all is well on every worker of the unit."""
        return all(bool(row[0]) for row in self.gather([float(well)]))


class UnitCommunicator(Communicator):
    """The collectives of one position of all units, which succeed on every worker of this unit, or on none.

    Within a backward pass the workers of a unit may be at different places, as stages of a pipeline are: there each
    continues by itself, and the unit agrees on what became of it before the optimizer steps.
    """

    def __init__(self, unit: UnitGroup, *args: Any, **options: Any) -> None:
        self._unit, self._alone = unit, True
        super().__init__(*args, **options)
        self._alone = False

    @contextlib.contextmanager
    def _agreeing(self) -> Iterator[None]:
        """Have what is done within done on all workers of the unit, or on none."""
        if self._alone or torch._C._current_graph_task_id() != -1:
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
        """Wait for a started operation, without impatience: what a worker does must not hang on the clock."""
        with self._agreeing():
            return super().wait(work, since_s=since_s)

    def wait_all(self, works: Sequence[Any], batched: Sequence[Any] = ()) -> None:
        """Wait for sends and receives."""
        with self._agreeing():
            super().wait_all(works, batched)

    def waited_briefly(self, work: Any) -> bool:
        """True if a short wait saw success; where the unit agrees on each wait, :meth:`wait` is the one to ask."""
        return (self._alone or torch._C._current_graph_task_id() != -1) and super().waited_briefly(work)

    def _failure(self, cause: str) -> CommunicationFailedError:
        """Return the error of an operation that could not be started, of which the unit's other workers hear."""
        if not self._alone and torch._C._current_graph_task_id() == -1:
            self._unit.agree(False)  # the others have come to wait for theirs
        return super()._failure(cause)
