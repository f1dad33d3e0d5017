"""Workers of units: what one of a unit cannot complete, none of its unit has completed."""

from __future__ import annotations

import concurrent.futures
import functools
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_ray.communication.communicator import CommunicationFailedError, Communicator
from elastic_ray.communication.unit_group import UnitCommunicator, UnitGroup
from elastic_ray.unit import Unit, place_in
from tests.membership.groups import local_controller, member

WORKERS = [(unit, position) for unit in (0, 1) for position in (0, 1)]


def in_two_units(
    folder: Path, work: Callable[[int, int, Communicator], Any], timeout_s: float = 20.0
) -> dict[tuple[int, int], Any]:
    """What ``work`` returns on each worker of two units of two, an exception of it in its place."""

    def run(worker: tuple[int, int]) -> Any:
        unit, position = worker
        place = place_in(2, position, str(folder / f"unit-{unit}" / "store"))
        try:
            group = UnitGroup(
                place, cuda=False, timeout_s=60.0
            )  # as long as its workers wait for other units, and more
            make = functools.partial(UnitCommunicator, group)
            return work(*worker, member(controller, unit, 2, generation=1 + position, make=make, timeout_s=timeout_s))
        except CommunicationFailedError as error:
            return error

    with local_controller() as controller, concurrent.futures.ThreadPoolExecutor(len(WORKERS)) as pool:
        return dict(zip(WORKERS, pool.map(run, WORKERS), strict=True))


def test_gradients_are_added_up_over_the_same_position(tmp_path: Path) -> None:
    def work(unit: int, position: int, communicator: Communicator) -> float:
        tensor = torch.tensor([10.0 * position + unit])
        communicator.wait(communicator.gradients.all_reduce(tensor))
        return float(tensor) + sum(row[0] for row in communicator.gather_ints([unit]))

    assert in_two_units(tmp_path, work) == {(unit, position): 20.0 * position + 2 for unit, position in WORKERS}


def test_group_called_off_on_one_worker_fails_its_unit(tmp_path: Path) -> None:
    for close in (False, True):

        def work(unit: int, position: int, communicator: Communicator, close: bool = close) -> None:
            if (unit, position) == (0, 0):
                communicator.close() if close else communicator.void()
            communicator.wait(communicator.gradients.all_reduce(torch.ones(1)))

        found = in_two_units(tmp_path / str(close), work, timeout_s=3.0)
        assert all(isinstance(each, CommunicationFailedError) for each in found.values()), found


@pytest.mark.parametrize(("cuda", "connects"), [(True, "0"), (False, None)])
def test_nccl_connects_early_also_in_a_unit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cuda: bool, connects: str | None
) -> None:
    """It reads this once, before the first group of the job forms; else a late rank lets the first collective fail."""
    monkeypatch.setenv("NCCL_RUNTIME_CONNECT", "1")
    monkeypatch.delenv("NCCL_RUNTIME_CONNECT")

    def opened(position: int) -> None:
        group = UnitGroup(place_in(Unit(shard=2), position, str(tmp_path / "u" / "store")), cuda=cuda, timeout_s=20.0)
        group.open(lambda backend, **options: None)

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        list(pool.map(opened, range(2)))
    assert os.environ.get("NCCL_RUNTIME_CONNECT") == connects


def test_infinite_sums_of_parts_end_no_training(tmp_path: Path) -> None:
    def work(position: int) -> list[float]:
        group = UnitGroup(
            place_in(Unit(shard=2), position, str(tmp_path / "unit" / "store")), cuda=False, timeout_s=20.0
        )
        own = {"inf": math.inf, "mixed": math.inf if position else -math.inf, "large": 1e308}
        return [value for _, _, value in group.over_shards([((0, 1), name, value) for name, value in own.items()])]

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for infinite, mixed, large in pool.map(work, range(2)):
            assert infinite == large == math.inf and math.isnan(mixed)
