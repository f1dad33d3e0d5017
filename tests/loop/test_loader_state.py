"""A loader's own state: a run that somebody else has stored continues where it stood."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import elastic_ray as er
from elastic_ray.loop.api import current_session
from elastic_ray.run.current import set_session
from elastic_ray.state.layout import ReplicasDifferError
from tests.loop.changing import Change, Kill, run_job
from tests.loop.small_net import BATCH, EPOCHS, SAMPLES, STEPS, net, rows, weights


class Stored:
    """What a user's own checkpoint holds."""

    def __init__(self) -> None:
        self.loader = self.model = self.optimizer = None


def train(stored: Stored | None = None, stop_after: int | None = None, note: Callable[[int], None] = id) -> Any:
    """The loop of a user who stores things by himself."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    wrapped = er.AdaptiveDataParallel(model, optimizer, scaling_rule="none")
    loader = er.AdaptiveDataLoader(range(SAMPLES), batch_size=BATCH, shuffle=True, seed=3)
    (samples,) = rows().tensors
    if stored is not None and stored.loader is not None:
        loader.load_state_dict(json.loads(json.dumps(stored.loader)))
        model.load_state_dict(stored.model)
        optimizer.load_state_dict(stored.optimizer)
    for _ in er.remaining_epochs_until(EPOCHS):
        for batch in loader:
            optimizer.zero_grad()
            wrapped(samples[batch]).square().mean().backward()
            optimizer.step()
            for each in batch.tolist():
                note(each)
            if stored is not None and er.get_context().get_global_step() + 1 == stop_after:
                stored.loader = loader.state_dict()
                stored.model, stored.optimizer = model.state_dict(), optimizer.state_dict()
                return weights(model)
    return weights(model)


@pytest.mark.parametrize("after", [1, 5, SAMPLES // BATCH, STEPS - 1])
@pytest.mark.parametrize("script", [(), (Change(STEPS - 1, (1, 2)),)], ids=["alone", "grows"])
def test_a_run_goes_on_where_it_was_stored(after: int, script: Sequence[Any]) -> None:
    set_session(None)
    stored, first, then = Stored(), [], []
    train(stored, after, first.append)
    assert len(first) == after * BATCH
    later = run_job(lambda: train(stored, None, then.append), script, first=(1,)).results
    set_session(None)
    undisturbed = train()
    for found in later.values():
        torch.testing.assert_close(found, undisturbed, rtol=0, atol=1e-9)
    assert sorted(first + then) == sorted([*range(SAMPLES)] * EPOCHS)
    set_session(None)


def test_through_a_loss_after_it() -> None:
    set_session(None)
    stored = Stored()
    train(stored, 3)
    outcome = run_job(lambda: train(stored), [Kill(5, 2, "backward")], first=(1, 2))
    set_session(None)
    torch.testing.assert_close(outcome.results[1], train(), rtol=0, atol=1e-9)
    set_session(None)


def test_ranks_that_begin_at_different_places_are_told() -> None:
    set_session(None)
    stored = Stored()
    train(stored, 3)
    with pytest.raises(
        ReplicasDifferError,
        match=r"place to begin at is epoch 0 after 0 steps on rank 0 and epoch 0 after 3 steps \(passes: 24",
    ):
        run_job(lambda: train(stored if current_session().worker == "w2" else None), first=(1, 2))


@pytest.mark.parametrize(
    ("state", "error", "says"),
    [
        ({}, ValueError, "must come from state_dict.., but is empty"),
        ([], ValueError, "must be an object, but is"),
        ({"epoch": -1}, ValueError, "epoch must be a whole number from 0, but is -1"),
        ({"epoch": 0, "passes": [["a", False]]}, ValueError, "position must be a whole number from 0, but is 'a'"),
    ],
)
def test_what_makes_no_sense_is_refused(state: Any, error: type[Exception], says: str) -> None:
    set_session(None)
    with pytest.raises(error, match=says):
        er.AdaptiveDataLoader(range(8)).load_state_dict(state)


def test_a_state_comes_before_the_first_epoch() -> None:
    set_session(None)
    loader = er.AdaptiveDataLoader(range(8), batch_size=4)
    for _ in er.remaining_epochs_until(1):
        with pytest.raises(RuntimeError, match="before the first epoch, but training has begun"):
            loader.load_state_dict(loader.state_dict())
        for _ in loader:
            pass
    set_session(None)
