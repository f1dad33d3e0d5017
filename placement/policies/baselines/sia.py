"""``sia``: an integer program over shapes on several GPU types."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping, Sequence

import numpy as np

from placement.cluster.cluster import Cluster
from placement.cluster.jobs import JobView, Shape, alike, shape_goodputs
from placement.cluster.packing import FreeResources
from placement.goodput.step_time import Floats
from placement.policies.shared.base import Target, admit, grow_in_turn, held
from placement.policies.shared.stable_placement import (
    MOST_NODES,
    StablePlacer,
    growth_limit,
    present_place,
    restart_factor,
    speeds_of,
    use_idle,
)
from placement.text import count

_LEAST_FACTOR = 0.05  # a job that has just arrived must still be worth starting
_UNALLOCATED = 1.1  # lambda: the cost of a job without GPUs
_GAP = 1e-4  # to the optimum, relative, at which the solver stops
_ONE: Shape = (1, 1)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """Size of a job (its numbers of nodes and workers) on the GPU type with index ``kind``."""

    kind: int
    nodes: int
    workers: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SiaPolicy:
    """Policy with Sia's integer program (Jayaram Subramanya et al., SOSP 2023, section 3.3), solved by HiGHS.

    With one 0/1 variable for each job i and configuration j (a GPU type and a power of two of GPUs within a node,
    or whole nodes), it minimises::

        sum_ij A_ij ((r_ij G_ij)^p - lambda)        sum_j A_ij <= 1, GPUs of each type not exceeded

    G_ij is the estimated goodput divided by the job's lowest. r is 1 for the current configuration, and
    (age - restarts d) / (age + d) with d = ``JobView.resize_cost_s`` for any other. A job may grow to
    ``JobView.growth_limit``. Running jobs, and as many waiting jobs as fit (in order of arrival), get some
    configuration; moving a job to nodes of the same kind counts as no change.
    """

    name = "sia"
    shares_knowledge = False  # its jobs know only their own measurements: the simulator gives them nothing else
    power: float = -0.5

    def __post_init__(self) -> None:
        if not self.power < 0:
            raise ValueError(f"power must be below 0, but got {self.power}")

    def load_solver(self) -> None:
        """Import SciPy ahead of the first decision, since the import costs at least half a second of CPU time."""
        for name in ("scipy.optimize", "scipy.sparse"):
            importlib.import_module(name)

    def decide(self, jobs: Sequence[JobView], cluster: Cluster, now_s: float) -> Mapping[str, Target]:
        """Return a target size, and the reason for it, for each job, keyed by job name; see ``Policy.decide``."""
        admission = admit(jobs, cluster)
        targets = {job: Target(workers=0, reason=why) for job, why in admission.waiting.items()}
        running = sorted((view for view in jobs if view.job in admission.floors), key=lambda view: view.arrival)
        if not alike(running):
            targets |= grow_in_turn(running, admission)
        elif running:
            targets.update(self._solve(running, admission.floors, cluster, now_s))
        return targets

    def _solve(
        self, running: Sequence[JobView], floors: Mapping[str, int], cluster: Cluster, now_s: float
    ) -> dict[str, Target]:
        """Return targets for the running jobs: configurations with nodes, or minimums if there is no solution."""
        slots = _SlotsByType(cluster, running[0])
        options: list[list[Configuration]] = []
        costs: list[list[float]] = []
        for view in running:
            configurations = self._configurations(view, floors[view.job], slots)
            options.append(configurations)
            costs.append(self._costs(view, configurations, slots, now_s))
        picks = _assign(options, costs, slots.capacity)
        places = None
        if picks is not None:
            chosen = [each[pick] for each, pick in zip(options, picks, strict=True)]
            chosen = self._fill(running, chosen, slots)
            settler = StablePlacer(slots.by_node, slots.kinds)
            places = settler.place(
                [each.workers for each in chosen],
                [present_place(view, slots.room.index) for view in running],
                [view.min_workers for view in running],
                [each.kind for each in chosen],
            )
        if places is None:  # minimums that fit only side by side on nodes of several kinds: the core's packing may
            return {
                view.job: Target(workers=floors[view.job], reason="the minimum, room is scattered") for view in running
            }
        use_idle(running, settler, places)
        targets = {}
        for view, place in zip(running, places, strict=True):
            workers = sum(place.values())
            kind = slots.types[slots.kinds[next(iter(place))]]
            said = f"{view.workers} -> {count(workers)} on {count(len(place), 'node')}{f' of {kind}' if kind else ''}"
            nodes = {slots.room.node_ids[i]: n for i, n in sorted(place.items())}
            targets[view.job] = Target(workers=workers, reason=held(view, workers) or said, nodes=nodes)
        return targets

    def _configurations(self, view: JobView, floor: int, slots: _SlotsByType) -> list[Configuration]:
        """Return the job's configurations for each GPU type: powers of two, whole nodes, and its current size."""
        most = max(floor, growth_limit(view))
        found: list[Configuration] = []
        for kind in range(len(slots.types)):
            node, total = slots.largest[kind], slots.capacity[kind]
            if not node:
                continue
            sizes = {1 << i for i in range(node.bit_length())} | {node, floor}
            sizes |= set(range(2 * node, min(total, most) + 1, node))
            here = present_place(view, slots.room.index)
            if here and all(slots.kinds[i] == kind for i in here):
                sizes.add(view.workers)
            if view.held_at is not None:
                sizes = {floor}
            wanted = [size for size in sorted(sizes) if floor <= size <= min(total, most)]
            each = [Configuration(kind=kind, nodes=slots.nodes_for(kind, size), workers=size) for size in wanted]
            found += [configuration for configuration in each if configuration.nodes <= MOST_NODES]
        return found

    def _fill(
        self, running: Sequence[JobView], chosen: Sequence[Configuration], slots: _SlotsByType
    ) -> list[Configuration]:
        """Give slots that the program leaves unused to jobs that recoup the cost of the change within a minute."""
        filled = list(chosen)
        left = list(slots.capacity)
        for each in chosen:
            left[each.kind] -= each.workers
        for i, view in enumerate(running):
            gain = 1.0 + view.resize_cost_s / 60.0 + 1e-9
            while view.held_at is None and left[filled[i].kind] and filled[i].workers < growth_limit(view):
                kind, workers = filled[i].kind, filled[i].workers + 1
                more = Configuration(kind=kind, nodes=slots.nodes_for(kind, workers), workers=workers)
                shapes = [(slots.types[kind], (each.nodes, each.workers)) for each in (filled[i], more)]
                before, after = estimates(view, shapes)
                if more.nodes > MOST_NODES or not after > gain * before:
                    break
                filled[i] = more
                left[kind] -= 1
        return filled

    def _costs(
        self, view: JobView, configurations: Sequence[Configuration], slots: _SlotsByType, now_s: float
    ) -> list[float]:
        """Return the cost of each configuration: its term in the sum in the class docstring, times the job's weight."""
        shapes = [(slots.types[each.kind], (each.nodes, each.workers)) for each in configurations]
        goodput = estimates(view, shapes)
        factor = restart_factor(view, now_s, _LEAST_FACTOR)
        here = present_place(view, slots.room.index)
        present = (slots.kinds[next(iter(here))], len(here), view.workers) if here else None
        costs = []
        for each, value in zip(configurations, goodput, strict=True):
            stays = present is not None and (each.kind, each.workers) == (present[0], present[2])
            worth = max(value * (1.0 if stays else factor), 1e-6)
            cost = float(worth**self.power) - _UNALLOCATED - (1e-6 if stays else 0.0)
            costs.append(view.weight * cost)
        return costs


