"""How time, rounds and the cost of a change work in a simulation: the published simulators' ways, and ours."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Protocol

from placement.simulator.errors import InputError

_SIA_RESTART_S: Mapping[str, float] = MappingProxyType(
    {"cifar10": 50.0, "deepspeech2": 25.0, "bert": 120.0, "yolov3": 80.0, "imagenet": 250.0, "ncf": 15.0}
)
_SIA_DIVISOR: Mapping[str, float] = MappingProxyType({"cifar10": 1.8, "ncf": 1.5})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Spot:
    """Where a job's workers are.

    Attributes:
        nodes: workers per node id, in the order in which the policy named them.
        gpu: type of the GPUs; of several types the one that counts is the slowest to wait for.
    """

    nodes: Mapping[str, int]
    gpu: str

    @property
    def workers(self) -> int:
        """Workers altogether."""
        return sum(self.nodes.values())

    @property
    def counts(self) -> tuple[int, ...]:
        """Workers on each node."""
        return tuple(self.nodes.values())


class Rules(Protocol):
    """What differs between the simulators.

    Attributes:
        name: as on the command line.
        round_s: seconds between two decisions; None decides on events, as the live allocator does.
        most_workers: no job gets more.
    """

    @property
    def name(self) -> str: ...
    @property
    def round_s(self) -> float | None: ...
    @property
    def most_workers(self) -> int: ...

    def restart_s(self, application: str, before: Spot | None, after: Spot) -> float:
        """Seconds without progress after a job was placed; ``before`` is None at its first start or after a wait."""
        ...

    def expected_restart_s(self, application: str) -> float:
        """What a job says that a change costs it [s]."""
        ...

    def divisor(self, application: str) -> float:
        """By what true progress is divided."""
        ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PolluxRules:
    """The simulator of Pollux (OSDI 2021): rounds of 60 s, 30 s for any change of nodes and for every start."""

    name: str = "pollux"
    round_s: float | None = 60.0
    most_workers: int = 64
    restart: float = 30.0

    def restart_s(self, application: str, before: Spot | None, after: Spot) -> float:
        """See ``Rules``."""
        return 0.0 if before is not None and dict(before.nodes) == dict(after.nodes) else self.restart

    def expected_restart_s(self, application: str) -> float:
        """See ``Rules``."""
        return self.restart

    def divisor(self, application: str) -> float:
        """See ``Rules``."""
        return 1.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SiaRules:
    """The simulator of Sia (SOSP 2023): rounds of 60 s, a restart delay and a slow-down for each application.

    A change of the counts per node or of the GPU type is a restart, as is every start; moving is free.

    Attributes:
        factor: multiplies every restart delay, to ask what cheaper changes would be worth.
    """

    name: str = "sia"
    round_s: float | None = 60.0
    most_workers: int = 64
    factor: float = 1.0

    def __post_init__(self) -> None:
        if not self.factor >= 0:
            raise InputError(f"factor must be 0 or more, but got {self.factor}")

    def restart_s(self, application: str, before: Spot | None, after: Spot) -> float:
        """See ``Rules``."""
        if before is not None and before.gpu == after.gpu and sorted(before.counts) == sorted(after.counts):
            return 0.0
        return self.expected_restart_s(application)

    def expected_restart_s(self, application: str) -> float:
        """See ``Rules``."""
        return _SIA_RESTART_S.get(application, 60.0) * self.factor

    def divisor(self, application: str) -> float:
        """See ``Rules``."""
        return _SIA_DIVISOR.get(application, 1.2)


RULES: Mapping[str, Callable[[], Rules]] = MappingProxyType({"pollux": PolluxRules, "sia": SiaRules})
"""Rules by name."""


def make_rules(rules: str | Rules) -> Rules:
    """The rules of that name, or the rules themselves.

    Raises:
        InputError: no rules have that name.
    """
    if not isinstance(rules, str):
        return rules
    if rules not in RULES:
        raise InputError(f"rules must be one of {', '.join(sorted(RULES))}, but got {rules!r}")
    return RULES[rules]()
