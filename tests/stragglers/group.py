"""A simulated group: each worker needs a fixed part and a part per sample, times how slow it is; with noise."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from elastic_ray.data.sharding import Shares, by_weight
from elastic_ray.membership.messages import Member
from elastic_ray.monitoring.measures import WorkerMeasures
from elastic_ray.stragglers.detection import Response, StragglerConfig
from elastic_ray.stragglers.gpu_types import TypeShares
from elastic_ray.stragglers.watch import StragglerWatch


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """A member of the group."""

    worker: str
    node: str


class Group:
    """Steps of a group under one watch.

    Args:
        config: of the watch.
        nodes: node of each worker.
        batch: samples of a step.
        fixed_s: part of a healthy worker's step that does not grow with its samples [s].
        sample_s: the part of one sample [s].
        noise: draws what a worker's time is multiplied with.
    """

    def __init__(
        self,
        config: StragglerConfig | None = None,
        *,
        nodes: Sequence[str] = ("n", "n", "n", "n"),
        batch: int = 64,
        fixed_s: float = 0.0,
        sample_s: float = 0.01,
        noise: Callable[[], float] = lambda: 1.0,
    ) -> None:
        self.members = [Place(f"w{rank}", node) for rank, node in enumerate(nodes, 1)]
        self.batch, self.fixed_s, self.sample_s, self.noise = batch, fixed_s, sample_s, noise
        self.measured: list[WorkerMeasures] = []
        self.told: list[dict[str, Any]] = []
        self.slow: dict[str, float] = {}
        self.data_s: dict[str, float] = {}
        self.memory: dict[str, dict[str, float]] = {}
        self.sending_s: dict[str, float] = {}
        self.network_s, self.equal = 0.0, False
        self._sizes: dict[tuple[int, tuple[float, ...]], list[int]] = {}
        self.steps, self.last_s = 0, 0.0
        self.watch = StragglerWatch(
            config or StragglerConfig(response="tell"),
            members=lambda: self.members,  # type: ignore[return-value]
            equal=lambda: self.equal,
            measured=lambda: self.measured,
            tell=self._tell,
        )

    def _tell(self, text: str, detail: Mapping[str, Any]) -> None:
        self.told.append({**detail, "text": text, "step": self.steps})

    @property
    def states(self) -> list[str]:
        """What was told, in order."""
        return [each["state"] for each in self.told]

    def sizes(self) -> list[int]:
        """Samples of each rank in the next step."""
        key = self.batch, self.watch.weights or (1.0,) * len(self.members)
        if key not in self._sizes:
            self._sizes[key] = by_weight(self.batch, Shares(weights=key[1]), 1)
        return self._sizes[key]

    def step(self, steps: int = 1) -> float:
        """Make steps; returns the time of the last one [s]."""
        for _ in range(steps):
            sizes = self.sizes()
            self.measured = [
                WorkerMeasures(
                    compute_s=(self.fixed_s + self.sample_s * size) * self.slow.get(member.worker, 1.0) * self.noise(),
                    data_s=self.data_s.get(member.worker, 0.0),
                    step_s=self.last_s,
                    sending_s=self.sending_s.get(member.worker, 0.0),
                    all_reduce_mib=100.0,
                    **self.memory.get(member.worker, {}),
                )
                for member, size in zip(self.members, sizes, strict=True)
            ]
            self.last_s = max(each.compute_s + each.data_s for each in self.measured) + self.network_s
            self.steps += 1
            self.watch.after_step([[size] for size in sizes])
        return self.last_s


def sequence_noise(generator: random.Random, spread: float) -> Callable[[], float]:
    """Times of batches padded to their longest sequence: 1 on average, with a long tail."""
    return lambda: generator.lognormvariate(-spread * spread / 2, spread)


@dataclasses.dataclass
class Times:
    """How long the workers take: a fixed part, and one per sample."""

    fixed_s: float = 0.0
    sample_s: float = 0.01
    noise: float = 0.0


class TypedGroup:
    """Steps of a group on several types under one watch."""

    def __init__(
        self, types: Sequence[str], slow: dict[str, float], times: Times | None = None, response: Response = "tell"
    ) -> None:
        self.members = [Member(worker=f"w{i}", node=f"n-{gpu}", gpu_type=gpu) for i, gpu in enumerate(types)]
        self.slow, self.times, self.random = slow, times or Times(), random.Random(0)
        self.worker_slow: dict[str, float] = {}
        self.measured: list[WorkerMeasures] = []
        self.told: list[str] = []
        self.equal = False
        self.types = TypeShares(members=lambda: self.members, measured=lambda: self.measured, equal=lambda: self.equal)
        self.watch = StragglerWatch(
            StragglerConfig(response=response),
            members=lambda: self.members,
            measured=self.types.comparable_measures,
            tell=lambda text, detail: self.told.append(text),
        )
        self.sizes: list[int] = []
        self.last_s = 0.0

    def run(self, steps: int, batch: int = 240) -> None:
        for _ in range(steps):
            weights = self.types.weights(self.watch.weights) or (1.0,) * len(self.members)
            self.sizes = by_weight(batch, Shares(weights=weights), 1)
            seconds = [self._seconds(member, n) for member, n in zip(self.members, self.sizes, strict=True)]
            self.last_s = max(seconds)
            self.measured = [WorkerMeasures(compute_s=s, step_s=self.last_s) for s in seconds]
            sizes = [[float(n)] for n in self.sizes]
            self.watch.after_step(self.types.comparable(sizes))
            self.types.after_step(sizes)

    def _seconds(self, member: Member, samples: int) -> float:
        times = self.slow[member.gpu_type] * self.worker_slow.get(member.worker, 1.0)
        noise = max(0.2, self.random.gauss(1.0, self.times.noise))
        return (self.times.fixed_s + self.times.sample_s * samples) * times * noise
