"""Records of measurements that are stored between runs of an allocator, and how they are merged (pure)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import TypeVar

from placement.cluster.jobs import FoundStrategy
from placement.goodput.fitting import Observation
from placement.goodput.model import NoiseScale

Shape = tuple[int, int, int, int]
"""Nodes, replicas, accumulation steps, and the power of two next to the atomic batch."""

_MOST_LENGTHS = 32
"""So many lengths are kept of each model: what users do with it now counts, not what they did last month."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Batches:
    """Limits on a job's batch, with fields as in ``JobView``."""

    init_batch_size: int
    max_batch_size: int | None = None
    atomic_bsz_range: tuple[int, int] | None = None
    accumulation: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KnownStep:
    """Stored measurement of a step time."""

    fingerprint: str  # of the job's model
    gpu_type: str  # of the nodes it ran on, empty without GPUs or label
    # descriptions of the nodes of that type when it was kept (see ``placement.knowledge.knowledge.machine_of``)
    machines: frozenset[str]
    observation: Observation
    seen_s: float  # when [s since the epoch]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KnownNoise:
    """Stored gradient noise for a job after a number of epochs, with the job's batch limits."""

    fingerprint: str  # of the job's model
    gpu_type: str  # of the nodes it ran on
    epoch: int  # epochs it had finished
    noise: NoiseScale  # at the initial batch size of ``batches``
    batches: Batches  # limits of its batch
    seen_s: float  # when [s since the epoch]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KnownLength:
    """Stored length of one job that has ended."""

    fingerprint: str  # of the job's model
    samples: float  # its progress in all: samples that it would have needed at the initial batch
    part: float | None  # of the length that it had declared first; None if it had declared none
    seen_s: float  # when it ended [s since the epoch]
    declarer: str = ""  # who had submitted it, or his tenant; empty where neither is known


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KnownStrategy:
    """Stored result of comparing synchronisation strategies: the fastest one."""

    fingerprint: str  # of the job's model
    form: str  # of its group
    found: FoundStrategy
    seen_s: float  # when [s since the epoch]


_Known = TypeVar("_Known", KnownStep, KnownNoise, KnownStrategy)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Measurements:
    """All measurements that are stored between runs of an allocator: step times, noise, lengths and strategies."""

    steps: tuple[KnownStep, ...] = ()
    noises: tuple[KnownNoise, ...] = ()
    lengths: tuple[KnownLength, ...] = ()
    strategies: tuple[KnownStrategy, ...] = ()


def merged(several: Iterable[Measurements]) -> Measurements:
    """Return several writers' measurements as one object, with only the newest per shape (for noise: per epoch)."""
    several = tuple(several)
    return Measurements(
        steps=_latest((each for one in several for each in one.steps), lambda each: (each.machines, *_step_key(each))),
        noises=_latest((each for one in several for each in one.noises), _noise_key),
        lengths=newest(length for one in several for length in one.lengths),
        strategies=_latest((each for one in several for each in one.strategies), _strategy_key),
    )


def _latest(records: Iterable[_Known], key: Callable[[_Known], object]) -> tuple[_Known, ...]:
    """Return the latest record of each key, in the order in which keys first occur."""
    found: dict[object, _Known] = {}
    for each in records:
        if (known := found.get(key(each))) is None or known.seen_s < each.seen_s:
            found[key(each)] = each
    return tuple(found.values())


def _step_key(step: KnownStep) -> tuple[object, ...]:
    return step.fingerprint, step.gpu_type, shape_of(step.observation)


def _noise_key(noise: KnownNoise) -> tuple[object, ...]:
    return noise.fingerprint, noise.gpu_type, noise.epoch


def _strategy_key(strategy: KnownStrategy) -> tuple[object, ...]:
    return strategy.fingerprint, strategy.form


def newest(lengths: Iterable[KnownLength]) -> tuple[KnownLength, ...]:
    """Return the latest job lengths for each model (a limited number), oldest first and without duplicates."""
    kept: dict[str, list[KnownLength]] = {}
    for length in sorted(set(lengths), key=lambda each: (each.seen_s, each.fingerprint, each.samples)):
        kept.setdefault(length.fingerprint, []).append(length)
    return tuple(length for several in kept.values() for length in several[-_MOST_LENGTHS:])


def covers(measurements: Measurements, other: Measurements, since_s: float) -> bool:
    """True if ``measurements`` has every record of ``other`` newer than ``since_s``, in that or a newer version."""
    steps = {_step_key(step): step for step in measurements.steps}
    for step in other.steps:
        mine = steps.get(_step_key(step))
        if step.seen_s > since_s and (mine is None or mine.seen_s < step.seen_s or not mine.machines & step.machines):
            return False
    known = {_noise_key(noise): noise.seen_s for noise in measurements.noises}
    if any(max(known.get(_noise_key(noise), since_s), since_s) < noise.seen_s for noise in other.noises):
        return False
    found = {_strategy_key(each): each.seen_s for each in measurements.strategies}
    if any(found.get(_strategy_key(each), since_s) < each.seen_s for each in other.strategies):
        return False
    theirs = [each for each in other.lengths if each.seen_s > since_s]
    return set(newest([*measurements.lengths, *theirs])) <= set(measurements.lengths)


def shape_of(observation: Observation) -> Shape:
    """Return the shape of a measurement: nodes, replicas, accumulation steps, and log2 of the atomic batch."""
    batch = round(math.log2(observation.atomic_bsz))
    return observation.nodes, observation.replicas, observation.accum_steps, batch
