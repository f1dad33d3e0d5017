"""torch.distributed's default group in a train function: the present group's, through every change of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.nn.functional import all_gather as gather_with_gradients
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils.data import TensorDataset

import elastic_ray as er
from elastic_ray.session.default_group import install
from tests.loop.changing import Change, Kill, Outcome, run_job

EPOCHS, SAMPLES, BATCH = 3, 24, 12


@pytest.fixture(autouse=True)
def installed() -> Iterator[None]:
    """As in a worker; the group of tests that make their own is left alone."""
    install()
    yield
    assert dist.get_backend() == "elastic_ray"


def rows() -> TensorDataset:
    return TensorDataset(torch.randn(SAMPLES, 3, generator=torch.Generator().manual_seed(1)))


def train(step: Callable[[], Any] = lambda: None, behind: Callable[[], Any] = lambda: None) -> tuple[list[Any], Any]:
    """What ``step`` returns in each step, and ``behind`` after each epoch; and the parameters."""
    model = nn.Linear(3, 1)
    nn.init.constant_(model.weight, 0.5)
    nn.init.zeros_(model.bias)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped = er.AdaptiveDataParallel(model, optimizer, scaling_rule="none")
    found = []
    for _ in er.remaining_epochs_until(EPOCHS):
        for (x,) in er.AdaptiveDataLoader(rows(), batch_size=BATCH, shuffle=False):
            optimizer.zero_grad()
            wrapped(x).square().mean().backward()
            optimizer.step()
            found.append(step())
        found.append(behind())
    return found, model.weight.detach().clone()


GROWS = [Change(2, (1, 2, 3)), Change(4, (1, 3))]


def job(step: Callable[[], Any] = lambda: None, behind: Callable[[], Any] = lambda: None) -> Outcome:
    return run_job(lambda: train(step, behind), GROWS, first=(1, 2))


def test_rank_size_and_sums_of_the_present_group() -> None:
    def step() -> tuple[int, int, float]:
        size, rank = dist.get_world_size(), dist.get_rank()
        assert dist.get_process_group_ranks(dist.group.WORLD) == list(range(size))
        value = torch.tensor([rank + 1.0])
        dist.all_reduce(value)
        assert value.item() == size * (size + 1) / 2
        return size, er.get_context().get_world_size(), value.item()

    found = job(step).results
    told = [each for each in found[1][0] if each is not None]
    assert {each[0] for each in told} == {2, 3} and all(size == known for size, known, _ in told)


def test_a_joiner_gets_the_results_that_it_has_missed() -> None:
    def behind() -> list[Any]:
        objects: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(objects, {"rank": dist.get_rank()})
        total = torch.ones(2)
        dist.all_reduce(total)
        assert total.tolist() == [len(objects)] * 2
        dist.barrier()
        return objects

    results = job(behind=behind).results
    everywhere = [each for each in results[1][0] if each is not None]
    assert [len(each) for each in everywhere] == [2, 3, 2]
    assert [each for each in results[3][0] if each is not None] == everywhere[-2:]


@pytest.mark.parametrize("moment", ["collective", "after_collective"])
def test_a_loss_in_a_collective_ends_in_no_exception(moment: str) -> None:
    def step() -> float:
        value = torch.ones(1)
        dist.all_reduce(value)
        return value.item()

    found = run_job(lambda: train(step, step), [Kill(3, 2, moment)], first=(1, 2, 3))
    wanted = run_job(lambda: train(step, step), first=(1,)).results[1][1]
    assert {1, 3} == found.results.keys()
    for sums, weight in found.results.values():
        assert sums[-1] == 2
        torch.testing.assert_close(weight, wanted)


def test_collectives_of_a_loss_belong_to_its_step() -> None:
    """A contrastive loss as CLIP's: gathered with gradients, in forward and in backward, whoever is lost meanwhile."""

    def contrastive() -> Tensor:
        model = nn.Linear(3, 2, bias=False)
        nn.init.eye_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        wrapped = er.AdaptiveDataParallel(model, optimizer, scaling_rule="none")
        for _ in er.remaining_epochs_until(EPOCHS):
            for (x,) in er.AdaptiveDataLoader(rows(), batch_size=BATCH, shuffle=False):
                optimizer.zero_grad()
                # torch's sum over ranks of each gathered part's gradient counts once for each rank's loss
                features = torch.cat(list(gather_with_gradients(wrapped(x))))
                (features @ features.T).logsumexp(1).mean().backward()
                optimizer.step()
        return model.weight.detach().clone()

    alone = run_job(contrastive, first=(1,)).results[1]
    for script in ([Change(2, (1, 2, 3)), Change(4, (1, 3))], [Kill(2, 2, "collective")], [Kill(3, 2, "allreduce")]):
        found = run_job(contrastive, script, first=(1, 2))
        for weight in found.results.values():
            torch.testing.assert_close(weight, alone, rtol=1e-4, atol=1e-5)


