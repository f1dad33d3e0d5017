"""SHELL: lines appended to a file of this machine that only its user can read."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable

from placement.storage.private_files import open_append

logger = logging.getLogger("placement.storage")


class LineFile:
    """File of lines; what was appended is in the file when the call returns, in order.

    After an error, which is logged, nothing is written any more: lines with a hole between them would say what never
    was.

    Args:
        path: of the file; its folder must be there.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._file: int | None = None
        try:
            self._file = open_append(path, private=True)
        except OSError as error:
            self._give_up(error)

    def append(self, lines: Iterable[str]) -> None:
        """Write lines that end with a line break."""
        left = "".join(lines).encode()
        while left and self._file is not None:
            try:
                left = left[os.write(self._file, left) :]
            except OSError as error:
                os.close(self._file)
                self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        self._file = None
        logger.warning("nothing is recorded in %s any more: %s", self._path, error)
