"""Requests that a policy may return, as plain values that can be sent to other ranks (pure)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeAlias

from elastic_ray.state.plain_metrics import plain_metrics
from elastic_ray.sync.builders import NAMED
from elastic_ray.sync.spec import TOPOLOGIES, Strategy
from placement.checks import check_choice, check_number, check_whole, plain_number


@dataclasses.dataclass(frozen=True, slots=True)
class Resize:
    """Request to the allocator for a different number of workers, within the job's own limits.

    The request gives the job no priority: the allocator grants only workers that are not more useful to other jobs.

    Attributes:
        to: exact number of workers; cannot be combined with ``min`` or ``max``.
        min: fewest workers; None keeps the job's own limit.
        max: most workers; None keeps the job's own limit.

    Raises:
        TypeError: a value is not an integer.
        ValueError: a value is below 1, ``min`` is above ``max``, or ``to`` is combined with ``min`` or ``max``.

    Examples:
        >>> from elastic_ray.adaptation import Resize
        >>> Resize(to=4)
        Resize(to=4, min=None, max=None)
    """

    to: int | None = None
    min: int | None = None
    max: int | None = None

    def __post_init__(self) -> None:
        for name in ("to", "min", "max"):
            value = getattr(self, name)
            if value is not None:
                check_whole(f"Resize({name})", value, least=1, unit="workers")
        if self.to is not None and (self.min is not None or self.max is not None):
            raise ValueError(f"Resize takes either to, or min and max, but got {self}")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(f"Resize(min) must be at most Resize(max), but got {self.min} and {self.max}")

    @property
    def bounds(self) -> tuple[int | None, int | None]:
        """Fewest and most workers requested; a bound of None keeps the job's own limit."""
        return (self.min, self.max) if self.to is None else (self.to, self.to)


@dataclasses.dataclass(frozen=True, slots=True)
class SetBatch:
    """Request for a global batch size that applies from the next step on, regardless of the number of workers.

    The loader must allow it (``AdaptiveDataLoader.autoscale_batch_size``). From then on the policy controls the batch
    size, and the job no longer chooses it to maximise goodput.

    Attributes:
        batch_size: global batch size [samples]; None lets the job choose again.

    Examples:
        >>> from elastic_ray.adaptation import SetBatch
        >>> SetBatch(256)
        SetBatch(batch_size=256)
    """

    batch_size: int | None

    def __post_init__(self) -> None:
        if self.batch_size is not None:
            check_whole("SetBatch(batch_size)", self.batch_size, least=1, unit="samples")


@dataclasses.dataclass(frozen=True, slots=True)
class ScaleRate:
    """Request to multiply all models' learning rates by a factor, in addition to schedules and the scaling rule.

    Attributes:
        factor: factor above 0, multiplied with the factors of earlier requests (``PolicyView.rate_factor``).

    Examples:
        >>> from elastic_ray.adaptation import ScaleRate
        >>> ScaleRate(0.5)
        ScaleRate(factor=0.5)
    """

    factor: float

    def __post_init__(self) -> None:
        check_number("ScaleRate(factor)", self.factor, above=0, finite=True)


@dataclasses.dataclass(frozen=True, slots=True)
class SetStrategy:
    """Request to synchronise with a different strategy from the next step on.

    Attributes:
        strategy: a name accepted by ``AdaptiveDataParallel(strategy=...)``, or a ``Strategy``.
        model: index of the model, in the order the loop wraps its models.

    Examples:
        >>> from elastic_ray.adaptation import SetStrategy
        >>> SetStrategy("bf16")
        SetStrategy(strategy='bf16', model=0)
    """

    strategy: str | Strategy
    model: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.strategy, str):
            if self.strategy not in NAMED:
                raise ValueError(
                    f"SetStrategy(strategy) must be one of {', '.join(NAMED)}, or a Strategy, but got {self.strategy!r}"
                )
        elif not isinstance(self.strategy, Strategy):
            raise TypeError(f"SetStrategy(strategy) must be a name or a Strategy, but got {self.strategy!r}")
        check_whole("SetStrategy(model)", self.model)


