"""What one worker does by itself within a framework's code that meets the others elsewhere."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


class SavesAlone:
    """To be inherited: ``_saves_alone`` tells whether one is within :meth:`_alone`."""

    _saves_alone = False

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """What is called within meets no other worker."""
        self._saves_alone = True
        try:
            yield
        finally:
            self._saves_alone = False
