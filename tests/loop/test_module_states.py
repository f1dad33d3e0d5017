"""What a model has besides parameters and buffers reaches joiners and checkpoints; what is left out is named."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import elastic_ray as er
from elastic_ray.loop.api import current_session
from elastic_ray.run.current import set_session
from elastic_ray.run.run import watch_optimizers
from elastic_ray.state.registered import ModuleExtras
from elastic_ray.state.tree import check_plain
from tests.loop.changing import Change, run_job
from tests.loop.ranks import Ranks

ROWS = TensorDataset(torch.randn(48, 4, generator=torch.Generator().manual_seed(7)))


class Counts(nn.Linear):
    """Counts its calls in an extra state, as FP8 layers keep their scales."""

    calls = 0

    def get_extra_state(self) -> Any:
        return {"calls": self.calls, "scale": torch.tensor(float(self.calls))}

    def set_extra_state(self, state: Any) -> None:
        assert float(state["scale"]) == state["calls"]
        self.calls = state["calls"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x)


class Saves(nn.Module):
    """Adds to its state dict by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.seen = nn.Parameter(torch.ones(1)), 0

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}seen"] = self.seen

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *rest)
        self.seen = state_dict.pop(f"{prefix}seen", self.seen)


class Model(nn.Module):
    """Two parts within others."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.tail = nn.Sequential(Counts(4, 1), nn.Dropout(0.5)), Saves()

    def forward(self, x: torch.Tensor) -> Any:
        self.tail.seen += len(x)
        return self.body(x) * self.tail.weight


def train(see: Callable[[Model, int], None], make: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Train; ``see`` may look at the model, and change it, before each step."""
    torch.manual_seed(1)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped = er.AdaptiveDataParallel(model, optimizer, **options)
    for _ in er.remaining_epochs_until(2):
        for (x,) in er.AdaptiveDataLoader(ROWS, batch_size=12):
            see(model, current_session().progress.steps)
            if make is not None and current_session().progress.steps == 5:
                kept = make(optimizer)
                assert kept is not None
            optimizer.zero_grad()
            wrapped(x).square().mean().backward()
            optimizer.step()
    return model.body[0].calls, model.tail.seen


def test_extra_states_and_modes_reach_a_joiner() -> None:
    modes: dict[tuple[str, int], bool] = {}

    def see(model: Model, step: int) -> None:
        if step == 0:
            model.body[1].eval()
        modes[current_session().worker, step] = model.body[1].training

    outcome = run_job(lambda: train(see), [Change(3, (1, 2))])
    calls = {worker: calls for worker, (calls, _) in outcome.results.items()}
    assert calls == {1: 8, 2: 8}, "as many as a worker has made that was there from the beginning"
    assert outcome.results[1][1] == 4 * 12 + 4 * 6 == outcome.results[2][1]
    assert modes["w2", 4] is False, "its own code has not come by the place where the others changed it"


def test_they_are_in_what_is_saved() -> None:
    kept: list[Any] = []

    def see(model: Model, step: int) -> None:
        if step == 3:
            kept.append(copy.deepcopy(current_session().states.capture()))

    set_session(None)
    train(see)
    check_plain(kept[0])
    state = kept[0]["modules/0"]["states"]
    assert state["body.0"]["_extra_state"]["calls"] == 3 and state["tail"] == {"seen": 36}
    assert "body.1" in kept[0]["modules/0"]["training"]


def test_another_model_does_not_take_them() -> None:
    tree = ModuleExtras(Model()).capture()
    with pytest.raises(RuntimeError, match=r"has no part body\.0, tail"):
        ModuleExtras(nn.Linear(1, 1)).restore(tree)


def test_parts_on_one_side_alone_keep_their_mode() -> None:
    """A model may make parts of it with its first call, and drop others."""
    theirs, mine = Model(), Model()
    theirs.made, mine.own = nn.ReLU().eval(), nn.ReLU()
    theirs.body[1].eval()
    ModuleExtras(mine).restore(ModuleExtras(theirs).capture())
    assert mine.own.training and not mine.body[1].training


