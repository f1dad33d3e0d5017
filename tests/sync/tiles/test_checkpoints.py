"""Automatic checkpoints of optimizer state in tiles: all ranks write, any number of ranks reads, in any strategy."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_ray.checkpoints.run_directory import RunStorage
from elastic_ray.checkpoints.sharded.reading import read_manifest
from elastic_ray.checkpoints.sharded.saver import write_part
from elastic_ray.consensus.consensus import RankConsensus
from elastic_ray.consensus.intents import Announced, Intent
from tests.loop.changing import Change, Kill
from tests.sync.tiles.saving import Job, wait_until
from tests.sync.tiles.trained import Net, assert_same_state

FOUR = (1, 2, 3, 4)


def states_of(trees: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's, as ``state_dict`` gives them."""
    return dict(trees["optimizer/0"]["state"])


@pytest.mark.matrix(every=1)
@pytest.mark.parametrize(
    ("optimizer", "script"),
    [("sgd", []), ("adamw", [Change(2, (1, 2, 3))]), ("adafactor", [])],
    ids=["sgd", "adamw", "adafactor"],
)
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
    for index, kept in expected["state"].items():
        assert list(states_of(trees)[index]) == list(kept), "also their order"


@pytest.mark.matrix(every=1)
@pytest.mark.parametrize(("strategy", "workers"), [("zero1", 3), ("all_reduce", 3), ("zero1", 1)])
def test_job_continues_at_another_size_and_under_another_strategy(tmp_path: Path, strategy: str, workers: int) -> None:
    job = Job(tmp_path / "run", at=(3,))
    job.run(FOUR)
    states, first = job.read(), tuple(range(1, workers + 1))
    found = Job(tmp_path / "second", strategy=strategy, states=states).run(first).results[1]
    wanted = Job(tmp_path / "third", strategy="all_reduce", states=states, records=True).run(first).results[1]
    assert min(wanted.steps) == job.files()[0].steps > 3
    assert all(map(torch.equal, found.parameters, wanted.parameters))
    assert_same_state(found.state, wanted.state)


def test_tiles_continue_from_a_replicated_jobs_part(tmp_path: Path) -> None:
    job = Job(tmp_path / "run", strategy="all_reduce", at=(3,))
    job.run(FOUR)
    (state,) = job.files()
    assert state.parts == 1
    first = (1, 2, 3)
    found = Job(tmp_path / "second", states=job.read()).run(first).results[1]
    wanted = Job(tmp_path / "third", strategy="all_reduce", states=job.read()).run(first).results[1]
    assert all(map(torch.equal, found.parameters, wanted.parameters))
    assert_same_state(found.state, wanted.state)


class Counting(Net):
    """Has a buffer that is different on each rank within a pass."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += x.detach().sum()
        return super().forward(x)


def test_checkpoint_asks_no_rank_in_collective_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What ranks must know of each other for it rides on the step's own sums; buffers are the first rank's."""
    asked: list[Intent] = []
    agree_on = RankConsensus.agree_on

    def noted(self: RankConsensus, what: Announced, payload: Sequence[float] = (), plan: Any = None) -> list[float]:
        asked.append(what.intent)
        return agree_on(self, what, payload, plan)

    monkeypatch.setattr(RankConsensus, "agree_on", noted)
    seen: dict[int, set[float]] = {}

    def between(session: Any, saver: Any, step: int) -> None:
        (buffers,) = session.registry.buffers
        seen.setdefault(step, set()).add(buffers._module.seen.item())
        if session.rank == 0:
            first[step] = buffers._module.seen.item()

    first: dict[int, float] = {}
    job = Job(tmp_path / "run", at=(1,), epochs=1, make=Counting, between=between)
    job.run(FOUR)
    (state,) = job.files()
    assert (state.parts, state.steps) == (4, 5)
    assert asked.count(Intent.BUFFERS) == 4, "that is when the group is entered"
    assert job.read()["model/0"]["seen"].item() == first[5] and len(seen[5]) == 4, "and nothing is made equal for it"


