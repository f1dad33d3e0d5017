"""Datasets of the train function of this thread."""

from __future__ import annotations

import contextvars
import secrets
from typing import Any

_run: contextvars.ContextVar[DatasetsOfJob | None] = contextvars.ContextVar("elastic_ray_datasets", default=None)


class DatasetsOfJob:
    """Names of a job's datasets, and the actor that reads them; as a context, the train function's in this thread.

    Attributes:
        token: of the train function's run in this process.
    """

    def __init__(self, coordinator: str, names: tuple[str, ...]) -> None:
        self.coordinator, self.names, self.token = coordinator, names, ""

    def __enter__(self) -> DatasetsOfJob:
        self.token = secrets.token_hex(8)
        _run.set(self)
        return self

    def __exit__(self, *error: Any) -> None:
        _run.set(None)


def datasets_of_thread() -> DatasetsOfJob | None:
    """Return the datasets of the train function that runs in this thread; None if it has none."""
    return _run.get()