class _SlotsByType:
    """Slots of the empty cluster by GPU type, for jobs with interchangeable workers."""

    def __init__(self, cluster: Cluster, like: JobView) -> None:
        self.room = FreeResources(cluster)
        self.by_node = self.room.slots(like).tolist()
        by_id = cluster.by_id()
        names = [by_id[node_id].gpu_type for node_id in self.room.node_ids]
        self.types = sorted(set(names))
        self.kinds = [self.types.index(name) for name in names]
        of = [
            [n for n, kind in zip(self.by_node, self.kinds, strict=True) if kind == k] for k in range(len(self.types))
        ]
        self.capacity = [sum(each) for each in of]
        self.largest = [max(each, default=0) for each in of]
        self._roomy = [np.cumsum(sorted(each, reverse=True)) for each in of]

    def nodes_for(self, kind: int, workers: int) -> int:
        """Return the smallest number of nodes of a kind that hold this many workers."""
        return int(np.searchsorted(self._roomy[kind], workers)) + 1


def _assign(
    options: Sequence[Sequence[Configuration]], costs: Sequence[Sequence[float]], capacity: Sequence[int]
) -> list[int] | None:
    """Return the index of each job's configuration at the lowest total cost; None if not all jobs can have one."""
    from scipy.optimize import Bounds, LinearConstraint, milp  # takes longer to import than a worker takes to start
    from scipy.sparse import csr_array

    if any(not each for each in options):
        return None
    rows, columns, amounts = [], [], []
    at = 0
    for job, each in enumerate(options):
        for configuration in each:
            rows += [job, len(options) + configuration.kind]
            columns += [at, at]
            amounts += [1.0, float(configuration.workers)]
            at += 1
    matrix = csr_array((amounts, (rows, columns)), shape=(len(options) + len(capacity), at))
    least = np.array([1.0] * len(options) + [0.0] * len(capacity))
    most = np.array([1.0] * len(options) + [float(each) for each in capacity])
    solved = milp(
        np.concatenate([np.array(each) for each in costs]),
        integrality=np.ones(at, dtype=np.int64),
        bounds=Bounds(0, 1),
        constraints=LinearConstraint(matrix, least, most),
        options={"mip_rel_gap": _GAP},
    )
    if solved.x is None:
        return None
    picks, at = [], 0
    for each in options:
        picks.append(int(np.argmax(solved.x[at : at + len(each)])))
        at += len(each)
    return picks


