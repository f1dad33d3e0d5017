"""Optimizer state in tiles that continues from a checkpoint of all ranks: each rank reads what it is to hold."""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import Parameter
from torch.utils.data import TensorDataset

import elastic_ray as er
from elastic_ray.checkpoints.automatic import CorruptStateError, StateFile
from elastic_ray.checkpoints.run_directory import RunStorage
from elastic_ray.checkpoints.sharded.reading import open_checkpoint
from elastic_ray.run.current import session_of_thread
from elastic_ray.state.unread import UnreadTensor
from elastic_ray.sync import Strategy
from elastic_ray.sync.optimizer_tiles.states import StoredStates
from elastic_ray.sync.spec import Owner, Reduce, Rule
from tests.loop.changing import Change, Kill, Outcome, run_job
from tests.sync.sharded_parameters.live import Live
from tests.sync.tiles.saving import Job, go_on_from, read_checkpoint
from tests.sync.tiles.trained import OPTIMIZERS, Net, assert_same_state, data

FOUR = (1, 2, 3, 4)
ALONE = Owner(unit="tile", copies=1)
BY_NAME = Strategy(rules=(Rule(pattern="last.*", sync=Reduce()),), default=Owner(unit="tile"))


@dataclasses.dataclass
class Resumed:
    """Workers that continue from a checkpoint, to the end of the second epoch.

    Attributes:
        states: of the checkpoint, or what gives each worker its own.
        act: called at the beginning of each step, with this, the optimizer, its wrapper and the step.
        first: step in which workers have begun, by worker.
        at_first: what the optimizer's ``state_dict`` was on rank 0 in the first step, if it was asked for there.
    """

    states: dict[str, Any] | Callable[[str], dict[str, Any] | None]
    strategy: Any = "zero1"
    optimizer: str = "adamw"
    act: Callable[[Resumed, Any, Any, int], None] = lambda resumed, optimizer, wrapped, step: None
    first: dict[str, int] = dataclasses.field(default_factory=dict)
    at_first: dict[str, Any] = dataclasses.field(default_factory=dict)

    def run(self, first: Sequence[int], script: Sequence[Change | Kill] = ()) -> Outcome:
        """Train, with these workers at the beginning."""
        return run_job(self.train, script, first=tuple(first))

    def train(self) -> tuple[int, list[torch.Tensor], dict[str, Any]]:
        """On one worker: its rank, parameters and optimizer state at the end."""
        model = Net()
        optimizer = OPTIMIZERS[self.optimizer](model.parameters())
        wrapped = er.AdaptiveDataParallel(model, optimizer, scaling_rule="none", strategy=self.strategy)
        session = go_on_from(self.states)
        for _ in er.remaining_epochs_until(2):
            for x, y in er.AdaptiveDataLoader(data(), batch_size=12, seed=3, drop_last=True):
                step = er.get_context().get_global_step()
                self.first.setdefault(session.worker, step)
                self.act(self, optimizer, wrapped, step)
                optimizer.zero_grad()
                nn.functional.cross_entropy(wrapped(x), y).backward()
                optimizer.step()
        rank = er.get_context().get_world_rank()
        return rank, [p.detach().clone() for p in model.parameters()], copy.deepcopy(optimizer.state_dict())


def saved(folder: Path, **options: Any) -> Job:
    """A job of four workers that has saved."""
    job = Job(folder / "run", at=(3,), **options)
    job.run(FOUR)
    assert job.files()[0].parts == 4
    return job


def check(found: Outcome, wanted: Outcome, *, exact: bool = True) -> None:
    """All workers end with the parameters of others, rank 0 with their state."""
    _, parameters, state = next(each for each in wanted.results.values() if each[0] == 0)
    for rank, own, kept in found.results.values():
        for mine, theirs in zip(own, parameters, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=0 if exact else 1e-5)
        if rank == 0 and exact:
            assert_same_state(kept, state)
            assert [list(each) for each in kept["state"].values()] == [list(each) for each in state["state"].values()]


def replicated(job: Job, optimizer: str = "adamw", *, workers: Sequence[int] = (1, 2, 3), **options: Any) -> Outcome:
    """What training ends with that has read the whole."""
    return Resumed(job.read(), "all_reduce", optimizer, **options).run(workers)


def unread(states: dict[str, Any]) -> list[UnreadTensor]:
    """Of an optimizer."""
    kept = states["optimizer/0"]["state"].values()
    return [value for state in kept for value in state.values() if isinstance(value, UnreadTensor)]


