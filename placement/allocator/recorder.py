"""SHELL: writes what the allocator's core is told and decides into a file, line by line."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable

from placement.allocator.config import AllocatorConfig
from placement.allocator.events import Event
from placement.allocator.recording import decision_line, event_line, start_line
from placement.allocator.snapshot import DecisionRecord
from placement.policies import Policy
from placement.storage.private_files import open_append

logger = logging.getLogger("placement.allocator")


class Recorder:
    """Appends to a file of the head node that only its user can read. One that cannot be written ends the recording.

    Args:
        path: of the file; its folder must be there.
        policy: of the core, before its first decision.
        config: of the core.
        settling: whether jobs may be running that have not been heard of yet.
    """

    def __init__(self, path: str, policy: Policy, config: AllocatorConfig | None, *, settling: bool) -> None:
        self._path = path
        self._file: int | None = None
        try:
            self._file = open_append(path, private=True)
        except OSError as error:
            self._give_up(error)
        self._append([start_line(policy, config, settling=settling)])

    def told(self, event: Event, now_s: float) -> None:
        """The core is told this."""
        self._append([event_line(event, now_s)])

    def decided(self, records: Iterable[DecisionRecord]) -> None:
        """It has decided this."""
        self._append([decision_line(record) for record in records])

    def _append(self, lines: list[str]) -> None:
        """Write whole lines, unless that has failed before."""
        if self._file is None or not lines:
            return
        left = "".join(lines).encode()
        try:
            while left:
                left = left[os.write(self._file, left) :]
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        """A recording with a hole in it would be of no use."""
        logger.warning("the allocator's events are not recorded in %s any more: %s", self._path, error)
        if self._file is not None:
            os.close(self._file)
            self._file = None