def estimates(view: JobView, wanted: Sequence[tuple[str, Shape]]) -> Floats:
    """Return the estimated goodput of each (GPU type, shape), relative to the lowest of them.

    If the job has measurements on several GPUs of the type, its model for that type is used. Otherwise (Jayaram
    Subramanya et al., SOSP 2023, section 3.2), the model for another type A with such measurements is used, scaled by
    the ratio of single-GPU goodputs::

        goodput_B(n, k) = goodput_B(1, 1) / goodput_A(1, 1) x goodput_A(n, k)

    If no type has such measurements, k GPUs are assumed to do k times the work of one. On a type that the job has never
    run on, one GPU is assumed to be as fast as one GPU of the job's fastest known type.
    """
    if not view.models:
        return _relative(speeds_of(view, tuple(shape for _, shape in wanted)))
    shapes = (_ONE, *(shape for _, shape in wanted))
    tables = {
        gpu: shape_goodputs(view, model, shapes, view.atomic_bsz_ranges.get(gpu, view.atomic_bsz_range))
        for gpu, model in view.models.items()
    }
    several = [gpu for gpu in tables if any(each.replicas > 1 for each in view.observations.get(gpu, ()))]
    sources = [gpu for gpu in several if tables[gpu][0] > 0]
    default = max(float(table[0]) for table in tables.values()) or 1.0
    values = np.zeros(len(wanted))
    for i, (gpu, (_, workers)) in enumerate(wanted):
        one = float(tables[gpu][0]) if gpu in tables else default
        if gpu in several or (gpu in tables and len(tables) == 1):
            values[i] = tables[gpu][i + 1]
        elif sources:
            table = tables[sources[0]]
            values[i] = one / table[0] * table[i + 1]
        else:
            values[i] = one * workers
    return _relative(values)


def _relative(values: Floats) -> Floats:
    positive = values[values > 0]
    return np.asarray(values / positive.min()) if positive.size else np.ones(len(values))
