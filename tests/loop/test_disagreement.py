"""Ranks that make different calls are told which rank does what, at once; no process dies of it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import elastic_ray as er
from elastic_ray.communication import connections
from elastic_ray.communication.communicator import CommunicationFailedError
from elastic_ray.consensus import announcer
from elastic_ray.consensus.intents import Announced, Intent, RanksDisagreeError, disagreement
from elastic_ray.loop.api import current_session
from elastic_ray.state.layout import digest
from tests.loop.ranks import RankFailedError, Ranks


def numbers(count: int) -> TensorDataset:
    """0..count-1."""
    return TensorDataset(torch.arange(float(count))[:, None])


def net(seed: int = 1) -> nn.Module:
    """A small model with a buffer."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(1, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))


class Setting:
    """One or two models, a loader and one for evaluation."""

    def __init__(self, *, models: int = 2, frozen: bool = False) -> None:
        self.rank = er.get_context().get_world_rank()
        self.models, self.optimizers = [], []
        for seed in range(1, models + 1):
            model = net(seed)
            model[0].weight.requires_grad_(not frozen)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            self.models.append(er.AdaptiveDataParallel(model, optimizer))
            self.optimizers.append(optimizer)
        self.loader = er.AdaptiveDataLoader(numbers(48), batch_size=12)
        self.evaluation = er.AdaptiveDataLoader(numbers(24), batch_size=12, shuffle=False)

    def train(self, x: torch.Tensor, which: int = 0) -> None:
        self.optimizers[which].zero_grad()
        self.models[which](x).square().mean().backward()
        self.optimizers[which].step()


def skips(it: Setting, number: int, x: torch.Tensor) -> bool:
    """One rank leaves a backward pass out."""
    if not (it.rank == 1 and number == 2):
        it.train(x)
    return True


def breaks(it: Setting, number: int, x: torch.Tensor) -> bool:
    """One rank leaves the loop."""
    it.train(x)
    return not (it.rank == 1 and number == 1)


def another_model(it: Setting, number: int, x: torch.Tensor) -> bool:
    """One rank trains the other model."""
    it.train(x, 1 if it.rank == 1 and number == 1 else 0)
    return True


def one_more(it: Setting, number: int, x: torch.Tensor) -> bool:
    """One rank has a second backward pass."""
    it.train(x)
    if it.rank == 1 and number == 2:
        it.train(x)
    return True


def evaluates(it: Setting, number: int, x: torch.Tensor) -> bool:
    """One rank evaluates within a step."""
    it.train(x)
    if it.rank == 1 and number == 2:
        for _batch in it.evaluation:
            pass
    return True


def catches(it: Setting, number: int, x: torch.Tensor) -> bool:
    """One rank catches an error in the middle of backward, and continues."""

    def fail(grad: torch.Tensor) -> None:
        raise KeyError("in the middle")

    if it.rank == 1 and number == 1:
        it.models[0].module[0].weight.register_hook(fail)
    try:
        it.train(x)
    except KeyError:
        return True
    return True


def returns(it: Setting, number: int, x: torch.Tensor) -> bool:
    """One rank is done; see `early`."""
    it.train(x)
    return True


def unfreezes(it: Setting, number: int, x: torch.Tensor) -> bool:
    """One rank trains more parameters than the others."""
    if it.rank == 1 and number == 1:
        it.models[0].module[0].weight.requires_grad_(True)
    it.train(x)
    return True


def more_buffers(it: Setting, number: int, x: torch.Tensor) -> bool:
    """One rank's model has another buffer."""
    it.train(x)
    if it.rank == 1 and number == 1:
        it.models[0].module.register_buffer("another", torch.zeros(1000))
    return True


def run(
    case: Callable[..., bool], swallow: bool = False, told: Path | None = None, models: int = 2
) -> tuple[str, float]:
    """What a rank is told, and after how long [s]."""
    it = Setting(models=models, frozen=case is unfreezes)
    begin_s = time.monotonic()
    try:
        for epoch in er.remaining_epochs_until(3):
            for number, (x,) in enumerate(it.loader):
                if case is returns and it.rank == 1 and epoch == 1 and number == 2:
                    break
                if not case(it, number, x):
                    break
            if case is returns and it.rank == 1 and epoch == 1:
                break
        if case is returns and it.rank == 1:
            current_session().ledger.abandoned = 0  # as when the train function returns from within the loop
        current_session().finish()
    except RanksDisagreeError as error:
        if told is not None:
            told.write_text(str(error))
            os._exit(1)
        if swallow:
            it.train(torch.zeros(6, 1))
        return str(error), time.monotonic() - begin_s
    return "", time.monotonic() - begin_s


