"""Plain facts that all ranks must have in common: compared by fingerprints, and told apart by name (pure)."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elastic_ray.communication.communicator import Communicator


_BYTES = 6  # exact in float64
_NAMED = 3
_SHOWN = 80
# Preprocessing on another kind of CPU may round otherwise.
_RELATIVE, _ABSOLUTE = 1e-2, 1e-4


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Facts of one rank.

    Attributes:
        facts: by name; plain values. None is no fact: it agrees with any other.
        joined: True if this rank has just joined the job.
    """

    facts: Mapping[str, Any]
    joined: bool = False

    @property
    def fingerprint(self) -> int:
        """A number that stands for the facts, never 0."""
        digest = hashlib.blake2b(self._text(), digest_size=_BYTES)
        return int.from_bytes(digest.digest(), "big") or 1

    def _text(self) -> bytes:
        return json.dumps(self.facts).encode()

    def difference(self, communicator: Communicator, fingerprints: Sequence[int]) -> str:
        """Return how the ranks differ as the text of an error; empty if they agree. All ranks call it.

        Args:
            fingerprints: of all ranks; 0 where one has told none.

        Raises CommunicationFailedError: the group broke meanwhile.
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
    """First rank of those that most ranks agree with; ranks that have just joined come last."""
    known = [rank for rank, value in enumerate(fingerprints) if value]
    return min(known, key=lambda rank: (joined[rank], -fingerprints.count(fingerprints[rank]), rank))


def differing(ones: Mapping[str, Any], others: Mapping[str, Any]) -> list[str]:
    """Names of the facts that differ, in order; numbers may differ a little."""
    return [name for name in dict.fromkeys([*ones, *others]) if not _alike(ones.get(name), others.get(name))]


def _alike(one: Any, other: Any) -> bool:
    """True if two facts agree, or one of them is none."""
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
    """Return a clause with the values on one rank and on others, and a sentence if one of those has just joined."""
    (first, mine), (ranks, theirs) = ones, others
    told = [
        f"{name} is {_shown(mine.get(name))} on rank {first} and {_shown(theirs.get(name))} on rank {ranks[0]}"
        for name in names
    ]
    also = f" (as on {', '.join(map(str, ranks[1:]))})" if len(ranks) > 1 else ""
    more = f"; and {len(told) - _NAMED} more" if len(told) > _NAMED else ""
    joins = f". Rank {ranks[0]} has just joined" if joined[ranks[0]] else ""
    return f"{'; '.join(told[:_NAMED])}{also}{more}{joins}"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."