@dataclasses.dataclass(frozen=True, slots=True)
class SetTopology:
    """Request to route all-reduces over a different topology from the next step on.

    The rest of the strategy is unchanged. If the strategy is ``"auto"``, its search ends and the current strategy is
    kept.

    Attributes:
        topology: ``"native"``, ``"two_level"``, ``"ring"``, ``"tree"`` or ``"star"``, as in ``Reduce``.
        model: index of the model, in the order the loop wraps its models.

    Examples:
        >>> from elastic_ray.adaptation import SetTopology
        >>> SetTopology("ring")
        SetTopology(topology='ring', model=0)
    """

    topology: str
    model: int = 0

    def __post_init__(self) -> None:
        check_choice("SetTopology(topology)", self.topology, TOPOLOGIES)
        check_whole("SetTopology(model)", self.model)


@dataclasses.dataclass(frozen=True, slots=True)
class Checkpoint:
    """Request for an automatic checkpoint after the current step, as soon as no other checkpoint is being written.

    Examples:
        >>> from elastic_ray.adaptation import Checkpoint
        >>> Checkpoint()
        Checkpoint()
    """


@dataclasses.dataclass(frozen=True, slots=True)
class Stop:
    """Request to end the training after the current step, as if all epochs were done.

    Code after the epoch loop still runs.

    Attributes:
        reason: sentence recorded in the job's events.

    Examples:
        >>> from elastic_ray.adaptation import Stop
        >>> Stop("good enough")
        Stop(reason='good enough')
    """

    reason: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.reason, str):
            raise TypeError(f"Stop(reason) must be a non-empty sentence, but got {self.reason!r}")


@dataclasses.dataclass(frozen=True, slots=True)
class Pause:
    """Request to save the job and release its slots until a user resumes it.

    Resume it with `elastic-ray resume`, ``JobHandle.resume()`` or the web page.

    Attributes:
        reason: sentence recorded in the job's events.

    Examples:
        >>> from elastic_ray.adaptation import Pause
        >>> Pause("the queue is full")
        Pause(reason='the queue is full')
    """

    reason: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.reason, str):
            raise TypeError(f"Pause(reason) must be a non-empty sentence, but got {self.reason!r}")


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """Request to notify the job's user through an event of kind ``policy``.

    Attributes:
        metrics: numbers and strings keyed by name, as accepted by ``elastic_ray.report``.

    Examples:
        >>> from elastic_ray.adaptation import Report
        >>> Report({"noise": 12.5})
        Report(metrics={'noise': 12.5})
    """

    metrics: Mapping[str, Any]

    def __post_init__(self) -> None:
        if not isinstance(self.metrics, Mapping):
            raise TypeError(f"Report(metrics) must be a mapping of names to values, but got {self.metrics!r}")
        object.__setattr__(self, "metrics", plain_metrics(self.metrics))


Request: TypeAlias = Resize | SetBatch | ScaleRate | SetStrategy | SetTopology | Checkpoint | Stop | Pause | Report

_KINDS: Mapping[str, type[Any]] = {
    kind.__name__: kind
    for kind in (Resize, SetBatch, ScaleRate, SetStrategy, SetTopology, Checkpoint, Stop, Pause, Report)
}


def is_request(value: object) -> bool:
    """True if `value` is an object that a policy's hook may return as a request."""
    return isinstance(value, tuple(_KINDS.values()))


def to_plain(request: Request) -> dict[str, Any]:
    """Return a request as plain values, for other ranks and checkpoints."""
    values = {field.name: plain_number(getattr(request, field.name)) for field in dataclasses.fields(request)}
    if isinstance(request, SetStrategy) and isinstance(request.strategy, Strategy):
        values["strategy"] = {"json": request.strategy.to_json()}
    return {"kind": type(request).__name__, **values}


def from_plain(values: Mapping[str, Any]) -> Request:
    """Return the request that :func:`to_plain` converted to these values."""
    given = {name: value for name, value in values.items() if name != "kind"}
    if isinstance(given.get("strategy"), Mapping):
        given["strategy"] = Strategy.from_json(given["strategy"]["json"])
    request: Request = _KINDS[values["kind"]](**given)
    return request
