"""Automatic checkpoints of optimizer state in tiles: all ranks write, any number of ranks reads, in any strategy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.loop.changing import Change
from tests.sync.tiles.saving import Job
from tests.sync.tiles.trained import assert_same_state

FOUR = (1, 2, 3, 4)


def states_of(trees: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's, as ``state_dict`` gives them."""
    return dict(trees["optimizer/0"]["state"])


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "adafactor"])
@pytest.mark.parametrize("script", [[], [Change(2, (1, 2, 3))]], ids=["4 ranks", "3 ranks"])
def test_all_ranks_parts_are_the_state_of_one_step(tmp_path: Path, optimizer: str, script: Any) -> None:
    job = Job(tmp_path / "run", optimizer=optimizer, at=(4,))
    job.run(FOUR, script)
    wanted = Job(tmp_path / "other", optimizer=optimizer, strategy="all_reduce", records=True).run(FOUR, script)
    (state,) = job.files()
    ranks = 3 if script else 4
    assert state.parts == ranks and [saved.state for saved in job.saved] == [state]
    assert sorted(path.name for path in Path(state.path).glob("*.distcp")) == [f"__{r}_0.distcp" for r in range(ranks)]
    trees = job.read()
    parameters, expected = wanted.results[1].steps[state.steps]
    names = [name for name, _ in zip(trees["model/0"], parameters, strict=True)]
    assert all(torch.equal(trees["model/0"][name], p) for name, p in zip(names, parameters, strict=True))
    assert_same_state({"param_groups": 0, "state": states_of(trees)}, {**expected, "param_groups": 0})


@pytest.mark.parametrize(("strategy", "workers"), [("zero1", 3), ("zero1", 2), ("all_reduce", 3), ("zero1", 1)])
def test_a_job_goes_on_at_another_size_and_under_another_strategy(tmp_path: Path, strategy: str, workers: int) -> None:
    job = Job(tmp_path / "run", at=(3,))
    job.run(FOUR)
    states, first = job.read(), tuple(range(1, workers + 1))
    found = Job(tmp_path / "second", strategy=strategy, states=states).run(first).results[1]
    wanted = Job(tmp_path / "third", strategy="all_reduce", states=states, records=True).run(first).results[1]
    assert min(wanted.steps) == job.files()[0].steps > 3
    assert all(map(torch.equal, found.parameters, wanted.parameters))
    assert_same_state(found.state, wanted.state)


def test_a_replicated_job_writes_one_file_which_tiles_go_on_from(tmp_path: Path) -> None:
    job = Job(tmp_path / "run", strategy="all_reduce", at=(3,))
    job.run(FOUR)
    (state,) = job.files()
    assert state.parts == 0 and state.path.endswith(".pt")
    first = (1, 2, 3)
    found = Job(tmp_path / "second", states=job.read()).run(first).results[1]
    wanted = Job(tmp_path / "third", strategy="all_reduce", states=job.read()).run(first).results[1]
    assert all(map(torch.equal, found.parameters, wanted.parameters))
    assert_same_state(found.state, wanted.state)
