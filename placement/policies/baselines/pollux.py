"""``pollux``: maximises a fair power mean of speed-ups, with a penalty for restarts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from placement.cluster.cluster import Cluster
from placement.cluster.jobs import JobView, Shape, alike
from placement.cluster.packing import FreeResources
from placement.policies.goodput.dual_prices import Options, solve_exactly
from placement.policies.shared.base import Admission, Target, admit, grow_in_turn, held
from placement.policies.shared.stable_placement import (
    MOST_NODES,
    StablePlacer,
    growth_limit,
    present_place,
    restart_factor,
    shapes,
    speeds_of,
    use_idle,
)
from placement.text import count

_LEAST_FACTOR = 0.01  # a job that has just arrived must still be worth starting


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PolluxPolicy:
    """Policy with Pollux's cluster objective (Qiao et al., OSDI 2021, section 4.2), solved exactly over node shapes.

    Maximises the power mean of exponent p over all jobs of ``speed-up x restart factor``::

        speed-up       = best goodput of the shape / best goodput of the job's fair share (slots / jobs, 1 or more)
        restart factor = max(age - d x restarts, 0) / (age + d) for a job whose place would change, else 1

    with d = ``JobView.resize_cost_s`` and age the time since submission; jobs are weighted by ``JobView.weight``.
    The paper uses a genetic search. This implementation finds the sizes by dynamic programming over the cluster's
    slots, which is exact for one kind of worker and node shapes (any part of a node, or whole nodes). Jobs are then
    placed on whole nodes first, moving as few other jobs as possible. A job may grow to ``JobView.growth_limit``.

    If the jobs' workers differ in kind, slots are not comparable: jobs keep their minimum and grow one after another.

    Attributes:
        power: p, below 1 and not 0; the published choice is -1, and lower values are fairer.
    """

    name = "pollux"
    power: float = -1.0

    def __post_init__(self) -> None:
        if not (self.power < 1 and self.power != 0):
            raise ValueError(f"power must be below 1 and not 0, but got {self.power}")

    def decide(self, jobs: Sequence[JobView], cluster: Cluster, now_s: float) -> Mapping[str, Target]:
        """Return a target size, and the reason for it, for each job, keyed by job name; see ``Policy.decide``."""
        admission = admit(jobs, cluster)
        targets = {job: Target(workers=0, reason=why) for job, why in admission.waiting.items()}
        running = sorted((view for view in jobs if view.job in admission.floors), key=lambda view: view.arrival)
        if not alike(running):
            return targets | grow_in_turn(running, admission)
        if running:
            targets.update(self._share(running, admission, cluster, now_s))
        return targets

    def _share(
        self, running: Sequence[JobView], admission: Admission, cluster: Cluster, now_s: float
    ) -> dict[str, Target]:
        """Return targets for the running jobs: sizes by ``knapsack``, or minimums if these cannot be placed."""
        room = FreeResources(cluster)
        slots = room.slots(running[0])
        share = max(1, round(int(slots.sum()) / len(running)))
        choices = [self._choice(view, admission.floors[view.job], share, room, now_s) for view in running]
        picks = knapsack(choices, int(slots.sum()))
        settler = StablePlacer(slots.tolist())
        wanted = [choice.sizes[pick] for choice, pick in zip(choices, picks, strict=True)]
        present = [present_place(view, room.index) for view in running]
        places = settler.place(wanted, present, [view.min_workers for view in running])
        if places is None:  # minimums of several workers can block each other: leave it to the core's packing
            return {
                view.job: Target(workers=admission.floors[view.job], reason="the minimum, room is scattered")
                for view in running
            }
        use_idle(running, settler, places)
        targets = {}
        for view, place in zip(running, places, strict=True):
            nodes = {room.node_ids[i]: n for i, n in sorted(place.items())}
            workers = sum(place.values())
            (speed,) = speeds_of(view, ((len(place), workers),))
            said = f"{view.workers} -> {count(workers)} on {count(len(place), 'node')}, speed-up {speed:.2f}"
            targets[view.job] = Target(workers=workers, reason=held(view, workers) or said, nodes=nodes)
        return targets

    def _choice(self, view: JobView, floor: int, share: int, room: FreeResources, now_s: float) -> SizeOptions:
        """Return the job's possible sizes with their worth; its current place, if it can keep it, comes first."""
        slots = room.slots(view)
        most = max(floor, growth_limit(view))
        options: list[Shape] = [
            shape for shape in shapes(view, slots.tolist(), most) if shape[0] <= MOST_NODES and shape[1] >= floor
        ]
        if view.held_at is not None:
            options = [(_nodes_of(floor, slots), floor)]
        here = present_place(view, room.index)
        stays = bool(here) and all(slots[i] >= n for i, n in here.items())
        stays = stays and floor <= view.workers <= most and (view.held_at is None or view.workers == floor)
        if stays and here:
            options = [(len(here), view.workers), *options]
        fair = min(max(share, view.min_workers), max(most, 1), int(slots.sum()))
        speed = speeds_of(view, ((_nodes_of(fair, slots), fair), *options))
        speed = speed[1:] / speed[0] if speed[0] > 0 else speed[1:]
        factor = np.full(len(options), restart_factor(view, now_s, _LEAST_FACTOR))
        if stays:
            factor[0] = 1.0
        utility = np.maximum(speed * factor, 1e-9)
        worth = view.weight * np.sign(self.power) * utility**self.power
        if stays:
            worth[0] += 1e-9 * abs(worth[0])  # of equal choices the one that changes nothing
        return SizeOptions(sizes=tuple(workers for _, workers in options), worth=worth)


def _nodes_of(workers: int, slots: NDArray[np.int64]) -> int:
    return int(np.searchsorted(np.cumsum(np.sort(slots)[::-1]), workers)) + 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SizeOptions:
    """Sizes that one job may have, with the worth of each."""

    sizes: tuple[int, ...]  # workers of each option, 1 or more
    worth: NDArray[np.float64]  # what each is worth; larger is better

    def __post_init__(self) -> None:
        if not self.sizes or min(self.sizes) < 1:
            raise ValueError(f"sizes must hold one size of 1 or more, but got {self.sizes}")
        if len(self.sizes) != len(self.worth):
            raise ValueError(f"worth must have {len(self.sizes)} entries, one a size, but has {len(self.worth)}")


def knapsack(choices: Sequence[SizeOptions], slots: int) -> list[int]:
    """Return each job's option index, for the largest total worth with sizes that fit into ``slots``.

    Ties go to the first option. Raises ValueError if even the smallest options do not fit together.
    """
    shape = len(choices), max(len(choice.sizes) for choice in choices)
    values, sizes = np.full(shape, -np.inf), np.zeros(shape)
    for j, choice in enumerate(choices):
        values[j, : len(choice.sizes)], sizes[j, : len(choice.sizes)] = choice.worth, choice.sizes
    options = Options(
        values=values,
        sizes=sizes,
        pool_of=np.zeros(shape, dtype=np.int64),
        capacities=np.array([float(slots)]),
        base=np.array([np.argmin(choice.sizes) for choice in choices]),
    )
    picks: list[int] = solve_exactly(options).tolist()
    return picks
