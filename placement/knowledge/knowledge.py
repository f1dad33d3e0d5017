"""Measurements shared by jobs of the same model: step times by GPU type and shape, kept after the jobs end.

Pure: the clock is passed in, and nothing is read or written. ``placement.knowledge.store`` stores it in files.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Collection, Iterable, Mapping

from placement.checks import check_number
from placement.cluster.cluster import Cluster, Node
from placement.cluster.jobs import FoundStrategy, JobView, Progress
from placement.goodput.fitting import Observation, fit
from placement.goodput.model import GoodputModel, NoiseScale
from placement.goodput.remaining import BEYOND
from placement.goodput.step_time import ThroughputModel
from placement.knowledge.records import (
    Batches,
    KnownLength,
    KnownNoise,
    KnownStep,
    KnownStrategy,
    Measurements,
    Shape,
    newest,
    shape_of,
)

_PARTS = 32  # declarations of one declarer, over all models, that are remembered
_MOST_BORROWED = 4.0  # a loop that declares one stage after the other goes a hundred times beyond the first
_CHANGED = 0.2
"""Relative change of a step time after which models are fitted anew: the first steps of a job may have been slow."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KnowledgeConfig:
    """Settings for how long measurements are kept."""

    forget_s: float = 30 * 86400.0  # an observation older than this no longer counts [s]; drivers and libraries change

    def __post_init__(self) -> None:
        check_number("forget_s", self.forget_s, above=0, unit="seconds")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Prior:
    """Model for a GPU type that a job has no measurements for, borrowed from other jobs that train the same model."""

    model: GoodputModel  # fitted to what others measured; its noise is that of the earliest epoch known
    largest_batch: int  # largest global batch that any of them ran with [samples]


@dataclasses.dataclass(slots=True)
class _Family:
    """Knowledge about one fingerprint (jobs of the same model) on one GPU type.

    A model is fitted when it is requested, but to the measurements known right after the last change that mattered. If
    measurements from after that change were used too, the allocator's decisions would depend on who reads models and
    when.
    """

    seen: dict[Shape, tuple[Observation, float]] = dataclasses.field(default_factory=dict)
    own: set[Shape] = dataclasses.field(default_factory=set)
    cached: tuple[Observation, ...] | None = None
    fits: dict[bool, ThroughputModel] = dataclasses.field(default_factory=dict)
    fitted_to: tuple[Observation, ...] | None = None
    most: int = 0
    noise: dict[int, tuple[NoiseScale, Batches, float]] = dataclasses.field(default_factory=dict)

    def take(self, observation: Observation, seen_s: float, *, stored: bool = False) -> bool:
        """Add one measurement; return True if it was new. A stored one never replaces one that a job reported."""
        shape = shape_of(observation)
        known = self.seen.get(shape)
        if stored and (shape in self.own or (known is not None and known[1] > seen_s)):
            return False
        if not stored:
            self.own.add(shape)
        if known is not None and known[0] == observation:
            return False
        if known is None or (
            observation.atomic_bsz == known[0].atomic_bsz
            and abs(observation.step_time / known[0].step_time - 1.0) > _CHANGED
        ):
            self.fits.clear()  # a model that has not seen a shape may be wrong by half there, and idle GPUs cost more
            self.fitted_to = None
        elif self.fitted_to is None:
            self.fitted_to = self._told()
        self.seen[shape] = observation, seen_s
        self.cached = None
        self.most = max(self.most, observation.replicas)
        return True

    def observations(self, now_s: float, forget_s: float) -> tuple[Observation, ...]:
        """Return one measurement per shape, after dropping those older than ``forget_s``."""
        old = [shape for shape, (_, seen_s) in self.seen.items() if now_s - seen_s > forget_s]
        for shape in old:
            del self.seen[shape]
            self.own.discard(shape)
        if self.cached is None or old:
            self.cached = self._told()
        return self.cached

    def model(self, *, fixed_batch: bool) -> ThroughputModel | None:
        """Return a model fitted to the measurements, or None without measurements."""
        told = self.fitted_to if self.fitted_to is not None else self._told()
        if fixed_batch not in self.fits and told:
            self.fits[fixed_batch] = fit(told, fixed_batch=fixed_batch)
        return self.fits.get(fixed_batch)

    def _told(self) -> tuple[Observation, ...]:
        return tuple(observation for _, (observation, _) in sorted(self.seen.items()))


