"""How long jobs of a model were in the end: what a job that says nothing of its length is compared with (pure)."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable

from placement.cluster.jobs import JobView
from placement.goodput.remaining import remaining
from placement.knowledge.records import KnownLength, newest


class EndedJobs:
    """Lengths of ended jobs by the fingerprint of their model.

    However a job ended, finished, stopped or failed, it left its workers to others then.

    Args:
        forget_s: a job that ended longer ago than this no longer counts [s].
    """

    def __init__(self, forget_s: float) -> None:
        self._forget_s = forget_s
        self._present: dict[str, KnownLength] = {}
        self._ended: dict[str, tuple[KnownLength, ...]] = {}

    def hear(self, view: JobView) -> None:
        """How far a job is, and what it declares."""
        if view.fingerprint is None or view.progress is None or not view.init_batch_size or not view.progress.done:
            return
        done, left = view.progress.done, remaining(view.progress)
        self._present[view.job] = KnownLength(
            fingerprint=view.fingerprint,
            samples=done * view.init_batch_size,
            part=None if left is None else done / (done + left),
            seen_s=0.0,
        )

    def ended(self, job: str, now_s: float) -> bool:
        """A job is over; whether that is to be kept."""
        length = self._present.pop(job, None)
        if length is None:
            return False
        self.recall([dataclasses.replace(length, seen_s=now_s)])
        return True

    def recall(self, lengths: Iterable[KnownLength]) -> None:
        """Take in what was kept."""
        fresh: dict[str, list[KnownLength]] = {}
        for each in lengths:
            fresh.setdefault(each.fingerprint, []).append(each)
        for fingerprint, several in fresh.items():
            self._ended[fingerprint] = newest([*self._ended.get(fingerprint, ()), *several])

    def of(self, fingerprints: Collection[str]) -> tuple[KnownLength, ...]:
        """All that is known of these models."""
        return tuple(each for name in sorted(fingerprints) for each in self._ended.get(name, ()))

    def complete(self, view: JobView, now_s: float) -> JobView:
        """The view with where earlier jobs of its model ended, in its own iterations."""
        known = [each for each in self._ended.get(view.fingerprint or "", ()) if now_s - each.seen_s < self._forget_s]
        if not known or view.progress is None or not view.init_batch_size:
            return view
        progress = dataclasses.replace(
            view.progress,
            usual_ends=tuple(each.samples / view.init_batch_size for each in known),
            usual_parts=tuple(each.part for each in known if each.part is not None),
        )
        return dataclasses.replace(view, progress=progress)
