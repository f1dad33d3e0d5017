"""Time of one optimizer step on given resources: Pollux's system throughput model.

Source: Qiao et al., "Pollux: Co-adaptive Cluster Scheduling for Goodput-Optimized Deep Learning", OSDI 2021,
section 3.2 (system throughput).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats: TypeAlias = NDArray[np.float64]
# A Python float when every argument was a scalar, else a float64 array of the arguments' broadcast shape.
# Overloads over four mixed arguments would say the same in forty lines.
FloatOrArray: TypeAlias = Any

LARGEST = float(np.finfo(np.float64).max)


@dataclass(frozen=True, slots=True)
class ThroughputModel:
    """Parameters for the time of one step, in seconds; communication is modelled by its slowest link alone.

    With N nodes, R replicas, m samples per replica and micro-step (atomic batch size), s accumulation steps::

        T_grad = alpha_c + beta_c m
        T_sync = alpha_n + beta_n max(R - 2, 0)    if N > 1
                 alpha_r + beta_r max(R - 2, 0)    if N = 1 and R > 1
                 0                                 if R = 1
        T_step = alpha_s + s T_grad + (T_grad^gamma + T_sync^gamma)^(1/gamma)

    alpha_s is not part of Pollux's model. Without it, accumulation saves only synchronisations, and nothing on a single
    replica.
    """

    alpha_c: float  # Constant part of one forward and backward pass, s
    beta_c: float  # Part of it that grows with the batch, s per sample
    alpha_n: float  # Gradient synchronisation between two replicas on different nodes, s
    beta_n: float  # What each replica beyond the second adds to it, s
    alpha_r: float  # As alpha_n, for replicas that share one node
    beta_r: float  # As beta_n, for replicas that share one node
    gamma: float  # Overlap of compute and synchronisation: 1 is none (their sum), large is full (their maximum)
    alpha_s: float = 0.0  # What a step takes once, however many micro-steps it has, such as the optimizer's update, s

    def __post_init__(self) -> None:
        for field in fields(self):
            least = 1.0 if field.name == "gamma" else 0.0
            value = real(field.name, getattr(self, field.name), at_least=least)
            object.__setattr__(self, field.name, value)

    def grad_time(self, atomic_bsz: ArrayLike) -> FloatOrArray:
        """Return T_grad: the seconds for one forward and backward pass over `atomic_bsz` (>= 1) samples."""
        return plain(self._grad_time(reals("atomic_bsz", atomic_bsz, at_least=1)))

    def sync_time(self, nodes: ArrayLike, replicas: ArrayLike) -> FloatOrArray:
        """Return T_sync: the seconds for one gradient synchronisation. Arguments as in `step_time`."""
        return plain(self._sync_time(*resources(nodes, replicas)))

    def step_time(
        self, nodes: ArrayLike, replicas: ArrayLike, atomic_bsz: ArrayLike, accum_steps: ArrayLike
    ) -> FloatOrArray:
        """Return T_step: the seconds of one optimizer step. Scalars give a float, arrays broadcast to an array."""
        n, r = resources(nodes, replicas)
        m = reals("atomic_bsz", atomic_bsz, at_least=1)
        s = reals("accum_steps", accum_steps, at_least=0)
        return plain(self.step_time_unchecked(n, r, m, s))

    def step_time_unchecked(self, nodes: Floats, replicas: Floats, atomic_bsz: Floats, accum_steps: Floats) -> Floats:
        """Return `step_time` for float64 arrays known to be in range; this is the inner loop of a search."""
        grad = self._grad_time(atomic_bsz)
        with np.errstate(over="ignore"):
            step = self.alpha_s + accum_steps * grad + power_sum(grad, self._sync_time(nodes, replicas), self.gamma)
        return np.minimum(step, LARGEST)

    def _grad_time(self, atomic_bsz: Floats) -> Floats:
        with np.errstate(over="ignore"):
            return np.minimum(self.alpha_c + self.beta_c * atomic_bsz, LARGEST)

    def _sync_time(self, nodes: Floats, replicas: Floats) -> Floats:
        beyond_two = np.maximum(replicas - 2, 0)
        with np.errstate(over="ignore"):
            between = self.alpha_n + self.beta_n * beyond_two
            within = self.alpha_r + self.beta_r * beyond_two
        sync = np.where(nodes > 1, between, np.where(replicas > 1, within, 0.0))
        return np.minimum(sync, LARGEST)


def power_sum(x: Floats, y: Floats, gamma: float) -> Floats:
    """Return (x^gamma + y^gamma)^(1/gamma) for x, y >= 0 and gamma >= 1, with the larger one factored out."""
    larger = np.maximum(x, y)
    ratio = np.minimum(x, y) / np.where(larger > 0, larger, 1.0)
    with np.errstate(over="ignore", under="ignore"):
        return np.asarray(larger * (1.0 + ratio**gamma) ** (1.0 / gamma))


def real(name: str, value: Any, *, at_least: float = -math.inf) -> float:
    """Return `value` as a float after checking that it is one finite number >= `at_least`; errors contain `name`."""
    if type(value) is float and at_least <= value <= LARGEST:  # in each step, where NumPy takes ten times as long
        return value
    if np.ndim(value):
        raise TypeError(f"{name} must be one number, but got {value!r}")
    return float(reals(name, value, at_least=at_least))


def reals(name: str, value: ArrayLike, *, at_least: float) -> Floats:
    """Return `value` as a float64 array; reject numbers that are not finite or below `at_least`, naming the first."""
    array = np.asarray(value)
    if array.dtype.kind not in "iuf" and array.size:
        raise TypeError(f"{name} must be a real number or an array of them, but got {value!r}")
    array = array.astype(np.float64)
    bad = ~((array >= at_least) & (array <= LARGEST))
    if bad.any():
        bound = "" if at_least == -math.inf else f" and at least {at_least:g}"
        raise ValueError(f"{name} must be finite{bound}, but got {array[bad].flat[0]:g}")
    return array


def resources(nodes: ArrayLike, replicas: ArrayLike) -> tuple[Floats, Floats]:
    """Return (nodes, replicas) as arrays after checking that 1 <= nodes <= replicas."""
    n = reals("nodes", nodes, at_least=1)
    r = reals("replicas", replicas, at_least=1)
    bad = r < n
    if bad.any():
        got_n, got_r = (np.broadcast_to(a, bad.shape)[bad].flat[0] for a in (n, r))
        raise ValueError(
            "replicas must be at least nodes (each node holds one or more), "
            f"but got replicas={got_r:g} on nodes={got_n:g}"
        )
    return n, r


def plain(array: NDArray[Any]) -> FloatOrArray:
    """Return a Python number for a zero-dimensional array, else the array itself."""
    return array.item() if np.ndim(array) == 0 else array
