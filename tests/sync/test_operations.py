"""What is done with one bucket, against the plain sum: in threads over real gloo groups."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from elastic_ray.communication.communicator import Communicator
from elastic_ray.sync.engine.reduction import carries_tail, make_operation
from elastic_ray.sync.operations.bucket_operation import BucketOperation
from elastic_ray.sync.operations.buckets import Bucket
from elastic_ray.sync.operations.owing import CompressedOperation
from elastic_ray.sync.operations.partitioned_reduce import partition_axis
from elastic_ray.sync.plan import BucketPlan
from elastic_ray.sync.spec import Owner, Reduce, Sync, Wire
from tests.membership.groups import on_ranks

SHAPES = [(3,), (40, 60), (), (2, 3, 5), (1, 7), (64, 33)]

EXACT: list[Sync] = [
    Reduce(),
    *(Reduce(parts=parts, axis=axis) for parts in (2, 5) for axis in (0, 1, 2, -1)),
    Reduce(parts=3, axis=-1, seed=7),
    Owner(),
]
ROUNDED: list[Sync] = [
    *(Reduce(wire=Wire(dtype=dtype), parts=parts) for dtype in ("bf16", "fp16") for parts in (1, 3)),
    Reduce(wire=Wire(dtype="bf16"), parts=3, axis=1),
    *(Owner(wire=Wire(dtype=dtype)) for dtype in ("bf16", "fp16")),
]
COMPRESSED = [Reduce(wire=Wire(dtype="int8")), Reduce(wire=Wire(rank=2))]


def plan(sync: Sync, owner: int = 0) -> BucketPlan:
    return BucketPlan(params=tuple(range(len(SHAPES))), group=0, sync=sync, owner=owner)


@dataclasses.dataclass
class Side:
    """One rank's bucket and its operation."""

    bucket: Bucket
    operation: BucketOperation
    communicator: Communicator

    def step(self, gradient: Tensor, *, scale: float = 1.0, plain: bool = False) -> Tensor:
        """Add up a pass's gradients; returns what the bucket holds then."""
        if isinstance(self.operation, CompressedOperation):
            self.operation.prepare(plain=plain, scale=scale)
        self.bucket.body.copy_(gradient)
        self._wait(self.operation.launch(self.bucket, self.communicator.gradients))
        finished = 1
        while works := self.operation.next_round(self.bucket, self.communicator.gradients, finished):
            self._wait(works)
            finished += 1
        return self.bucket.body.clone()

    def _wait(self, works: Sequence[Any]) -> None:
        for work in works:
            self.communicator.wait(work)

    def owed(self) -> Tensor:
        """What is owed, without a loss scale."""
        assert isinstance(self.operation, CompressedOperation)
        owed = self.operation.residual.owed
        return torch.zeros_like(self.bucket.body) if owed is None else owed.flat / owed.scale


def gradient(rank: int, step: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Of all shapes, flat; large and small ones."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    sizes = [torch.Size(shape).numel() for shape in SHAPES]
    return torch.cat([10.0**i * torch.randn(size, generator=generator) for i, size in enumerate(sizes)]).to(dtype) / 100


def on_sides(world: int, sync: Sync, work: Callable[[Side], Any], dtype: torch.dtype = torch.float32) -> list[Any]:
    """What `work` returns on each rank; raises what it raises."""

    def run(communicator: Communicator) -> Any:
        params = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in SHAPES]
        side = Side(Bucket(0, 0, params, 0), make_operation(plan(sync, world - 1)), communicator)
        with torch.no_grad():
            return work(side)

    results = on_ranks(world, run)
    for each in results:
        if isinstance(each, Exception):
            raise each
    return results


