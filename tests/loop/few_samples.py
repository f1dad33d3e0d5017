"""Evaluations of fewer samples than workers: what one worker's loop has seen, and the sums that all have."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset

import elastic_ray as er
from tests.loop.changing import Change, Kill, Outcome, run_job
from tests.sync.sharded_parameters.sharded import Net, data, sharded_net

FEW = 3
STEPS = 8  # of an epoch
FOUR = (1, 2, 3, 4)


class Stream(IterableDataset[Any]):
    """The few samples as a stream."""

    def __iter__(self) -> Iterator[Any]:
        return iter([(x, y) for x, y in TensorDataset(*data()[:FEW])])  # type: ignore[attr-defined]


def few(**options: Any) -> er.AdaptiveDataLoader:
    """They alone."""
    return er.AdaptiveDataLoader(TensorDataset(*data()[:FEW]), batch_size=2, shuffle=False, **options)


class Evaluated:
    """One worker's run.

    Args:
        model: makes the model.
        loader: makes the loader of the evaluation.
        nested: evaluate within a step of training as well, "before" the model is called or "after" that.
        every_step: do so in each step, not only in the sixth of an epoch.
        lazy: make a sum in the sixth step of training, add to it from there on and evaluate before the model is called.
        grad: evaluate with gradients on.
        before: evaluate before anything is trained.
    """

    def __init__(
        self,
        model: Callable[[], nn.Module],
        loader: Callable[[], er.AdaptiveDataLoader],
        *,
        nested: str = "",
        every_step: bool = False,
        lazy: bool = False,
        grad: bool = False,
        before: bool = False,
    ) -> None:
        torch.manual_seed(0)
        self.model = model()
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, eps=1e-2)
        self.wrapped = er.AdaptiveDataParallel(self.model, optimizer, scaling_rule="none")
        self.loader, self.grad = loader(), grad
        late: er.Accumulator | None = None
        self.late: list[dict[str, float]] = []
        self.sums: list[dict[str, float]] = []
        self.seen: list[int] = []
        train = er.AdaptiveDataLoader(data(), batch_size=12, seed=3, drop_last=True)
        for _ in er.remaining_epochs_until(2):
            if before:
                self.evaluate()
            for x, y in train:
                sixth = er.get_context().get_global_step() % STEPS == 5
                here = nested if every_step or sixth else ""
                if here == "before":
                    self.evaluate()
                if lazy and sixth:
                    late = late or er.Accumulator()
                    self.evaluate()
                if late is not None:
                    late["rows"] += len(x)
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(self.wrapped(x), y)
                if here == "after":
                    self.evaluate()
                loss.backward()
                optimizer.step()
            self.evaluate()
            if late is not None:
                self.late.append(dict(late))
                late = None
        self.world = er.get_context().get_world_size()

    def evaluate(self) -> None:
        """Add up what the few samples give."""
        total = er.Accumulator()
        seen = 0
        for x, y in self.loader:
            with torch.set_grad_enabled(self.grad):
                loss = nn.functional.cross_entropy(self.wrapped(x), y, reduction="sum")
            total["loss"] += loss.item()
            total["samples"] += len(x)
            seen += len(x)
        self.seen.append(seen)
        self.sums.append(dict(total))


def run(
    script: Sequence[Change | Kill],
    first: tuple[int, ...],
    model: Callable[[], nn.Module] = Net,
    loader: Callable[[], er.AdaptiveDataLoader] = few,
    **options: Any,
) -> Outcome:
    """Train and evaluate while the group changes."""
    return run_job(lambda: Evaluated(model, loader, **options), script, first=first)


def check(found: Outcome, **options: Any) -> None:
    """Each rank knows the sums of one process that holds the whole model, in which each sample counts once."""
    (alone,) = run([], (1,), **options).results.values()
    for own in found.results.values():
        assert own.sums
        for mine, theirs in zip(own.sums[::-1], alone.sums[::-1], strict=False):
            assert mine["samples"] == FEW
            assert mine["loss"] == pytest.approx(theirs["loss"], abs=1e-4)


GROWS = [Change(3, FOUR)]
KILLS = [Kill(STEPS, 1, "forward"), Kill(STEPS, 4, "edge"), Kill(STEPS, 4, "edge", after=(1, 2, 3))]
__all__ = ["FEW", "FOUR", "GROWS", "KILLS", "STEPS", "Evaluated", "Net", "Stream", "check", "few", "run", "sharded_net"]
