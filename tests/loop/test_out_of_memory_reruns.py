"""Memory that runs out where a step cannot be drawn again: the train function runs again with what the worker keeps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import elastic_ray as er
from elastic_ray.run.current import set_session
from elastic_ray.state.progress import RunProgress
from elastic_ray.steps.out_of_memory import EvaluationMemoryError
from tests.loop.alone import session_of

FEATURES, SAMPLES, BATCH = 3, 48, 16


@pytest.fixture(autouse=True)
def no_session() -> Iterator[None]:
    yield
    set_session(None)


def rows() -> torch.utils.data.TensorDataset:
    return torch.utils.data.TensorDataset(torch.linspace(-1, 1, FEATURES * SAMPLES).view(SAMPLES, FEATURES))


class Mean(nn.Module):
    """Gives one number for a batch; in an evaluation it has room for no more than ``room`` samples."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self.layer, self.room = nn.Linear(FEATURES, 1), room

    def forward(self, x: Tensor) -> Any:
        if not self.training and len(x) > self.room:
            raise torch.OutOfMemoryError("as if, in an evaluation")
        return self.layer(x).square().mean()


def train(
    evaluate: Callable[[Any], None], room: int = SAMPLES, *, loss: Callable[[], None] = lambda: None, at: int = 1
) -> None:
    """Train for an epoch; ``evaluate`` is called in step ``at``, and ``loss`` after it."""
    net = Mean(room)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = er.AdaptiveDataParallel(net, optimizer, scaling_rule="none")
    loader = er.AdaptiveDataLoader(rows(), batch_size=BATCH, seed=1)
    for _ in er.remaining_epochs_until(1):
        for (x,) in loader:
            if er.get_context().get_global_step() == at:
                model.eval()
                with torch.no_grad():
                    evaluate(model)
                model.train()
                loss()
            optimizer.zero_grad()
            model(x).backward()
            optimizer.step()


def lack() -> None:
    raise torch.OutOfMemoryError("as if, in the loop's own code")


def in_pass(batch_size: int, **options: Any) -> Callable[[Any], None]:
    """Return an evaluation by a loader of its own."""

    def evaluate(model: Any) -> None:
        for (x,) in er.AdaptiveDataLoader(rows(), batch_size=batch_size, shuffle=False, **options):
            model(x)

    return evaluate


def whole(model: Any) -> None:
    """Evaluate all rows at once."""
    model(rows().tensors[0])


@pytest.mark.parametrize(
    ("evaluate", "room", "loss", "samples"),
    [
        (whole, 40, lambda: None, 0),
        (in_pass(SAMPLES, whole_batches=True), 40, lambda: None, 0),
        (in_pass(SAMPLES), 40, lambda: None, SAMPLES),
        (in_pass(BATCH), 10, lambda: None, 0),
        (whole, SAMPLES, lack, BATCH),
    ],
    ids=["rows", "whole batches", "divided batches", "batches that train", "loss"],
)
def test_evaluations_bound_their_own_batches(
    evaluate: Callable[[Any], None], room: int, loss: Callable[[], None], samples: int
) -> None:
    session = session_of()
    with pytest.raises(torch.OutOfMemoryError) as error:
        train(evaluate, room, loss=loss)
    assert isinstance(error.value, EvaluationMemoryError) == (room < SAMPLES)
    assert session.samples_beyond_memory(error.value) == samples


@pytest.mark.parametrize(("room", "loss", "more"), [(40, lambda: None, False), (SAMPLES, lack, True)])
def test_evaluations_say_nothing_of_unequal_shares(room: int, loss: Callable[[], None], more: bool) -> None:
    session = session_of()
    with pytest.raises(torch.OutOfMemoryError) as error:
        train(in_pass(SAMPLES), room, loss=loss)
    assert session.ledger.outermost is not None
    session.ledger.outermost.sizes = [[BATCH], [0]]
    assert session.takes_more(error.value) is more


def test_what_others_committed_beyond_the_bound_did_not_fit() -> None:
    progress = RunProgress()
    progress.count_fit(8)
    progress.bound_memory(32)
    progress.count_fit(32)
    assert (progress.memory_bound, progress.fits) == (16, 16)
    progress.bound_memory(16)
    assert (progress.memory_bound, progress.fits) == (8, 8)


def test_a_bound_that_does_not_suffice_falls() -> None:
    progress = RunProgress(memory_bound=8, fits=8)
    progress.bound_memory(9)  # the last step of an epoch has a sample more
    assert progress.memory_bound == 4
    progress.bound_memory(5, 4)
    assert progress.memory_bound == 4


@pytest.mark.parametrize("options", [{}, {"whole_batches": True}], ids=["divided", "whole"])
@pytest.mark.parametrize("inside", [True, False], ids=["in it", "after it"])
def test_a_rerun_makes_nested_evaluations_whole(inside: bool, options: dict[str, Any]) -> None:
    seen, failures = list[float](), [None]

    def fail() -> None:
        if failures and (not inside or len(seen) == 2):
            failures.pop()
            lack()

    def evaluate(model: Any) -> None:
        seen.clear()
        total = er.Accumulator()
        for (x,) in er.AdaptiveDataLoader(rows(), batch_size=8, shuffle=False, **options):
            seen.append(float(x.sum()))
            total["samples"] += len(x)
            if inside:
                fail()
        assert total["samples"] == SAMPLES

    session = session_of()
    with pytest.raises(torch.OutOfMemoryError):
        train(evaluate, loss=fail if not inside else lambda: None)
    kept = session.keep_state()
    assert kept is not None
    session_of(kept[0])
    train(evaluate)
    assert len(seen) == SAMPLES // 8