def test_checkpoint_is_saved_by_all_ranks_in_an_evaluation(tmp_path: Path) -> None:
    job = Job(tmp_path / "run", epochs=1, evaluates=True)
    job.run(FOUR)
    (state,) = job.files()
    assert (state.parts, state.steps) == (4, 8)
    assert job.read()["run"]["loader_steps"] > 8


@pytest.mark.thorough
def test_torchs_own_readers_read_it_in_a_plain_process(tmp_path: Path) -> None:
    job = Job(tmp_path / "run", at=(3,))
    job.run(FOUR)
    (state,), trees = job.files(), job.read()
    program = f"""
import sys, torch, torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
dcp_to_torch_save({state.path!r}, {str(tmp_path / "whole.pt")!r})
from torch.nn import LayerNorm, Linear, ModuleDict
model = ModuleDict(dict(first=Linear(13, 57), norm=LayerNorm(57), last=Linear(57, 5)))
loaded = {{"model/0": model.state_dict(), "optimizer/0": {{"state": {{0: {{"exp_avg": torch.zeros(57, 13)}}}}}}}}
dcp.load(loaded, checkpoint_id={state.path!r})
torch.save(loaded, {str(tmp_path / "loaded.pt")!r})
assert not any(name.startswith("elastic_ray") for name in sys.modules)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300, env={**os.environ, "PYTHONPATH": ""})
    whole, loaded = (torch.load(tmp_path / name, weights_only=True) for name in ("whole.pt", "loaded.pt"))
    for name, value in trees["model/0"].items():
        assert torch.equal(whole["model/0"][name], value) and torch.equal(loaded["model/0"][name], value)
    for index, kept in states_of(trees).items():
        for name, value in kept.items():
            assert torch.equal(whole["optimizer/0"]["state"][str(index)][name], value), (index, name)
    assert torch.equal(loaded["optimizer/0"]["state"][0]["exp_avg"], states_of(trees)[0]["exp_avg"])
    assert whole["optimizer/0"]["groups"] == trees["optimizer/0"]["groups"]
    assert whole["run"]["steps"] == trees["run"]["steps"] == state.steps


def test_a_kill_while_others_write_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    job = Job(tmp_path / "run", at=(3, 9), epochs=3, settles_to=10)
    found = job.run(FOUR, [Kill(11, 3, "save", last=True)])  # else others may be called off first, and save later
    assert found.groups == [FOUR, (1, 2, 4)]
    assert [state.steps for state in job.files()] == [7]
    names = sorted(path.name for path in (tmp_path / "run" / "automatic").iterdir() if path.is_dir())
    assert len(names) == 2 and not (tmp_path / "run" / "automatic" / names[1] / "manifest.bin").exists()
    assert len(job.read()["optimizer/0"]["state"]) == 6
    again = Job(tmp_path / "run", at=(8,), states=job.read())
    again.run((1, 2, 3))
    assert [state.steps for state in job.files()] == [12, 7]
    left = {path.name for path in (tmp_path / "run" / "automatic").iterdir() if path.is_dir()}
    assert len(left) == 2 and names[1] not in left, "what nobody has completed is cleaned up"


@pytest.mark.matrix(every=1)
@pytest.mark.parametrize("marked", [False, True], ids=["no directory", "a directory of another run"])
def test_with_disks_per_node_rank_0_writes_all(tmp_path: Path, marked: bool) -> None:
    other = tmp_path / "other disk"
    if marked:
        RunStorage(str(other)).create()
    job = Job(tmp_path / "run", at=(3, 9, 14), epochs=3, elsewhere={"w3": other}, timeout_s=2.0)
    found = job.run(FOUR)
    assert all(state.parts == 1 for state in job.files()) and job.files()
    assert len(job.read()["optimizer/0"]["state"]) == 6
    (text,) = [text for kind, text, _ in found.told if kind == "storage"]
    assert "rank 0 gathers the whole state" in text and "to storage that all nodes share" in text
    assert ("there is no part of ranks 2 after 2 s" if marked else "1 of the ranks cannot write a part") in text


class Silent(RunStorage):
    """Does not answer who looks for it."""

    over = threading.Event()

    def check_reachable(self) -> None:
        assert Silent.over.wait(60.0)


def test_a_node_whose_storage_is_silent_is_not_awaited(tmp_path: Path) -> None:
    silent = tmp_path / "silent"

    def storage(folder: Path) -> RunStorage:
        return Silent(str(folder)) if folder == silent else RunStorage(str(folder))

    def between(session: Any, saver: Any, step: int) -> None:
        looking = saver._parts._looking
        if session.worker != "w3" and looking is not None:
            wait_until(looking.answer.done)
        time.sleep(0.02)  # a step

    job = Job(
        tmp_path / "run", at=(1,), epochs=3, elsewhere={"w3": silent}, storages=storage, timeout_s=0.1, looks=False,
        between=between,
    )  # fmt: skip
    found = job.run(FOUR)
    Silent.over.set()
    (state,) = job.files()
    assert state.parts == 1
    assert "1 of the ranks cannot write a part" in next(text for kind, text, _ in found.told if kind == "storage")


def test_the_first_rank_is_given_no_others_tiles(tmp_path: Path) -> None:
    """Its part is its share, and nothing was gathered on it meanwhile."""
    gathered = []

    def look(session: Any, saver: Any, step: int) -> None:
        (gradients,) = session.registry.gradients
        if step:  # at the beginning there is nothing to gather
            gathered.append(gradients._tiles[0]._gathered)

    job = Job(tmp_path / "run", at=(1,), epochs=1, between=look)
    job.run(FOUR)
    (state,) = job.files()
    assert state.steps == 5 and all(each is None for each in gathered)
    content = read_manifest(job.storage, state)
    elements = [0] * 4
    for tensor in content.tensors:
        if tensor.path[0] in ("model/0", "optimizer/0"):
            for rank, piece in tensor.pieces:
                elements[rank] += piece.length
    assert max(elements) <= 1.25 * sum(elements) / 4


def test_preempted_job_is_saved_by_all_and_continues_exactly(tmp_path: Path) -> None:
    job = Job(tmp_path / "run")
    job.preempt_at(5)
    job.run(FOUR)
    assert job.problems == dict.fromkeys(range(4), "")
    (state,), (saved,) = job.files(), job.saved
    assert (state.parts, state.steps) == (4, 6) and saved.state == state
    wanted = Job(tmp_path / "other", strategy="all_reduce", records=True).run(FOUR).results[1].steps[6]
    assert_same_state({"param_groups": 0, "state": states_of(job.read())}, {**wanted[1], "param_groups": 0})
    found = Job(tmp_path / "second", states=job.read(), records=True).run((1, 2, 3)).results[1]
    assert min(found.steps) == 6


def test_a_death_while_preempted_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    job = Job(tmp_path / "run", at=(1,), timeout_s=2.0)
    job.preempt_at(8)
    job.run(FOUR, [Kill(9, 2, "save", last=True)])  # else others may still be on their way out of the group
    assert "there is no part of ranks 1 after 2 s" in job.problems[0]
    assert [state.steps for state in job.files()] == [5]


def test_training_continues_while_ranks_write_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    further = threading.Event()

    def write_later(*arguments: Any, **options: Any) -> Any:
        assert further.wait(60.0)
        return write_part(*arguments, **options)

    def between(session: Any, saver: Any, step: int) -> None:
        if step == 8:
            further.set()

    monkeypatch.setattr("elastic_ray.checkpoints.sharded.saver.write_part", write_later)
    job = Job(tmp_path / "run", at=(1,), between=between, settles_to=0)
    job.run(FOUR)
    (state,) = job.files()
    assert state.steps == 5
    wanted = Job(tmp_path / "other", strategy="all_reduce", records=True).run(FOUR).results[1].steps[5]
    assert all(map(torch.equal, job.read()["model/0"].values(), wanted[0]))
    assert_same_state({"param_groups": 0, "state": states_of(job.read())}, {**wanted[1], "param_groups": 0})
