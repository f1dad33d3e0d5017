"""Work of torch's process groups that is over when it is returned (torch)."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

BACKEND = "elastic_ray"
"""What torch calls the process groups that return such work."""


class EndedWork(dist._Work):  # type: ignore[name-defined,misc]
    """Work of a process group that has already ended.

    Args:
        tensors: its results.
    """

    def __init__(self, tensors: Any = ()) -> None:
        super().__init__()
        self._tensors = list(tensors)

    def wait(self, timeout: Any = None) -> bool:
        """For torch."""
        return True

    def is_completed(self) -> bool:
        """For torch."""
        return True

    def is_success(self) -> bool:
        """For torch."""
        return True

    def result(self) -> list[Any]:
        """For torch."""
        return self._tensors

    def get_future(self) -> Any:
        """For torch."""
        future: Any = torch.futures.Future()
        future.set_result(self._tensors)
        return future
