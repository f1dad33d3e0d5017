"""What workers measure of each other in real groups: the same on all ranks, however the group changes."""

from __future__ import annotations

import itertools
from statistics import median
from typing import Any

import pytest
import torch
from torch import nn

import elastic_ray as er
from elastic_ray.loop.api import current_session
from elastic_ray.monitoring import Monitor, StepMeasures
from tests.loop.changing import Change, Kill, run_job
from tests.loop.ranks import Ranks
from tests.loop.trainee import each

ALL = Monitor(noise_every=1, variance_every=2, norms_every=3, workers=True)
SAMPLES, BATCH = 96, 12
SLOW_S = 0.1


def rows() -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(7)
    return torch.utils.data.TensorDataset(torch.randn(SAMPLES, 5, generator=generator))


def net() -> nn.Module:
    """Built without torch's generator, which belongs to all threads."""
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 2))
    with torch.no_grad():
        for number, p in enumerate(model.parameters()):
            p.copy_(torch.linspace(-0.5, 0.6, p.numel()).reshape(p.shape) + 0.03 * number)
    return model


Seen = tuple[int, int, StepMeasures]


class Loop:
    """Trains, and tells what is known before each step: step, generation, measures.

    Args:
        strategy: of the model.
        accumulation: most samples at once; None for no accumulation.
        evaluates: whether each step holds a pass over other data.
        models: how many are trained in each step.
    """

    def __init__(
        self, strategy: Any = "all_reduce", *, accumulation: int | None = None, evaluates: bool = False, models: int = 1
    ) -> None:
        self.strategy, self.accumulation, self.evaluates, self.models = strategy, accumulation, evaluates, models

    def __call__(self) -> list[Seen]:
        trained = []
        for _ in range(self.models):
            model = net()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            options: dict[str, Any] = {"scaling_rule": "none", "strategy": self.strategy, "monitor": ALL}
            trained.append((er.AdaptiveDataParallel(model, optimizer, **options), optimizer))
        loader = er.AdaptiveDataLoader(rows(), batch_size=BATCH, seed=3)
        if self.accumulation is not None:
            loader.autoscale_batch_size(SAMPLES, local_bsz_bounds=(1, self.accumulation), gradient_accumulation=True)
        others = er.AdaptiveDataLoader(rows(), batch_size=SAMPLES // 2, seed=3)
        session, seen = current_session(), []
        for _ in er.remaining_epochs_until(2):
            for (x,) in loader:
                if session.ledger.outermost.micro == 0:
                    seen.append((session.progress.steps, session.group.generation, trained[-1][0].measures))
                for wrapped, optimizer in trained:
                    optimizer.zero_grad()
                    wrapped(x).square().mean().backward()
                    optimizer.step()
                if self.evaluates:
                    for (y,) in others:
                        with torch.no_grad():
                            trained[0][0](y)
        return seen


def check(results: list[list[Seen]]) -> list[StepMeasures]:
    """Ranks know the same before each step, of each worker of their group; returns the first one's measures."""
    by_step: dict[tuple[int, int], StepMeasures] = {}
    for result in results:
        for step, generation, measures in result:
            assert by_step.setdefault((step, generation), measures) == measures, (step, generation)
    return [measures for _, _, measures in results[0]]


@pytest.mark.matrix(every=4)
@pytest.mark.thorough
@pytest.mark.parametrize("world", [None, 2, 3])
@pytest.mark.parametrize(
    "loop",
    [Loop(), Loop(accumulation=2), Loop(evaluates=True), Loop(models=2)],
    ids=["plain", "accumulation", "evaluation", "two models"],
)
def test_every_rank_knows_what_each_worker_has_measured(ranks: Ranks, loop: Loop, world: int | None) -> None:
    found = check(each(ranks, world, loop))
    assert found[0].workers == (), "nothing is measured yet"
    for measures in found[1:]:
        assert len(measures.workers) == (world or 1)
        for worker in measures.workers:
            assert worker.compute_s > 0 and worker.data_s > 0 and worker.passed_s >= 0
    for measures in found[3:]:
        for worker in measures.workers:
            assert worker.step_s >= worker.sync_s >= 0 and worker.step_s > 0 and worker.host_mib > 50
            assert (worker.wire_mib > 0) == (world is not None)


@pytest.mark.thorough
def test_times_of_slow_worker_are_told_as_its_own(ranks: Ranks) -> None:
    steps = [measures.workers for measures in check(ranks.run(slow_last, world=2))[3:]]
    # of most steps: a busy machine makes any rank slow now and then
    first, last = ([steps[at][rank] for at in range(len(steps))] for rank in range(2))
    assert median(each.compute_s for each in last) > median(each.compute_s for each in first) + SLOW_S / 2
    assert median(each.sync_s for each in first) > median(each.sync_s for each in last) + SLOW_S / 2


def slow_last() -> list[Seen]:
    """The last rank computes for longer."""
    import time

    loop, session = Loop(), current_session()
    original = nn.Sequential.forward

    def slow(self: Any, x: Any) -> Any:
        if session.rank == session.world_size - 1:
            time.sleep(SLOW_S)  # the last rank is slow
        return original(self, x)

    nn.Sequential.forward = slow
    try:
        return loop()
    finally:
        nn.Sequential.forward = original


def bytes_by_hand() -> tuple[list[float], int, dict[str, int]]:
    """MiB that this rank's steps have handed over, bytes of its gradients' buffers, and what collectives add."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    wrapped = er.AdaptiveDataParallel(model, optimizer, monitor=Monitor(workers=True))
    session, found = current_session(), []
    for _ in er.remaining_epochs_until(1):
        for (x,) in er.AdaptiveDataLoader(rows(), batch_size=BATCH, seed=3):
            optimizer.zero_grad()
            wrapped(x).square().mean().backward()
            found.append(wrapped.measures.workers[session.rank].all_reduce_mib)
            optimizer.step()
        communicator = session.group.communicator
        before = dict(communicator.traffic)
        group, world = communicator.gradients, communicator.world_size
        tensors = [torch.ones(world * size) for size in (10, 20, 30, 40, 50)]
        gathered = torch.empty(world * tensors[1].numel())
        for work in (
            group.all_reduce(tensors[0]),
            group.all_gather(gathered, tensors[1]),
            group.all_to_all(torch.empty_like(tensors[2]), tensors[2]),
            group.reduce(tensors[3], 0),
            group.broadcast(tensors[4], 1),
        ):
            communicator.wait(work)
        added = {name: count - before[name] for name, count in communicator.traffic.items()}
    return found, sum(bucket.flat.nbytes for bucket in wrapped._sync._reducer._buckets), added


def test_bytes_are_those_that_collectives_are_given(ranks: Ranks) -> None:
    for rank, (found, nbytes, added) in enumerate(ranks.run(bytes_by_hand, world=2)):
        # From the third step on nothing is announced any more; the last ones tell of the steps before.
        assert [round(each * 2**20) for each in found[3:]] == [nbytes] * len(found[3:])
        broadcast = 2 * 50 * 4 if rank == 1 else 0
        wanted = {"all_reduce": 80, "all_gather": 160, "all_to_all": 240, "reduce": 320, "broadcast": broadcast}
        assert added == {**wanted, "send": 0}


@pytest.mark.parametrize("strategy", ["all_reduce", "local_sgd", "powersgd"])
def test_measures_are_the_same_however_the_group_changes(strategy: str) -> None:
    dies = Kill(10, 1, "backward" if strategy == "local_sgd" else "allreduce")
    script = [Change(3, (1, 2)), Change(7, (1, 2, 3)), dies, Change(13, (3,))]
    outcome = run_job(Loop(strategy), script)
    assert [len(group) for group in outcome.groups] == [1, 2, 3, 2, 1]
    results = list(outcome.results.values())
    check(results)
    last = outcome.results[3]
    known = {len(measures.workers) for _, _, measures in last}
    assert known >= ({2} if strategy == "local_sgd" else {1, 2})  # the last change comes with its round's end
    for (_, before, _), (step, generation, measures) in itertools.pairwise(last):
        assert generation == before or measures.workers == (), f"step {step}: another group's measures do not count"
    if strategy == "local_sgd":
        assert all(m.variance is None for _, generation, m in last if generation in (2, 3, 4))
    else:
        assert any(measures.variance is not None and measures.norms is not None for _, _, measures in last)
