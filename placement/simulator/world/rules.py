"""Rules for time, rounds and the cost of changes in a simulation: published simulators' rules, and ours."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType

from placement.checks import check_number
from placement.errors import InputError

_SIA_RESTART_S: Mapping[str, float] = MappingProxyType(
    {"cifar10": 50.0, "deepspeech2": 25.0, "bert": 120.0, "yolov3": 80.0, "imagenet": 250.0, "ncf": 15.0}
)
_SIA_DIVISOR: Mapping[str, float] = MappingProxyType({"cifar10": 1.8, "ncf": 1.5})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Location:
    """Nodes and GPU type of a job's workers."""

    nodes: Mapping[str, int]  # workers per node id, in the order in which the policy named them
    gpu: str  # type of the GPUs; of several types the one that counts is the slowest to wait for
    # type of each node, of a job that shares its batch out among several; empty where one counts for all
    types: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def workers(self) -> int:
        """Number of workers."""
        return sum(self.nodes.values())

    @property
    def counts(self) -> tuple[int, ...]:
        """Number of workers on each node."""
        return tuple(self.nodes.values())

    @property
    def workers_by_type(self) -> dict[str, int]:
        """Number of workers, keyed by GPU type."""
        found: dict[str, int] = {}
        for node, workers in sorted(self.nodes.items()):
            gpu = self.types.get(node, self.gpu)
            found[gpu] = found.get(gpu, 0) + workers
        return found

    def only(self, nodes: Mapping[str, int]) -> Location:
        """Return the location with only these workers; ``nodes`` is the number of workers keyed by node id."""
        types = {node: self.types[node] for node in nodes if node in self.types}
        gpu = self.gpu if self.gpu in types.values() or not types else min(types.values())
        return Location(nodes=nodes, gpu=gpu, types=types)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ChangeCost:
    """Cost of moving a job to a new location, as time without progress."""

    pause_s: float  # seconds without progress, now
    meanwhile: Location | None = None  # the workers that train on while new ones start; None if all are there at once
    joins_after_s: float = 0.0  # when the new ones join [s from now]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Intervals of heartbeats and decisions in an event-driven simulation; coarse by default, for traces of days."""

    heartbeat_s: float = 30.0  # time between two heartbeats of a job [s]
    measured_s: float = 10.0  # of training until a new size has been measured, and is told [s]
    min_interval_s: float = 15.0  # see ``AllocatorConfig``
    refresh_s: float = 60.0  # see ``AllocatorConfig``
    # a job grows to twice its largest size so far at most, as under the published schedulers; live jobs that are no
    # trials have no such limit once they have a model
    doubling: bool = True
    # a job tells neither how long it will be, nor what it costs to stop it, before it trains, as live jobs do, whose
    # train function only then runs
    silent_start: bool = False

    def __post_init__(self) -> None:
        check_number("heartbeat_s", self.heartbeat_s, above=0, unit="seconds", error=InputError)
        for field in ("measured_s", "min_interval_s", "refresh_s"):
            check_number(field, getattr(self, field), least=0, unit="seconds", error=InputError)


