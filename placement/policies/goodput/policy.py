"""``goodput``: gives workers to the jobs that shorten the queue the most, and only if the change pays for itself."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from placement.checks import check_number
from placement.cluster.cluster import Allocation, Cluster, without
from placement.cluster.jobs import JobView
from placement.cluster.packing import FreeResources
from placement.goodput.mixed import MixedBatch, MixedGroup, TypePart
from placement.goodput.model import NoiseScale
from placement.goodput.remaining import overdue, rank_weights, seconds_left
from placement.goodput.speeds import GoodputCache, model_of, table
from placement.policies.goodput.local_search import improve, present_placements
from placement.policies.goodput.tables import OptionTable, Placement, SpeedValue, build, useful
from placement.policies.shared.base import Target, held
from placement.reasons import Cause, Reason
from placement.text import ago, count, short_name

_MOST_URGENT = 10.0  # a job that is late weighs at most so many times more
_ROUNDS = 6  # a decision is repeated from its own outcome until it stays; more than two are rare
_RECENT_S = 1800.0  # arrivals within this time say how soon the next one comes
_MOST_TOLD = 3  # jobs whose gains `explain` lists
_LEAST_SHARE = 2  # samples: of a worker with one, no speed can be told by its share
_Places = dict[str, int]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GoodputPolicy:
    """Policy that maximises the summed, weighted utility of the jobs' speeds, after the cost of every change.

    The sum over jobs is weight x phi(speed) - max(weight, charge) x (phi(speed) - phi(speed x discount)), with:

    * speed: goodput of an option divided by the goodput at the job's smallest size. Measured step times take precedence
      over the fitted model (``placement.goodput.speeds``).
    * weight = ``JobView.weight`` x (rank / n)^a, with rank 1 for the job with the most remaining work, as in heSRPT
      (``remaining.rank_weights``). With GPUs of several types, the emptier the cluster, the softer the ranks, so that
      the last few long jobs share the best type instead of ending one after another. Remaining work is declared
      epochs x measured progress per epoch; a job that declares nothing counts as average. If a job would end later
      than ``late`` times its fair time (``remaining.overdue``), its weight is multiplied by that ratio, up to ten
      times, so that no job starves.
    * discount = H' / (H' + n d) for every option except staying unchanged, with d = ``resize_cost_s``, H' =
      min(horizon, remaining time) and n = 1 + the chance that a job arrives before this one ends, at the arrival rate
      of the last half hour: an arrival undoes a change, at the cost of another pause. If a change removes workers or
      moves the job, the discount is also divided by 1 + hysteresis. The cost is charged with a weight of at least
      ``charge``: a paused job's GPUs serve nobody, and a long job would otherwise pause for every short job that comes
      and goes. With one GPU type, GPUs that stay idle in the outcome are assigned without that charge, and with n = 1,
      to jobs that gain more than the cost of the pause and ``hysteresis``.
    * phi(s) = (s^p - 1) / p, or log s for p = 0, which makes the sum proportionally fair (Nash's bargaining solution).
      If no length is known, p = ``fair_power``. If all lengths are known, p = ``power``; if some are, p is
      proportionally in between, and the other jobs count as average length. On a crowded cluster (more than ``crowd``
      jobs for each worker that fits), p grows with the crowd, up to 1: the closer each job is to a single worker, the
      less there is to gain by sharing evenly, and with p = 1 the sum becomes "shortest remaining time first", which is
      optimal if speed grows linearly. With less than half of ``crowd``, p falls towards 0: there is enough for all,
      and even shares finish all jobs soonest.

    Minimums come first (``admission``), except on a crowded cluster. There, a job may wait, which is worth weight x
    phi(0). A running job may be stopped if it reports the cost of a stop (``JobView.stop_cost_s``), which is charged as
    the pause when it starts again. Then, every job picks the option with the largest value - price x workers, with one
    dual price per GPU type (``dual_prices``), among sizes that leave no scattered room; remaining room is then filled
    with any size. The outcome replaces the current allocation only if it is worth more after all costs of changing
    (``local_search``), so equal inputs change nothing. A job's workers are all of one GPU type, unless
    ``JobView.mixed_gpu_types`` lets it use leftover slots of other types (``MixedTypes``).

    The defaults are round numbers; between them and their neighbours (p 0.4 to 0.7, a 0.7 to 1.5, H 200 to 400 s)
    the average completion time of a trace changes by 1 to 4 %, for better or worse depending on the trace.

    Attributes:
        horizon_s: Minimum H, the time within which a change must pay for itself [s]. H is the mean time that the job's
            sizes have lasted, if that is longer. A job whose changes cost minutes therefore does not react to every
            short job, yet does not stay at one worker for days: the longer its size lasts, the more a change may cost.
        crowd: Number of jobs per worker that fits, above which a cluster counts as crowded.
        hysteresis: Relative gain required to remove a worker from a running job.
        exponent: a; 0 gives all jobs the same rank weight.
        power: p if all lengths are known and the jobs number between half of ``crowd`` and ``crowd``; see above.
        fair_power: p if no length is known.
        late: Estimated finish-time fairness above which a job gets more weight.
        charge: Minimum weight for charging a pause, as a fraction of the largest ``JobView.weight``.
        sharpness: Sharpness of the ranks, q in ``remaining.rank_weights``, at ``crowd`` jobs per worker. It is
            proportional to the number of jobs, at least 1, and infinite with one GPU type.
        lengths: True to use declared lengths.
    """

    name = "goodput"
    horizon_s: float = 300.0
    crowd: float = 0.25
    hysteresis: float = 0.05
    exponent: float = 1.0
    power: float = 0.5
    fair_power: float = 0.0
    late: float = 3.0
    charge: float = 0.5
    sharpness: float = 2.0
    lengths: bool = True
    _cache: GoodputCache = dataclasses.field(default_factory=GoodputCache, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_number("horizon_s", self.horizon_s, above=0, unit="seconds")
        check_number("crowd", self.crowd, above=0, unit="jobs for each worker")
        for field in ("hysteresis", "exponent", "charge", "sharpness"):
            check_number(field, getattr(self, field), least=0)
        for field in ("power", "fair_power"):
            if not 0 <= getattr(self, field) <= 1:
                raise ValueError(f"{field} must be between 0 and 1, but got {getattr(self, field)}")
        check_number("late", self.late, least=1)

    @property
    def prices(self) -> Mapping[str, float]:
        """Dual price per slot in the latest decision, keyed by GPU type; empty before the first decision."""
        return dict(self._cache.prices)

    def decide(self, jobs: Sequence[JobView], cluster: Cluster, now_s: float) -> Mapping[str, Target]:
        """Return a target size, and the reason for it, for each job, keyed by job name; see ``Policy.decide``."""
        if not any(view.mixed_gpu_types for view in jobs):
            return self._on_one_type_each(jobs, cluster, now_s)
        mixed = MixedTypes(cluster=cluster, horizon_s=self.horizon_s, hysteresis=self.hysteresis, cache=self._cache)
        alone = [mixed.on_one_type(view) for view in jobs]
        return mixed.extend(jobs, self._on_one_type_each(alone, cluster, now_s))

    def _on_one_type_each(self, jobs: Sequence[JobView], cluster: Cluster, now_s: float) -> Mapping[str, Target]:
        """Return the decision that keeps all of a job's workers on one GPU type."""
        instance = build(jobs, cluster, self._cache)
        utility = self.utility(instance, now_s)
        placements, valid = present_placements(instance)
        before, waiting = placements, dict[int, Reason]()
        for _ in range(_ROUNDS):
            better, waiting = improve(instance, utility, placements, valid)
            if better is None:  # Nothing better: keep each valid placement, drop jobs whose nodes have shrunk.
                placements = [placement if ok else Placement() for placement, ok in zip(placements, valid, strict=True)]
                break
            placements, valid = better, [True] * len(better)
        decided = Decided(instance=instance, utility=utility, before=before, after=placements)
        return {
            view.job: _target(instance, here, waiting.get(j) or decided.reason(j))
            for j, (view, here) in enumerate(zip(instance.views, placements, strict=True))
        }

    def utility(self, instance: OptionTable, now_s: float) -> SpeedValue:
        """Return the parameters for valuing speeds in a decision about the jobs in ``instance``.

        ``now_s`` is the current time [s since the epoch].
        """
        views = instance.views
        left_s = seconds_left(views, instance.rate) if self.lengths else np.full(len(views), np.nan)
        untold = np.array([view.progress is None for view in views], dtype=np.bool_)
        unknown = np.isnan(left_s) & ~untold
        if np.isfinite(left_s[~untold]).any():
            # One that has yet to start can tell nothing, and others may be the first of their model: they count as long
            # as the rest is on average. Were they of unknown length, lengths would count for nothing until the last of
            # them is known, and with each arrival jobs that wait would start, and stop again.
            left_s = np.where(untold | unknown, np.nanmean(left_s[~untold]), left_s)
        known = len(views) > 0 and not np.isnan(left_s).any()
        room = self.crowd * max(float(instance.capacities.sum()), 1.0)
        crowd = len(views) / room if instance.alike and known else 1.0
        # Sizes on one type are shared out finely anyway; of several, the best would go whole to the one that is ahead.
        sharpness = max(self.sharpness * crowd, 1.0) if len(instance.pools) > 1 else math.inf
        weight = rank_weights(left_s, self.exponent, sharpness)
        weight = weight * np.array([view.weight for view in views], dtype=np.float64)
        if known:
            share = max(float(instance.capacities.sum()) / len(views), 1.0) if instance.alike else 1.0
            fair = np.where(instance.possible & (instance.sizes <= share), instance.speed, 0.0).max(axis=1, initial=0.0)
            lateness = overdue(views, left_s, instance.rate, np.maximum(fair, 1.0), now_s)
            weight = weight * np.clip(np.nan_to_num(lateness, nan=1.0) / self.late, 1.0, _MOST_URGENT)
        cost_s = np.array([view.resize_cost_s for view in views], dtype=np.float64)
        stop_s = np.array([view.stop_cost_s or 0.0 for view in views], dtype=np.float64)
        lasted_s = np.array([max(now_s - v.submitted_s, 0.0) / (v.restarts + 1) for v in views], dtype=np.float64)
        guessed = float(unknown.mean()) if known else 1.0
        power = self.power + guessed * (self.fair_power - self.power)
        return SpeedValue(
            weight=weight,
            left_s=left_s,
            cost_s=cost_s,
            stop_s=stop_s,
            power=min(power * max(min(2.0 * crowd, 1.0), crowd), 1.0) if known else self.fair_power,
            horizon_s=np.maximum(self.horizon_s, lasted_s),
            hysteresis=self.hysteresis,
            charge=self.charge * max((view.weight for view in views), default=1.0),
            crowded=crowd > 1.0,
            arrivals_per_s=max(sum(now_s - view.submitted_s < _RECENT_S for view in views) - 1, 0) / _RECENT_S,
        )


def _target(instance: OptionTable, placement: Placement, reason: Reason) -> Target:
    """Return a job's target: its workers, their nodes and the reason."""
    if not placement.place:
        return Target(workers=0, reason=reason)
    pool = instance.pools[placement.pool]
    nodes = {pool.node_ids[i]: workers for i, workers in sorted(placement.place.items())}
    return Target(workers=placement.workers, reason=reason, nodes=nodes)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Decided:
    """Decision with its causes: the jobs' placements before and after it."""

    instance: OptionTable
    utility: SpeedValue
    before: Sequence[Placement]
    after: Sequence[Placement]
    had: Sequence[float] = dataclasses.field(init=False)
    speed: Sequence[float] = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        for name, placements in (("had", self.before), ("speed", self.after)):
            object.__setattr__(self, name, self.instance.speed_at(placements).tolist())

    def reason(self, j: int) -> Reason:
        """Return the reason for the size of job number ``j``: its gain in speed, or the jobs that got its workers."""
        view, was, here = self.instance.views[j], self.before[j], self.after[j]
        if here.place and (why := held(view, here.workers)) is not None:
            return why
        gain = self.speed[j] / self.had[j] if self.had[j] else 1.0
        if here.workers < view.workers or not here.place:
            cause, facts = self._lost(j, gain)
        elif not view.workers:
            known = "no model yet" if view.goodput is None else "by measured speeds"
            cause, facts = Cause.STARTS, (count(here.workers), known)
        elif here.workers > view.workers and view.goodput is None:
            cause, facts = Cause.EXPLORES, (count(here.workers),)
        elif here != was:
            cause = Cause.GROWTH if here.workers > view.workers else Cause.MOVES
            facts = gain, view.resize_cost_s
        else:
            cause, facts = self._stays(j), (count(here.workers),)
        return Reason(cause, facts, self._figures(j))

    def _lost(self, j: int, gain: float) -> tuple[Cause, tuple[str | float, ...]]:
        """Return the cause for a job that is waiting or has fewer workers than before, and the jobs that got them."""
        views, left_s = self.instance.views, self.utility.left_s
        more = [k for k, here in enumerate(self.after) if here.workers > views[k].workers]
        ahead = [k for k in more or range(len(views)) if k != j and self.after[k].place]
        shorter = [k for k in ahead if left_s[k] < left_s[j]]
        if shorter and len(shorter) == len(ahead):
            return Cause.SHORTER, (count(len(shorter), "job"), ago(float(left_s[j])))
        if not more:
            return (Cause.FEWER, (gain,)) if self.after[j].place else (Cause.FULL, ("waits",))
        won = sum(self.after[k].workers - views[k].workers for k in more)
        who = f"job {short_name(views[more[0]].job)}" if len(more) == 1 else f"{len(more)} jobs together"
        gains = [self.speed[k] / self.had[k] for k in more if self.had[k]]
        what = f"more, for {max(gains):.3g} x the speed" if gains else "to start with"
        return Cause.TAKEN, (who, count(won), what)

    def _stays(self, j: int) -> Cause:
        """Return the cause for a job that keeps its workers: why it gets no more."""
        case, here = self.instance, self.after[j]
        if not (case.possible[j] & (case.pool_of == here.pool) & (case.sizes > here.workers)).any():
            return Cause.MOST
        pool, unit = here.pool, case.unit[:, here.pool]
        used = sum(each.workers * unit[k] for k, each in enumerate(self.after) if each.pool == pool)
        return Cause.NOT_WORTH if used + unit[j] <= case.capacities[pool] + 1e-6 else Cause.FULL

    def _figures(self, j: int) -> str:
        """Return a job's speeds, next size and weight as text; if it lost workers, also the gains of others."""
        case, view, here = self.instance, self.instance.views[j], self.after[j]
        said = [f"{view.workers} -> {count(here.workers)}, speed {self.had[j]:.2f} -> {self.speed[j]:.2f}"]
        larger = case.possible[j] & (case.pool_of == here.pool) & (case.sizes > here.workers)
        if here.place and larger.any():
            c = int(np.flatnonzero(larger)[0])
            more = "one" if case.sizes[c] == here.workers + 1 else str(int(case.sizes[c]) - here.workers)
            said.append(f"{more} more would add {case.speed[j, c] - self.speed[j]:.2f}")
        said.append("speeds are assumed, no model yet" if view.goodput is None else "speeds are fitted and measured")
        said.append(f"its weight is {self.utility.weight[j]:.2f}, a resize costs {view.resize_cost_s:.3g} s")
        if here.workers < view.workers:
            said += [
                f"{short_name(other.job)} {other.workers} -> {then.workers}, speed {had:.2f} -> {has:.2f}"
                for other, then, had, has in zip(case.views, self.after, self.had, self.speed, strict=True)
                if then.workers > other.workers
            ][:_MOST_TOLD]
        return "; ".join(said)


# The policy decides first as if every job stayed on one type, and sees of a job on several only its part on its own
# type. So a foreign worker takes nothing from another job, and goes as soon as one has a use for its slot.
@functools.lru_cache(maxsize=4096)  # a decision asks again for all jobs, though few models have changed
def _best(
    group: MixedGroup, noise: NoiseScale, init: int, most: int | None, held: int | None, accumulation: bool
) -> MixedBatch:
    """Return the cached best batch; see ``MixedGroup.best``."""
    return group.best(noise, init, max_batch_size=most, held_batch=held, accumulation=accumulation)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MixedTypes:
    """Assignment of workers on GPU types other than a job's own, for jobs that allow mixed types."""

    cluster: Cluster
    horizon_s: float  # time within which a change must pay back [s]
    hysteresis: float  # relative gain that is worth taking a worker away for
    cache: GoodputCache  # of what was computed before

    def on_one_type(self, view: JobView) -> JobView:
        """Return the job's view with only the workers on its own GPU type: the type where its workers do the most."""
        if not view.mixed_gpu_types:
            return view
        parts = self._parts(view.allocation)
        if len(parts) < 2:
            return view
        return view.placed(parts[self._own_type(view, parts)])

    def extend(self, jobs: Sequence[JobView], targets: Mapping[str, Target]) -> dict[str, Target]:
        """Return the targets with workers on other GPU types added, in order of arrival, if they promise a gain.

        The model of mixed groups (``MixedGroup``) predicts the gain.
        """
        placed: Allocation = {job: target.nodes for job, target in targets.items() if target.nodes}
        room = FreeResources(without(self.cluster, placed, {view.job: view.bundle for view in jobs}))
        found = dict(targets)
        for view in sorted(jobs, key=lambda view: view.arrival):
            own = targets[view.job].nodes
            if not view.mixed_gpu_types or view.held_at is not None or view.goodput is None or not own:
                continue
            foreign, types, rates = self._foreign(view, dict(own), room)
            if not foreign:
                continue
            for node_id, workers in foreign.items():
                index = room.index(node_id)
                assert index is not None, f"node {node_id} has free slots"
                room.take(view, index, workers)
            found[view.job] = Target(
                workers=targets[view.job].workers + sum(foreign.values()),
                reason=Reason(Cause.OTHER_TYPES, (types,), f"{rates}; {targets[view.job].reason}"),
                nodes={**own, **foreign},
            )
        return found

    def _foreign(self, view: JobView, own: _Places, room: FreeResources) -> tuple[_Places, str, str]:
        """Return the best workers to add on other GPU types, their description and the gain; empty if none help."""
        nodes, (gpu,) = self.cluster.by_id(), self._parts(own)
        present = {n: k for n, k in view.allocation.items() if n in nodes and n not in own and nodes[n].gpu_type != gpu}
        alone = self._goodput(view, own)
        left_s = max(self.horizon_s, 1e-9)
        worth = left_s / (left_s + view.resize_cost_s)
        best, best_value, best_rate = _Places(), alone if not present else alone * worth / (1 + self.hysteresis), alone
        for foreign in self._choices(view, own, gpu, present, room):
            together = {**own, **foreign}
            if not view.sizes.allow(sum(together.values())):
                continue
            if self._own_type(view, self._parts(together)) != gpu:
                continue  # the next decision would take the others for its own
            rate = self._goodput(view, together)
            fewer = sum(foreign.values()) < sum(present.values())
            value = rate if foreign == present else rate * worth / (1 + self.hysteresis * fewer)
            if rate > alone and value > best_value * (1 + 1e-9):
                best, best_value, best_rate = foreign, value, rate
        if not best:
            return {}, "", ""
        parts = sorted(self._parts(best).items())
        types = ", ".join(f"{count(sum(p.values()))} on {g or 'GPUs without a type'}" for g, p in parts)
        return best, types, f"{alone:.4g} -> {best_rate:.4g} samples/s"

    def _choices(
        self, view: JobView, own: _Places, gpu: str, present: _Places, room: FreeResources
    ) -> Iterator[_Places]:
        """Yield candidate sets of foreign workers: the current ones; 1, 2, 4... and all of each type; all types."""
        free = dict(zip(room.node_ids, room.slots(view).tolist(), strict=True))
        fits = all(workers <= free.get(node_id, 0) for node_id, workers in present.items())
        # Its own type may have grown meanwhile, up to all that the job can use.
        if present and fits and sum(own.values()) + sum(present.values()) <= view.max_workers:
            yield present
        nodes, everything = self.cluster.by_id(), _Places()
        for other in sorted({node.gpu_type for node in self.cluster.nodes} - {gpu}):
            open_nodes = [n for n, slots in free.items() if slots and nodes[n].gpu_type == other]
            open_nodes = [n for n in open_nodes if not nodes[n].draining]
            open_nodes.sort(key=lambda n: (-present.get(n, 0), -free[n], n))
            most = min(useful(view, gpu), useful(view, other)) - sum(own.values())
            total = min(sum(free[n] for n in open_nodes), most)
            sizes = {1 << bit for bit in range(max(total, 0).bit_length())} | {max(total, 0)}
            alone = sum(own.values())
            for size in sorted({view.sizes.at_most(alone + size) - alone for size in sizes}):
                if size > 0:
                    yield _first(open_nodes, free, size)
            if total > 0:
                left = most - sum(everything.values())
                everything |= _first(open_nodes, free, min(total, max(left, 0)))
        if len(self._parts(everything)) > 1:
            yield everything

    def _goodput(self, view: JobView, place: Mapping[str, int]) -> float:
        """Return the goodput of the place [samples/s] from the mixed-group model; 0 if a worker has too few samples."""
        model = view.goodput
        assert model is not None, f"job {view.job} has a model"
        parts, low = [], _LEAST_SHARE
        for gpu, here in self._parts(place).items():
            bounds = view.atomic_bsz_ranges.get(gpu, view.atomic_bsz_range)
            own = model_of(view, gpu) or model
            most = bounds[1] if bounds else None
            low = max(low, bounds[0] if bounds else 1)
            parts.append(TypePart(gpu=gpu, workers=sum(here.values()), model=own.throughput_model, most=most))
        group = MixedGroup(parts=tuple(parts), nodes=len(place))
        init = model.init_batch_size
        most_samples = None if view.max_batch_size is None else max(view.max_batch_size, init)
        found = _best(group, model.noise, init, most_samples, view.held_batch, view.accumulation)
        return found.goodput if len(parts) == 1 or found.smallest_share >= low else 0.0

    def _own_type(self, view: JobView, parts: Mapping[str, _Places]) -> str:
        """Return the type whose workers alone have the highest goodput (without a model: the most workers)."""

        def rate(gpu: str) -> float:
            here = parts[gpu]
            shape = np.array([[len(here)]], dtype=np.int64), np.array([[sum(here.values())]], dtype=np.int64)
            value = float(table([view], gpu, *shape, self.cache)[0, 0])
            return value if value == value else float(sum(here.values()))

        return min(parts, key=lambda gpu: (-round(rate(gpu), 9), gpu))

    def _parts(self, place: Mapping[str, int]) -> dict[str, _Places]:
        """Return workers per node, grouped by GPU type; nodes that have left the cluster are omitted."""
        nodes, parts = self.cluster.by_id(), dict[str, _Places]()
        for node_id, workers in sorted(place.items()):
            if node_id in nodes:
                parts.setdefault(nodes[node_id].gpu_type, {})[node_id] = workers
        return parts


def _first(node_ids: Sequence[str], free: Mapping[str, int], workers: int) -> _Places:
    """Place workers on the first nodes that have room."""
    place = _Places()
    for node_id in node_ids:
        here = min(free[node_id], workers - sum(place.values()))
        if here > 0:
            place[node_id] = here
    return place
