"""Knowledge of slow workers, as plain values (pure)."""

from __future__ import annotations

import dataclasses
import enum
import math
from typing import Literal, get_args

Response = Literal["ignore", "tell", "share", "replace"]
"""What is done about a straggler; each includes what stands before it."""

RESPONSES: tuple[str, ...] = get_args(Response)


class StragglerCause(str, enum.Enum):
    """Cause of a worker's slowness, as far as measures of it and the others show."""

    WORKER = "worker"
    NODE = "node"
    DATA = "data"
    MEMORY = "memory"
    NETWORK = "network"

    @property
    def sentence(self) -> str:
        """The cause in words."""
        return {
            StragglerCause.WORKER: "the others on its node, if any, are not slow",
            StragglerCause.NODE: "all workers on its node are slow",
            StragglerCause.DATA: "it waits for its data",
            StragglerCause.MEMORY: "its memory is full, or it fetches pages from a disk",
            StragglerCause.NETWORK: "its network, or that of the worker that it sends to",
        }[self]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StragglerConfig:
    """Configuration of the response to stragglers.

    Attributes:
        response: see :data:`Response`.
        patience_s: how long a worker must have been slow before it is replaced [s].

    Raises ValueError: no such response, or a time that is not above 0.
    """

    response: Response = "ignore"
    patience_s: float = 60.0

    def __post_init__(self) -> None:
        if self.response not in RESPONSES:
            raise ValueError(f"stragglers must be one of {', '.join(RESPONSES)}, but got {self.response!r}")
        if not (self.patience_s > 0 and math.isfinite(self.patience_s)):
            raise ValueError(f"patience_s must be above 0 seconds and finite, but got {self.patience_s}")

    def goes_beyond(self, other: StragglerConfig) -> bool:
        """True if this response does more than `other`."""
        return RESPONSES.index(self.response) > RESPONSES.index(other.response)

    @property
    def watches(self) -> bool:
        """True if stragglers are watched for."""
        return self.response != "ignore"

    @property
    def shares(self) -> bool:
        """True if slow workers get fewer samples."""
        return self.response in ("share", "replace")

    @property
    def replaces(self) -> bool:
        """True if workers that stay slow are replaced."""
        return self.response == "replace"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SlowWorker:
    """A worker that holds up its group.

    Attributes:
        ratio: how many times as long as the others it takes for the same work, above 1; of a slow network, to send as
            many bytes.
        cause: why, as far as that can be told.
        weight: its share of a step's samples, that of a worker that is not slow being 1.
        fixed: part of its time at weight 1 that did not shrink with its samples, from 0 to 1; None before its first
            steps at another weight.
        slow_s: for how long it has been slow [s].
        replace: whether it is to be replaced.
    """

    worker: str
    node: str
    ratio: float
    cause: StragglerCause
    weight: float = 1.0
    fixed: float | None = None
    slow_s: float = 0.0
    replace: bool = False

    def __str__(self) -> str:
        what = " to send as much" if self.cause is StragglerCause.NETWORK else ""
        return f"worker {self.worker} takes {self.ratio:.1f} times as long as the others{what}: {self.cause.sentence}"