LIVE_PACE = Pace(heartbeat_s=1.0, measured_s=4.0, min_interval_s=2.0, refresh_s=30.0, doubling=False, silent_start=True)
"""That of jobs and allocators as they are by default, for short runs and comparisons with real ones."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rules(abc.ABC):
    """Base class of a simulator's rules: rounds, costs of changes, and pace."""

    name: str = ""  # as on the command line
    round_s: float | None = 60.0  # seconds between two decisions; None decides on events, as the live allocator does
    most_workers: int = 64  # no job gets more
    whole_seconds: bool = True  # ends of epochs are rounded to whole seconds
    profiles_types: bool = False  # where there are several GPU types, a job knows one GPU of each before it starts
    pace: Pace = Pace()  # of news, where decisions follow events

    @property
    def join_s(self) -> float:
        """Pause for a job while workers that were started in the background join it [s]."""
        return 0.0

    @abc.abstractmethod
    def change(
        self, application: str, before: Location | None, training: Location | None, after: Location
    ) -> ChangeCost:
        """Return the cost of moving a job's workers from ``before`` (None if it has none) to ``after``."""

    @abc.abstractmethod
    def expected_restart_s(self, application: str) -> float:
        """Return the cost that a job of this application reports to the allocator for a change to its workers [s]."""

    def expected_stop_s(self, application: str) -> float | None:
        """Return the cost that a job reports for a stop and restart [s]; None if the job must not be stopped."""
        return self.expected_restart_s(application)

    def divisor(self, application: str) -> float:
        """Return how many times slower jobs of this application are than their profile; 1 if they are not slower."""
        return 1.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PolluxRules(Rules):
    """Rules of Pollux's simulator (OSDI 2021): rounds of 60 s, and 30 s for every start and every change of nodes."""

    name: str = "pollux"
    restart: float = 30.0

    def change(
        self, application: str, before: Location | None, training: Location | None, after: Location
    ) -> ChangeCost:
        same = before is not None and dict(before.nodes) == dict(after.nodes)
        return ChangeCost(pause_s=0.0 if same else self.restart)

    def expected_restart_s(self, application: str) -> float:
        return self.restart


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SiaRules(Rules):
    """Rules of Sia's simulator (SOSP 2023): rounds of 60 s, a restart delay and a slow-down for each application.

    A start costs one restart, as does a change of GPU type or of workers per node. A move to other nodes is free.
    """

    name: str = "sia"
    profiles_types: bool = True
    factor: float = 1.0  # multiplies every restart delay, to ask what cheaper changes would be worth

    def __post_init__(self) -> None:
        check_number("factor", self.factor, least=0, error=InputError)

    def change(
        self, application: str, before: Location | None, training: Location | None, after: Location
    ) -> ChangeCost:
        same = before is not None and before.gpu == after.gpu and sorted(before.counts) == sorted(after.counts)
        return ChangeCost(pause_s=0.0 if same else self.expected_restart_s(application))

    def expected_restart_s(self, application: str) -> float:
        return _SIA_RESTART_S.get(application, 60.0) * self.factor

    def divisor(self, application: str) -> float:
        return _SIA_DIVISOR.get(application, 1.2)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LiveRules(Rules):
    """Rules of this project: events trigger decisions, and a running job is resized between two steps.

    New workers start while the others are training, and then join; leaving workers leave at once. A job pauses while
    workers start only if it keeps none of its workers (another GPU type, all nodes changed, the first start). Node
    identity matters: a worker that moves is a new worker.
    """

    name: str = "live"
    round_s: float | None = None
    whole_seconds: bool = False
    profiles_types: bool = True
    pause: float = 0.6  # of training at one change of size [s]; ``tests/benchmarks`` measured 0.02 to 0.60 (README)
    start: float = 15.0  # of a new worker, until it could take a step [s]
    # of the workers of a job that has none, with all that starts with them [s]; None is as ``start``
    first: float | None = None
    slow_sia: bool = True  # divide progress as Sia's simulator does, to compare with it

    def __post_init__(self) -> None:
        for field in ("pause", "start", "first"):
            if getattr(self, field) is not None:
                check_number(field, getattr(self, field), least=0, unit="seconds", error=InputError)

    @property
    def join_s(self) -> float:
        return self.pause

    def change(
        self, application: str, before: Location | None, training: Location | None, after: Location
    ) -> ChangeCost:
        trained = {} if training is None else training.nodes
        stay = {n: min(w, after.nodes[n]) for n, w in trained.items() if n in after.nodes}
        if not stay or training is None or (training.gpu != after.gpu and not after.types):
            return ChangeCost(pause_s=self.start if before is not None or self.first is None else self.first)
        leaves = self.pause if sum(stay.values()) < training.workers else 0.0
        if sum(stay.values()) == after.workers:
            return ChangeCost(pause_s=leaves)
        return ChangeCost(pause_s=leaves, meanwhile=training.only(stay), joins_after_s=self.start)

    def expected_restart_s(self, application: str) -> float:
        return self.pause

    def expected_stop_s(self, application: str) -> float | None:
        """Return the stop cost [s]: a preempted job saves its state between two steps and restarts on new workers."""
        return self.start + self.pause

    def divisor(self, application: str) -> float:
        return _SIA_DIVISOR.get(application, 1.2) if self.slow_sia else 1.0


RULES: Mapping[str, Callable[[], Rules]] = MappingProxyType({"live": LiveRules, "pollux": PolluxRules, "sia": SiaRules})
"""Rules by name."""


def make_rules(rules: str | Rules) -> Rules:
    """Return the rules with this name, or an object unchanged; raise InputError if the name is unknown."""
    if not isinstance(rules, str):
        return rules
    if rules not in RULES:
        raise InputError(f"rules must be one of {', '.join(sorted(RULES))}, but got {rules!r}")
    return RULES[rules]()
