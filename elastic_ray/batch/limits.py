"""Limits on a job's batch size, and ways to divide a batch between workers and micro-steps."""

from __future__ import annotations

import dataclasses
from typing import Any

_OF_BATCHES = (
    "if the dataset's items are batches already, pass batch_size=the number of such items that all workers together "
    "train on in a step, and a collate_fn that joins them"
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    """Limits on a job's batch size, in samples; M0 is the initial global batch.

    Raises:
        TypeError: A value has the wrong type.
        ValueError: A value is out of range, or the bounds exclude the batch size.
    """

    init_batch_size: int  # global batch M0 that the user's learning rate belongs to
    max_batch_size: int | None = None  # largest global batch; None = the batch stays M0 whatever the number of workers
    # least and largest samples a worker takes in one micro-step, either None for no bound. A fixed batch is split as it
    # must be, so the least bound is for adaptive ones only.
    local_bsz_bounds: tuple[int | None, int | None] | None = None
    gradient_accumulation: bool = False  # whether a step may consist of several micro-steps

    def __post_init__(self) -> None:
        _positive("batch_size", self.init_batch_size)
        if not isinstance(self.gradient_accumulation, bool):
            raise TypeError(f"gradient_accumulation must be True or False, but got {self.gradient_accumulation!r}")
        if self.max_batch_size is not None:
            _positive("max_batch_size", self.max_batch_size)
            if self.max_batch_size < self.init_batch_size:
                raise ValueError(
                    f"max_batch_size must be at least batch_size ({self.init_batch_size}), "
                    f"but got {self.max_batch_size}; None keeps the batch fixed"
                )
        if self.local_bsz_bounds is not None:
            self._check_bounds(self.local_bsz_bounds)
        # Controllers read them, which are not to import the user's IntEnum for that.
        object.__setattr__(self, "init_batch_size", int(self.init_batch_size))
        if self.max_batch_size is not None:
            object.__setattr__(self, "max_batch_size", int(self.max_batch_size))

    def _check_bounds(self, bounds: Any) -> None:
        """Raise TypeError or ValueError if the bounds are malformed, or exclude each other or the batch."""
        if not isinstance(bounds, (tuple, list)) or len(bounds) != 2:
            raise TypeError(f"local_bsz_bounds must be a pair (least, largest) or None, but got {bounds!r}")
        for name, value in zip(("least", "largest"), bounds, strict=True):
            if value is not None:
                _positive(f"the {name} of local_bsz_bounds", value)
        exact = tuple(None if value is None else int(value) for value in bounds)
        object.__setattr__(self, "local_bsz_bounds", exact)
        least, largest = self.lower, self.upper
        if largest is not None and least > largest:
            raise ValueError(f"local_bsz_bounds must be (least, largest) with least <= largest, but got {bounds!r}")
        if least > self.init_batch_size:
            raise ValueError(
                f"local_bsz_bounds must not exclude batch_size={self.init_batch_size}, but the least is "
                f"{least}; lower it or raise batch_size"
            )
        if largest is not None and largest < self.init_batch_size and not self.gradient_accumulation:
            raise ValueError(
                f"local_bsz_bounds must not exclude batch_size={self.init_batch_size}, but one worker may "
                f"take at most {largest}; raise the bound or set gradient_accumulation=True"
            )

    @property
    def fixed(self) -> bool:
        """True if the global batch is always M0, the initial batch."""
        return self.max_batch_size is None

    @property
    def per_worker(self) -> bool:
        """True if each worker has M0 samples (the initial batch), so that the global batch grows with the workers."""
        return not self.fixed and self.local_bsz_bounds == (self.init_batch_size, self.init_batch_size)

    @property
    def one_size(self) -> bool:
        """True if M0 (the initial batch) is the only allowed global batch, although its division may change."""
        return self.max_batch_size in (None, self.init_batch_size)

    def size_of(self, cut: BatchChoice, replicas: int) -> int:
        """Return a step's global batch [samples], divided according to ``cut`` between R = ``replicas`` workers.

        It is R m (s + 1), for m samples per micro-step and s accumulating micro-steps, or the largest allowed batch if
        that is smaller. In that case some micro-steps have fewer samples than m, but no worker has fewer than its
        minimum.
        """
        size = cut.batch_size(replicas)
        if self.max_batch_size is None:
            return size
        return min(size, max(self.max_batch_size, replicas * self.lower * (cut.accum_steps + 1)))

    @property
    def lower(self) -> int:
        """Smallest number of samples per worker and micro-step."""
        return (self.local_bsz_bounds[0] if self.local_bsz_bounds else None) or 1

    @property
    def least(self) -> int:
        """Smallest number of samples per worker and micro-step where memory is short; a fixed batch is cut freely."""
        return 1 if self.fixed else self.lower

    @property
    def upper(self) -> int | None:
        """Largest number of samples per worker and micro-step; None if unbounded."""
        return self.local_bsz_bounds[1] if self.local_bsz_bounds else None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, order=True)
