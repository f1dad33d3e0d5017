"""Automatic checkpoints of sharded models: all ranks write the rows that they own, any number of ranks reads."""

from __future__ import annotations

import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from elastic_ray.checkpoints.automatic import CorruptStateError
from elastic_ray.state.unread import UnreadTensor
from elastic_ray.sync.sharded_parameters.held_shards import placed, rows_of_state
from tests.loop.changing import Kill
from tests.sync.sharded_parameters.sharded import CLOSE, OPTIMIZERS, Net, data, meta_net, sharded_net
from tests.sync.tiles.saving import Job

NAMES = [name for name, _ in Net().named_parameters()]


def job(folder: Path, *, sharded: bool = True, meta: bool = False, **options: Any) -> Job:
    options.setdefault("make", (meta_net if meta else sharded_net) if sharded else Net)
    return Job(folder, strategy=None, optimizer="adamw", optimizers=OPTIMIZERS, data=data, **options)


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


@pytest.mark.matrix(every=2)
@pytest.mark.thorough
@pytest.mark.parametrize(("workers", "meta"), [((1, 2), False), ((1,), False), ((1, 2), True)])
def test_a_job_goes_on_from_them_at_another_size(tmp_path: Path, workers: tuple[int, ...], meta: bool) -> None:
    saving = job(tmp_path / "run", at=(3,), meta=meta)
    saving.run((1, 2, 3))
    second = job(tmp_path / "second", states=saving.read(), meta=meta).run(workers).results
    check(tmp_path, second)


def check(folder: Path, results: dict[int, Any]) -> None:
    """Rank 0 ends with what plain training ends with."""
    wanted = job(folder / "plain", sharded=False).run((1,)).results[1]
    whole = next(each for each in results.values() if each.rank == 0)
    for name, value in zip(NAMES, wanted.parameters, strict=True):
        torch.testing.assert_close(whole.model_state[name], value, rtol=0, atol=CLOSE)
    for index, kept in wanted.state["state"].items():
        assert list(whole.state["state"][index]) == list(kept), "also their order"
        for key, value in kept.items():
            torch.testing.assert_close(whole.state["state"][index][key], value, rtol=0, atol=CLOSE)


@pytest.mark.matrix(every=3)
@pytest.mark.thorough
@pytest.mark.parametrize("meta", [False, True])
@pytest.mark.parametrize(
    ("workers", "least_bytes"), [((1,), 0), ((1, 2, 3, 4), 0), ((1, 2, 3, 4), 100), ((1, 2, 3, 4), 1 << 20)]
)
def test_each_worker_reads_its_rows(tmp_path: Path, workers: tuple[int, ...], least_bytes: int, meta: bool) -> None:
    """All tensors by rows, down to vectors, one row and counts of steps; larger ones alone; none."""
    saving = job(tmp_path / "run", at=(3,), meta=meta)
    saving.run((1, 2, 3))
    states = saving.open(least_bytes=least_bytes)
    unread = [each for each in states["model/0"]["parameters"].values() if isinstance(each, UnreadTensor)]
    assert len(unread) == {0: len(NAMES), 100: 5, 1 << 20: 0}[least_bytes]
    check(tmp_path, job(tmp_path / "second", states=states, meta=meta).run(workers).results)


@pytest.mark.matrix(every=3)
@pytest.mark.thorough
@pytest.mark.parametrize("behind", [None, 1])
@pytest.mark.parametrize("meta", [False, True])
def test_a_worker_with_another_checkpoint_gets_rows_from_readers(
    tmp_path: Path, behind: int | None, meta: bool
) -> None:
    """One has found no good one, or an older one."""
    saving = job(tmp_path / "run", at=(2, 9), meta=meta)
    saving.run((1, 2, 3))
    assert len({state.steps for state in saving.files()}) == 2

    def states(worker: str) -> dict[str, Any] | None:
        if worker != "w2":
            return saving.open()
        return None if behind is None else saving.open(behind)

    check(tmp_path, job(tmp_path / "second", states=states, meta=meta).run((1, 2, 3)).results)