CASES = {
    skips: ("rank 0 reduces the gradients of model 0", "rank 1 has come to the end of a step"),
    breaks: ("rank 0 reduces the gradients", "rank 1 ends its pass over a loader, or left it"),
    another_model: ("rank 0 reduces the gradients of model 0", "rank 1 reduces the gradients of model 1"),
    one_more: ("rank 0 reduces the gradients", "rank 1 reduces the gradients", "after"),
    evaluates: ("rank 0 reduces the gradients", "rank 1 has come to the end of a step of a loader nested 1 deep"),
    unfreezes: tuple(
        f"rank {rank} reduces the gradients of model 0 under strategy 'all_reduce' (layout" for rank in "01"
    ),
    more_buffers: ("rank 0 ends its pass", "rank 1 ends its pass"),
    returns: ("rank 0 reduces the gradients", "rank 1 has returned from the train function"),
}


@pytest.mark.matrix(every=1)
@pytest.mark.parametrize("models", [1, 2])
@pytest.mark.parametrize("case", list(CASES), ids=lambda case: case.__name__)
def test_ranks_that_disagree_are_all_told_who_does_what(ranks: Ranks, case: Callable[..., bool], models: int) -> None:
    if case is another_model and models == 1:
        pytest.skip("there is no other model")
    heard = ranks.run(run, case, False, None, models, world=2)
    if case is returns and models == 1:
        heard = heard[:1]  # the one that has returned does not wait for the other
    for told, took_s in heard:
        for words in CASES[case]:
            assert words in told
        assert took_s < 30


@pytest.mark.thorough
@pytest.mark.parametrize("models", [1, 2])
def test_with_three_ranks_those_that_agree_are_named_together(ranks: Ranks, models: int) -> None:
    for told, _ in ranks.run(run, skips, False, None, models, world=3):
        assert "ranks 0, 2 reduce" in told.replace("reduces", "reduce")


def test_an_error_caught_within_backward_is_told_next_step(ranks: Ranks, tmp_path: Path) -> None:
    told = tmp_path / "told"
    with pytest.raises(RankFailedError):  # the others wait for the rest of its gradients, until its process ends
        ranks.run(run, catches, False, told, world=2)
    assert "rank 0 reduces the gradients of model 0" in told.read_text()
    assert "rank 1 has come to the end of a step" in told.read_text()


@pytest.mark.thorough
def test_ranks_cannot_go_on_after_a_disagreement(ranks: Ranks) -> None:
    with pytest.raises(RankFailedError, match="the ranks do different things"):
        ranks.run(run, skips, True, world=2)


def slow(naps: Sequence[tuple[int, int]], then: Callable[..., bool] | None) -> tuple[str, float]:
    """Ranks take their time before some of their backward passes, so that the others say what they wait for."""
    announcer._PATIENCE_S, announcer._HEARING_S = 0.15, 0.1
    it = Setting(models=1)
    totals = er.Accumulator()
    try:
        for epoch in er.remaining_epochs_until(3):
            for number, (x,) in enumerate(it.loader):
                if (it.rank, 4 * epoch + number) in naps:
                    time.sleep(0.6)  # slower than the patience of the others
                if epoch == 2 and then is not None:
                    then(it, number, x)
                else:
                    it.train(x)
                if epoch == 1:
                    totals["x"] += x.sum().item()
        session = current_session()
        session.finish()
        session.membership.close(broken=False)
    except RanksDisagreeError as error:
        return str(error), 0.0
    return "", totals["x"]


NAPS = [
    pytest.param([(1, 2)], id="one"),
    pytest.param([(0, 1), (1, 2), (0, 3)], id="in turns"),
    pytest.param([(2, 1), (2, 2), (1, 3), (2, 5), (0, 11)], id="up to the end"),
]


@pytest.mark.thorough
@pytest.mark.parametrize("naps", NAPS)
def test_slow_ranks_are_no_disagreement(ranks: Ranks, naps: list[tuple[int, int]]) -> None:
    assert ranks.run(slow, naps, None, world=3) == [("", float(sum(range(48))))] * 3


@pytest.mark.thorough
@pytest.mark.matrix(every=1)
@pytest.mark.parametrize("naps", NAPS)
def test_a_disagreement_is_told_after_ranks_were_slow(ranks: Ranks, naps: list[tuple[int, int]]) -> None:
    for told, _ in ranks.run(slow, naps, skips, world=3):
        assert "ranks 0, 2 reduce" in told.replace("reduces", "reduce") and "rank 1 has come to the end" in told


def wait_for_files(folder: Path, *names: str) -> None:
    """Wait until other ranks have written these."""
    deadline = time.monotonic() + 60.0
    while not all((folder / name).exists() for name in names):
        assert time.monotonic() < deadline, f"{names} are not all in {folder}"
        time.sleep(0.02)


