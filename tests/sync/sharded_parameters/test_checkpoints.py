"""Automatic checkpoints of sharded models: all ranks write the rows that they own, any number of ranks reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.sync.sharded_parameters.sharded import CLOSE, OPTIMIZERS, Net, data, meta_net, sharded_net
from tests.sync.tiles.saving import Job

NAMES = [name for name, _ in Net().named_parameters()]


def job(folder: Path, *, sharded: bool = True, meta: bool = False, **options: Any) -> Job:
    make = (meta_net if meta else sharded_net) if sharded else Net
    return Job(folder, strategy=None, optimizer="adamw", optimizers=OPTIMIZERS, make=make, data=data, **options)


def test_all_ranks_rows_are_the_whole_of_one_step(tmp_path: Path) -> None:
    saving = job(tmp_path / "run", at=(4,))
    saving.run((1, 2, 3))
    (state,) = saving.files()
    assert state.parts == 3, "nothing was gathered"
    sizes = [path.stat().st_size for path in sorted(Path(state.path).glob("*.distcp"))]
    assert max(sizes[1:]) < sum(sizes) / 2
    trees = saving.read()
    wanted = job(tmp_path / "other", sharded=False, records=True).run((1,)).results[1]
    parameters, optimizer = wanted.steps[state.steps]
    found = trees["model/0"]["parameters"]
    assert found.keys() == set(NAMES)
    for name, value in zip(NAMES, parameters, strict=True):
        torch.testing.assert_close(found[name], value, rtol=0, atol=CLOSE)
    states = trees["optimizer/0"]["state"]
    assert states.keys() == optimizer["state"].keys()
    for index, kept in optimizer["state"].items():
        assert list(states[index]) == list(kept), "also their order"
        for key, value in kept.items():
            torch.testing.assert_close(states[index][key], value, rtol=0, atol=CLOSE)


@pytest.mark.parametrize(("workers", "meta"), [((1, 2), False), ((1,), False), ((1, 2), True)])
def test_a_job_goes_on_from_them_at_another_size(tmp_path: Path, workers: tuple[int, ...], meta: bool) -> None:
    saving = job(tmp_path / "run", at=(3,), meta=meta)
    saving.run((1, 2, 3))
    second = job(tmp_path / "second", states=saving.read(), meta=meta).run(workers).results
    wanted = job(tmp_path / "third", sharded=False).run((1,)).results[1]
    whole = next(each for each in second.values() if each.rank == 0)
    for name, value in zip(NAMES, wanted.parameters, strict=True):
        torch.testing.assert_close(whole.model_state[name], value, rtol=0, atol=CLOSE)


def test_a_job_that_is_preempted_saves_its_rows(tmp_path: Path) -> None:
    saving = job(tmp_path / "run", at=(2,))
    saving.preempt_at(7)
    saving.run((1, 2, 3))
    assert not any(saving.problems.values())
    newest = saving.files()[0]
    assert (newest.parts, newest.steps) == (3, 8)