def test_ranks_that_disagree_are_told_what_each_has_called() -> None:
    def step() -> None:
        if dist.get_rank() == 0:
            dist.all_reduce(torch.ones(3))
        else:
            dist.broadcast(torch.ones(2), 1)

    with pytest.raises(er.errors.RanksDisagreeError, match=r"all_reduce\(SUM, float32\[3\].*broadcast\(float32\[2\]"):
        run_job(lambda: train(step), first=(1, 2))


def test_in_backward_too() -> None:
    def backward() -> None:
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        wrapped = er.AdaptiveDataParallel(model, optimizer)

        def reduced(gradient: Tensor) -> None:
            if dist.get_rank() == 0:
                dist.all_reduce(torch.ones(3))

        for _ in er.remaining_epochs_until(EPOCHS):
            for (x,) in er.AdaptiveDataLoader(rows(), batch_size=BATCH):
                optimizer.zero_grad()
                hidden = x.clone().requires_grad_()
                hidden.register_hook(reduced)
                wrapped(hidden).mean().backward()
                optimizer.step()

    with pytest.raises(er.errors.RanksDisagreeError, match=r"rank 0 makes a collective.*all_reduce\(SUM, float32\[3\]"):
        run_job(backward, first=(1, 2))


def test_functional_collectives_and_dtensors_of_the_present_group() -> None:
    import torch.distributed._functional_collectives as funcol

    def step() -> None:
        size, rank = dist.get_world_size(), dist.get_rank()
        summed = funcol.wait_tensor(funcol.all_reduce(torch.ones(2), "sum", dist.group.WORLD))
        assert summed.tolist() == [size, size]
        mesh = init_device_mesh("cpu", (size,))
        whole = torch.arange(6.0 * 2).view(6, 2)
        cut: DTensor = distribute_tensor(whole, mesh, [Shard(0)])
        assert torch.equal(cut.to_local(), whole.chunk(size)[rank])
        assert torch.equal(cut.full_tensor(), whole)
        assert torch.equal(cut.redistribute(mesh, [Shard(1)]).full_tensor(), whole)
        assert torch.equal(cut.redistribute(mesh, [Replicate()]).to_local(), whole)

    job(step)


def test_results_are_no_change_of_what_autograd_keeps() -> None:
    """As with torch's own groups: DTensors are made of leaves that are broadcast."""

    def step() -> None:
        x = torch.full((3,), 2.0, requires_grad=True)
        y = (x * x).sum()
        dist.broadcast(x, 0)
        y.backward()
        assert x.grad is not None and x.grad.tolist() == [4.0] * 3

    run_job(lambda: train(step), first=(1, 2))


def test_new_groups_have_all_ranks_or_are_refused() -> None:
    def step() -> None:
        group, size = dist.new_group(), dist.get_world_size()
        value = torch.ones(1)
        dist.all_reduce(value, group=group)
        assert value.item() == size == dist.get_world_size(group)
        if size > 2:
            with pytest.raises(ValueError, match="of a part of the ranks is not there in a job"):
                dist.new_group([0, 1])

    job(step)


def test_a_group_of_one_rank_is_alone_ever_after() -> None:
    kept: dict[int, Any] = {}

    def step() -> None:
        size, rank = dist.get_world_size(), dist.get_rank()
        if size == 1:
            return
        groups = [dist.new_group([each]) for each in range(size)]
        assert [each is not dist.GroupMember.NON_GROUP_MEMBER for each in groups] == [r == rank for r in range(size)]
        for group in (groups[rank], kept.setdefault(threading.get_ident(), groups[rank])):
            value = torch.full((2,), rank + 1.0)
            dist.all_reduce(value, group=group)
            dist.broadcast(value, rank, group=group)
            assert value.tolist() == [rank + 1.0] * 2 and (group.rank(), group.size()) == (0, 1)
            assert dist.get_process_group_ranks(group) == [rank]

    job(step)


