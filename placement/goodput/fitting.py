"""Fit of the throughput model to measured steps, with optimistic priors for configurations not yet measured.

Source of the priors: Pollux (OSDI 2021), section 4.1 ("prior-driven exploration"). A job that has never run on more
resources is assumed to scale perfectly onto them, so that the allocator tries them and thereby gets measurements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from placement.goodput.step_time import LARGEST, Floats, ThroughputModel, power_sum, real

# Positions in the vector of parameters, in the order of ThroughputModel.
_ALPHA_C, _BETA_C, _ALPHA_N, _BETA_N, _ALPHA_R, _BETA_R, _GAMMA, _ALPHA_S = range(8)
_PARAMETERS = 8
_GAMMA_RANGE = (1.0, 10.0)  # Pollux: 10 is as good as the maximum
_GOOD_ENOUGH = 1e-6  # a sum of squared errors (0.1 %) with which no other start is tried
_LEAST = 1e-8  # the least value of a parameter, of the shortest time measured: T_grad is never 0
# Priors as more errors, _PRIORS @ parameters - _PRIOR_VALUES, against errors of logarithms (0.01 is 1 %):
# equal shares of alpha_c and beta_c m, little synchronisation and much less growth of it, little overlap. They are
# weak enough to decide only what the data leave open.
_PRIORS = np.zeros((7, _PARAMETERS))
_PRIORS[0, [_ALPHA_C, _BETA_C]] = 1e-3, -1e-3
_PRIORS[[1, 3], [_ALPHA_N, _ALPHA_R]] = 3e-3
_PRIORS[[2, 4], [_BETA_N, _BETA_R]] = 5e-2
_PRIORS[5, _GAMMA] = 1e-3
_PRIORS[6, _ALPHA_S] = 1e-3
_PRIOR_VALUES = np.array([0.0, 0.0, 0.0, 0.0, 0.0, 1e-3, 0.0])
_DAMPING = 1e-3  # of the first step
_EASIER, _HARDER = 0.2, 4.0  # the damping after a step that was taken, and after one that was not
_MOST_DAMPING = 1e12


@dataclass(frozen=True, slots=True)
class Observation:
    """Measured step time of a job in one configuration of nodes, replicas and batch."""

    nodes: int  # N >= 1
    replicas: int  # R >= N
    atomic_bsz: float  # m >= 1, samples per replica and micro-step
    accum_steps: int  # s >= 0, micro-steps before the one that synchronises
    step_time: float  # Seconds of one optimizer step, s + 1 micro-steps and synchronisation together. > 0.
    grad_time: float = 0.0  # Seconds of one micro-step without synchronisation (T_grad), or 0 if not measured
    count: float = 1.0  # Weight, such as how many steps the times are a mean of. > 0.
    spread: float = 0.0  # Standard deviation of the logarithms of the reports in ``step_time``; 0 if not measured

    def __post_init__(self) -> None:
        real("nodes", self.nodes, at_least=1)
        if real("replicas", self.replicas, at_least=1) < self.nodes:
            raise ValueError(f"replicas must be at least nodes ({self.nodes}), but got {self.replicas}")
        real("atomic_bsz", self.atomic_bsz, at_least=1)
        real("accum_steps", self.accum_steps, at_least=0)
        real("grad_time", self.grad_time, at_least=0)
        real("spread", self.spread, at_least=0)
        for name in ("step_time", "count"):
            if real(name, getattr(self, name)) <= 0:
                raise ValueError(f"{name} must be above 0, but got {getattr(self, name)}")


def fit(observations: Iterable[Observation], *, fixed_batch: bool = False) -> ThroughputModel:
    """Return the model that best fits the measured step times, by least squares of their logarithms.

    Minimises, over alpha, beta >= 0 and 1 <= gamma <= 10, with w_i = count_i / sum of counts::

        sum_i w_i [(log T_step(i) - log step_time_i)^2 + (log T_grad(i) - log grad_time_i)^2]

    with the second term only if grad_time was measured. Priors determine any parameters that the data do not. If the
    data contain

    - only one atomic batch size: alpha_c = beta_c m, half of the compute time each. With ``fixed_batch``, alpha_c =
      0: more replicas then mean smaller atomic batches, and sizes that were never tried are assumed to scale
      perfectly;
    - no more than one replica: synchronisation is free (alpha = beta = 0), gamma = 1;
    - no group on several nodes: synchronisation across nodes costs as much as within a node. No group of several
      replicas within a node: synchronisation within a node is free;
    - no more than two replicas: more add nothing (beta = 0); beta_n = beta_r if three were seen only within one node;
    - no micro-steps of one replica that were timed or varied in number: no fixed time per step (alpha_s = 0), since
      it cannot be distinguished from the constant part of a pass or from synchronisation;
    - several nodes (or replicas of one node) at one size only: synchronisation is mostly alpha, not beta, since a
      time that grows with every replica would rule out all larger sizes before any were tried.

    The fit is deterministic, and any valid observations give a model.
    """
    given = list(observations)
    if not given:
        raise ValueError("observations must hold at least one measured step, but got none")
    for each in given:
        if not isinstance(each, Observation):
            raise TypeError(f"observations must be Observation values, but got {each!r}")
    problem = _Regression(given, fixed_batch=fixed_batch)
    first, *others = problem.starts()
    best = problem.solve(first)
    for start in others:
        if best[0] > _GOOD_ENOUGH:
            best = min(best, problem.solve(start), key=lambda solved: solved[0])
    return problem.model(best[1])


class _Regression:
    """Least squares over the free parameters z; the full parameter vector is p = ties @ z + offset.

    Times are in units of the geometric mean step time, and beta_c in such units per mean atomic batch, so that the
    unknowns are near 1 whatever the job's speed.
    """

    def __init__(self, observations: list[Observation], *, fixed_batch: bool) -> None:
        config = [[o.nodes, o.replicas, o.atomic_bsz, o.accum_steps] for o in observations]
        nodes, replicas, atomic_bsz, self.accum = np.array(config, dtype=np.float64).T
        weight = np.array([o.count for o in observations], dtype=np.float64)
        weight = weight / weight.max()
        self.weight = np.sqrt(weight / weight.sum())
        log_step = np.log([o.step_time for o in observations])
        grad_time = np.array([o.grad_time for o in observations], dtype=np.float64)
        self.measured = grad_time > 0
        log_grad = np.log(np.where(self.measured, grad_time, 1.0))
        self.log_unit = float(log_step.mean())
        # Times further apart than exp(30) are no measurements, but their squares must not overflow.
        self.log_step, self.log_grad = (np.clip(x - self.log_unit, -30, 30) for x in (log_step, log_grad))
        self.mean_bsz = float(np.exp(np.log(atomic_bsz).mean()))
        self.bsz = atomic_bsz / self.mean_bsz
        self.remote, self.alone = nodes > 1, replicas == 1
        self.beyond_two = np.maximum(replicas - 2, 0)
        self.ties, self.offset, self.free = self._tie(one_bsz=np.unique(atomic_bsz).size == 1, fixed_batch=fixed_batch)
        least, most = np.full(_PARAMETERS, _LEAST * np.exp(min(self.log_step.min(), 0.0))), np.full(_PARAMETERS, np.inf)
        least[_GAMMA], most[_GAMMA] = _GAMMA_RANGE
        self.bounds = least[self.free], most[self.free]

    def _tie(self, *, one_bsz: bool, fixed_batch: bool) -> tuple[Floats, Floats, list[int]]:
        """Return (ties, offset, free parameters); what the data leave open is tied to another, to 0 or (gamma) to 1."""
        local, third = ~self.remote & ~self.alone, self.beyond_two > 0
        seen_n, seen_r = self.remote.any(), local.any()
        grows_n, grows_r = (self.remote & third).any(), (local & third).any()
        # Whose value each unseen parameter takes: another one's, or none: 0, and 1 for gamma.
        tied: dict[int, int | None] = {}
        if one_bsz:
            tied[_ALPHA_C] = None if fixed_batch else _BETA_C
        if not seen_n:
            tied[_ALPHA_N] = _ALPHA_R if seen_r else None
        if not grows_n:
            tied[_BETA_N] = _BETA_R if grows_r else None
        if not seen_r:
            tied[_ALPHA_R] = None
        if not grows_r:
            tied[_BETA_R] = None
        if not (seen_n or seen_r):
            tied[_GAMMA] = None
        if not (self.measured & self.alone).any() and np.unique(self.accum[self.alone]).size < 2:
            tied[_ALPHA_S] = None
        free = [i for i in range(_PARAMETERS) if i not in tied]
        ties, offset = np.zeros((_PARAMETERS, len(free))), np.zeros(_PARAMETERS)
        for i in range(_PARAMETERS):
            source = tied.get(i, i)
            if source is not None:
                ties[i, free.index(source)] = 1.0
            elif i == _GAMMA:
                offset[i] = 1.0
        return ties, offset, free

    def starts(self) -> list[Floats]:
        """Return starting points for the search: little synchronisation with little overlap, and much of both."""
        micro = np.where(self.measured, self.log_grad, self.log_step - np.log1p(self.accum))
        compute = float(np.exp(np.median(micro))) / 2
        points = [(0.1, 1.5), (1.0, 3.0)] if _GAMMA in self.free else [(0.0, 1.0)]
        wholes = [np.array([compute, compute, *[sync, 0.1 * sync] * 2, gamma, 0.1 * compute]) for sync, gamma in points]
        return [np.clip(whole[self.free], *self.bounds) for whole in wholes]

    def solve(self, start: Floats) -> tuple[float, Floats]:
        """Return (cost, free parameters) at the minimum found from `start`; its error is below measurement noise."""
        return least_squares(self.errors, self.slopes, start, self.bounds)

    def model(self, free: Floats) -> ThroughputModel:
        whole = self.ties @ free + self.offset
        whole[_BETA_C] /= self.mean_bsz
        with np.errstate(divide="ignore", over="ignore", under="ignore"):
            times = np.minimum(np.exp(np.log(np.delete(whole, _GAMMA)) + self.log_unit), LARGEST)
        alpha_c, beta_c, alpha_n, beta_n, alpha_r, beta_r, alpha_s = times
        gamma = float(np.clip(whole[_GAMMA], *_GAMMA_RANGE))
        return ThroughputModel(alpha_c, beta_c, alpha_n, beta_n, alpha_r, beta_r, gamma, alpha_s)

    def _times(self, p: Floats) -> tuple[Floats, Floats]:
        grad = p[_ALPHA_C] + p[_BETA_C] * self.bsz
        alpha = np.where(self.remote, p[_ALPHA_N], p[_ALPHA_R])
        beta = np.where(self.remote, p[_BETA_N], p[_BETA_R])
        return grad, np.where(self.alone, 0.0, alpha + beta * self.beyond_two)

    def errors(self, free: Floats) -> Floats:
        p = self.ties @ free + self.offset
        grad, sync = self._times(p)
        step = p[_ALPHA_S] + self.accum * grad + power_sum(grad, sync, p[_GAMMA])
        of_step = self.weight * (np.log(step) - self.log_step)
        of_grad = np.where(self.measured, self.weight * (np.log(grad) - self.log_grad), 0.0)
        return np.concatenate([of_step, of_grad, _PRIORS @ p - _PRIOR_VALUES])

    def slopes(self, free: Floats) -> Floats:
        """Return the derivatives of `errors`: one row per error, one column per free parameter."""
        p = self.ties @ free + self.offset
        (grad, sync), gamma = self._times(p), p[_GAMMA]
        joint = power_sum(grad, sync, gamma)
        ratio = np.minimum(grad, sync) / np.maximum(grad, sync)
        power, log_ratio = ratio**gamma, np.log(np.where(ratio > 0, ratio, 1.0))
        by_grad = self.accum + (grad / joint) ** (gamma - 1.0)
        by_sync = np.where(self.alone, 0.0, (sync / joint) ** (gamma - 1.0))
        of_grad = np.zeros((len(grad), _PARAMETERS))
        of_grad[:, _ALPHA_C], of_grad[:, _BETA_C] = 1.0, self.bsz
        of_step = by_grad[:, np.newaxis] * of_grad
        for link, alpha, beta in ((self.remote, _ALPHA_N, _BETA_N), (~self.remote, _ALPHA_R, _BETA_R)):
            of_step[:, alpha] = np.where(link, by_sync, 0.0)
            of_step[:, beta] = np.where(link, by_sync * self.beyond_two, 0.0)
        of_step[:, _GAMMA] = joint * (power * log_ratio / (gamma * (1.0 + power)) - np.log1p(power) / gamma**2)
        of_step[:, _ALPHA_S] = 1.0
        of_step *= (self.weight / (p[_ALPHA_S] + self.accum * grad + joint))[:, np.newaxis]
        of_grad *= (np.where(self.measured, self.weight, 0.0) / grad)[:, np.newaxis]
        return np.concatenate([of_step, of_grad, _PRIORS]) @ self.ties


# SciPy has the like, at 40 MB of memory in every process that imports it: as much as all else that a job's controller
# imports.
def least_squares(
    errors: Callable[[Floats], Floats],
    slopes: Callable[[Floats], Floats],
    start: Floats,
    bounds: tuple[Floats, Floats],
    *,
    ftol: float = 1e-4,
    xtol: float = 1e-5,
    gtol: float = 1e-8,
    steps: int = 60,
) -> tuple[float, Floats]:
    """Minimise the cost from ``start`` by the Levenberg-Marquardt method, projected onto the bounds.

    With errors e, slopes J = de/dx and g = J^T e, an unknown is fixed while it is on a bound and -g points beyond that
    bound. All other unknowns move by d, clipped at the bounds, with Marquardt's damping mu and a separate scale for
    each unknown::

        (J^T J + mu diag(J^T J)) d = -g

    A step that lowers the cost is accepted and mu falls; any other step is rejected and mu rises.

    Returns the cost, half of the sum of squared errors, and the unknowns.
    """
    x, e, damping = start, errors(start), _DAMPING
    cost = 0.5 * float(e @ e)
    normal, g = _normal(slopes(x), e)
    for _ in range(steps):
        free = ~(((x <= bounds[0]) & (g > 0)) | ((x >= bounds[1]) & (g < 0)))
        if not free.any() or np.abs(g[free]).max() <= gtol:
            break
        step = _step(normal, g, free, damping)
        tried = np.clip(x + step, *bounds)
        moved = float(np.linalg.norm(tried - x))
        e_tried = errors(tried)
        gain = cost - 0.5 * float(e_tried @ e_tried)
        if gain > 0:
            converged = gain < ftol * cost and damping <= _DAMPING
            x, e, cost, damping = tried, e_tried, cost - gain, damping * _EASIER
            if converged:
                break
            normal, g = _normal(slopes(x), e)
        else:
            damping *= _HARDER
        if moved <= xtol * (xtol + float(np.linalg.norm(x))) or damping > _MOST_DAMPING:
            break
    return cost, x


def _normal(j: Floats, e: Floats) -> tuple[Floats, Floats]:
    return j.T @ j, j.T @ e


def _step(normal: Floats, g: Floats, free: npt.NDArray[np.bool_], damping: float) -> Floats:
    """Return the step for the unknowns, which is 0 for those that are not free."""
    step = np.zeros_like(g)
    of_free = normal[np.ix_(free, free)]
    scale = np.maximum(np.diag(of_free), np.finfo(np.float64).tiny * 1e16)
    step[free] = np.linalg.lstsq(of_free + np.diag(damping * scale), -g[free], rcond=None)[0]
    return step