@pytest.mark.matrix(every=8)
@pytest.mark.parametrize(
    ("optimizer", "written", "strategy", "workers", "least_bytes"),
    [
        ("adamw", "zero1", "zero1", 3, 0),
        ("adamw", "zero1", "zero1", 4, 300),  # some of a parameter's are read at once, and some are not
        ("sgd", "zero1", "zero1", 6, 0),
        ("sgd", ALONE, "zero1", 3, 300),
        ("adamw", "zero1", ALONE, 2, 0),
        ("adamw", "zero1", "zero1", 2, 0),  # all hold everything
        ("adamw", "zero1", "zero1", 1, 0),
        ("adamw", "zero1", "all_reduce", 3, 0),
        ("adamw", "zero1", BY_NAME, 3, 0),
        ("adamw", BY_NAME, "zero1", 3, 0),
        ("adamw", "uneven_partitioned_ps", "partitioned_ps", 3, 0),
        ("adamw", "partitioned_ps", "zero1", 3, 0),
        ("adafactor", "zero1", "zero1", 3, 0),  # whole tensors, and states of other shapes
        ("fused adamw", "zero1", "zero1", 3, 0),
    ],
    ids=range(14),
)
def test_tiles_that_are_read_late_are_those_of_whole(
    tmp_path: Path, optimizer: str, written: Any, strategy: Any, workers: int, least_bytes: int
) -> None:
    job = saved(tmp_path, optimizer=optimizer, strategy=written)
    states = job.open(least_bytes=least_bytes)
    assert unread(states) and not any(map(unread_in, states["model/0"].values())), "parameters are read at once"
    resumed, first = Resumed(states, strategy, optimizer), range(1, workers + 1)
    check(resumed.run(first), replicated(job, optimizer, workers=first))
    assert set(resumed.first.values()) == {job.files()[0].steps}


def unread_in(value: Any) -> bool:
    return isinstance(value, UnreadTensor)


@pytest.mark.thorough
def test_sliced_gradients_go_on_as_well(tmp_path: Path) -> None:
    job = saved(tmp_path, strategy="zero2")
    check(Resumed(job.open(), "zero2").run((1, 2, 3)), replicated(job), exact=False)


