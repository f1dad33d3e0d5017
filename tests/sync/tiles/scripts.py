"""A group that grows, shrinks and loses a worker."""

from __future__ import annotations

from tests.loop.changing import Change, Kill

GROWS_AND_SHRINKS = [
    Change(3, (1, 2, 3)),
    Change(7, (1, 2, 3, 4)),
    Change(15, (3, 4)),
    Kill(20, 3, "backward", last=True),
]