def test_meshes_with_a_dimension_of_one() -> None:
    def step() -> None:
        size, whole = dist.get_world_size(), torch.arange(6.0 * 2).view(6, 2)
        for shape, cuts in (((size, 1), [Shard(0), Shard(1)]), ((1, size), [Replicate(), Shard(0)])):
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=("outer", "inner"))
            cut: DTensor = distribute_tensor(whole, mesh, cuts)
            assert torch.equal(cut.full_tensor(), whole)
            assert torch.equal(cut.to_local(), whole.chunk(size)[dist.get_rank()])

    job(step)


def test_lists_and_ranks_of_another_size_are_refused() -> None:
    def step() -> None:
        size, value = dist.get_world_size(), torch.zeros(2)
        for count in {1, size - 1, size + 1} - {size}:
            with pytest.raises((RuntimeError, ValueError), match=f"a group of {count} workers"):
                dist.all_gather([torch.zeros(2) for _ in range(count)], value)
        with pytest.raises(ValueError, match=r"float32\[2\] cannot use float32\[3\]"):
            dist.all_gather([torch.zeros(3) for _ in range(size)], value)
        for call in (dist.broadcast, dist.reduce):
            with pytest.raises(ValueError, match=f"names rank {size}, but the present ranks are 0 to {size - 1}"):
                call(value, size)
        with pytest.raises(ValueError, match="has 1"):
            dist.reduce_scatter(torch.zeros(1), [value] * size)
        if size > 1:
            with pytest.raises(ValueError, match="which without splits must divide"):
                dist.all_to_all_single(torch.zeros(size + 1), torch.zeros(size + 1))
        with pytest.raises(ValueError, match="make it alike, or give splits"):
            dist.all_to_all_single(torch.zeros(2 * size), torch.zeros(size))

    job(step)


def test_rank_without_rows_receives_those_of_others() -> None:
    """As of a mixture of experts, none of whose tokens are on that rank."""

    def step() -> None:
        size, first = dist.get_world_size(), dist.get_rank() == 0
        given, found = [2 * first] * size, torch.zeros(2, 3)
        dist.all_to_all_single(found, torch.ones(sum(given), 3), [2] + [0] * (size - 1), given)
        assert found.sum() == 6

    job(step)


@pytest.mark.parametrize(
    ("splits", "says"), [((), r"rows of 12 bytes.*rows of 8"), (([1, 1],) * 2, "rows of 12 bytes")]
)
def test_rows_of_different_sizes_are_named(splits: Any, says: str) -> None:
    def step() -> None:
        width = 3 if dist.get_rank() == 0 else 2
        dist.all_to_all_single(torch.zeros(2, width), torch.ones(2, width), *splits)

    with pytest.raises(er.errors.RanksDisagreeError, match=says):
        run_job(lambda: train(step), first=(1, 2))


def test_splits_that_do_not_fit_are_named() -> None:
    def step() -> None:
        splits = ([2, 1], [1, 2]) if dist.get_rank() == 0 else ([1, 1], [1, 1])
        dist.all_to_all_single(torch.zeros(sum(splits[0])), torch.zeros(sum(splits[1])), *splits)

    with pytest.raises(er.errors.RanksDisagreeError, match=r"rank 0 sends 1 rows to rank 0, which expects 2"):
        run_job(lambda: train(step), first=(1, 2))


def test_operations_of_the_group_s_own_methods() -> None:
    def step() -> None:
        value: Any = torch.tensor([dist.get_rank() + 1.0])
        group: Any = dist.group.WORLD
        group.allreduce(value, dist.ReduceOp.MAX)
        assert value.item() == dist.get_world_size()

    job(step)


def test_a_receiver_names_the_sender() -> None:
    def step() -> None:
        with pytest.raises(ValueError, match=r"recv\(\) needs src= in a job .*name the rank that sends"):
            dist.recv(torch.zeros(1))

    job(step)


def test_to_begin_and_to_end_the_group_does_nothing() -> None:
    def step() -> int:
        dist.init_process_group("nccl")
        dist.destroy_process_group()
        return dist.get_world_size()

    assert {each for each in job(step).results[1][0] if each is not None} == {2, 3}


def test_point_to_point() -> None:
    def step() -> None:
        size, rank = dist.get_world_size(), dist.get_rank()
        found = torch.zeros(5)
        sent = dist.isend(torch.full((5,), float(rank)), (rank + 1) % size)
        dist.recv(found, (rank - 1) % size)
        assert sent is not None
        sent.wait()
        assert found.tolist() == [(rank - 1) % size] * 5

    job(step)


