"""Proofs of a run as a chain: changes of its group, and passes that use each sample once (pure)."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from elastic_ray.json_numbers import dump

_LINK_BYTES = 6  # exact in a float64, as JavaScript reads it
_CHUNK = 1 << 20
BITS = (1 << 32) - 1
"""Sums of samples' hashes are taken modulo 2^32."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A link of a run's chain of proofs: who changes, adds or leaves out a line breaks it.

    Attributes:
        before: the link that it follows; 0 for the first of a run, and after a checkpoint that does not know it.
        link: its own number, from that and its facts; never 0.
        facts: what it proves, as plain values.
    """

    before: int
    link: int
    facts: Mapping[str, Any]

    @classmethod
    def after(cls, before: int, facts: Mapping[str, Any]) -> Link:
        """The link with these facts that follows another one."""
        told = f"{before} {dump(dict(facts), sort_keys=True)}".encode()
        number = int.from_bytes(hashlib.blake2b(told, digest_size=_LINK_BYTES).digest(), "big") or 1
        return cls(before=before, link=number, facts=facts)

    @property
    def detail(self) -> dict[str, Any]:
        """Fields of the link for an event's ``detail``."""
        return {"proof": {**self.facts, "before": self.before, "link": self.link}}


def sample_hashes(indices: np.ndarray[Any, np.dtype[np.int64]]) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """Return 64 bits for each index, that look random (the finalizer of SplitMix64, Steele et al. 2014)."""
    values = indices.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def hash_of_all(samples: int) -> int:
    """Return the sum of the hashes of indices 0 to ``samples`` - 1, modulo 2^32."""
    total = 0
    for begin in range(0, samples, _CHUNK):
        hashes = sample_hashes(np.arange(begin, min(begin + _CHUNK, samples), dtype=np.int64))
        total += int(hashes.sum(dtype=np.uint64)) & BITS
    return total & BITS