class Counted:
    """A checkpoint of which it is counted which elements each worker reads."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self.read: collections.Counter[str] = collections.Counter()
        self.elements = sum(torch.Size(each.shape).numel() for each in unread(job.open()))

    def __call__(self, worker: str) -> dict[str, Any]:
        states = self._job.open()
        for state in states["optimizer/0"]["state"].values():
            for key, value in state.items():
                if isinstance(value, UnreadTensor):
                    state[key] = dataclasses.replace(value, elements=functools.partial(self._count, worker, value))
        return states

    def _count(self, worker: str, value: UnreadTensor, start: int, stop: int) -> torch.Tensor:
        self.read[worker] += stop - start
        return value.elements(start, stop)


@pytest.mark.matrix(every=2)
@pytest.mark.parametrize(("strategy", "copies", "workers"), [("zero1", 2, 4), ("zero1", 2, 3), (ALONE, 1, 4)])
def test_a_worker_reads_the_tiles_it_is_to_hold(tmp_path: Path, strategy: Any, copies: int, workers: int) -> None:
    job = saved(tmp_path)
    counted, first = Counted(job), range(1, workers + 1)
    check(Resumed(counted, strategy).run(first), replicated(job, workers=first))
    assert sum(counted.read.values()) == pytest.approx(copies * counted.elements, rel=0.05)
    assert max(counted.read.values()) < 1.4 * copies / workers * counted.elements, "tiles are not all of one size"


def test_rank_0_alone_may_ask_before_the_first_update(tmp_path: Path) -> None:
    job = saved(tmp_path)
    counted, wanted, first = Counted(job), job.read(), job.files()[0].steps

    def act(resumed: Resumed, optimizer: Any, wrapped: Any, step: int) -> None:
        if step == first and er.get_context().get_world_rank() == 0:
            assert wrapped._steps[0].tiles.settled
            resumed.at_first = copy.deepcopy(optimizer.state_dict())
            optimizer.state_dict()["state"][0]["exp_avg"].zero_()  # what it gives is the caller's, and read once
            assert not optimizer.state
        assert bool(wrapped._steps[0].tiles._holder.stored) == (step == first), "it is let go of with the first update"

    resumed = Resumed(counted, act=act)
    check(resumed.run(FOUR), replicated(job, workers=FOUR))
    for index, kept in wanted["optimizer/0"]["state"].items():
        for key, value in kept.items():
            assert torch.equal(resumed.at_first["state"][index][key], value)
    assert sum(counted.read.values()) == pytest.approx(3 * counted.elements, rel=0.05)


@pytest.mark.matrix(every=2)
@pytest.mark.thorough
@pytest.mark.parametrize("behind", [None, 1])
def test_a_worker_with_another_checkpoint_gets_tiles_from_readers(tmp_path: Path, behind: int | None) -> None:
    """One has found no good one, or an older one; it may be the first rank."""
    job = Job(tmp_path / "run", at=(2, 9))
    job.run(FOUR)
    assert len({state.steps for state in job.files()}) == 2

    def act(resumed: Resumed, optimizer: Any, wrapped: Any, step: int) -> None:
        if step == job.files()[0].steps and er.get_context().get_world_rank() == 0:
            resumed.at_first = copy.deepcopy(optimizer.state_dict())

    for other in ("w1", "w2"):

        def states(worker: str, other: str = other) -> dict[str, Any] | None:
            if worker != other:
                return job.open()
            return None if behind is None else job.open(behind)

        resumed = Resumed(states, act=act)
        check(resumed.run((1, 2, 3)), replicated(job))
        kept = {"param_groups": 0, "state": job.read()["optimizer/0"]["state"]}
        assert_same_state({"param_groups": 0, "state": resumed.at_first["state"]}, kept)


@pytest.mark.matrix(every=3)
@pytest.mark.parametrize("worker", [1, 2])
@pytest.mark.parametrize("moment", ["forward", "vote", "publish"])
def test_a_worker_lost_around_the_first_update_costs_nothing(tmp_path: Path, worker: int, moment: Any) -> None:
    job = saved(tmp_path)
    outcome = Resumed(job.open()).run(FOUR, [Kill(job.files()[0].steps, worker, moment)])
    assert len(outcome.groups) == 2 and len(outcome.results) == 3
    check(outcome, replicated(job), exact=False)


@pytest.mark.matrix(every=2)
@pytest.mark.thorough
@pytest.mark.parametrize("workers", [(1, 2, 3), (1, 2)])
def test_the_group_changes_soon_afterwards(tmp_path: Path, workers: tuple[int, ...]) -> None:
    job = saved(tmp_path)
    first = job.files()[0].steps
    script = [Change(first, (1, 2, 3, 4)), Change(first + 3, (2, 4))]
    wanted = Resumed(job.read(), "all_reduce").run(workers, script)
    check(Resumed(job.open()).run(workers, script), wanted)


@pytest.mark.matrix(every=2)
@pytest.mark.parametrize("strategies", [("zero1", "all_reduce"), ("all_reduce", "zero1"), ("zero1", "partitioned_ps")])
def test_the_strategy_is_switched_before_the_first_update(tmp_path: Path, strategies: tuple[str, str]) -> None:
    job = saved(tmp_path)

    def act(resumed: Resumed, optimizer: Any, wrapped: Any, step: int) -> None:
        if step == job.files()[0].steps:
            wrapped.set_strategy(strategies[1])

    check(Resumed(job.open(), strategies[0], act=act).run((1, 2, 3)), replicated(job))


def test_state_that_user_code_loads_takes_place_of_checkpoints(tmp_path: Path) -> None:
    job = saved(tmp_path)
    given = {}
    for index, kept in job.read()["optimizer/0"]["state"].items():
        given[index] = {key: value * 2 if value.dim() else value for key, value in kept.items()}

    def act(resumed: Resumed, optimizer: Any, wrapped: Any, step: int) -> None:
        if step == job.files()[0].steps:
            groups = optimizer.state_dict()["param_groups"]
            optimizer.load_state_dict({"state": copy.deepcopy(given), "param_groups": groups})
            state = copy.deepcopy(optimizer.state_dict())
            if er.get_context().get_world_rank() == 0:
                resumed.at_first = state

    resumed = Resumed(job.open(), act=act)
    check(resumed.run((1, 2, 3)), replicated(job, act=act))
    assert_same_state({"param_groups": 0, "state": resumed.at_first["state"]}, {"param_groups": 0, "state": given})


@pytest.mark.thorough
def test_a_preempted_job_goes_on_by_tiles(tmp_path: Path) -> None:
    job = Job(tmp_path / "run")
    job.preempt_at(5)
    job.run(FOUR)
    resumed = Resumed(job.open())
    check(resumed.run((1, 2, 3)), replicated(job))
    assert set(resumed.first.values()) == {6}


def test_a_rerun_keeps_what_was_not_read_yet(tmp_path: Path) -> None:
    """A worker that runs out of memory before its first group is entered."""
    job = saved(tmp_path)
    counted = Counted(job)

    def rerun(worker: str) -> dict[str, Any]:
        session = session_of_thread()
        assert session is not None
        session.states.resume(counted(worker), loaded=True)
        kept = session.states.capture_to_keep()
        assert len(unread(kept)) == len(unread(job.open())) and not counted.read[worker]
        return kept

    check(Resumed(rerun).run((1, 2, 3)), replicated(job))


def test_a_part_changed_after_the_check_is_an_error(tmp_path: Path) -> None:
    job = saved(tmp_path)
    states, (state,) = job.open(), job.files()
    path = Path(state.path) / "__1_0.distcp"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    for strategy in ("zero1", "all_reduce"):
        with pytest.raises(CorruptStateError, match=r"__1_0\.distcp has changed since it was compared"):
            Resumed(states, strategy).run((1, 2, 3))


def test_states_lie_where_torch_has_them() -> None:
    """A checkpoint is read to the CPU; what counts steps stays there, unless the optimizer is told otherwise."""
    for options, device in ((dict[str, Any](), "cpu"), ({"capturable": True}, "meta")):
        param, other = (Parameter(torch.empty(3, device="meta")) for _ in range(2))
        optimizer = torch.optim.AdamW([param, other], **options)
        late = UnreadTensor(shape=(3,), dtype=torch.float32, elements=lambda start, stop: torch.ones(stop - start))
        for each in (param, other):
            optimizer.state[each] = {"step": torch.tensor(1.0), "exp_avg": torch.ones(3), "exp_avg_sq": late}
        stored = StoredStates(optimizer)
        stored.take([param])
        assert stored and param not in optimizer.state
        assert [value.device.type for value in optimizer.state[other].values()] == [device, "meta", "meta"]
        given = stored.states()[param]
        assert isinstance(given["exp_avg"], UnreadTensor), "no more of it goes to the device than this rank holds"
        assert torch.equal(given["exp_avg"].elements(1, 3), torch.ones(2))
        stored.read()
        assert not stored
        assert [value.device.type for value in optimizer.state[param].values()] == [device, "meta", "meta"]


def _model() -> nn.Module:
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))


def _peak(folder: Path, read: Callable[[RunStorage, StateFile], dict[str, Any]]) -> float:
    """The most bytes that a worker holds until its first step, in whole models; it continues from a checkpoint."""
    job = Job(folder)

    def train() -> float:
        session = session_of_thread()
        assert session is not None
        with Live() as live:
            model = _model()
            whole = sum(p.numel() for p in model.parameters()) * 4
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            wrapped = er.AdaptiveDataParallel(model, optimizer, scaling_rule="none", strategy="zero1")
            session.states.resume(read(job.storage, job.files()[0]), loaded=True)
            peak = 0.0
            for _ in er.remaining_epochs_until(1):
                for (x,) in er.AdaptiveDataLoader(
                    TensorDataset(torch.randn(96, 64, generator=torch.Generator().manual_seed(0))), batch_size=12
                ):
                    peak = peak or live.peak
                    optimizer.zero_grad()
                    wrapped(x).pow(2).mean().backward()
                    optimizer.step()
        return peak / whole

    return float(max(run_job(train, first=FOUR).results.values()))


@pytest.mark.thorough
def test_worker_holds_its_tiles_and_never_the_whole_state(tmp_path: Path) -> None:
    def dataset() -> TensorDataset:
        return TensorDataset(
            torch.randn(96, 64, generator=torch.Generator().manual_seed(0)), torch.zeros(96, dtype=torch.long)
        )

    Job(tmp_path, make=_model, data=dataset, at=(2,)).run(FOUR)
    # The model, and either its parameters in the checkpoint or half of two states; a worker alone has no buckets.
    assert _peak(tmp_path, functools.partial(open_checkpoint, least_bytes=1024)) < 3.6
    assert 4.0 < _peak(tmp_path, read_checkpoint) < 5.5, "as is seen where all is read, once also by rank 0"
