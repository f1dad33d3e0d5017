"""States that user code registers, and epochs that somebody else's loop counts: the same however the group changes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import elastic_ray as er
from elastic_ray.loop.epochs import Epochs
from elastic_ray.run.current import set_session
from elastic_ray.state.tree import UnsafeStateError
from tests.loop.alone import session_of
from tests.loop.changing import Change, Kill, run_job
from tests.loop.counter import Counter
from tests.loop.small_net import net, rows, weights

EPOCHS, BATCH = 2, 8
MOMENTS = ("forward", "backward", "allreduce", "optimizer_step", "after_step", "edge")


def train(epochs: Callable[[int], Any]) -> tuple[torch.Tensor, torch.Tensor, int, list[float]]:
    """A loop with a moving average of its model, and a counter; both are moved on in every step, lost or not."""
    model = net()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    counter = Counter()
    er.register_state("average", average)
    er.register_state("counter", counter)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    wrapped = er.AdaptiveDataParallel(model, optimizer, scaling_rule="none")
    loader = er.AdaptiveDataLoader(rows(), batch_size=BATCH, seed=3)
    for _ in epochs(EPOCHS):
        for (x,) in loader:
            optimizer.zero_grad()
            wrapped(x).square().mean().backward()
            optimizer.step()
            average.update_parameters(model)
            counter.steps += 1
            counter.mean += 1.0
    return weights(model), weights(average), counter.steps, counter.mean.tolist()


def by_hand(epochs: int) -> Any:
    """As a framework's loop counts them."""
    counted = Epochs(epochs)
    while not counted.done:
        yield counted.start_epoch()
        counted.end_epoch()


COUNTS = {"for": er.remaining_epochs_until, "calls": by_hand}
UNDISTURBED: dict[str, Any] = {}


def check(script: Sequence[Change | Kill], first: Sequence[int], epochs: str = "for") -> None:
    if not UNDISTURBED:
        UNDISTURBED.update(zip("wasm", run_job(lambda: train(er.remaining_epochs_until)).results[1], strict=True))
    outcome = run_job(lambda: train(COUNTS[epochs]), script, first=first)
    assert sorted(outcome.results) == sorted(outcome.groups[-1])
    for found in outcome.results.values():
        torch.testing.assert_close(found[0], UNDISTURBED["w"], rtol=0, atol=1e-9)
        torch.testing.assert_close(found[1], UNDISTURBED["a"], rtol=0, atol=1e-9)
        assert found[2:] == (12, [12.0] * 3) == (UNDISTURBED["s"], UNDISTURBED["m"])


@pytest.mark.parametrize("epochs", sorted(COUNTS))
def test_joiner_has_them_and_a_leaver_takes_nothing_along(epochs: str) -> None:
    check([Change(2, (1, 2)), Change(5, (1, 2, 3)), Change(9, (2, 3))], first=(1,), epochs=epochs)


def test_a_sum_that_was_read_reaches_a_joiner() -> None:
    def work() -> Any:
        model, counter = net(), Counter()
        er.register_state("samples", counter)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        wrapped, seen = er.AdaptiveDataParallel(model, optimizer), []
        for _ in er.remaining_epochs_until(EPOCHS):
            seen.append(counter.steps)
            sums = er.Accumulator()
            for (x,) in er.AdaptiveDataLoader(rows(), batch_size=BATCH):
                wrapped(x).square().mean().backward()
                optimizer.step()
                sums["samples"] += len(x)
            counter.steps = sums["samples"]
        return seen[-1]

    found = run_job(work, [Change(8, (1, 2))])
    assert found.results == {1: 48.0, 2: 48.0}


@pytest.mark.matrix(every=4)
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("step", [0, 4, 6])
def test_a_lost_step_moves_them_on_once(step: int, moment: str) -> None:
    check([Kill(step, 2, moment)], first=(1, 2), epochs="calls" if step == 4 else "for")


def test_what_a_checkpoint_or_a_rerun_keeps_has_them() -> None:
    first, later = Counter(), Counter()
    session = session_of()
    er.register_state("counter", first)
    first.steps, first.mean = 7, torch.ones(3)
    saved, kept = (copy.deepcopy(take()) for take in (session.states.capture_to_save, session.states.capture_to_keep))
    for states in (saved, kept):
        session = session_of(states)
        er.register_state("counter", later)
        session.start_epochs(1)
        assert later.steps == 7 and later.mean.tolist() == [1.0] * 3
        later = Counter()
    set_session(None)


class Silent:
    """Has a state, and cannot take one."""

    def state_dict(self) -> dict[str, Any]:
        return {}


@pytest.mark.parametrize(
    ("name", "target", "error", "says"),
    [
        (3, Counter(), TypeError, "name must be text, but got 3"),
        ("", Counter(), ValueError, "must name the state"),
        ("a", Silent(), TypeError, "state 'a' must have state_dict.. and load_state_dict"),
        ("a", nn.Linear, TypeError, "must have state_dict"),
        ("a", {"steps": 1}, TypeError, "dict has not both"),
    ],
)
def test_what_makes_no_sense_is_refused(name: Any, target: Any, error: type[Exception], says: str) -> None:
    set_session(None)
    with pytest.raises(error, match=says):
        er.register_state(name, target)