def early(naps: Sequence[tuple[int, int]], folder: Path) -> tuple[str, float]:
    """Rank 2 returns in the first epoch, and its process stays, as a worker's does."""
    announcer._PATIENCE_S, announcer._HEARING_S = 0.3, 0.1
    it = Setting(models=1)
    session = current_session()
    begin_s = 0.0
    try:
        for epoch in er.remaining_epochs_until(3):
            for number, (x,) in enumerate(it.loader):
                if (it.rank, 4 * epoch + number) in naps:
                    time.sleep(0.8)  # slower than the patience of the others
                if (epoch, number) == (0, 3):
                    session.group.communicator.timeout_s = 60.0
                    begin_s = time.monotonic()
                    if it.rank == 2:
                        session.ledger.abandoned = 0
                        session.finish()
                        wait_for_files(folder, "0", "1")  # its process lives on
                        return "has returned", 0.0
                it.train(x)
    except RanksDisagreeError as error:
        return str(error), time.monotonic() - begin_s
    finally:
        (folder / str(it.rank)).touch()
    return "", time.monotonic() - begin_s


@pytest.mark.thorough
@pytest.mark.parametrize("naps", [[], [(1, 2), (2, 2)]], ids=["none", "some"])
def test_an_early_return_is_told_despite_an_outdated_announcement(
    ranks: Ranks, naps: list[tuple[int, int]], tmp_path: Path
) -> None:
    for told, took_s in ranks.run(early, naps, tmp_path, world=3):
        assert "has returned" in told and took_s < 30, "not before the group's timeout"


def ends(folder: Path) -> None:
    """One rank leaves a backward pass out; whoever hears of it ends its process at once."""
    it = Setting(models=1)
    try:
        for _epoch in er.remaining_epochs_until(2):
            for number, (x,) in enumerate(it.loader):
                skips(it, number, x)
    except (RanksDisagreeError, CommunicationFailedError) as error:
        (folder / str(it.rank)).write_text(type(error).__name__)
        os._exit(1)


def test_who_ends_of_a_disagreement_is_told_of_that(ranks: Ranks, tmp_path: Path) -> None:
    with pytest.raises(RankFailedError):
        ranks.run(ends, tmp_path, world=2, others_s=60.0)
    assert [(tmp_path / name).read_text() for name in "01"] == ["RanksDisagreeError"] * 2


def many_sums(names: int) -> dict[str, float]:
    """More sums than ride along with a vote."""
    loader = er.AdaptiveDataLoader(numbers(8), batch_size=4, shuffle=False)
    totals = er.Accumulator()
    rank = er.get_context().get_world_rank()
    for _epoch in er.remaining_epochs_until(1):
        for (x,) in loader:
            for name in range(names if rank == 0 else abs(names)):
                totals[f"{name:03}"] += x.sum().item() * name
    return dict(totals)


@pytest.mark.matrix(every=3)
@pytest.mark.thorough
@pytest.mark.parametrize("names", [1, 22, 23, 100])
def test_any_number_of_sums_is_added_up(ranks: Ranks, names: int) -> None:
    for totals in ranks.run(many_sums, names, world=2):
        assert totals == {f"{name:03}": 28.0 * name for name in range(names)}


def test_another_number_of_sums_is_told(ranks: Ranks) -> None:
    with pytest.raises(RankFailedError, match="must add to the same names"):
        ranks.run(many_sums, -40, world=2)


def late(folder: Path) -> tuple[float, int]:
    """Rank 0 takes its time after the last epoch, as one that exports a model does: until rank 1 has finished."""
    it = Setting()
    for _epoch in er.remaining_epochs_until(1):
        for (x,) in it.loader:
            it.train(x)
    if it.rank == 0:
        wait_for_files(folder, "finished")
    session = current_session()
    begin_s = time.monotonic()
    session.finish()
    took_s = time.monotonic() - begin_s
    (folder / "finished").touch()
    gloo = session.group.communicator._gloo
    session.membership.close(broken=False)  # as a worker does; the group must outlive it
    return took_s, int(any(group is gloo and not work.is_completed() for work, group in connections._KEPT))


@pytest.mark.thorough
def test_a_rank_slow_at_the_end_is_no_disagreement(ranks: Ranks, tmp_path: Path) -> None:
    (first_s, first), (_, second) = ranks.run(late, tmp_path, world=2)
    assert (first, second) == (0, 1)
    assert first_s < 20.0


@pytest.mark.parametrize("intent", list(Intent))
def test_what_is_announced_survives_its_number(intent: Intent) -> None:
    announced = Announced(intent, 1, digest(("x", 3)))
    assert Announced.from_code(announced.code) == announced
    assert 0 < float(announced.code) == announced.code < 2**52
    assert str(announced)


def test_a_rank_s_steps_are_told_where_they_differ() -> None:
    code = Announced(Intent.EDGE, 1).code
    assert "rank 0 has come to the end of a step after 4 steps" in disagreement([code] * 2, [4, 5])
    many = disagreement([code] * 11 + [Announced(Intent.FINISH).code], [3] * 12)
    assert "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 3 more has come" in many and "rank 11 has returned" in many
