"""Remaining work of jobs, and what follows: weights, lateness, the discount of a change, concave values."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from placement.cluster.jobs import JobView, goodputs
from placement.cluster.progress import Progress
from placement.goodput.step_time import Floats

_MANY = 1_000  # jobs, of which pairs are no longer compared
BEYOND = 1.05  # part of the declared length from which a job proves that more was meant


def remaining(progress: Progress | None) -> float | None:
    """Return scale-invariant iterations to the end, estimated as a live job can; None without a declared length.

    Declared epochs x measured progress per epoch - progress so far. In its first epoch what other jobs of the same
    model needed for one counts, if it is known; else only that an epoch takes at least what is done already: a
    newcomer counts as short until it proves to be long.
    """
    return None if progress is None or progress.epochs is None else _left(progress, progress.epochs)


def _left(progress: Progress, epochs: float) -> float:
    """Scale-invariant iterations until this number of epochs is done."""
    finished = len(progress.epoch_ends)
    if finished:
        per_epoch = progress.epoch_ends[-1] / finished
    elif progress.usual_epoch is not None:
        per_epoch = max(progress.usual_epoch, progress.done)
    else:
        return max(epochs - 1.0, 0.0) * progress.done
    return max(epochs * per_epoch - progress.done, 0.01 * per_epoch)


def seconds_to_end(view: JobView, slots: Sequence[int]) -> Floats | None:
    """Return the time until the job's end on 1..n workers [s]; None until an epoch is over and its length is known.

    Args:
        slots: how many of its workers fit on each node of the empty cluster.
    """
    missing = remaining(view.progress)
    if missing is None or view.progress is None or not view.progress.epoch_ends or view.goodput is None:
        return None
    with np.errstate(divide="ignore"):
        left_s: Floats = missing * view.goodput.init_batch_size / goodputs(view, slots)
    return left_s


def likely_left(progress: Progress | None) -> float | None:
    """Return scale-invariant iterations by which a job counts for shortest-first decisions; None where nothing tells.

    Nobody gains by what he declares: the length that counts is the one declared first, and it counts as much as those
    of the same declarer have proven right. The possible ends are

    * of a declarer who is known: the parts of the declared end after which his earlier jobs ended, or how far beyond it
      they went, and the declared end once all of these have passed; where some went beyond, those of the model's jobs
      if they are farther; where they are scattered, and the ends of the model's jobs are less so, those;
    * of one who is not known: those of the model's earlier jobs, and the declared end only where that puts the job back
      (as one of many ends, it would put each job in front that is just before the end it declared);
    * of a job beyond its declared end: the farther of both that lie ahead;
    * of a job that declares nothing: where the model's earlier jobs ended, and once twice the longest of these, for it
      may be another kind of run.

    They are weighed by :func:`gittins_left`, so that among jobs with the same mean the surer end counts as nearer. Of a
    job beyond all of them as much is taken to be left as was done.
    """
    if progress is None:
        return None
    done, model_ends, parts = progress.done, progress.usual_ends, progress.usual_parts
    if progress.epochs is None:
        if not model_ends:
            return None
        return gittins_left(done, [*model_ends, 2 * max(done, *model_ends)])
    declared = progress.epochs if progress.first_epochs is None else progress.first_epochs
    end, beyond = done + _left(progress, declared), len(progress.epoch_ends) >= declared
    if beyond:
        end = declared * progress.epoch_ends[-1] / len(progress.epoch_ends)
    elif model_ends and (not parts or _scatter(model_ends) < _scatter([*parts, 1.0])):
        return max(gittins_left(done, model_ends), gittins_left(done, [*model_ends, end]))
    ahead = [part * end for part in parts if part * end > done]
    if not ahead and not beyond:
        ahead = [end]
    if not model_ends or (not beyond and max(parts, default=1.0) <= BEYOND):
        return gittins_left(done, ahead)
    usual = gittins_left(done, model_ends)
    return max(usual, gittins_left(done, ahead)) if ahead else usual


def _scatter(values: Sequence[float]) -> float:
    """Return the standard deviation of the logarithms, infinite of one value."""
    return float(np.std(np.log(values))) if len(values) > 1 else math.inf


def gittins_left(done: float, ends: Sequence[float]) -> float:
    """Return the inverse of Gittins' index.

    Work to be invested for each end that is reached, at the best place to stop.

        min over t of  E[min(X, t) - done | X > done] / P(X <= t | X > done)

    X is equally likely each of ``ends``. Serving the job with the smallest value first minimises the mean completion
    time where only the distribution of lengths is known (Gittins, "Bandit processes and dynamic allocation indices",
    1979; Aalto, Ayesta and Righter, "On the Gittins index in the M/G/1 queue", 2009). For a certain end it is what is
    left.

    Args:
        done: work that the job has had, 0 or more.
        ends: totals at which it may end; what is not above ``done`` cannot be any more.

    Returns work, in the unit of ``ends``; as much as was done where it should have ended.
    """
    left = sorted(end - done for end in ends if end > done)
    best, below = done if not left else left[-1] * len(left), 0.0
    for ended, each in enumerate(left, start=1):
        below += each
        best = min(best, (below + (len(left) - ended) * each) / ended)
    return best


def seconds_left(views: Sequence[JobView], rate: Floats) -> Floats:
    """Return remaining time on the smallest size [s] of each job; NaN where nothing is known of its length.

    Args:
        rate: goodput on the smallest size [samples/s], 0 where no model is known yet.
    """
    left = np.full(len(views), np.nan)
    for j, view in enumerate(views):
        missing = likely_left(view.progress)
        if missing is None:
            continue
        if rate[j] > 0 and view.init_batch_size:
            left[j] = missing * view.init_batch_size / rate[j]
        else:
            left[j] = 0.0  # not even started: it counts as the shortest
    return left


def rank_weights(left_s: Floats, exponent: float, sharpness: float = math.inf) -> Floats:
    """Return w_j = (rank_j / n)^a, the rank near 1 for the largest remaining time, near n for the smallest.

        rank_j = 1/2 + sum over i of  left_i^q / (left_i^q + left_j^q)

    heSRPT (Berg, Vesilo, Harchol-Balter, "heSRPT: Parallel scheduling to minimize mean slowdown", Performance
    Evaluation 2020) is optimal for jobs of equal concave speed-up s(k) = k^p with shares that depend on the ranks
    only: q infinite, where equal times share a rank. The smaller q, the nearer the weights of jobs with about as much
    left, so that neither waits for the other and the last does not end alone. A job without known length gets the
    middle rank: it is neither favoured nor put off.

    Args:
        left_s: remaining times [s], (J,), NaN where unknown.
        exponent: a.
        sharpness: q; among more than ``_MANY`` jobs it counts as infinite.
    """
    n = len(left_s)
    known = np.flatnonzero(~np.isnan(left_s))
    rank = np.full(n, (n + 1) / 2)
    if len(known):
        times = left_s[known]
        if len(known) <= _MANY and sharpness < math.inf:
            logs = sharpness * np.log(np.maximum(times, 1e-9))
            ranks = 0.5 + (1.0 / (1.0 + np.exp(np.clip(logs[:, np.newaxis] - logs, -50.0, 50.0)))).sum(axis=1)
        else:
            order = np.sort(times)
            below, upto = (np.searchsorted(order, times, side=side) for side in ("left", "right"))
            ranks = len(known) - upto + (upto - below + 1) / 2
        rank[known] = ranks * (n / len(known))
    weights: Floats = (rank / max(n, 1)) ** exponent
    return weights


def overdue(views: Sequence[JobView], left_s: Floats, rate: Floats, fair_speed: Floats, now_s: float) -> Floats:
    """Return each job's lateness on an equal share from now on: at most 1 if it is not late, NaN if it has not trained.

        lateness = (age + left / speed(fair share)) / ((left + done) / speed(fair share))

    an estimate of finish-time fairness (Mahajan et al., "Themis", NSDI 2020) from what the job knows of itself, or, of
    one without a length, from what it is taken to have left.

    Args:
        left_s: remaining time at speed 1 [s], (J,), NaN where unknown.
        rate: progress at speed 1 [samples/s], (J,).
        fair_speed: of each job on an equal share, (J,).
        now_s: the time [s].
    """
    lateness = np.full(len(views), np.nan)
    for j, (view, left, speed) in enumerate(zip(views, left_s.tolist(), fair_speed.tolist(), strict=True)):
        missing = likely_left(view.progress)
        if view.progress is None or (missing is not None and not missing > 0):
            continue
        if missing is not None:
            whole_s = left * (1.0 + view.progress.done / missing) / max(speed, 1e-9)
        else:
            done_s = view.progress.done * (view.init_batch_size or 0) / max(float(rate[j]), 1e-9)
            whole_s = (left + done_s) / max(speed, 1e-9)
        if whole_s > 0:
            age_s = max(now_s - view.submitted_s, 0.0)
            lateness[j] = (age_s + left / max(speed, 1e-9)) / whole_s
    return lateness


def discount(speed: Floats, left_s: Floats, cost_s: Floats, horizon_s: Floats, arrivals_per_s: float = 0.0) -> Floats:
    """Return H' / (H' + n d): the part of the next H' = min(horizon, remaining time T) in which a changed job trains.

    A change that the next arrival undoes costs a second pause: n = 2 - exp(-arrivals x T), 1 where none comes before
    the job's end.

    Args:
        speed: of each job and option, (J, C).
        left_s: remaining time at speed 1 [s], (J,), NaN where unknown.
        cost_s: time without progress that a change costs [s], (J,).
        horizon_s: H [s], (J,).
        arrivals_per_s: jobs that arrive [1/s].
    """
    lasting = np.where(np.isnan(left_s), np.inf, left_s)[:, np.newaxis] / np.maximum(speed, 1e-9)
    span = np.clip(lasting, 1.0, horizon_s[:, np.newaxis])
    undone = -np.expm1(-arrivals_per_s * np.minimum(lasting, 1e12))
    part: Floats = span / (span + (1.0 + undone) * cost_s[:, np.newaxis])
    return part


def concave_value(speed: Floats, power: float) -> Floats:
    """Return phi(s) = (s^p - 1) / p, log s for p = 0: the smaller p, the more an even distribution counts."""
    positive = np.maximum(speed, 1e-9)
    with np.errstate(under="ignore"):
        result: Floats = np.log(positive) if power == 0 else (positive**power - 1.0) / power
    return result