def _never(act: Callable[[int, torch.Tensor], Any]) -> Callable[[], None]:
    def step() -> None:
        if er.get_context().get_global_step() == 1:
            act(dist.get_rank(), torch.zeros(5_000_000))

    return step


@pytest.mark.parametrize(
    ("act", "told"),
    [
        pytest.param(
            lambda rank, tensor: dist.recv(tensor, 0, tag=3) if rank else None,
            r"rank 1 waits to receive a message from rank 0 \(tag 3\)",
            id="not sent",
        ),
        pytest.param(
            lambda rank, tensor: None if rank else dist.send(tensor, 1),
            "rank 0 waits to send a message to rank 1",
            id="not received",
            marks=pytest.mark.thorough,
        ),
        pytest.param(
            lambda rank, tensor: dist.recv(tensor, 1 - rank),
            "rank 0 waits to receive.*; rank 1 waits to receive",
            id="both receive",
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_message_that_never_comes_is_named(act: Any, told: str) -> None:
    begin_s = time.monotonic()
    with pytest.raises(er.errors.RanksDisagreeError, match=told):
        run_job(lambda: train(_never(act)), first=(1, 2))
    assert time.monotonic() - begin_s < 25.0, "not before the group's timeout"


def test_message_that_comes_late_is_waited_for() -> None:
    def act(rank: int, tensor: torch.Tensor) -> None:
        if rank:
            dist.recv(tensor, 0)
            assert tensor[-1] == 1
        else:
            time.sleep(2.5)  # longer than the other one waits in silence
            dist.send(tensor + 1, 1)

    run_job(lambda: train(_never(act)), first=(1, 2))


def test_what_no_reduction_takes_is_refused() -> None:
    with pytest.raises(TypeError, match=r"all_reduce\(op=BAND\) cannot take a tensor of torch\.float32"):
        dist.all_reduce(torch.ones(1), dist.ReduceOp.BAND)


def test_torchmetrics_synchronise_by_themselves() -> None:
    torchmetrics = pytest.importorskip("torchmetrics")

    def behind() -> float:
        metric = torchmetrics.MeanMetric()
        metric.update(float(dist.get_rank()))
        return float(metric.compute())

    means = [each for each in job(behind=behind).results[1][0] if each is not None]
    assert means == [0.5, 1.0, 0.5]


def test_torch_s_checkpoints_in_the_loop(tmp_path: Path) -> None:
    dcp: Any = pytest.importorskip("torch.distributed.checkpoint")

    def behind() -> None:
        size, folder = dist.get_world_size(), tmp_path / str(er.get_context().get_global_step())
        mesh = init_device_mesh("cpu", (size,))
        whole = torch.arange(12.0).view(6, 2)
        dcp.save({"cut": distribute_tensor(whole, mesh, [Shard(0)]), "whole": whole}, checkpoint_id=folder)
        found = {"cut": distribute_tensor(torch.zeros(6, 2), mesh, [Shard(0)]), "whole": torch.zeros(6, 2)}
        dcp.load(found, checkpoint_id=folder)
        cut: Any = found["cut"]
        assert torch.equal(found["whole"], whole) and torch.equal(cut.full_tensor(), whole)

    job(behind=behind)


def test_zero_redundancy_is_refused_by_name() -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = nn.Linear(2, 1)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    with pytest.raises(ValueError, match=r'ZeroRedundancyOptimizer divides its state.*strategy="zero1"'):
        er.AdaptiveDataParallel(model, optimizer)


def test_a_collective_between_gradients_of_two_layers() -> None:
    def two_layers() -> list[int]:
        model, sizes = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1)), list[int]()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        wrapped = er.AdaptiveDataParallel(model, optimizer)

        def reduced(gradient: Tensor) -> None:
            value = torch.ones(1)
            dist.all_reduce(value)
            sizes.append(int(value.item()) - dist.get_world_size())

        model[0].register_forward_hook(lambda layer, given, hidden: hidden.register_hook(reduced) and None)
        for _ in er.remaining_epochs_until(EPOCHS):
            for (x,) in er.AdaptiveDataLoader(rows(), batch_size=BATCH):
                optimizer.zero_grad()
                wrapped(x).mean().backward()
                optimizer.step()
        return sizes

    assert all(set(each) == {0} for each in run_job(two_layers, GROWS, first=(1, 2)).results.values())
