"""Facts and layouts (registered states by name, and the data) that must be equal on all ranks (pure)."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elastic_ray.communication.communicator import Communicator

_MOST_FACTS = 3
_SHOWN = 80
# Preprocessing on another kind of CPU may round otherwise.
_RELATIVE, _ABSOLUTE = 1e-2, 1e-4


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Facts about one rank that must be equal on all ranks."""

    facts: Mapping[str, Any]  # by name; plain values. None is no fact: it agrees with any other.
    joined: bool = False  # True if this rank has just joined the job

    @property
    def fingerprint(self) -> int:
        """Hash of the facts, never 0."""
        return digest(self._text()) or 1

    def _text(self) -> bytes:
        return json.dumps(self.facts).encode()

    def difference(self, communicator: Communicator, fingerprints: Sequence[int]) -> str:
        """Return an error message on how the ranks' facts differ; empty if they agree. Call this on every rank.

        Args:
            fingerprints: Fingerprint of each rank's facts; 0 for a rank without facts.

        Raises CommunicationFailedError if the group breaks during the call.
        """
        known = [value for value in fingerprints if value]
        if len(set(known)) <= 1:
            return ""
        joined = [bool(row[0]) for row in communicator.gather_ints([self.joined])]
        first = common_rank(fingerprints, joined)
        ones = self._facts_of(communicator, first)
        for other in dict.fromkeys(known):
            if other == fingerprints[first]:
                continue
            ranks = [rank for rank, value in enumerate(fingerprints) if value == other]
            others = self._facts_of(communicator, ranks[0])
            if names := differing(ones, others):
                return _described(names, (first, ones), (ranks, others), joined)
        return ""

    def _facts_of(self, communicator: Communicator, rank: int) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(communicator.broadcast_bytes(self._text(), rank))
        return found


def common_rank(fingerprints: Sequence[int], joined: Sequence[bool]) -> int:
    """Return the first rank with the most common nonzero fingerprint, preferring ranks that have not just joined."""
    known = [rank for rank, value in enumerate(fingerprints) if value]
    return min(known, key=lambda rank: (joined[rank], -fingerprints.count(fingerprints[rank]), rank))


def differing(ones: Mapping[str, Any], others: Mapping[str, Any]) -> list[str]:
    """Return the names of facts that differ between two ranks; None matches anything, and floats match within 1 %."""
    return [name for name in dict.fromkeys([*ones, *others]) if not _alike(ones.get(name), others.get(name))]


def _alike(one: Any, other: Any) -> bool:
    """True if two facts agree, or either is None."""
    if one is None or other is None:
        return True
    if isinstance(one, float) and isinstance(other, float):
        both_nan = math.isnan(one) and math.isnan(other)
        return both_nan or math.isclose(one, other, rel_tol=_RELATIVE, abs_tol=_ABSOLUTE)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(_alike(*pair) for pair in zip(one, other, strict=True))
    return bool(one == other)


def _described(
    names: Sequence[str],
    ones: tuple[int, Mapping[str, Any]],
    others: tuple[Sequence[int], Mapping[str, Any]],
    joined: Sequence[bool],
) -> str:
    """Return a clause with the values on one rank and on the others, and whether the first of those has just joined."""
    (first, mine), (ranks, theirs) = ones, others
    told = [
        f"{name} is {_fact(mine.get(name))} on rank {first} and {_fact(theirs.get(name))} on rank {ranks[0]}"
        for name in names
    ]
    also = f" (as on {', '.join(map(str, ranks[1:]))})" if len(ranks) > 1 else ""
    more = f"; and {len(told) - _MOST_FACTS} more" if len(told) > _MOST_FACTS else ""
    joins = f". Rank {ranks[0]} has just joined" if joined[ranks[0]] else ""
    return f"{'; '.join(told[:_MOST_FACTS])}{also}{more}{joins}"


