"""What a framework's ``log`` is told, as reports of the job."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import elastic_ray as er
from elastic_ray.loop.api import current_session


class LoggedValues:
    """Reports what a framework logs: the job's metrics, its page, its trackers and ``Result`` have it.

    A report holds the last value of every name, since evaluation and training log at different times. A trial's reports
    are its scheduler's rounds, which the train function counts itself: there nothing is added to them.
    """

    def __init__(self) -> None:
        self._last: dict[str, float] = {}

    def report(self, values: Mapping[str, Any]) -> None:
        """Report numbers; called on every rank alike. Values of other types stay with the framework."""
        session = current_session()
        for name, value in values.items():
            with contextlib.suppress(TypeError, ValueError, RuntimeError):  # text, or a tensor of several
                self._last[str(name)] = float(value)
        if session.elastic and session.synced and not session.controller.paced and self._last:
            er.report(self._last)
