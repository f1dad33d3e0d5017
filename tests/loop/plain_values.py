"""Values that may be sent between ranks, and one that may not."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np


def alike(one: Any, other: Any) -> bool:
    """Equal in type, order and bits."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return alike(list(one.items()), list(other.items()))
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(alike(a, b) for a, b in zip(one, other, strict=True))
    if isinstance(one, (float, np.generic)):
        return struct.pack("<d", one) == struct.pack("<d", other)
    if isinstance(one, complex):
        return alike((one.real, one.imag), (other.real, other.imag))
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    return bool(one == other)


class Thing:
    """Something that only its own code can build."""