class Keeps(nn.Module):
    """Its extra state is this."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state

    def get_extra_state(self) -> Any:
        return self.state

    def set_extra_state(self, state: Any) -> None:
        self.state = state


def test_bytes_in_memory_travel_objects_stay_with_a_warning() -> None:
    told: list[str] = []
    theirs = nn.Sequential(Keeps(io.BytesIO(b"scales")), Keeps(object()), Keeps(None))
    mine = nn.Sequential(Keeps(None), Keeps("mine"), Keeps(None))
    extras = ModuleExtras(theirs, warn=told.append)
    trees = [extras.capture() for _ in range(2)]
    check_plain({"extras": trees[1]})
    ModuleExtras(mine).restore(trees[1])
    assert mine[0].state.read() == b"scales" and mine[1].state == "mine"
    (only,) = told
    assert "the state '_extra_state' of module '1' reaches neither workers that join" in only


def asked_alone() -> list[str]:
    """What rank 0 captures by itself of a model some of whose rows are elsewhere."""
    model = nn.Sequential(er.sync.ShardedEmbedding(12, 2, optimizer="sgd", seed=5), nn.Flatten(), nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped, kept = er.AdaptiveDataParallel(model, optimizer), []
    for _ in er.remaining_epochs_until(1):
        for x in er.AdaptiveDataLoader(list(range(12)), batch_size=6):
            if current_session().rank == 0:
                kept = sorted(current_session().states.capture()["modules/0"]["states"])
            optimizer.zero_grad()
            wrapped(x[:, None]).square().mean().backward()
            optimizer.step()
    return kept


def test_a_rank_alone_is_not_asked_for_common_holdings(ranks: Ranks) -> None:
    """As one rank is that sends its state to a joiner, or writes a checkpoint: the others would not answer."""
    assert ranks.run(asked_alone, world=2) == [[], []]


def test_sums_of_registered_metrics_travel_and_are_rolled_back() -> None:
    metrics = pytest.importorskip("torchmetrics")
    set_session(None)
    mine = metrics.MeanMetric()
    er.register_state("mean", mine)
    session = current_session()
    mine.update(3.0)
    session.states.snapshot()
    held = copy.deepcopy(session.states.capture())
    mine.update(9.0)
    session.states.roll_back()
    assert float(mine.compute()) == 3.0
    set_session(None)
    other = metrics.MeanMetric()
    er.register_state("mean", other)
    current_session().states.install(held)
    assert float(other.compute()) == 3.0 and other.update_called


# -- schedulers and scalers that nobody knows ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind",
    [
        lambda optimizer: torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0),
        lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer),
        lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9),
    ],
)
def test_scheduler_that_is_made_anew_in_training_is_refused(kind: Any) -> None:
    watch_optimizers()
    with pytest.raises(RuntimeError, match=r"optimizer of a wrapped model after the start of the first epoch"):
        run_job(lambda: train(lambda model, step: None, kind))


class WarmUp(torch.optim.lr_scheduler.LRScheduler):
    """Continues as another one, which it holds, as those of other libraries do."""

    def __init__(self, optimizer: Any, then: Any) -> None:
        self.after = {"then": [then]}
        super().__init__(optimizer)

    def get_lr(self) -> Any:
        return [group["lr"] for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        return {"last_epoch": self.last_epoch, "then": self.after["then"][0].state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.last_epoch = state["last_epoch"]
        self.after["then"][0].load_state_dict(state["then"])


def schedulers(which: str) -> Any:
    """Train with schedulers of which not all are passed."""
    torch.manual_seed(1)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step, other = (torch.optim.lr_scheduler.StepLR(optimizer, 3) for _ in range(2))
    both = torch.optim.lr_scheduler.SequentialLR(optimizer, [step, other], [5])
    warm_up = WarmUp(optimizer, step) if which == "warm-up" else None
    if warm_up is not None:
        del other, both
        both = warm_up
    given = {
        "warm-up": warm_up,
        "one": step,
        "both": both,
        "chained": torch.optim.lr_scheduler.ChainedScheduler([both]),
    }.get(which)
    if which == "registered":
        for number, each in enumerate((step, other, both)):
            er.register_state(f"schedule {number}", each)
    wrapped = er.AdaptiveDataParallel(model, optimizer, lr_scheduler=given)
    for _ in er.remaining_epochs_until(1):
        for (x,) in er.AdaptiveDataLoader(ROWS, batch_size=12):
            optimizer.zero_grad()
            wrapped(x).square().mean().backward()
            optimizer.step()
            both.step()


def test_schedulers_of_which_not_all_are_passed_are_refused() -> None:
    watch_optimizers()
    with pytest.raises(ValueError, match=r"learning-rate scheduler \(StepLR\) that AdaptiveDataParallel does not know"):
        run_job(lambda: schedulers("one"))
    for which in ("both", "chained", "registered", "warm-up"):
        run_job(lambda: schedulers(which))  # noqa: B023


def scaled(passed: bool, enabled: bool = True, registered: bool = False) -> Any:
    """Train with AMP's scaler."""
    torch.manual_seed(1)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", enabled=enabled)
    if registered:
        er.register_state("scaler", scaler)
    wrapped = er.AdaptiveDataParallel(model, optimizer, grad_scaler=scaler if passed else None)
    for _ in er.remaining_epochs_until(1):
        for (x,) in er.AdaptiveDataLoader(ROWS, batch_size=12):
            optimizer.zero_grad()
            scaler.scale(wrapped(x).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()


def test_a_scaler_that_is_not_handed_over_is_named(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(RuntimeError, match=r"GradScaler steps the optimizer of a model that was wrapped without it"):
        run_job(lambda: scaled(False))
    run_job(lambda: scaled(True))
    run_job(lambda: scaled(False, enabled=False))
    run_job(lambda: scaled(False, registered=True))
    set_session(None)
    scaled(False)
    assert [each for each in caplog.messages if "GradScaler steps the optimizer" in each]
