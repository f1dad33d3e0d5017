"""Effects of policies that all ranks share: values that travel with the run's state (pure)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(slots=True)
class SharedValues:
    """Effects of policies on a run, equal on all ranks."""

    rate_factor: float = 1.0  # product of all ``ScaleRate`` requests
    batch_size: int | None = None  # global batch that a policy has set [samples]; None where the job chooses
    # fewest and most workers that a policy asks for; None for no wish
    wish: tuple[int | None, int | None] | None = None
    wished_by: int = -1  # number of the policy whose wish it is
    # epoch and number of the loader pass in which a policy has ended the training; None while it continues
    stopped: tuple[int, int] | None = None
    elapsed_s: float = 0.0  # since the run's first step [s]
    worker_s: float = 0.0  # the same, summed over the workers
    samples: int = 0
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)  # watched ones, as reported last
    reports: int = 0  # how many reports they stand for
    trains: bool = False  # whether ``before_train`` has been called
    epoch: int = -1  # the last one for which ``before_epoch`` was called; -1 before
    ended_epoch: int = -1  # the same for ``after_epoch``
    off: dict[int, str] = dataclasses.field(default_factory=dict)  # why a policy is not asked any more, by its number
    # what was reported of the last step that was committed: text and detail of each event
    news: list[tuple[str, dict[str, Any]]] = dataclasses.field(default_factory=list)
    events: int = 0  # how many events there were

    def advance(self, passed_s: float, workers: int, samples: int) -> None:
        """Count a committed step, which ended `passed_s` after the one before."""
        self.elapsed_s += passed_s
        self.worker_s += passed_s * workers
        self.samples += samples

    def take_metrics(self, metrics: Mapping[str, float], reports: int) -> None:
        """Store the metrics that all ranks know to have been reported."""
        self.metrics, self.reports = dict(metrics), reports

    def begin_train(self) -> bool:
        """Start a step; True if it is the run's first."""
        begun, self.trains = self.trains, True
        return not begun

    def begin_epoch(self, epoch: int) -> bool:
        """Start a step of this epoch; True if it is the epoch's first."""
        before, self.epoch = self.epoch, max(self.epoch, epoch)
        return before < epoch

    def end_epoch(self, epoch: int) -> bool:
        """Record the end of an epoch; True if it is new."""
        before, self.ended_epoch = self.ended_epoch, max(self.ended_epoch, epoch)
        return before < epoch

    def scale_rate(self, factor: float) -> None:
        """Multiply learning rates once more."""
        self.rate_factor *= factor

    def hold_batch(self, batch_size: int | None) -> None:
        """Hold the batch that a policy has set; None gives the choice back."""
        self.batch_size = batch_size

    def wish_for(self, bounds: tuple[int | None, int | None]) -> None:
        """Store a policy's wish for a number of workers."""
        self.wish, self.wished_by = None if bounds == (None, None) else bounds, -1

    def asked_by(self, policy: int) -> None:
        """Attribute a wish without an owner to the policy whose request was carried out."""
        if self.wish is not None and self.wished_by < 0:
            self.wished_by = policy
        if policy in self.off and self.wished_by == policy:
            self.wish_for((None, None))

    def stop_in(self, epoch: int, number: int) -> None:
        """Stop the training in this pass."""
        self.stopped = (epoch, number)

    def add_news(self, text: str, detail: Mapping[str, Any]) -> dict[str, Any]:
        """Add news; return its detail with a number, by which the job recognises repeated news."""
        self.events += 1
        numbered = {**detail, "number": self.events}
        self.news.append((text, numbered))
        return numbered

    def forget_news(self) -> None:
        """Drop the reported news, which has arrived once another step is committed."""
        self.news = []

    def switch_off(self, policy: int, why: str) -> None:
        """Switch off a policy and end its wish, which it could not take back."""
        self.off[policy] = why
        if self.wished_by == policy:
            self.wish_for((None, None))

    def ask_again(self) -> None:
        """Ask all policies again, because the run has other policies than before."""
        self.off = {}
        self.wish_for((None, None))

    def to_state(self) -> dict[str, Any]:
        """Return the effects as plain values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> SharedValues:
        """Invert :meth:`to_state`."""
        values = cls(**state)
        for name in ("wish", "stopped"):
            pair = getattr(values, name)
            setattr(values, name, None if pair is None else tuple(pair))
        return values
