"""``boa``: each class of jobs has a fixed width, chosen to minimise the mean completion time within a budget."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from placement.checks import check_number
from placement.cluster.cluster import Cluster
from placement.cluster.jobs import JobView
from placement.goodput.step_time import Floats
from placement.policies.shared.base import Target, decide_by_worth
from placement.text import count


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobClass:
    """Class of jobs that train the same model: arrivals per hour, and run time keyed by number of workers."""

    per_h: float  # arrivals [1/h]
    seconds: Mapping[int, float]  # T(k), the time of such a job alone on k workers [s], by k; a width is one of these

    def __post_init__(self) -> None:
        check_number("per_h", self.per_h, above=0)
        if not self.seconds:
            raise ValueError("seconds must have the time of one number of workers or more, but is empty")
        for workers, seconds in self.seconds.items():
            check_number("workers", workers, least=1)
            check_number(f"seconds[{workers}]", seconds, above=0)


def boa_widths(classes: Mapping[str, JobClass], gpus: float) -> dict[str, int]:
    """Return the width (workers per job) for each class, by the method of BOA Constrictor (arXiv 2602.01404).

        min over k  of  sum_i r_i T_i(k_i)     subject to     sum_i r_i k_i T_i(k_i) <= B

    with arrival rates r_i and B the GPUs that may be rented on average. By Little's law, the two sums are the number of
    jobs in the system and the GPUs that they hold if no job waits. Only points on the lower convex hull of (k T(k),
    T(k)) are optimal for some B. Among the steps along these hulls, those that save the most time per GPU hour come
    first, regardless of arrival rates; the search stops at the first step that would exceed B.

    Raises ValueError: B is less than the classes need at their cheapest widths.
    """
    hulls = {name: _hull(each) for name, each in classes.items()}
    used = sum(classes[name].per_h * hull[0][0] for name, hull in hulls.items()) / 3600.0
    if used > gpus * (1 + 1e-9):
        raise ValueError(
            f"a budget must be at least {used:.4g} GPUs on average for these arrivals, each job at its cheapest width, "
            f"but got {gpus:.4g}"
        )
    steps = [
        ((hull[i][1] - hull[i + 1][1]) / (hull[i + 1][0] - hull[i][0]), name, i + 1)
        for name, hull in hulls.items()
        for i in range(len(hull) - 1)
    ]
    at = dict.fromkeys(hulls, 0)
    for _, name, point in sorted(steps, key=lambda step: (-step[0], step[1])):
        more = classes[name].per_h * (hulls[name][point][0] - hulls[name][point - 1][0]) / 3600.0
        if used + more > gpus:
            break
        used, at[name] = used + more, point
    return {name: hulls[name][point][2] for name, point in at.items()}


def _hull(each: JobClass) -> list[tuple[float, float, int]]:
    """Return the lower convex hull of (GPU seconds, seconds, width), from the cheapest to the fastest."""
    points = sorted((workers * seconds, seconds, workers) for workers, seconds in each.seconds.items())
    hull: list[tuple[float, float, int]] = []
    for point in points:
        if hull and point[1] >= hull[-1][1]:
            continue  # dearer, and no faster
        while len(hull) > 1 and _slope(hull[-2], point) <= _slope(hull[-2], hull[-1]):
            hull.pop()
        hull.append(point)
    return hull


def _slope(one: tuple[float, float, int], other: tuple[float, float, int]) -> float:
    """Return the change in seconds per additional GPU second; it is negative."""
    return (other[1] - one[1]) / (other[0] - one[0])


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BoaPolicy:
    """Policy with the widths of :func:`boa_widths`, which do not change as other jobs come and go.

    It was published for a cluster rented to fit: if all jobs find room, each keeps its width throughout. Otherwise,
    single workers go to the job with the fewest, up to its width. A job of unknown class grows while more workers make
    it faster. The widths computed for one GPU type are used for all. The paper's classes per epoch, which would change
    a job's width as its gradient noise grows, are not implemented.
    """

    name = "boa"

    # what all GPUs may cost on average [USD/h]; None for as many GPUs as the cluster has, or where the arrivals need
    # more at their cheapest, for so many
    budget_usd_per_h: float | None = None
    usd: float = 1.0  # price of a GPU [USD/h]
    widths: Mapping[str, int] = dataclasses.field(default_factory=dict)  # by ``JobView.fingerprint``

    def __post_init__(self) -> None:
        if self.budget_usd_per_h is not None:
            check_number("budget_usd_per_h", self.budget_usd_per_h, above=0)
        check_number("usd", self.usd, above=0)

    def priced(self, prices: Mapping[str, float]) -> BoaPolicy:
        """Return the policy with the lowest GPU price [USD/h] in ``prices``, which is keyed by GPU type."""
        return dataclasses.replace(self, usd=min(prices.values(), default=self.usd))

    def told(self, classes: Mapping[str, JobClass], gpus: float) -> BoaPolicy:
        """Return the policy with widths for these classes, on ``gpus`` GPUs or as many as its budget (if any) pays for.

        Without a budget, it assumes at least as many GPUs as the classes need at their cheapest widths. Raises
        ValueError if the budget pays for fewer than that.
        """
        least = sum(each.per_h * _hull(each)[0][0] for each in classes.values()) / 3600.0
        budget = max(gpus, least) if self.budget_usd_per_h is None else self.budget_usd_per_h / self.usd
        return dataclasses.replace(self, widths=boa_widths(classes, budget))

    def decide(self, jobs: Sequence[JobView], cluster: Cluster, now_s: float) -> Mapping[str, Target]:
        """Return a target per job: workers go one by one to the job with the fewest, up to its class's width."""

        def worth(view: JobView, curve: Floats, workers: int) -> float | None:
            width = self.widths.get(view.fingerprint or "")
            wants = curve[workers + 1] > curve[workers] if width is None else workers < width
            return -float(workers) if wants else None

        return decide_by_worth(jobs, cluster, worth, lambda workers, _: f"{count(workers)}, up to its width")
