"""SHELL: output of Ray's own daemons, in the driver's output, about processes that the job has lost."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

from ray._private import worker as _ray_worker

logger = logging.getLogger(__name__)

_DUMP = "A worker died or was killed"


@contextlib.contextmanager
def without_raylet_dumps() -> Iterator[None]:
    """Log what raylets say about lost workers at level debug: the job's own events say it in one line."""
    theirs: Any = _ray_worker
    printed = theirs.print_to_stdstream

    def print_to_stdstream(data: Any, *args: Any, **options: Any) -> None:
        lines = data.get("lines") or ()
        if data.get("pid") == "raylet" and lines and str(lines[0]).startswith(_DUMP):
            logger.debug("%s", lines[0])
            return
        printed(data, *args, **options)

    theirs.print_to_stdstream = print_to_stdstream
    try:
        yield
    finally:
        theirs.print_to_stdstream = printed
