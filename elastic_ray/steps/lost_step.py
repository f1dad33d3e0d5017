"""A step of one rank that was taken back (pure)."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class LostStep:
    """What matters of it once a group has been found to go on with.

    Attributes:
        nested: whether it lies within a step of another pass.
        outer_lost: whether that one has failed as well, or its gradients wait for an update: they may be gone.
        before: where the outermost pass is, and optimizers stepped in its step; a pass within it may be a step behind.
    """

    nested: bool
    outer_lost: bool
    before: tuple[int, int]