def total(world: int, step: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.stack([gradient(rank, step).double() for rank in range(world)]).sum(0).to(dtype)


def assert_identical(results: Sequence[Tensor]) -> None:
    for each in results[1:]:
        assert torch.equal(each, results[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("sync", EXACT, ids=str)
@pytest.mark.matrix(every=3)
def test_exact_ones_give_the_sum(sync: Sync, world: int, dtype: torch.dtype) -> None:
    results = on_sides(
        world, sync, lambda side: [side.step(gradient(side.communicator.rank, n, dtype)) for n in range(2)], dtype
    )
    for step in range(2):
        assert_identical([each[step] for each in results])
        coarse = {"rtol": 0.02, "atol": 50.0} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-2}
        torch.testing.assert_close(results[0][step].double(), total(world, step), **coarse)


@pytest.mark.parametrize("sync", ROUNDED, ids=str)
def test_16_bits_round_what_they_add_up(sync: Any) -> None:
    results = on_sides(3, sync, lambda side: side.step(gradient(side.communicator.rank, 0) / 1e4))
    assert_identical(results)
    wanted = total(3, 0) / 1e4
    assert not torch.equal(results[0], wanted.float())
    each = 2.0**-7 if sync.wire.dtype == "bf16" else 2.0**-10
    torch.testing.assert_close(results[0].double(), wanted, rtol=each, atol=3 * each)
    assert float(results[0].norm()) == pytest.approx(float(wanted.norm()), rel=1e-3)


@pytest.mark.parametrize("sync", [*EXACT, *ROUNDED, *COMPRESSED], ids=str)
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.matrix(every=3)
def test_what_is_not_finite_on_one_rank_is_everywhere(sync: Sync, value: float) -> None:
    def work(side: Side) -> tuple[bool, bool]:
        mine = gradient(side.communicator.rank, 0) / 1e4
        mine[-5] = value if side.communicator.rank == 1 else 1.0
        return bool(side.step(mine).isfinite().all()), bool(side.bucket.total().isfinite())

    assert on_sides(3, sync, work) == [(False, False)] * 3


def test_what_fp16_cannot_hold_is_infinite_on_all_ranks() -> None:
    def work(side: Side) -> Tensor:
        return side.step(torch.full_like(side.bucket.body, 7e4 if side.communicator.rank == 0 else 1.0))

    for each in on_sides(2, Reduce(wire=Wire(dtype="fp16")), work):
        assert bool(each.isinf().all())


# -- compression ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("sync", COMPRESSED, ids=str)
def test_what_is_left_out_is_owed_to_last_bit(sync: Sync, world: int, dtype: torch.dtype) -> None:
    steps = 4

    def work(side: Side) -> tuple[Tensor, Tensor]:
        sums = []
        for step in range(steps):
            sums.append(side.step(gradient(side.communicator.rank, step, dtype)).double())
            side.operation.commit()
        return torch.stack(sums), side.owed().double()

    results = on_sides(world, sync, work, dtype)
    assert_identical([sums for sums, _ in results])
    wanted = torch.stack([total(world, step) for step in range(steps)]).sum(0)
    owed = torch.stack([each for _, each in results]).sum(0)
    assert float(owed.norm()) > 1e-3 * float(wanted.norm()), "nothing was left out"
    found = results[0][0].sum(0) + owed
    assert float((found - wanted).norm()) < 1e-6 * float(wanted.norm())


@pytest.mark.parametrize("sync", COMPRESSED, ids=str)
def test_a_voided_step_leaves_everything_as_it_was(sync: Sync) -> None:
    """And one that was not finite, and several passes of which only the step as a whole counts."""

    def work(side: Side, disturbed: bool) -> tuple[Tensor, Tensor]:
        rank = side.communicator.rank
        side.step(gradient(rank, 0))
        side.operation.commit()
        if disturbed:
            side.step(gradient(rank, 1))
            side.step(gradient(rank, 2))
            side.operation.void()
            side.step(torch.full_like(side.bucket.body, float("nan")))
            side.operation.drop()  # type: ignore[attr-defined]
            side.operation.commit()
        found = side.step(gradient(rank, 3))
        side.operation.commit()
        return found, side.owed()

    plain = on_sides(2, sync, lambda side: work(side, False))
    for (found, owed), (wanted, wanted_owed) in zip(
        on_sides(2, sync, lambda side: work(side, True)), plain, strict=True
    ):
        assert torch.equal(found, wanted) and torch.equal(owed, wanted_owed)


@pytest.mark.parametrize("sync", COMPRESSED, ids=str)
def test_passes_of_one_step_follow_each_other(sync: Sync) -> None:
    def work(side: Side) -> tuple[Tensor, Tensor]:
        rank = side.communicator.rank
        sums = side.step(gradient(rank, 0)) + side.step(gradient(rank, 1))
        side.operation.commit()
        return sums.double(), side.owed().double()

    results = on_sides(2, sync, work)
    wanted = total(2, 0) + total(2, 1)
    found = results[0][0] + results[0][1] + results[1][1]
    assert float((found - wanted).norm()) < 1e-6 * float(wanted.norm())


@pytest.mark.parametrize("sync", COMPRESSED, ids=str)
def test_what_is_owed_follows_the_loss_scale(sync: Sync) -> None:
    scales = [1024.0, 1024.0, 2048.0, 512.0]

    def work(side: Side, scaled: bool) -> tuple[Tensor, Tensor]:
        found = []
        for step, scale in enumerate(scales if scaled else [1.0] * len(scales)):
            found.append(side.step(gradient(side.communicator.rank, step) * scale, scale=scale) / scale)
            side.operation.commit()
        return torch.stack(found), side.owed()

    for (found, owed), (wanted, wanted_owed) in zip(
        on_sides(2, sync, lambda side: work(side, True)), on_sides(2, sync, lambda side: work(side, False)), strict=True
    ):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-3)
        torch.testing.assert_close(owed, wanted_owed, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("sync", COMPRESSED, ids=str)
def test_plain_pass_is_exact_and_leaves_what_is_owed(sync: Sync) -> None:
    def work(side: Side) -> tuple[Tensor, Tensor, Tensor]:
        rank = side.communicator.rank
        side.step(gradient(rank, 0))
        side.operation.commit()
        before = side.owed()
        found = side.step(gradient(rank, 1), plain=True)
        side.operation.commit()
        return found, before, side.owed()

    for found, before, after in on_sides(2, sync, work):
        torch.testing.assert_close(found.double(), total(2, 1), rtol=1e-5, atol=1e-2)
        assert torch.equal(before, after) and bool(before.any())


def test_a_sum_of_low_rank_arrives_whole_after_zeros() -> None:
    """A factor that has come out as zero once finds its matrix again."""
    generator = torch.Generator().manual_seed(5)
    left, right = torch.randn(64, 2, generator=generator), torch.randn(2, 33, generator=generator)
    matrix = (left @ right).reshape(-1)

    def work(side: Side) -> Tensor:
        side.step(torch.zeros_like(side.bucket.body))
        side.operation.commit()
        mine = torch.zeros_like(side.bucket.body)
        mine[-matrix.numel() :] = matrix * (0.25 if side.communicator.rank else 0.75)
        return side.step(mine)[-matrix.numel() :]

    for each in on_sides(2, Reduce(wire=Wire(rank=2)), work):
        torch.testing.assert_close(each, matrix, rtol=1e-4, atol=1e-4)


# -- partitions ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "axis", "wanted"), [((4, 5), 0, 0), ((4, 5), 1, 1), ((4,), 1, 0), ((4, 5), 9, 1), ((), 0, 0), ((), -1, 0)]
)
def test_tensor_is_divided_along_wanted_axis_or_its_last(shape: Any, axis: int, wanted: int) -> None:
    assert partition_axis(shape, axis, 0, 0) == wanted


def test_a_seed_chooses_among_axes_that_can_be_divided() -> None:
    chosen = [partition_axis((1, 4, 5), -1, 3, place) for place in range(50)]
    assert set(chosen) == {1, 2} and chosen == [partition_axis((1, 4, 5), -1, 3, place) for place in range(50)]
    assert chosen != [partition_axis((1, 4, 5), -1, 4, place) for place in range(50)]


def test_control_values_ride_on_nothing_that_rounds_or_divides() -> None:
    ways = [*EXACT, *ROUNDED, *COMPRESSED]
    assert [way for way in ways if carries_tail(plan(way), torch.float32)] == [Reduce()]
    assert not carries_tail(plan(Reduce()), torch.bfloat16)
