"""How ranks find out from the control sums whether their policies ask for the same (pure)."""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_DIGITS = 8
# Four bits each: a sum of squares is exact in float32 for up to 70 000 ranks.
_BITS = 4
_SIZE = 1 + 2 * _DIGITS


class Verdict(enum.Enum):
    """What all ranks conclude of one policy."""

    NOTHING = enum.auto()
    AGREED = enum.auto()
    DIFFERENT = enum.auto()


class PolicyBallot:
    """A part of the control sums: for each policy whether this rank has something to say, and a digest of it.

    Each digit d of a digest rides with its square: all ranks have the same one exactly when W sum(d^2) = sum(d)^2
    (Cauchy-Schwarz). So what a step's sums say is known to all ranks that commit the step, and no collective is needed
    to apply it.

    Args:
        said: what each policy has to say on this rank, as plain values; None for nothing.
    """

    def __init__(self, said: Callable[[], Sequence[Any]]) -> None:
        self._said = said
        self._policies = 0
        self._verdicts: tuple[Verdict, ...] = ()
        self._entered = False

    def have(self, policies: int) -> None:
        """So many policies there are, on all ranks alike."""
        self._policies = policies

    def begin(self) -> None:
        """A group was entered: what another one agreed on does not count in it."""
        self._verdicts, self._entered = (), True

    def take_entered(self) -> bool:
        """Whether a group was entered since the last call."""
        entered, self._entered = self._entered, False
        return entered

    def size(self, world_size: int) -> int:
        """Values that ride along."""
        return _SIZE * self._policies

    def values(self, rank: int, world_size: int) -> Sequence[float]:
        """This rank's flags and digests."""
        return [value for said in self._said() for value in flag_and_digest(said)] if self._policies else ()

    def conclude(self, sums: Sequence[float], world_size: int) -> None:
        """The sums over all ranks."""
        self._verdicts = tuple(verdict(sums[first : first + _SIZE], world_size) for first in range(0, len(sums), _SIZE))

    def take(self) -> tuple[Verdict, ...]:
        """What the latest sums say of each policy, once."""
        verdicts, self._verdicts = self._verdicts, ()
        return verdicts


def flag_and_digest(said: Any) -> list[float]:
    """What one rank contributes for one policy: zeros for None."""
    if said is None:
        return [0.0] * _SIZE
    number = int.from_bytes(
        hashlib.blake2b(_canonical(said).encode(), digest_size=_DIGITS * _BITS // 8).digest(), "big"
    )
    digits = [(number >> (_BITS * index)) % (1 << _BITS) for index in range(_DIGITS)]
    return [1.0, *(float(value) for digit in digits for value in (digit, digit * digit))]


def _canonical(value: Any) -> str:
    """One text for equal values, whatever the order of a dict's keys, and tuples like lists."""
    if isinstance(value, Mapping):
        items = sorted(f"{key!r}: {_canonical(item)}" for key, item in value.items())
        return f"{{{', '.join(items)}}}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_canonical, value))}]"
    return repr(value)


def verdict(sums: Sequence[float], world_size: int) -> Verdict:
    """What follows from the sums of all ranks' contributions for one policy."""
    saying = round(sums[0])
    if saying == 0:
        return Verdict.NOTHING
    pairs = zip(sums[1::2], sums[2::2], strict=True)
    same = saying == world_size and all(world_size * round(squares) == round(total) ** 2 for total, squares in pairs)
    return Verdict.AGREED if same else Verdict.DIFFERENT