class BatchChoice:
    """Division of a global batch: m samples per worker and micro-step, and s micro-steps that only accumulate."""

    atomic_bsz: int  # m >= 1, most samples a worker takes in one micro-step
    accum_steps: int = 0  # s >= 0, micro-steps before the one that synchronises

    def batch_size(self, replicas: int) -> int:
        """Return the global batch M = R m (s + 1) [samples] on R = ``replicas`` workers."""
        return replicas * self.atomic_bsz * (self.accum_steps + 1)


def split(
    batch_size: int,
    replicas: int,
    *,
    lower: int = 1,
    upper: int | None = None,
    accumulation: bool = False,
    limit: int | None = None,
) -> BatchChoice:
    """Return the division of a global batch M = ``batch_size`` over R = ``replicas`` workers; M is rounded up.

    share = ceil(M / R) samples per worker, in k = ceil(share / upper) micro-steps of m = ceil(share / k).

    Args:
        lower: Smallest m; if shares are smaller, the batch grows.
        upper: Largest m; if shares are larger, the batch shrinks unless accumulation is allowed.
        accumulation: True if k may be above 1.
        limit: Largest M, unless a worker would be left without a sample or below its smallest m; None for no limit.
    """
    share = -(-batch_size // replicas)
    k = -(-share // upper) if upper is not None and accumulation else 1
    m = -(-share // k)
    if limit is not None:
        m = min(m, limit // (replicas * k))
    m = max(m, lower, 1)
    if upper is not None:
        m = min(m, upper)
    return BatchChoice(atomic_bsz=m, accum_steps=k - 1)


def cut_within(limits: BatchLimits, batch_size: int, replicas: int) -> BatchChoice:
    """Return the division over ``replicas`` workers, within ``limits``, whose batch is nearest to a global batch.

    If only one batch size is allowed, the division covers it, and :meth:`BatchLimits.size_of` returns that size for any
    number of workers.
    """
    return split(
        batch_size,
        replicas,
        lower=limits.lower,
        upper=limits.upper,
        accumulation=limits.gradient_accumulation,
        limit=None if limits.one_size else limits.max_batch_size,
    )


def bounded(limits: BatchLimits, cut: BatchChoice, bound: int | None) -> BatchChoice:
    """Return the division ``cut``, changed so that a worker processes at most ``bound`` samples at once.

    ``bound`` is the number of samples that fit into memory; None means no bound. If the batch is fixed or accumulation
    is allowed, more and smaller micro-steps keep the batch size. Otherwise, the batch shrinks. No micro-step has fewer
    samples than the limits allow; the batch grows if necessary, as in :func:`split`.
    """
    if bound is None or cut.atomic_bsz <= max(bound, limits.least):
        return cut
    bound = max(bound, limits.least)
    if not (limits.fixed or limits.gradient_accumulation):
        return BatchChoice(atomic_bsz=bound)
    share = cut.atomic_bsz * (cut.accum_steps + 1)
    k = -(-share // bound)
    return BatchChoice(atomic_bsz=max(-(-share // k), limits.least), accum_steps=k - 1)


def _positive(name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        way_out = f": {_OF_BATCHES}" if value is None and name == "batch_size" else ""
        raise TypeError(f"{name} must be a whole number of samples, but got {value!r}{way_out}")
    if value < 1:
        raise ValueError(f"{name} must be 1 or more samples, but got {value}")