class Knowledge:
    """Observations from all known jobs, keyed by fingerprint (id of the model that a job trains) and GPU type.

    A job without a fingerprint neither contributes nor receives knowledge. If a shape was measured several times, the
    newest measurement counts, whichever job made it. A job's own measurements are included, since its heartbeat is
    processed before any decision about the job.
    """

    def __init__(self, config: KnowledgeConfig | None = None) -> None:
        self._config = config or KnowledgeConfig()
        self._families: dict[str, dict[str, _Family]] = {}
        self._read: dict[tuple[str, str], tuple[Observation, ...]] = {}
        self._epochs: dict[str, float] = {}
        self._lengths = EndedJobs(self._config.forget_s)
        self._machines: dict[str, frozenset[str]] = {}
        self._strategies: dict[str, dict[str, KnownStrategy]] = {}
        self._told_strategies: dict[str, Mapping[str, FoundStrategy]] = {}  # by job
        self.version = 0  # rises whenever there is something new to keep

    def machines(self, cluster: Cluster) -> None:
        """Compare the nodes with earlier ones, and discard observations of GPU types whose machines were replaced.

        A type keeps its observations as long as any of its nodes is of a kind that was present before, since a cluster
        may mix node sizes and add new sizes.
        """
        present: dict[str, set[str]] = {}
        for node in cluster.nodes:
            present.setdefault(node.gpu_type, set()).add(machine_of(node))
        for gpu, kinds in present.items():
            before = self._machines.get(gpu)
            self._machines[gpu] = frozenset(kinds)
            if before is not None and not before & kinds:
                self.discard(gpu)

    def discard(self, gpu: str) -> None:
        """Discard all observations of a GPU type."""
        for families in self._families.values():
            families.pop(gpu, None)
        for key in [key for key in self._read if key[1] == gpu]:
            del self._read[key]

    def learn(self, view: JobView, now_s: float) -> None:
        """Record a heartbeat's measurements, replacing older ones of the same shape (nodes, workers, batch)."""
        if view.fingerprint is None:
            return
        self._lengths.receive(view)
        told = self._told_strategies.get(view.job, {})
        for form, found in view.strategies.items():
            if told.get(form) != found:
                known = self._strategies.setdefault(view.fingerprint, {})
                known[form] = KnownStrategy(fingerprint=view.fingerprint, form=form, found=found, seen_s=now_s)
                self.version += 1
        self._told_strategies[view.job] = view.strategies
        if _epoch(view) and view.progress is not None and view.progress.epoch_ends[-1] > 0:
            self._epochs[view.fingerprint] = view.progress.epoch_ends[-1] / _epoch(view)
        for gpu, observations in view.observations.items():
            read = self._read.get((view.job, gpu))
            if read is observations or (read is not None and read == observations):
                continue
            self._read[view.job, gpu] = observations
            family = self._family(view.fingerprint, gpu)
            for each in observations:
                self.version += family.take(each, now_s)
            model = view.models.get(gpu)
            if model is not None:
                batches = Batches(
                    init_batch_size=model.init_batch_size,
                    max_batch_size=view.max_batch_size,
                    atomic_bsz_range=view.atomic_bsz_ranges.get(gpu, view.atomic_bsz_range),
                    accumulation=view.accumulation,
                )
                epoch = _epoch(view)
                if model.noise.sqr or model.noise.var:  # a job of one batch does not measure it
                    self.version += epoch not in family.noise
                    family.noise[epoch] = model.noise, batches, now_s

    def ended(self, job: str, now_s: float) -> None:
        """Record that a job ended at ``now_s``, keeping its measurements and its length for later jobs."""
        self.version += self._lengths.ended(job, now_s)
        self._told_strategies.pop(job, None)
        for key in [key for key in self._read if key[0] == job]:
            del self._read[key]

    def complete(self, view: JobView, now_s: float) -> JobView:
        """Return the view with gaps in the job's own measurements filled in from other jobs of the same model.

        The gaps are observations, models, room to grow, and the progress per epoch. The model is fitted to all
        observations; the gradient noise remains the job's own if it has measured any. The growth limit becomes at least
        twice the most workers that any job of the same model has run with. A job that has not reported its batch yet
        (its workers are still starting) is assumed to have the batch limits of the model's latest job.
        """
        fingerprint = view.fingerprint
        if fingerprint is None:
            return view
        families = self._families.get(fingerprint, {})
        if view.init_batch_size is None:
            view = _with_batches(view, families.values())
        observations, models = dict(view.observations), dict(view.models)
        most = 0
        for gpu, family in families.items():
            if not family.seen:
                continue
            told = family.observations(now_s, self._config.forget_s)
            model = family.model(fixed_batch=view.max_batch_size is None) if told else None
            own = models.get(gpu, view.goodput)
            noise = own.noise if own is not None else _noise(family, view)
            if model is None or noise is None or view.init_batch_size is None:
                continue
            observations[gpu] = told
            models[gpu] = GoodputModel(model, noise, view.init_batch_size)
            most = max(most, family.most)
        # The view is copied once, with all that is added: jobs times decisions, copies were a fifth of a simulation.
        progress = self._lengths.progress(view, self._epochs.get(fingerprint), now_s)
        if not most:
            return view if progress is view.progress else dataclasses.replace(view, progress=progress)
        limit = None if view.growth_limit is None else max(view.growth_limit, 2 * most)
        first = next(iter(sorted(models)))
        return dataclasses.replace(
            view,
            progress=progress,
            observations=observations,
            models=models,
            goodput=models[_present_type(view, models) or first],
            most_workers=max(view.most_workers, most),
            growth_limit=limit,
        )

    def priors(self, view: JobView, now_s: float) -> dict[str, Prior]:
        """Return a borrowed model for each GPU type that only other jobs of the same model have used, keyed by type."""
        if self._families.get(view.fingerprint or "", {}).keys() <= view.models.keys():
            return {}
        known = self.complete(view, now_s)
        return {
            gpu: Prior(
                model=model, largest_batch=int(max(o.replicas * o.atomic_bsz * (o.accum_steps + 1) for o in seen))
            )
            for gpu, model in known.models.items()
            if gpu not in view.models and (seen := known.observations.get(gpu))
        }

    def strategies(self, view: JobView, now_s: float) -> dict[str, FoundStrategy] | None:
        """Return the fastest strategies known of this model by form of group; None until it has a fingerprint."""
        if view.fingerprint is None:
            return None
        known = self._strategies.get(view.fingerprint, {})
        return {form: each.found for form, each in known.items() if not self._is_old(each.seen_s, now_s)}

    def measurements(self, fingerprints: Collection[str], now_s: float) -> Measurements:
        """Return all recent measurements for the models with these fingerprints, for storage."""
        steps: list[KnownStep] = []
        noises: list[KnownNoise] = []
        known = [(name, gpu) for name in sorted(fingerprints) for gpu in sorted(self._families.get(name, ()))]
        for name, gpu in known:
            family, about = self._families[name][gpu], self._machines.get(gpu, frozenset())
            steps += [
                KnownStep(fingerprint=name, gpu_type=gpu, machines=about, observation=observation, seen_s=seen_s)
                for _, (observation, seen_s) in sorted(family.seen.items())
                if not self._is_old(seen_s, now_s)
            ]
            noises += [
                KnownNoise(fingerprint=name, gpu_type=gpu, epoch=epoch, noise=noise, batches=batches, seen_s=seen_s)
                for epoch, (noise, batches, seen_s) in sorted(family.noise.items())
                if not self._is_old(seen_s, now_s)
            ]
        lengths = tuple(each for each in self._lengths.of(fingerprints) if not self._is_old(each.seen_s, now_s))
        strategies = tuple(
            each
            for name in sorted(fingerprints)
            for _, each in sorted(self._strategies.get(name, {}).items())
            if not self._is_old(each.seen_s, now_s)
        )
        return Measurements(steps=tuple(steps), noises=tuple(noises), lengths=lengths, strategies=strategies)

    def recall(self, measurements: Measurements, now_s: float) -> None:
        """Load saved measurements, but those too old or of machines that are gone; a future time counts as now."""
        for step in measurements.steps:
            here = self._machines.setdefault(step.gpu_type, step.machines)
            if (here and step.machines and not here & step.machines) or self._is_old(step.seen_s, now_s):
                continue
            self._family(step.fingerprint, step.gpu_type).take(step.observation, min(step.seen_s, now_s), stored=True)
        self._lengths.recall(
            dataclasses.replace(each, seen_s=min(each.seen_s, now_s))
            for each in measurements.lengths
            if not self._is_old(each.seen_s, now_s)
        )
        for each in measurements.strategies:
            known, seen_s = self._strategies.setdefault(each.fingerprint, {}), min(each.seen_s, now_s)
            if not self._is_old(seen_s, now_s) and (each.form not in known or known[each.form].seen_s < seen_s):
                known[each.form] = dataclasses.replace(each, seen_s=seen_s)
        for noise in measurements.noises:
            if self._is_old(noise.seen_s, now_s):
                continue
            family = self._family(noise.fingerprint, noise.gpu_type)
            seen_s = min(noise.seen_s, now_s)
            if noise.epoch not in family.noise or family.noise[noise.epoch][2] < seen_s:
                family.noise[noise.epoch] = noise.noise, noise.batches, seen_s

    def _family(self, fingerprint: str, gpu: str) -> _Family:
        return self._families.setdefault(fingerprint, {}).setdefault(gpu, _Family())

    def _is_old(self, seen_s: float, now_s: float) -> bool:
        return now_s - seen_s > self._config.forget_s


