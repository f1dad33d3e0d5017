"""A batch size that is declared by progress: ``batch_size=[(0, 64), (0.1, 256)]``."""

from __future__ import annotations

import itertools
import math
from typing import Any, TypeAlias

Ramp: TypeAlias = "tuple[tuple[float, int], ...]"
"""(progress from which it counts, global batch), by progress; empty for one batch size throughout."""


def read_ramp(batch_size: Any) -> tuple[Any, Ramp]:
    """The initial batch size, and the ramp that begins with it.

    Raises:
        TypeError: an entry is no pair of numbers.
        ValueError: it does not begin at 0, goes back, or ends beyond 1; a batch is not a whole number from 1.
    """
    if not isinstance(batch_size, list | tuple):
        return batch_size, ()
    found = tuple(_entry(each) for each in batch_size)
    begins = [begin for begin, _ in found]
    if not begins or begins[0] != 0.0:
        raise ValueError(f"a batch ramp must begin at progress 0, as [(0, 64), (0.1, 256)], but got {batch_size!r}")
    if any(later <= sooner for sooner, later in itertools.pairwise(begins)) or begins[-1] >= 1.0:
        raise ValueError(f"a batch ramp's progress must rise, and stay below 1, but got {batch_size!r}")
    return found[0][1], found


def _entry(entry: Any) -> tuple[float, int]:
    """Check one (progress, batch) pair of a ramp and return it."""
    if not isinstance(entry, list | tuple) or len(entry) != 2:
        raise TypeError(f"a batch ramp must hold pairs (progress, global batch), but got {entry!r}")
    begin, size = entry
    if isinstance(begin, bool) or not isinstance(begin, int | float) or not math.isfinite(begin):
        raise TypeError(f"a batch ramp's progress must be a number from 0 to 1, but got {begin!r}")
    if isinstance(size, bool) or not isinstance(size, int):
        raise TypeError(f"a batch ramp's global batch must be a whole number, but got {size!r}")
    if size < 1:
        raise ValueError(f"a batch ramp's global batch must be 1 or more, but got {size}")
    return float(begin), size
