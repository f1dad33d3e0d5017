"""Remaining work of jobs, and derived quantities: weights, lateness, discounts for changes, utility."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from placement.cluster.jobs import JobView, Progress, goodputs
from placement.goodput.step_time import Floats

_MANY = 1_000  # jobs, of which pairs are no longer compared
BEYOND = 1.05  # part of the declared length from which a job proves that more was meant


def remaining(progress: Progress | None) -> float | None:
    """Return the estimated work until the job ends, in steps at the initial batch; None if no length is declared.

    The estimate is declared epochs x measured progress per epoch - progress so far, as a running job reports them.
    During the first epoch, epochs are assumed to be as long as in other jobs of the same model. If that is unknown too,
    an epoch is assumed to be as long as the progress so far: a new job counts as short until it proves to be long.
    """
    return None if progress is None or progress.epochs is None else _left(progress, progress.epochs)


def _left(progress: Progress, epochs: float) -> float:
    """Return the scale-invariant iterations until this number of epochs is done."""
    finished = len(progress.epoch_ends)
    if finished:
        per_epoch = progress.epoch_ends[-1] / finished
    elif progress.usual_epoch is not None:
        per_epoch = max(progress.usual_epoch, progress.done)
    else:
        return max(epochs - 1.0, 0.0) * progress.done
    return max(epochs * per_epoch - progress.done, 0.01 * per_epoch)


def seconds_to_end(view: JobView, slots: Sequence[int]) -> Floats | None:
    """Return the time to the end [s] on 1..n workers; None without a model, a declared length or a finished epoch."""
    missing = remaining(view.progress)
    if missing is None or view.progress is None or not view.progress.epoch_ends or view.goodput is None:
        return None
    with np.errstate(divide="ignore"):
        left_s: Floats = missing * view.goodput.init_batch_size / goodputs(view, slots)
    return left_s


def likely_left(progress: Progress | None) -> float | None:
    """Return the remaining iterations for shortest-first decisions; None if nothing is known about the length.

    An iteration is the progress of one step at the initial batch. Declarations cannot be used to gain priority: only
    the first declared length counts, and only to the extent that earlier jobs of the same declarer (the user or
    tenant that submitted them) kept to theirs. The possible ends of a job are:

    * known declarer: the declared end, scaled to where the declarer's earlier jobs ended relative to their declared
      ends, and the declared end itself once the job is past all of these. If some jobs went beyond their declared end,
      the ends of earlier jobs of the same model are used if they are farther. If the relative ends are more scattered
      than the ends of the model's earlier jobs, the latter are used instead;
    * unknown declarer: the ends of the model's earlier jobs. The declared end is added only if that moves the job
      back; otherwise every job close to its declared end would move forward;
    * job past its declared end: the farther of both kinds of ends that are still ahead;
    * no declaration: the ends of the model's earlier jobs, and twice the longest of them, as this may be a different
      kind of run.

    :func:`gittins_left` weighs the possible ends, so that of two jobs with the same mean length, the one with the more
    certain end counts as shorter. A job past all its possible ends is assumed to be halfway.
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
    """Return the standard deviation of the logarithms; infinite for a single value."""
    return float(np.std(np.log(values))) if len(values) > 1 else math.inf


def gittins_left(done: float, ends: Sequence[float]) -> float:
    """Return the expected work per completion at the optimal stopping point: the inverse of the Gittins index.

        min over t of  E[min(X, t) - done | X > done] / P(X <= t | X > done)

    X is uniformly distributed over ``ends``. If only the distribution of lengths is known, serving the job with the
    smallest value first minimises the mean completion time (Gittins, "Bandit processes and dynamic allocation indices",
    1979; Aalto, Ayesta and Righter, "On the Gittins index in the M/G/1 queue", 2009). If the end is certain, the value
    is the remaining work.

    Returns work in the unit of ``ends``; ``done`` if the job is past all ends.
    """
    left = sorted(end - done for end in ends if end > done)
    best, below = done if not left else left[-1] * len(left), 0.0
    for ended, each in enumerate(left, start=1):
        below += each
        best = min(best, (below + (len(left) - ended) * each) / ended)
    return best


def seconds_left(views: Sequence[JobView], rate: Floats) -> Floats:
    """Return the remaining time of each job at its smallest size [s]; NaN if nothing is known about its length.

    Args:
        rate: Goodput of each job at its smallest size [samples/s]; where this is 0 (no model yet), the time is 0.
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
    """Return the weight (rank / n)^a of each of n jobs; the longest job has the lowest rank, the shortest the highest.

        rank_j = 1/2 + sum over i of  left_i^q / (left_i^q + left_j^q)

    heSRPT (Berg, Vesilo, Harchol-Balter, "heSRPT: Parallel scheduling to minimize mean slowdown", Performance
    Evaluation 2020) is optimal for jobs of equal concave speed-up s(k) = k^p. Its shares depend only on the ranks, as
    they do here for infinite q. Jobs with equal times share a rank. A smaller q brings the weights of jobs with similar
    remaining times closer together, so that these jobs run side by side. A job of unknown length gets the middle rank,
    (n + 1) / 2; if only m lengths are known, the ranks of those m jobs are multiplied by n / m.

    Args:
        sharpness: q; counts as infinite if more than 1000 lengths are known.
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
    """Return each job's estimated lateness if it gets an equal share from now on, (J,); NaN before it trains.

        lateness = (age + left / speed(fair share)) / ((left + done) / speed(fair share))

    A job with lateness up to 1 is on time. This estimates finish-time fairness (Mahajan et al., "Themis", NSDI 2020)
    from the job's own measurements. For a job without a declared length, the remaining time in ``left_s`` is used.
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
    """Return the fraction of the coming time that a job spends training if it changes to each option, (J, C).

        part = H' / (H' + n d)    with H' = min(horizon, remaining time T)

    d is the pause for a change of size and n the expected number of pauses. A job that arrives before this one ends
    undoes the change at the cost of a second pause, so n = 2 - exp(-arrivals x T).
    """
    lasting = np.where(np.isnan(left_s), np.inf, left_s)[:, np.newaxis] / np.maximum(speed, 1e-9)
    span = np.clip(lasting, 1.0, horizon_s[:, np.newaxis])
    undone = -np.expm1(-arrivals_per_s * np.minimum(lasting, 1e12))
    part: Floats = span / (span + (1.0 + undone) * cost_s[:, np.newaxis])
    return part


def concave_value(speed: Floats, power: float) -> Floats:
    """Return phi(s) = (s^p - 1) / p for each speed s (log s for p = 0); a smaller ``power`` p favours even speeds."""
    positive = np.maximum(speed, 1e-9)
    with np.errstate(under="ignore"):
        result: Floats = np.log(positive) if power == 0 else (positive**power - 1.0) / power
    return result