def machine_of(node: Node) -> str:
    """Return text such as ``8 CPU 4 GPU`` of a node's devices, without memory, which Ray measures anew each time."""
    devices = {name: amount for name, amount in node.total.items() if name in ("CPU", "GPU") and amount > 0}
    return " ".join(f"{amount:g} {name}" for name, amount in sorted(devices.items()))


def _epoch(view: JobView) -> int:
    """Return the number of finished epochs, since gradient noise depends on the progress of training."""
    return 0 if view.progress is None else len(view.progress.epoch_ends) * view.progress.stride


def _noise(family: _Family, view: JobView) -> NoiseScale | None:
    """Return the family's noise at the job's epoch, or else the earliest known noise; noise rises during training.

    Since var = tr(Sigma) / M0, it is rescaled if the job's M0 differs from the measuring job's. A job of one batch size
    needs none: jobs of its kind may never have measured any.
    """
    if not family.noise or view.init_batch_size is None:
        return NoiseScale(sqr=0.0, var=0.0) if view.max_batch_size in (None, view.init_batch_size) else None
    noise, batches, _ = family.noise.get(_epoch(view)) or family.noise[min(family.noise)]
    if batches.init_batch_size == view.init_batch_size:
        return noise
    return NoiseScale(sqr=noise.sqr, var=noise.var * batches.init_batch_size / view.init_batch_size)


