"""Batches declared in tokens, converted to samples when a loader is made and back for display (pure).

All other code counts samples.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from typing import Any

from elastic_ray.batch.limits import BatchLimits

WEIGH = "weigh"
"""Value of ``tokens_per_sample`` where the loop counts tokens by ``loader.weigh(n)``."""

NOT_COUNTED = (
    f"tokens_per_sample={WEIGH!r} means that the loop counts tokens, but a step has trained without loader.weigh(n): "
    "call it with the tokens of each micro-batch of every step before backward(), or give tokens_per_sample as a "
    "number (strategies that average models exchange no counts)"
)

MOVED = 0.05
"""Relative change of the counted tokens of a sample from which on a batch has another number of samples."""

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_COUNT = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([KMBT]?)\s*", re.IGNORECASE)


def token_count(name: str, value: Any, *, least: int = 1) -> int:
    """Return the number of tokens in ``value``, a number or a text with a unit (K, M, B, T); errors quote ``name``.

    >>> token_count("batch_tokens", "0.25B")
    250000000

    Raises:
        TypeError: The value is not an integer or such a text.
        ValueError: The value is below ``least``.
    """
    found = value
    if isinstance(value, str) and (match := _COUNT.fullmatch(value)):
        found = round(float(match[1]) * _UNITS[match[2].upper()])
    if isinstance(found, bool) or not isinstance(found, int):
        raise TypeError(f"{name} must be a whole number of tokens, or a text such as '0.25B', but got {value!r}")
    if found < least:
        raise ValueError(f"{name} must be {least} or more tokens, but got {value!r}")
    return found


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TokenBatch:
    """Global batch declared in tokens, with its conversion to samples."""

    # (tokens trained on from which it counts, tokens of a step), by the former; the first begins at 0
    ramp: tuple[tuple[int, int], ...]
    most: int | None = None  # largest batch that the job may choose [tokens]; None where it does not choose
    per_sample: float  # tokens of a sample; where the loop counts them, the mean of those it has counted
    counted: bool = False  # the loop counts them

    def samples(self, tokens: int) -> int:
        """Return the number of samples that hold ``tokens`` tokens, rounded down; at least 1."""
        return max(1, math.floor(tokens / self.per_sample + 1e-9))

    @property
    def batch_size(self) -> int:
        """Initial global batch M0 [samples]."""
        return self.samples(self.ramp[0][1])

    @property
    def max_batch_size(self) -> int | None:
        """Largest global batch [samples]; None if the batch is constant."""
        return None if self.most is None and len(self.ramp) == 1 else self.samples(self.most or self._largest)

    def most_within(self, epoch: int | None) -> int:
        """Return the largest global batch [samples]; ``epoch`` is the number of samples in an epoch, None if unknown.

        Raises ValueError if samples of a known length do not fill the largest batch.
        """
        largest = self.max_batch_size or self.batch_size
        if epoch is None or largest <= epoch:
            return largest
        if self.counted and self.batch_size <= epoch:  # the length is a guess so far
            return epoch
        name, tokens = ("max_batch_tokens", self.most) if self.most else ("batch_tokens's batch", self._largest)
        if self.batch_size > epoch:
            name, tokens = "batch_tokens", self.ramp[0][1]
        raise ValueError(
            f"{name} must be at most an epoch's {epoch} samples of {self.per_sample:g} tokens, but got {tokens}"
        )

    @property
    def _largest(self) -> int:
        return max(size for _, size in self.ramp)

    def limits(self, limits: BatchLimits, per_sample: float, most: int | None) -> tuple[TokenBatch, BatchLimits]:
        """Return this batch and its limits [samples], both recomputed for ``per_sample`` tokens per sample.

        Args:
            most: Samples per epoch, which no batch exceeds; None if unknown.
        """
        batch = dataclasses.replace(self, per_sample=per_sample)
        first = max(batch.batch_size if most is None else min(batch.batch_size, most), limits.lower)
        if limits.upper is not None and not limits.gradient_accumulation:
            first = min(first, limits.upper)
        largest = limits.max_batch_size
        if largest is not None:
            scaled = batch.max_batch_size or round(largest * self.per_sample / per_sample)
            largest = max(first, scaled if most is None else min(scaled, most))
        return batch, dataclasses.replace(limits, init_batch_size=first, max_batch_size=largest)


def read_token_batch(
    batch_tokens: Any, max_batch_tokens: Any, tokens_per_sample: Any, *, counted_first: float | None
) -> TokenBatch | None:
    """Return the batch that a loader's user declared in tokens; None if it was declared in samples.

    Raises TypeError or ValueError if an argument is invalid. The message names it and says how to fix it.
    """
    if batch_tokens is None:
        for name, value in (("max_batch_tokens", max_batch_tokens), ("tokens_per_sample", tokens_per_sample)):
            if value is not None:
                raise ValueError(f"{name}={value!r} belongs to batch_tokens, which is None: give the batch in tokens")
        return None
    if tokens_per_sample is None:
        raise ValueError(
            f"batch_tokens={batch_tokens!r} needs tokens_per_sample: a number if all samples have the same length, or "
            f"{WEIGH!r} if the loop counts tokens by loader.weigh(n)"
        )
    counted = tokens_per_sample == WEIGH
    if isinstance(tokens_per_sample, str) and not counted:
        raise ValueError(f"tokens_per_sample must be a number of tokens or {WEIGH!r}, but got {tokens_per_sample!r}")
    if counted and counted_first is None:
        raise ValueError(
            f"tokens_per_sample={WEIGH!r} needs a map-style dataset whose samples are, or begin with, a tensor, an "
            "array or a list, which says how long a sample is until the loop has counted; give a number instead"
        )
    per_sample = float(token_count("tokens_per_sample", tokens_per_sample)) if not counted else counted_first or 1.0
    batch = TokenBatch(
        ramp=_ramp(batch_tokens),
        most=None if max_batch_tokens is None else token_count("max_batch_tokens", max_batch_tokens),
        per_sample=per_sample,
        counted=counted,
    )
    _check(batch, max_batch_tokens)
    return batch


def _ramp(given: Any) -> tuple[tuple[int, int], ...]:
    """Return a declared batch as a ramp, with one entry if the batch is constant."""
    if not isinstance(given, list | tuple):
        return ((0, token_count("batch_tokens", given)),)
    for entry in given:
        if not isinstance(entry, list | tuple) or len(entry) != 2:
            raise TypeError(
                f"a ramp of batch_tokens must hold pairs (tokens trained on, tokens of a step), but got {entry!r}"
            )
    ramp = tuple(
        (token_count("batch_tokens's begin", begin, least=0), token_count("batch_tokens's batch", size))
        for begin, size in given
    )
    begins = [begin for begin, _ in ramp]
    if not begins or begins[0] != 0 or any(later <= sooner for sooner, later in itertools.pairwise(begins)):
        raise ValueError(
            f"a ramp of batch_tokens must begin at 0 tokens and rise, as [(0, 65_536), ('0.25B', 262_144)], "
            f"but got {given!r}"
        )
    return ramp


def _check(batch: TokenBatch, most: Any) -> None:
    """Raise ValueError if the declared values contradict each other."""
    least = min(size for _, size in batch.ramp)
    if not batch.counted and least < batch.per_sample:
        raise ValueError(
            f"batch_tokens must be at least tokens_per_sample={batch.per_sample:g}, one sample, but got {least}"
        )
    if most is None:
        return
    if len(batch.ramp) > 1:
        raise ValueError(f"max_batch_tokens={most!r} and a ramp of batch_tokens exclude each other: leave one out")
    if batch.most is not None and batch.most < batch.ramp[0][1]:
        raise ValueError(f"max_batch_tokens must be at least batch_tokens={batch.ramp[0][1]}, but got {most!r}")


def length_of(sample: Any) -> int | None:
    """Return the number of elements in a sample's first tensor, array or list; None if it has none."""
    if isinstance(sample, dict):
        sample = next(iter(sample.values()), None)
    if isinstance(sample, tuple):
        sample = sample[0] if sample else None
    if hasattr(sample, "numel"):
        return int(sample.numel())
    if isinstance(getattr(sample, "size", None), int):
        return int(sample.size)
    return len(sample) if isinstance(sample, list | str | bytes) else None
