"""Shard groups of two workers each, and replicas of them, while workers come, go and die."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import elastic_ray as er
from elastic_ray.membership.worker_side import LostGroupError
from elastic_ray.state.layout import ReplicasDifferError
from elastic_ray.sync.optimizer_tiles.moves import StateLostError
from tests.loop.changing import Change, Kill, Outcome, run_job
from tests.sync.sharded_parameters.sharded import CLOSE, OPTIMIZERS, Case, Net, Run, check, data, run, sharded_net
from tests.sync.tiles.saving import Job

GROUPS = (("shard_size", 2),)
FOUR = (1, 2, 3, 4)


def case(optimizer: str = "adamw", **options: object) -> Case:
    return Case(optimizer=optimizer, options=GROUPS, **options)


def warnings(found: Outcome) -> list[str]:
    return [text for kind, text, _ in found.told if kind == "warning" and "shard_size" in text]


@pytest.mark.matrix(every=1)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_two_groups_of_two_train_as_a_whole_model(optimizer: str) -> None:
    found = check(case(optimizer), [], FOUR)
    moments = {"sgd": 1, "adamw": 2}[optimizer] * sum(p.numel() for p in Net().parameters())
    for own in found.results.values():
        assert max(own.held) <= moments / 2 * 1.2, "one copy of half of the rows"
    assert not warnings(found)


@pytest.mark.matrix(every=2)
@pytest.mark.parametrize(
    "other",
    [
        case("sgd", batch=10),  # 3 or 2 samples each
        case(micro=1, clip=False),
        Case(meta=True, options=GROUPS),
    ],
    ids=["unequal shares", "accumulation", "meta"],
)
def test_other_loops_are_as_with_a_whole_model(other: Case) -> None:
    check(other, [Kill(9, 2, "backward")], FOUR)


@pytest.mark.thorough
def test_three_groups_add_up_what_two_do() -> None:
    check(case("sgd"), [], (1, 2, 3, 4, 5, 6))


@pytest.mark.thorough
def test_groups_follow_the_workers_from_two_to_six() -> None:
    script = [Change(3, FOUR), Change(6, (1, 2, 4)), Change(8, (1, 2, 4, 5)), Change(11, (1, 2, 4, 5, 6, 7))]
    found = check(case(), script, (1, 2))
    (text,) = warnings(found)
    assert "2 workers are not two or more groups of 2" in text and "multiple_of=2" in text


@pytest.mark.matrix(every=4)
@pytest.mark.thorough
@pytest.mark.parametrize("moment", ["forward", "backward", "vote"])
@pytest.mark.parametrize("worker", [2, 3, *(pytest.param(each, marks=pytest.mark.slow) for each in (1, 4))])
def test_a_lost_worker_takes_nothing_with_it(worker: int, moment: str) -> None:
    check(case(), [Kill(5, worker, moment)], FOUR)


@pytest.mark.thorough
def test_another_in_the_place_of_a_lost_one() -> None:
    check(case("sgd"), [Kill(4, 3, "backward", joins=(5,)), Kill(8, 1, "vote", joins=(6,))], FOUR)


def test_group_that_is_lost_as_a_whole_loses_nothing() -> None:
    """Workers 3 and 4."""
    found = check(case(), [Kill(5, 3, "forward", after=(4,)), Kill(5, 4, "receiving")], FOUR)
    assert found.groups == [FOUR, (1, 2, 4), (1, 2)]


def test_both_holders_of_a_row_lost_lose_the_state() -> None:
    """Workers 2 and 4 own the second half."""
    with pytest.raises((StateLostError, LostGroupError), match="lies with 2 workers, one of each shard group"):
        run(case(), [Kill(5, 2, "forward", after=(4,)), Kill(5, 4, "receiving")], FOUR)


def test_rows_that_differ_between_groups_are_found() -> None:
    def between(own: Run, step: int) -> None:
        if step == 3 and er.get_context().get_world_rank() == 1:
            own.model.last.weight.data.mul_(2.0)

    with pytest.raises(ReplicasDifferError, match="rank 1 owns differ from those that rank 3"):
        run(case(clip=False, between=between), [], FOUR)


def test_workers_that_shard_with_different_sizes_are_told() -> None:
    made: list[int] = []

    def trained() -> None:
        made.append(2 if not made else 3)
        model = sharded_net(shard_size=made[-1])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        er.AdaptiveDataParallel(model, optimizer, scaling_rule="none")
        for _ in er.remaining_epochs_until(1):
            list(er.AdaptiveDataLoader(data(), batch_size=12))

    with pytest.raises(
        ValueError, match="shard_size must be the same on all workers, but is 2 on rank 0 and 3 on rank"
    ):
        run_job(trained, [], first=(1, 2))


@pytest.mark.thorough
def test_each_row_is_once_in_checkpoint_shared_by_owners(tmp_path: Path) -> None:
    def job(folder: Path, **options: object) -> Job:
        make = lambda: sharded_net(shard_size=2)  # noqa: E731
        return Job(folder, strategy=None, optimizer="adamw", optimizers=OPTIMIZERS, make=make, data=data, **options)

    saving = job(tmp_path / "run", at=(4,))
    saving.run(FOUR)
    (state,) = saving.files()
    sizes = [path.stat().st_size for path in sorted(Path(state.path).glob("*.distcp"))]
    assert state.parts == 4 and max(sizes[1:]) < sum(sizes) / 2.5
    second = job(tmp_path / "second", states=saving.read()).run((1, 2, 3)).results
    whole = next(each for each in second.values() if each.rank == 0)
    wanted = job(tmp_path / "third").run((1,)).results[1]
    for name, value in wanted.model_state.items():
        torch.testing.assert_close(whole.model_state[name], value, rtol=0, atol=CLOSE)
