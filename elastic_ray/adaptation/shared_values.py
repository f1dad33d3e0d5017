"""What policies have brought about, as far as all ranks share it: values that travel with the run's state (pure)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(slots=True)
class SharedValues:
    """See the module's text.

    Attributes:
        rate_factor: product of all ``ScaleRate`` requests.
        batch_size: global batch that a policy has set [samples]; None where the job chooses.
        wish: fewest and most workers that a policy asks for; None for no wish.
        wished_by: number of the policy whose wish it is.
        stopped: epoch and number of the loader pass in which a policy has ended the training; None while it goes on.
        elapsed_s: since the run's first step [s].
        worker_s: the same, summed over the workers.
        metrics: watched ones, as reported last.
        reports: how many reports they stand for.
        trains: whether ``before_train`` has been called.
        epoch: the last one for which ``before_epoch`` was called; -1 before.
        ended_epoch: the same for ``after_epoch``.
        off: why a policy is not asked any more, by its number.
        news: what was told of the last step that was committed: text and detail of each event.
        events: how many events there were.
    """

    rate_factor: float = 1.0
    batch_size: int | None = None
    wish: tuple[int | None, int | None] | None = None
    wished_by: int = -1
    stopped: tuple[int, int] | None = None
    elapsed_s: float = 0.0
    worker_s: float = 0.0
    samples: int = 0
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)
    reports: int = 0
    trains: bool = False
    epoch: int = -1
    ended_epoch: int = -1
    off: dict[int, str] = dataclasses.field(default_factory=dict)
    news: list[tuple[str, dict[str, Any]]] = dataclasses.field(default_factory=list)
    events: int = 0

    def advance(self, passed_s: float, workers: int, samples: int) -> None:
        """A step was committed, so long after the one before [s]."""
        self.elapsed_s += passed_s
        self.worker_s += passed_s * workers
        self.samples += samples

    def take_metrics(self, metrics: Mapping[str, float], reports: int) -> None:
        """What all ranks know to have been reported."""
        self.metrics, self.reports = dict(metrics), reports

    def begin_train(self) -> bool:
        """A step begins; whether it is the run's first."""
        begun, self.trains = self.trains, True
        return not begun

    def begin_epoch(self, epoch: int) -> bool:
        """A step of this epoch begins; whether it is the epoch's first."""
        before, self.epoch = self.epoch, max(self.epoch, epoch)
        return before < epoch

    def end_epoch(self, epoch: int) -> bool:
        """This epoch ends; whether that is news."""
        before, self.ended_epoch = self.ended_epoch, max(self.ended_epoch, epoch)
        return before < epoch

    def scale_rate(self, factor: float) -> None:
        """Multiply learning rates once more."""
        self.rate_factor *= factor

    def hold_batch(self, batch_size: int | None) -> None:
        """A policy has set the batch; None gives the choice back."""
        self.batch_size = batch_size

    def wish_for(self, bounds: tuple[int | None, int | None]) -> None:
        """A policy asks for so many workers."""
        self.wish, self.wished_by = None if bounds == (None, None) else bounds, -1

    def asked_by(self, policy: int) -> None:
        """A request of this policy was carried out: a wish that is nobody's yet is its."""
        if self.wish is not None and self.wished_by < 0:
            self.wished_by = policy
        if policy in self.off and self.wished_by == policy:
            self.wish_for((None, None))

    def stop_in(self, epoch: int, number: int) -> None:
        """The training ends in this pass."""
        self.stopped = (epoch, number)

    def add_news(self, text: str, detail: Mapping[str, Any]) -> dict[str, Any]:
        """Something is to be told; returns its detail with its number, by which the job tells repeated news apart."""
        self.events += 1
        numbered = {**detail, "number": self.events}
        self.news.append((text, numbered))
        return numbered

    def forget_news(self) -> None:
        """Another step was committed: what was told of the one before has arrived."""
        self.news = []

    def switch_off(self, policy: int, why: str) -> None:
        """A policy is not asked any more; its wish ends, for it could not take it back."""
        self.off[policy] = why
        if self.wished_by == policy:
            self.wish_for((None, None))

    def ask_again(self) -> None:
        """The run has other policies than those that were switched off, or that have wished for a size."""
        self.off = {}
        self.wish_for((None, None))

    def to_state(self) -> dict[str, Any]:
        """As plain values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> SharedValues:
        """The inverse of :meth:`to_state`."""
        values = cls(**state)
        for name in ("wish", "stopped"):
            pair = getattr(values, name)
            setattr(values, name, None if pair is None else tuple(pair))
        return values
