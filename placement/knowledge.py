"""What jobs of one model learn from each other: step times, by GPU type and shape, kept beyond the job's end.

Pure: the clock is passed in, and nothing is read or written.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from placement.cluster import Cluster
from placement.fitting import Observation, fit
from placement.goodput import GoodputModel, NoiseScale
from placement.jobs import JobView
from placement.throughput import ThroughputModel

_Shape = tuple[int, int, int, int]
"""Nodes, replicas, accumulation steps, and the power of two next to the atomic batch."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KnowledgeConfig:
    """How much is kept, and for how long.

    Attributes:
        forget_s: an observation older than this no longer counts [s]; drivers and libraries change.
        refit: a model is fitted anew when there are so many times as many shapes as it was fitted to.
    """

    forget_s: float = 30 * 86400.0
    refit: float = 1.25

    def __post_init__(self) -> None:
        if not self.forget_s > 0:
            raise ValueError(f"forget_s must be above 0 seconds, but got {self.forget_s}")
        if not self.refit >= 1:
            raise ValueError(f"refit must be 1 or more, but got {self.refit}")


@dataclasses.dataclass(slots=True)
class _Family:
    """What is known of one fingerprint on one GPU type."""

    seen: dict[_Shape, tuple[Observation, float]] = dataclasses.field(default_factory=dict)
    told: tuple[Observation, ...] | None = None
    model: ThroughputModel | None = None
    fitted_to: int = 0
    most: int = 0
    noise: dict[int, NoiseScale] = dataclasses.field(default_factory=dict)


class Knowledge:
    """Observations of all jobs that were heard of, by fingerprint and GPU type.

    A job without a fingerprint neither gives nor takes. Of several measurements of one shape the newest counts,
    whosever it is; the job's own are among them, since it is heard before it is decided about.
    """

    def __init__(self, config: KnowledgeConfig | None = None) -> None:
        self._config = config or KnowledgeConfig()
        self._families: dict[tuple[str, str], _Family] = {}
        self._read: dict[tuple[str, str], tuple[Observation, ...]] = {}
        self._machines: dict[str, object] = {}
        self._epochs: dict[str, float] = {}

    def machines(self, cluster: Cluster) -> None:
        """Look at the nodes: where those of a GPU type are not what they were, its observations are forgotten.

        A type is the same machine as long as no node of it shows other totals than any node did before.
        """
        for node in cluster.nodes:
            what = frozenset(node.total.items())
            before = self._machines.setdefault(node.gpu_type, what)
            if before != what and node.gpu_type:
                self._machines[node.gpu_type] = what
                self.forget(node.gpu_type)

    def forget(self, gpu: str) -> None:
        """Forget everything about a GPU type."""
        for key in [key for key in self._families if key[1] == gpu]:
            del self._families[key]
        for key in [key for key in self._read if key[1] == gpu]:
            del self._read[key]

    def learn(self, view: JobView, now_s: float) -> None:
        """Take in what a job's heartbeat says; the newest observation of a shape counts."""
        if view.fingerprint is None:
            return
        if view.progress is not None and view.progress.epoch_ends and view.progress.epoch_ends[-1] > 0:
            self._epochs[view.fingerprint] = view.progress.epoch_ends[-1] / len(view.progress.epoch_ends)
        for gpu, observations in view.observations.items():
            read = self._read.get((view.job, gpu))
            if read is observations or (read is not None and read == observations):
                continue
            self._read[view.job, gpu] = observations
            family = self._families.setdefault((view.fingerprint, gpu), _Family())
            for each in observations:
                shape = _shape(each)
                if shape not in family.seen or family.seen[shape][0] != each:
                    family.seen[shape] = each, now_s
                    family.told = None
                family.most = max(family.most, each.replicas)
            model = view.models.get(gpu)
            if model is not None:
                family.noise[_epoch(view)] = model.noise

    def ended(self, job: str) -> None:
        """A job is over: what it measured stays known."""
        for key in [key for key in self._read if key[0] == job]:
            del self._read[key]

    def complete(self, view: JobView, now_s: float) -> JobView:
        """The view with what others have measured where the job itself has not.

        Observations, models, room to grow, and how much progress an epoch takes.

        The growth limit becomes twice the most workers that any job of the family has run with. The model is fitted
        to everything known; the gradient noise stays the job's own where it has one.
        """
        if view.fingerprint is None:
            return view
        observations, models = dict(view.observations), dict(view.models)
        most = 0
        for (fingerprint, gpu), family in self._families.items():
            if fingerprint != view.fingerprint or not family.seen:
                continue
            told = self._told(family, now_s)
            model = self._model(family, told)
            own = models.get(gpu, view.goodput)
            noise = own.noise if own is not None else family.noise.get(_epoch(view))
            if noise is None and family.noise:  # the earliest seen: noise rises as training goes on
                noise = family.noise[min(family.noise)]
            if model is None or noise is None or view.init_batch_size is None:
                continue
            observations[gpu] = told
            models[gpu] = GoodputModel(model, noise, view.init_batch_size)
            most = max(most, family.most)
        usual_epoch = self._epochs.get(view.fingerprint)
        if view.progress is not None and usual_epoch is not None:
            view = dataclasses.replace(view, progress=dataclasses.replace(view.progress, usual_epoch=usual_epoch))
        if not most:
            return view
        limit = None if view.growth_limit is None else max(view.growth_limit, 2 * most)
        first = next(iter(sorted(models)))
        return dataclasses.replace(
            view,
            observations=observations,
            models=models,
            goodput=models[_present_type(view, models) or first],
            most_workers=max(view.most_workers, most),
            growth_limit=limit,
        )

    def _told(self, family: _Family, now_s: float) -> tuple[Observation, ...]:
        old = [shape for shape, (_, seen_s) in family.seen.items() if now_s - seen_s > self._config.forget_s]
        for shape in old:
            del family.seen[shape]
        if family.told is None or old:
            family.told = tuple(observation for _, (observation, _) in sorted(family.seen.items()))
        return family.told

    def _model(self, family: _Family, told: tuple[Observation, ...]) -> ThroughputModel | None:
        if not told:
            return None
        if family.model is None or len(told) >= self._config.refit * family.fitted_to:
            family.model, family.fitted_to = fit(told), len(told)
        return family.model


def _epoch(view: JobView) -> int:
    """Finished epochs: gradient noise depends on how far training is."""
    return 0 if view.progress is None else len(view.progress.epoch_ends)


def _shape(observation: Observation) -> _Shape:
    batch = round(math.log2(max(observation.atomic_bsz, 1.0)))
    return observation.nodes, observation.replicas, observation.accum_steps, batch


def _present_type(view: JobView, models: Mapping[str, GoodputModel]) -> str | None:
    """The GPU type whose model the view carries as its present one."""
    for gpu, model in view.models.items():
        if model == view.goodput:
            return gpu
    return None
