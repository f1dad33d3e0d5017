"""Policy that sets the batch size according to a schedule (pure)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from elastic_ray.adaptation.policies.ready import ReadyPolicy
from elastic_ray.adaptation.policy import Answer
from elastic_ray.adaptation.requests import SetBatch
from elastic_ray.adaptation.view import PolicyView


class BatchSchedule(ReadyPolicy):
    """Policy that sets the global batch size by step, epoch, progress or tokens.

    A requested batch takes effect one step later. With ``by="step"`` the policy requests it one step early, so that it
    applies exactly from the scheduled step on. By epoch or progress, it applies from the second step on. The first step
    of a run uses the loader's batch.

    Args:
        schedule: batch sizes [samples] keyed by the point where they take effect, such as ``{0: 32, 100: 64}``; or
            KungFu's text ``"batch:length,batch:length"``, whose last batch then stays in effect.
        by: unit of the schedule's keys: ``"step"`` (committed steps), ``"epoch"`` (from 0), ``"progress"`` (0..1 of the
            declared epochs), or ``"tokens"`` (tokens trained on). With ``"tokens"``, batches are in tokens too, and the
            loader must know the tokens per sample.

    Raises:
        TypeError, ValueError: an argument has the wrong type or is out of range, or the schedule is empty.

    Examples:
        >>> from elastic_ray.adaptation import BatchSchedule
        >>> BatchSchedule({0: 32, 1000: 256}).by
        'step'
    """

    starts_at_initial = True

    def __init__(
        self,
        schedule: Mapping[int, int] | Mapping[float, int] | str,
        *,
        by: str = "step",
    ) -> None:
        self.by = self._one_of("by", by, ("step", "epoch", "progress", "tokens"))
        if not isinstance(schedule, (str, Mapping)) or not schedule:
            raise TypeError(f"BatchSchedule(schedule) must be a mapping or a text with an entry, but got {schedule!r}")
        begins = _begins(schedule) if isinstance(schedule, str) else dict(schedule)
        self.schedule = tuple(
            (self._number("schedule's begin", begin, least=0.0), self._whole("schedule's batch", size, least=1))
            for begin, size in sorted(begins.items())
        )
        self.asked: int | None = None

    def before_train(self, view: PolicyView) -> Answer:
        return self._at(view, ahead=0)

    def before_epoch(self, view: PolicyView) -> Answer:
        return self._at(view, ahead=0)

    def after_step(self, view: PolicyView) -> Answer:
        return self._at(view, ahead=1)

    def coming_batches(self, view: PolicyView) -> Sequence[tuple[float, int]]:
        """Return the future batches as pairs (samples from now, batch size); with ``by="step"``, only the next one."""
        progress, left, per_sample = view.progress, view.samples_left, view.tokens_per_sample
        if self.by == "step":
            ahead = [
                ((begin - view.step) * view.batch_size, size) for begin, size in self.schedule if begin > view.step
            ]
            return ahead[:1]
        if self.by == "tokens":
            done, most = view.tokens or 0.0, view.max_batch_size
            if not per_sample:
                return ()
            ahead = [((begin - done) / per_sample, int(size / per_sample + 1e-9)) for begin, size in self.schedule]
            return [(each, max(1, min(size, most or size))) for each, size in ahead if each > 0]
        if progress is None or left is None or progress >= 1:
            return ()
        part = 1.0 if self.by == "progress" else 1.0 / (view.epochs or 1)
        return [
            ((begin * part - progress) / (1 - progress) * left, s)
            for begin, s in self.schedule
            if begin * part > progress
        ]

    def _at(self, view: PolicyView, *, ahead: int) -> Answer:
        """Return the request for the batch that is due; None if it has already been made."""
        now = {"step": view.step + ahead, "epoch": view.epoch, "progress": view.progress, "tokens": view.tokens}[
            self.by
        ]
        due = [size for begin, size in self.schedule if now is not None and begin <= now]
        if not due:
            return None
        size = due[-1]
        if self.by == "tokens" and view.tokens_per_sample is not None:
            size = min(max(1, int(size / view.tokens_per_sample + 1e-9)), view.max_batch_size or size)
        if size == self.asked:
            return None
        self.asked = size
        return SetBatch(size)


def _begins(text: str) -> dict[float, int]:
    found, begin = dict[float, int](), 0.0
    for size, length in parse_schedule(text):
        found[begin] = size
        begin += length
    return found


def parse_schedule(text: str) -> tuple[tuple[int, float], ...]:
    """Parse KungFu's ``"value:length,value:length"``: consecutive values, each valid for a length.

    >>> parse_schedule("10:2,100:4")
    ((10, 2.0), (100, 4.0))
    """
    try:
        pairs = [part.split(":") for part in text.split(",") if part.strip()]
        found = tuple((int(value), float(length)) for value, length in pairs)
    except ValueError:
        found = ()
    if not found or any(value < 1 or not length > 0 for value, length in found):
        raise ValueError(
            f"a schedule must be 'value:length,value:length', with whole values of 1 or more and lengths above 0, such "
            f"as '10:2,100:4' (10 for two steps, then 100 for four), but got {text!r}"
        )
    return found