def test_name_is_taken_once_and_not_after_first_epoch() -> None:
    set_session(None)
    er.register_state("a", Counter())
    with pytest.raises(ValueError, match="'user/a' is registered already"):
        er.register_state("a", Counter())
    for _ in er.remaining_epochs_until(1):
        with pytest.raises(RuntimeError, match="state 'b' must be registered before the first epoch"):
            er.register_state("b", Counter())
    set_session(None)


def test_a_state_that_could_only_be_pickled_is_named() -> None:
    class Pickled(Counter):
        def state_dict(self) -> dict[str, Any]:
            return {"rule": object()}

    def loop() -> None:
        er.register_state("curriculum", Pickled())
        for _ in er.remaining_epochs_until(1):
            pass

    with pytest.raises(UnsafeStateError, match="state 'user/curriculum' holds something other than tensors"):
        run_job(loop)


def test_epochs_are_begun_and_ended_in_turn() -> None:
    set_session(None)
    epochs = Epochs(1)
    with pytest.raises(RuntimeError, match="without start_epoch"):
        epochs.end_epoch()
    assert epochs.start_epoch() == 0
    with pytest.raises(RuntimeError, match="called twice"):
        epochs.start_epoch()
    epochs.end_epoch()
    assert epochs.done
    with pytest.raises(RuntimeError, match="all 1 epochs have been trained"):
        epochs.start_epoch()
    set_session(None)
    with pytest.raises(ValueError, match="0 or more"):
        Epochs(-1)
    with pytest.raises(TypeError, match="an integer"):
        Epochs(2.0)


class Fails(Counter):
    """Its own code raises, in one of its methods."""

    def __init__(self, method: str) -> None:
        super().__init__()
        self._method = method

    def state_dict(self) -> dict[str, Any]:
        if self._method == "state_dict" and self.steps:
            raise KeyError("mine")
        return super().state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._method == "load_state_dict" and state["steps"]:
            raise KeyError("mine")
        super().load_state_dict(state)


def with_registered(target: Any) -> Any:
    """A loop with this state."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    wrapped = er.AdaptiveDataParallel(model, optimizer, scaling_rule="none")
    loader = er.AdaptiveDataLoader(rows(), batch_size=BATCH, seed=3)
    er.register_state("mine", target)
    for _ in er.remaining_epochs_until(EPOCHS):
        for (x,) in loader:
            optimizer.zero_grad()
            wrapped(x).square().mean().backward()
            optimizer.step()
            if isinstance(target, Counter):
                target.steps += 1
    return target


@pytest.mark.parametrize(
    ("method", "script", "says"),
    [
        ("load_state_dict", [Change(2, (1, 2))], "cannot take over what another worker, or a checkpoint, has sent"),
        (
            "load_state_dict",
            [Kill(2, 2, "backward", last=True)],
            "cannot go back to the beginning of a step that is lost",
        ),
        ("state_dict", [], "cannot tell what it is at the beginning of a step"),
    ],
)
def test_error_of_a_states_own_code_names_the_state(method: str, script: Any, says: str) -> None:
    first = (1, 2) if isinstance(next(iter(script), None), Kill) else (1,)
    with pytest.raises(RuntimeError, match=f"state 'user/mine' {says}.*: KeyError: 'mine'"):
        run_job(lambda: with_registered(Fails(method)), script, first=first)


@pytest.mark.parametrize(("script", "first"), [([Change(2, (1, 2))], (1,)), ([Kill(2, 2, "backward")], (1, 2, 3))])
def test_a_module_whose_buffer_is_expanded_is_restored(script: Any, first: Sequence[int]) -> None:
    made: list[nn.Module] = []

    def train() -> None:
        module = nn.Linear(1, 1)
        module.register_buffer("scale", torch.full((1,), float(len(made))).expand(4))
        made.append(module)
        with_registered(module)

    assert len(run_job(train, script, first=first).results) == 2
    assert all(torch.equal(module.scale, made[0].scale) for module in made)


class Observed(nn.Module):
    """A net with an observer of each input's range, whose buffer has its size from the first batch on."""

    largest: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = net()
        self.register_buffer("largest", torch.tensor(0.0))

    def forward(self, x: torch.Tensor) -> Any:
        with torch.no_grad():
            if self.largest.shape != x.shape[1:]:
                self.largest.resize_(x.shape[1:]).zero_()
            self.largest.copy_(torch.maximum(self.largest, x.abs().amax(0)))
        return self.inner(x)


def test_a_joiner_has_a_buffer_that_has_grown() -> None:
    def train() -> torch.Tensor:
        model = Observed()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
        wrapped = er.AdaptiveDataParallel(model, optimizer, scaling_rule="none")
        for _ in er.remaining_epochs_until(EPOCHS):
            for (x,) in er.AdaptiveDataLoader(rows(), batch_size=BATCH, seed=3):
                optimizer.zero_grad()
                wrapped(x).square().mean().backward()
                optimizer.step()
        return model.largest

    results = run_job(train, [Change(2, (1, 2))], first=(1,)).results
    assert torch.equal(results[1], results[2]) and results[1].dim() == 1