def _fact(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


_NAMED = 5
_DIGEST_BYTES = 5
_WAY_OUT = (
    "Each rank takes its share of an order of its own, so some samples would be left out and others used twice. Give "
    "AdaptiveDataLoader the same whole dataset and the same arguments on every worker, whatever its rank, and let it "
    "share the samples out: sort what comes from a set or a directory listing, seed random_split, shuffles and "
    "generated data alike, register what the model itself makes (rollouts, pseudo-labels; docs/recipes.md), and do not "
    "cut the dataset by rank"
)


class ReplicasDifferError(RuntimeError):
    """Error raised if ranks hold different parameters after the same steps, or train on different data."""


def digest(what: object) -> int:
    """Return a 40-bit hash of ``repr(what)``."""
    return int.from_bytes(hashlib.blake2b(repr(what).encode(), digest_size=_DIGEST_BYTES).digest(), "big")


def packed(layout: Mapping[str, str]) -> bytes:
    """Return a layout (description of each registered state, keyed by name) as JSON bytes."""
    return json.dumps(layout, sort_keys=True).encode()


def difference(layouts: Mapping[int, bytes]) -> str:
    """Return an error message on how two ranks' layouts differ."""
    (one, ones), (other, others) = ((rank, json.loads(text)) for rank, text in sorted(layouts.items()))
    names = [name for name in dict.fromkeys([*ones, *others]) if ones.get(name) != others.get(name)]
    told = [
        f"{name} is {_shown(ones, name)} on rank {one} and {_shown(others, name)} on rank {other}" for name in names
    ]
    more = f"; and {len(told) - _NAMED} more" if len(told) > _NAMED else ""
    return (
        "every rank must build the same models, optimizers and schedulers before its first epoch, but "
        f"{'; '.join(told[:_NAMED])}{more}"
    )


def check_samples(samples: Sequence[int], joins: Sequence[bool] = ()) -> None:
    """Check that all ranks have datasets of the same length, because they divide the samples by position.

    Args:
        samples: Samples per epoch on each rank; negative if unknown to the rank.
        joins: ``joins[r]`` is True if rank r is joining; empty if unknown.

    Raises ReplicasDifferError if any two known lengths differ.
    """
    known = {rank: count for rank, count in enumerate(samples) if count >= 0}
    one = next(iter(known), 0)
    other = next((rank for rank, count in known.items() if count != known[one]), None)
    if other is not None:
        one_joins, other_joins = (", which joins" if joins and joins[rank] else "" for rank in (one, other))
        raise ReplicasDifferError(
            f"every worker must train on the same dataset, but the training loader's has {known[one]} samples on rank "
            f"{one}{one_joins} and {known[other]} on rank {other}{other_joins}: each would read its share of a "
            "different order, so some samples would be left out and others used twice. Build it from the same files "
            "on every worker, and let the loader share it out"
        )


class DataPlan(Facts):
    """Facts about a loader pass's data that must be equal on all ranks."""

    __slots__ = ()

    def compare(self, communicator: Communicator, fingerprints: Sequence[int]) -> None:
        """Compare the fingerprints announced by all ranks; 0 means unknown.

        Raises:
            CommunicationFailedError: The group broke during the call.
            ReplicasDifferError: The facts differ; raised on every rank.
        """
        if text := self.difference(communicator, fingerprints):
            raise ReplicasDifferError(
                f"every worker must train on the same data in the same order, but {text}. {_WAY_OUT}"
            )


class MergeLayout:
    """Layout of the tensors that replicas will merge; if it is the same on all ranks, they only add up the tensors.

    Attributes:
        fingerprint: Digest of the layout.
        alike: True once all ranks are known to have the same layout.
    """

    __slots__ = ("alike", "fingerprint")

    def __init__(self, fingerprint: int) -> None:
        self.fingerprint, self.alike = fingerprint, False

    def compare(self, communicator: Communicator, fingerprints: Sequence[int]) -> None:
        """Compare the fingerprints announced by all ranks; layouts may differ."""
        self.alike = len(set(fingerprints)) == 1


def check_ends(fingerprints: Sequence[int]) -> None:
    """Check that all ranks hold the same parameters after the last epoch.

    Args:
        fingerprints: Fingerprint of each rank's parameters; 0 if a rank has none.

    Raises ReplicasDifferError if the fingerprints differ.
    """
    known = {rank: value for rank, value in enumerate(fingerprints) if value}
    if len(set(known.values())) > 1:
        common = max(known.values(), key=lambda value: (fingerprints.count(value), -fingerprints.index(value)))
        others = ", ".join(str(rank) for rank, value in known.items() if value != common)
        raise ReplicasDifferError(
            f"the result of rank 0 stands for all ranks, but when the loop over epochs was left, rank(s) {others} held "
            "or trained parameters differently from the others: something in the last steps depends "
            "on rank, clock, local samples or unseeded random numbers"
        )


def _shown(layout: Mapping[str, str], name: str) -> str:
    return layout.get(name, "missing")
