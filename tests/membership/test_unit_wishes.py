"""What all workers of a unit know before it counts: the controller's wishes, and that all is well."""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from elastic_ray.batch.limits import BatchChoice
from elastic_ray.communication.communicator import Communicator
from elastic_ray.communication.unit_group import UnitGroup
from elastic_ray.consensus.unit_wishes import UnitWishes
from elastic_ray.membership.messages import BatchProposal, GenerationSpec, Member, StopJob
from elastic_ray.membership.worker_side import WorkerMembership
from elastic_ray.unit import place_in

LARGER = BatchProposal(generation=0, batch=BatchChoice(atomic_bsz=8, accum_steps=3))
FLAT = BatchProposal(generation=0, batch=BatchChoice(atomic_bsz=8))


def next_group(number: int, void_below: int = 0) -> GenerationSpec:
    return GenerationSpec(generation=number, members=(Member(worker="w", node="n"),), void_below=void_below)


def in_unit(folder: Path, told: Sequence[Sequence[Any]], work: Callable[[UnitWishes, int], Any]) -> list[Any]:
    """What ``work`` returns on each worker of a unit, each of which its controller has told something."""

    def form(spec: GenerationSpec, rank: int) -> Communicator:
        return Communicator(None, "alone", rank=0, world_size=1, host="127.0.0.1", timeout_s=20.0, form_timeout_s=20.0)

    def run(position: int) -> Any:
        unit = UnitGroup(place_in(len(told), position, str(folder / "unit" / "store")), cuda=False, timeout_s=20.0)
        membership = WorkerMembership("w", form, lambda generation, cause: None)
        for message in told[position]:
            if isinstance(message, GenerationSpec) and message.void_below:
                membership.await_next(timeout_s=20.0)
            membership.post(message)
        while any(isinstance(each, GenerationSpec) for each in told[position]) and not membership.prepared_ahead:
            time.sleep(0.001)
        return work(UnitWishes(membership, unit), position)

    with concurrent.futures.ThreadPoolExecutor(len(told)) as pool:
        return list(pool.map(run, range(len(told))))


def known(wishes: UnitWishes) -> tuple[Any, ...]:
    return (
        wishes.prepared_ahead,
        wishes.stop_requested,
        wishes.preempting,
        wishes.voided,
        wishes.wanted_batch,
    )


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ([[], []], (0, False, False, False, None)),
        ([[], [StopJob()]], (0, True, False, False, None)),
        ([[StopJob(save=True)], []], (0, False, True, False, None)),
        ([[next_group(2)], [next_group(2)]], (2, False, False, False, None)),
        ([[next_group(3)], [next_group(2)]], (0, False, False, False, None)),
        ([[next_group(2)], []], (0, False, False, False, None)),
        ([[], [next_group(2)]], (0, False, False, False, None)),
        ([[next_group(1), next_group(3, void_below=2)], []], (0, False, False, True, None)),
        ([[LARGER], []], (0, False, False, False, LARGER.batch)),
        ([[FLAT], [LARGER]], (0, False, False, False, FLAT.batch)),
        ([[], [LARGER]], (0, False, False, False, None)),
    ],
)
def test_a_wish_counts_once_a_unit_knows_it(tmp_path: Path, told: Any, expected: Any) -> None:
    def work(wishes: UnitWishes, position: int) -> Any:
        assert wishes.complete(well=True, due=False) and wishes.pop_save() == 0
        return known(wishes)

    assert in_unit(tmp_path, told, work) == [expected] * 2


def test_all_is_well_if_it_is_on_all_workers(tmp_path: Path) -> None:
    def work(wishes: UnitWishes, position: int) -> list[bool]:
        return [
            wishes.complete(well=well[position], due=False) for well in ((True, True), (True, False), (False, True))
        ]

    assert in_unit(tmp_path, [[], []], work) == [[True, False, False]] * 2


def test_first_workers_checkpoint_has_one_token_told_once(tmp_path: Path) -> None:
    def work(wishes: UnitWishes, position: int) -> Any:
        tokens = []
        for due in ((True, True), (False, True), (True, False)):
            wishes.complete(well=True, due=due[position])
            tokens += [wishes.pop_save(), wishes.pop_save()]
        return tokens

    first, second = in_unit(tmp_path, [[], []], work)
    assert first == second and first[1:4] == [0, 0, 0] and first[5] == 0
    assert first[0] != first[4] and min(first[0], first[4]) > 0


def test_what_was_known_in_another_group_does_not_count(tmp_path: Path) -> None:
    def work(wishes: UnitWishes, position: int) -> Any:
        wishes.complete(well=True, due=True)
        wishes.start()
        return (*known(wishes), wishes.pop_save(), wishes.alike(float(position)))

    told = [[LARGER, next_group(2), StopJob()]] * 2
    assert in_unit(tmp_path, told, work) == [(0, True, False, False, None, 0, [0.0, 1.0])] * 2
