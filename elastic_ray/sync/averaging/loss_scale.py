"""The loss scale of all ranks where each has updated AMP's ``GradScaler`` by its own gradients (torch)."""

from __future__ import annotations

import struct
from typing import Any

from elastic_ray.communication.communicator import Communicator

_SCALE, _TRACKER = "scale", "_growth_tracker"


def smallest_scale(communicator: Communicator, scaler: Any, *, counts: bool) -> tuple[float, int] | None:
    """The smallest scale of those ranks that count, which no rank's gradients have overflowed; a collective.

    Args:
        communicator: the group.
        scaler: this rank's, enabled; None without AMP, on all ranks alike.
        counts: whether this rank's counts.

    Returns:
        The scale, and the steps since it last changed, as few as on any rank that has it; None where there is none.

    Raises:
        CommunicationFailedError: the group broke.
    """
    if scaler is None:
        return None
    state = scaler.state_dict()
    # In whole numbers, as which positive floats have the same order.
    (bits,) = struct.unpack("<i", struct.pack("<f", state[_SCALE]))
    told = communicator.gather_ints([int(counts), bits, state[_TRACKER]], with_gradients=True)
    rows = [row for row in told if row[0]]
    if not rows:
        return None
    _, bits, tracker = min(rows)
    return struct.unpack("<f", struct.pack("<i", bits))[0], tracker


def take_scale(scaler: Any, agreed: tuple[float, int] | None) -> None:
    """Go on with that scale."""
    if agreed is not None:
        scaler.load_state_dict({**scaler.state_dict(), _SCALE: agreed[0], _TRACKER: agreed[1]})
