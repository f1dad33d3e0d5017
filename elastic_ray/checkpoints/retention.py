"""Retention of a run's checkpoints (pure; the rules are Ray Train's)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

Kept = tuple[str, Mapping[str, Any]]


class CheckpointRetention:
    """The checkpoints of a run, oldest first, and which of them a new one displaces.

    Without a score the newest ``num_to_keep`` are kept. With one, the best ``num_to_keep`` are kept, and the
    latest in addition where it is not among them: a run must always be able to continue from where it was. A
    checkpoint whose metrics lack the score, or whose score is no number, ranks below all others; among equals
    the newer one stays.
    """

    def __init__(
        self, *, num_to_keep: int | None = None, score_attribute: str | None = None, score_order: str = "max"
    ) -> None:
        """Check the rules; no checkpoint is kept yet.

        Args:
            num_to_keep: how many to keep, at least 1; None keeps all.
            score_attribute: metric that ranks checkpoints; None ranks by age.
            score_order: "max" if a larger score is better, "min" otherwise.
        """
        if num_to_keep is not None and num_to_keep < 1:
            raise ValueError(f"num_to_keep must be None (keep all) or 1 or more, but got {num_to_keep}")
        if score_order not in ("max", "min"):
            raise ValueError(f"score_order must be 'max' or 'min', but got {score_order!r}")
        self._num_to_keep, self._score_attribute = num_to_keep, score_attribute
        self._sign = 1.0 if score_order == "max" else -1.0
        self._kept: list[Kept] = []

    def add(self, path: str, metrics: Mapping[str, Any]) -> tuple[str, ...]:
        """Enter a new checkpoint.

        Returns paths of the checkpoints that are no longer kept, oldest first; the caller deletes them.
        """
        self._kept = [entry for entry in self._kept if entry[0] != path]
        self._kept.append((path, metrics))
        if self._num_to_keep is None or len(self._kept) <= self._num_to_keep:
            return ()
        ranked = sorted(range(len(self._kept)), key=self._rank)
        staying = {*ranked[-self._num_to_keep :], len(self._kept) - 1}
        dropped = tuple(path for i, (path, _) in enumerate(self._kept) if i not in staying)
        self._kept = [entry for i, entry in enumerate(self._kept) if i in staying]
        return dropped

    def clear(self) -> None:
        """Discard all entries: those in storage are entered again."""
        self._kept = []

    @property
    def kept(self) -> tuple[Kept, ...]:
        """Path and metrics of the checkpoints that are kept, oldest first."""
        return tuple(self._kept)

    @property
    def latest(self) -> Kept | None:
        """The newest checkpoint."""
        return self._kept[-1] if self._kept else None

    def _rank(self, index: int) -> tuple[float, int]:
        """Return the sorting key: worse first, older first among equals."""
        if self._score_attribute is None:
            return 0.0, index
        score = self._kept[index][1].get(self._score_attribute)
        try:
            value = math.nan if score is None else float(score) * self._sign
        except (TypeError, ValueError):
            value = math.nan
        return -math.inf if math.isnan(value) else value, index
