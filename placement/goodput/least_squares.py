"""Least squares within bounds, for a handful of unknowns (pure).

SciPy has the like, at 40 MB of memory in every process that imports it: as much as all else that a job's controller
imports.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from placement.goodput.step_time import Floats

_DAMPING = 1e-3  # of the first step
_EASIER, _HARDER = 0.2, 4.0  # the damping after a step that was taken, and after one that was not
_MOST_DAMPING = 1e12


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
    """Where the search for the least cost from ``start`` ends: Levenberg-Marquardt, projected onto the bounds.

    With errors e, slopes J = de/dx and g = J^T e, an unknown is held while it lies on a bound and -g points beyond it;
    the others move by d, cut off at the bounds, with Marquardt's damping mu and each unknown's own scale::

        (J^T J + mu diag(J^T J)) d = -g

    mu falls after a step that lowers the cost, and rises after one that does not, which is not taken.

    Args:
        errors: e of the unknowns.
        slopes: J: a row for each error, a column for each unknown.
        start: within the bounds.
        bounds: least and greatest values.
        ftol: it ends when a step lowers the cost by less than this share of it,
        xtol: or moves the unknowns by less than this share of their length,
        gtol: or when no unknown that is free has a steeper g.
        steps: tried at most.

    Returns:
        The cost, half of the sum of squared errors, and the unknowns.
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
    """How far the free unknowns move."""
    step = np.zeros_like(g)
    of_free = normal[np.ix_(free, free)]
    scale = np.maximum(np.diag(of_free), np.finfo(np.float64).tiny * 1e16)
    step[free] = np.linalg.lstsq(of_free + np.diag(damping * scale), -g[free], rcond=None)[0]
    return step