@pytest.mark.matrix(every=2)
@pytest.mark.thorough
@pytest.mark.parametrize("meta", [False, True])
def test_a_worker_lost_while_rows_are_read_costs_nothing(tmp_path: Path, meta: bool) -> None:
    saving = job(tmp_path / "run", at=(3,), meta=meta)
    saving.run((1, 2, 3))
    states, (state,) = saving.open(), saving.files()
    second = job(tmp_path / "second", states=states, meta=meta)
    outcome = second.run((1, 2, 3, 4), [Kill(state.steps, 2, "rows")])
    assert outcome.groups == [(1, 2, 3, 4), (1, 3, 4)]
    check(tmp_path, outcome.results)


def test_a_part_changed_after_the_check_is_an_error(tmp_path: Path) -> None:
    saving = job(tmp_path / "run", at=(3,))
    saving.run((1, 2))
    states, (state,) = saving.open(), saving.files()
    tensor = states["model/0"]["parameters"]["first.weight"]
    wanted = saving.read()["model/0"]["parameters"]["first.weight"]
    assert torch.equal(tensor.rows(1, 6), wanted[1:6]) and torch.equal(tensor.read(), wanted)
    path = Path(state.path) / "__1_0.distcp"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    second = job(tmp_path / "second", states=states)
    with pytest.raises(CorruptStateError, match=r"__1_0\.distcp has changed since it was compared"):
        second.run((1, 2))
    path.unlink()
    with pytest.raises(CorruptStateError, match=r"cannot be read: .*__1_0\.distcp"):
        tensor.rows(6, 7)


@pytest.mark.thorough
def test_a_job_that_is_preempted_saves_its_rows(tmp_path: Path) -> None:
    saving = job(tmp_path / "run", at=(2,))
    saving.preempt_at(7)
    saving.run((1, 2, 3))
    assert not any(saving.problems.values())
    newest = saving.files()[0]
    assert (newest.parts, newest.steps) == (3, 8)


@pytest.mark.matrix(every=2)
@pytest.mark.thorough
@pytest.mark.parametrize("meta", [False, True])
def test_workers_of_shard_groups_read_rows_of_their_place(tmp_path: Path, meta: bool) -> None:
    make = functools.partial(meta_net if meta else sharded_net, shard_size=2)
    saving = job(tmp_path / "run", at=(3,), make=make)
    saving.run((1, 2, 3, 4))
    (state,) = saving.files()
    assert state.parts == 4
    check(tmp_path, job(tmp_path / "second", states=saving.open(), make=make).run((1, 2, 3, 4)).results)


@pytest.mark.thorough
def test_with_disks_per_node_rank_0_gathers_and_saves(tmp_path: Path) -> None:
    saving = job(tmp_path / "run", at=(3, 6), meta=True, elsewhere={"w3": tmp_path / "other"}, timeout_s=1.0)
    found = saving.run((1, 2, 3))
    assert any(kind == "storage" and "rank 0 gathers the whole" in text for kind, text, _ in found.told)
    state = saving.files()[0]
    assert state.parts == 1 and state.steps < 16
    check(tmp_path, job(tmp_path / "second", states=saving.open(), meta=True).run((1, 2, 3, 4)).results)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("option", ["fused", "capturable", None])
def test_states_of_a_checkpoint_go_where_torch_has_them(option: str | None, late: bool) -> None:
    moment, step = torch.zeros(6, 2), torch.tensor(3.0)
    state: dict[str, Any] = {"step": step, "exp_avg": moment, "name": "adamw"}
    if late:
        flat = moment.view(-1)
        state["exp_avg"] = UnreadTensor(
            shape=(6, 2), dtype=moment.dtype, elements=lambda start, stop: flat[start:stop].clone()
        )
    param: Any = SimpleNamespace(local=torch.empty(6, 2, device="meta"), shape=(6, 2))  # takes the place of a GPU
    found = rows_of_state(placed(state, param, {option: True} if option else {}), (6, 2), 1, 4)
    assert (found["exp_avg"].shape, found["exp_avg"].device.type) == ((3, 2), "meta")
    assert found["step"].device.type == ("meta" if option else "cpu") and found["name"] == "adamw"
