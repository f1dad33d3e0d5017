"""Workers on GPUs of other types, for jobs that may have several: from slots that no job has a use for on its own type.

The policy decides first as if every job stayed on one type, and sees of a job on several only its part on its own type.
So a foreign worker takes nothing from another job, and goes as soon as one has a use for its slot.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from placement.cluster.cluster import Allocation, Cluster, without
from placement.cluster.free_resources import FreeResources
from placement.cluster.jobs import JobView
from placement.goodput.mixed import MixedBatch, MixedGroup, TypePart
from placement.goodput.model import NoiseScale
from placement.goodput.speeds import GoodputCache, model_of, table
from placement.policies.goodput.tables import useful
from placement.policies.shared.base import Target, count

_LEAST_SHARE = 2  # samples: of a worker with one, no speed can be told by its share

_Places = dict[str, int]


@functools.lru_cache(maxsize=4096)  # a decision asks again for all jobs, though few models have changed
def _best(
    group: MixedGroup, noise: NoiseScale, init: int, most: int | None, held: int | None, accumulation: bool
) -> MixedBatch:
    """See ``MixedGroup.best``."""
    return group.best(noise, init, max_batch_size=most, held_batch=held, accumulation=accumulation)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MixedTypes:
    """One decision about workers on other types.

    Attributes:
        cluster: its nodes.
        horizon_s: time within which a change must pay back [s].
        hysteresis: relative gain that is worth taking a worker away for.
        cache: of what was computed before.
    """

    cluster: Cluster
    horizon_s: float
    hysteresis: float
    cache: GoodputCache

    def on_one_type(self, view: JobView) -> JobView:
        """The job with its workers on its own type alone: the type on which these do most."""
        if not view.mixed_gpu_types:
            return view
        parts = self._parts(view.allocation)
        if len(parts) < 2:
            return view
        return view.placed(parts[self._own_type(view, parts)])

    def extend(self, jobs: Sequence[JobView], targets: Mapping[str, Target]) -> dict[str, Target]:
        """Give jobs workers on other types, in the order of arrival, where the model of mixed groups says more.

        Args:
            jobs: all of the decision.
            targets: what the policy gives them on one type each, with nodes.
        """
        placed: Allocation = {job: target.nodes for job, target in targets.items() if target.nodes}
        room = FreeResources(without(self.cluster, placed, {view.job: view.bundle for view in jobs}))
        found = dict(targets)
        for view in sorted(jobs, key=lambda view: view.arrival):
            own = targets[view.job].nodes
            if not view.mixed_gpu_types or view.held_at is not None or view.goodput is None or not own:
                continue
            foreign, note = self._foreign(view, dict(own), room)
            if not foreign:
                continue
            for node_id, workers in foreign.items():
                index = room.index(node_id)
                assert index is not None, f"node {node_id} has free slots"
                room.take(view, index, workers)
            found[view.job] = Target(
                workers=targets[view.job].workers + sum(foreign.values()),
                reason=f"{targets[view.job].reason}; {note}",
                nodes={**own, **foreign},
            )
        return found

    def _foreign(self, view: JobView, own: _Places, room: FreeResources) -> tuple[_Places, str]:
        """The best workers on other types beside those on its own, and why; none where they do not bring more."""
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
            return {}, ""
        types = ", ".join(f"{count(sum(p.values()))} on {g or 'GPUs without a type'}" for g, p in self._named(best))
        return best, f"with {types}, which no other job needs, {alone:.4g} -> {best_rate:.4g} samples/s"

    def _choices(
        self, view: JobView, own: _Places, gpu: str, present: _Places, room: FreeResources
    ) -> Iterator[_Places]:
        """What it could have besides: what it has; one, two, four... and all free slots of a type; those of all."""
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
            sizes = {1 << bit for bit in range(max(total, 0).bit_length()) if 1 << bit <= total} | {max(total, 0)}
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
        """Goodput there [samples/s] by the model of mixed groups; 0 where a worker would have too few samples."""
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
        """The type whose workers do most by themselves; most workers where nothing is known."""

        def rate(gpu: str) -> float:
            here = parts[gpu]
            shape = np.array([[len(here)]], dtype=np.int64), np.array([[sum(here.values())]], dtype=np.int64)
            value = float(table([view], gpu, *shape, self.cache)[0, 0])
            return value if value == value else float(sum(here.values()))

        return min(parts, key=lambda gpu: (-round(rate(gpu), 9), gpu))

    def _parts(self, place: Mapping[str, int]) -> dict[str, _Places]:
        """Workers by node of each type, of nodes that are in the cluster."""
        nodes, parts = self.cluster.by_id(), dict[str, _Places]()
        for node_id, workers in sorted(place.items()):
            if node_id in nodes:
                parts.setdefault(nodes[node_id].gpu_type, {})[node_id] = workers
        return parts

    def _named(self, place: Mapping[str, int]) -> list[tuple[str, _Places]]:
        return sorted(self._parts(place).items())


def _first(node_ids: Sequence[str], free: Mapping[str, int], workers: int) -> _Places:
    """So many workers on the first nodes that have room."""
    place = _Places()
    for node_id in node_ids:
        here = min(free[node_id], workers - sum(place.values()))
        if here > 0:
            place[node_id] = here
    return place