def _with_batches(view: JobView, families: Iterable[_Family]) -> JobView:
    """Return the view with the batch limits of the family's latest job."""
    known = [(seen_s, batches) for family in families for _, batches, seen_s in family.noise.values()]
    if not known:
        return view
    _, batches = max(known, key=lambda entry: entry[0])
    return dataclasses.replace(view, **{f.name: getattr(batches, f.name) for f in dataclasses.fields(batches)})


def _present_type(view: JobView, models: Mapping[str, GoodputModel]) -> str | None:
    """Return the GPU type whose model is the view's current model; None if there is no such type."""
    for gpu, model in view.models.items():
        if model == view.goodput:
            return gpu
    return None


def declarer_of(view: JobView) -> str:
    """Return the user who submitted the job and so declared its length, or else the tenant; empty if unknown."""
    return view.user or view.tenant


class EndedJobs:
    """Lengths of jobs that have ended (finished, stopped or failed alike), keyed by the fingerprint of their model."""

    def __init__(self, forget_s: float) -> None:
        self._forget_s = forget_s
        self._present: dict[str, KnownLength] = {}
        self._declared: dict[str, float] = {}
        # by declarer: ended jobs of all models, and running ones that are beyond their declared end
        self._told: dict[str, collections.deque[KnownLength]] = {}
        self._beyond: dict[str, dict[str, float]] = {}
        self._ended: dict[str, tuple[KnownLength, ...]] = {}
        self._longest: dict[str, tuple[str, float]] = {}  # by model: the job that has done most, and how much [samples]

    def receive(self, view: JobView) -> None:
        """Record a job's progress and its declared length."""
        if view.fingerprint is None or view.progress is None or not view.init_batch_size or not view.progress.done:
            return
        progress, done = view.progress, view.progress.done
        if progress.epochs is not None:
            self._declared.setdefault(view.job, progress.epochs * progress.stride)
        told = self._declared.get(view.job)
        per_epoch = (
            progress.epoch_ends[-1] / len(progress.epoch_ends) / progress.stride if progress.epoch_ends else None
        )
        self._present[view.job] = KnownLength(
            fingerprint=view.fingerprint,
            samples=done * view.init_batch_size,
            part=None if told is None or not per_epoch else done / (told * per_epoch),
            seen_s=0.0,
            declarer=declarer_of(view),
        )
        if self._longest.get(view.fingerprint, ("", 0.0))[1] < done * view.init_batch_size:
            self._longest[view.fingerprint] = view.job, done * view.init_batch_size
        part = self._present[view.job].part
        if (declarer := declarer_of(view)) and part is not None and part > BEYOND:
            self._beyond.setdefault(declarer, {})[view.job] = 2.0 * part  # as much is left as was done

    def ended(self, job: str, now_s: float) -> bool:
        """Record a job's end; return True if its length is known and therefore worth storing."""
        length = self._present.pop(job, None)
        self._declared.pop(job, None)
        if length is None:
            return False
        self._beyond.get(length.declarer, {}).pop(job, None)
        self._longest.pop(length.fingerprint, None)  # from now on ended ones count
        self.recall([dataclasses.replace(length, seen_s=now_s)])
        return True

    def recall(self, lengths: Iterable[KnownLength]) -> None:
        """Load saved lengths."""
        fresh: dict[str, list[KnownLength]] = {}
        for each in lengths:
            fresh.setdefault(each.fingerprint, []).append(each)
            told = self._told.setdefault(each.declarer, collections.deque(maxlen=_PARTS))
            if each.declarer and each.part is not None and each not in told:
                told.append(each)
        for fingerprint, several in fresh.items():
            self._ended[fingerprint] = newest([*self._ended.get(fingerprint, ()), *several])

    def of(self, fingerprints: Collection[str]) -> tuple[KnownLength, ...]:
        """Return the lengths of ended jobs whose models have these fingerprints."""
        return tuple(each for name in sorted(fingerprints) for each in self._ended.get(name, ()))

    def progress(self, view: JobView, usual_epoch: float | None, now_s: float) -> Progress | None:
        """Return the job's progress, with the points (in its own iterations) where earlier jobs ended.

        If no job of this model has ended yet and the declarer's jobs usually exceed their declared length, the longest
        running job of the model counts as half done.
        """
        if view.progress is None:
            return None
        usual_epoch = view.progress.usual_epoch if usual_epoch is None else usual_epoch
        if not view.init_batch_size:
            return dataclasses.replace(view.progress, usual_epoch=usual_epoch)
        known = [each for each in self._ended.get(view.fingerprint or "", ()) if now_s - each.seen_s < self._forget_s]
        told, declarer = self._declared.get(view.job), declarer_of(view)
        own = [each.part for each in known if each.declarer == declarer and each.part is not None]
        if not own:  # how far he went beyond what he declared of other models; what ended early there says nothing here
            told_of = self._told.get(declarer, ())
            other = [each.part for each in told_of if each.part is not None and now_s - each.seen_s < self._forget_s]
            other += [part for job, part in self._beyond.get(declarer, {}).items() if job != view.job]
            own = [min(max(part, 1.0), _MOST_BORROWED) for part in other]
        samples = [each.samples for each in known]
        job, most = self._longest.get(view.fingerprint or "", (view.job, 0.0))
        if not known and job != view.job and max(own, default=0.0) > BEYOND:
            samples = [2.0 * most]
        return dataclasses.replace(
            view.progress,
            usual_epoch=usual_epoch,
            first_epochs=None if told is None else told / view.progress.stride,
            usual_ends=tuple(each / view.init_batch_size for each in samples),
            usual_parts=tuple(own),
        )
