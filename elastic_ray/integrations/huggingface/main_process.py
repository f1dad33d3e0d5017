"""What Accelerate does on the main process only, on rank 0 of the present group."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import accelerate

from elastic_ray.loop.api import get_context


class OnMainProcess(accelerate.Accelerator):
    """Accelerate asks a state of the process, where each worker is alone; here the rank is asked whenever it counts.

    Trackers are begun by the first rank 0, and by a later one when it first logs.
    """

    _trackers_wanted: tuple[tuple[Any, ...], dict[str, Any]] | None = None

    def on_main_process(self, function: Callable[..., Any] | None = None) -> Any:
        """A decorator: the function runs on rank 0 only."""
        return self._where(function, lambda: get_context().get_world_rank() == 0)

    def on_local_main_process(self, function: Callable[..., Any] | None = None) -> Any:
        """A decorator: the function runs on the first worker of each node only."""
        return self._where(function, lambda: get_context().get_local_rank() == 0)

    def on_last_process(self, function: Callable[..., Any]) -> Any:
        """A decorator: the function runs on the last rank only."""
        return self._where(function, lambda: get_context().get_world_rank() + 1 == get_context().get_world_size())

    def on_process(self, function: Callable[..., Any] | None = None, process_index: int | None = None) -> Any:
        """A decorator: the function runs on this rank only."""
        return self._where(function, lambda: get_context().get_world_rank() == process_index)

    def on_local_process(
        self, function: Callable[..., Any] | None = None, local_process_index: int | None = None
    ) -> Any:
        """A decorator: the function runs on this worker of each node only."""
        return self._where(function, lambda: get_context().get_local_rank() == local_process_index)

    def _where(self, function: Callable[..., Any] | None, here: Callable[[], bool]) -> Any:
        """A decorator, or with a function its result: what is called where this is so, and is None elsewhere."""
        if function is None:
            return functools.partial(self._where, here=here)

        @functools.wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs) if here() else None

        return called

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on the first worker of each node."""
        if get_context().get_local_rank() == 0:
            print(*args, **kwargs)

    def init_trackers(self, *args: Any, **kwargs: Any) -> None:
        """Begin trackers on rank 0."""
        self._trackers_wanted = args, kwargs
        if get_context().get_world_rank() == 0:
            super().init_trackers(*args, **kwargs)

    def log(self, *args: Any, **kwargs: Any) -> None:
        """Log on rank 0."""
        if get_context().get_world_rank() == 0:
            if self._trackers_wanted is not None and not self.trackers:
                again, options = self._trackers_wanted
                super().init_trackers(*again, **options)
            super().log(*args, **kwargs)
