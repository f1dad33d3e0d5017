"""Memory that runs out in a step: it is drawn again in smaller parts, and the loop continues, alone and in groups."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import elastic_ray as er
from elastic_ray.adaptation import Policy, PolicyView, Request, SetBatch
from elastic_ray.loop.api import current_session
from elastic_ray.parallel.out_of_memory import in_parts
from elastic_ray.run.current import set_session
from elastic_ray.steps.out_of_memory import is_out_of_memory
from tests.loop.changing import run_job
from tests.loop.ranks import RankFailedError, Ranks

WIDTH, SAMPLES = 6, 96
MOMENTS = ("forward", "backward", "update")


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    found = Ranks()
    yield found
    found.close()


@pytest.fixture(autouse=True)
def no_session() -> Iterator[None]:
    set_session(None)
    yield
    set_session(None)


class Allocator:
    """Stands in for one of a GPU: has room for so many samples at once, which it counts at one moment of a step.

    Args:
        moment: "forward", "backward" or "update".
        room: samples.
        rank: whose it is; another rank's has room for all.
    """

    def __init__(self, moment: str, room: int, rank: int | None = None) -> None:
        self.moment, self.room, self.rank = moment, room, rank
        self.refused = 0

    def take(self, moment: str, samples: int) -> None:
        """Raise torch.OutOfMemoryError where there is no room."""
        mine = self.rank is None or self.rank == er.get_context().get_world_rank()
        if mine and moment == self.moment and samples > self.room:
            self.refused += 1
            raise torch.OutOfMemoryError(f"CUDA out of memory, as if, at {moment} with {samples} samples")


class _Passes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, memory: Allocator) -> Tensor:
        ctx.memory, ctx.samples = memory, len(x)
        memory.take("forward", len(x))
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.memory.take("backward", ctx.samples)
        return gradients[0], None


class Net(nn.Module):
    """Two layers, and the allocator between them: a backward pass that it ends has reached the second."""

    def __init__(self, memory: Allocator) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.memory, self.seen = memory, 0

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            self.seen = len(x)
        passed: Tensor = _Passes.apply(self.first(x).tanh(), self.memory)
        return self.second(passed)


def rows() -> torch.utils.data.TensorDataset:
    x = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(3))
    return torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))


def trained(
    moment: str,
    room: int,
    batch_size: Any = 32,
    rank: int | None = None,
    strategy: str | None = None,
    *,
    sharded: bool = False,
    epochs: int = 2,
    adapt: dict[str, Any] | None = None,
    policy: Policy | None = None,
    amp: bool = False,
) -> tuple[list[float], int, int, int | None, int]:
    """What the trained model gives, refusals, steps, the bound, and samples that counted."""
    memory = Allocator(moment, room, rank)
    net = Net(memory)
    if sharded:
        er.fully_shard(net)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    optimizer.register_step_pre_hook(lambda *_: memory.take("update", net.seen))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=amp)
    model = er.AdaptiveDataParallel(
        net,
        optimizer,
        scheduler,
        grad_scaler=scaler if amp else None,
        scaling_rule="none",
        schedule="steps",
        strategy=strategy,
        policy=policy,
    )
    loader = er.AdaptiveDataLoader(rows(), batch_size=batch_size, seed=1)
    if adapt is not None:
        loader.autoscale_batch_size(**adapt)
    samples = 0
    for _ in er.remaining_epochs_until(epochs):
        totals = er.Accumulator()
        for x, y in loader:
            optimizer.zero_grad()
            scaler.scale((model(x) - y).square().mean()).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 10.0)
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            totals["samples"] += len(x)
        samples += int(totals["samples"])
    progress = current_session().progress
    refused, memory.room = memory.refused, SAMPLES
    model.eval()
    with torch.no_grad():
        outputs = model(rows().tensors[0])
    return outputs.flatten().tolist(), refused, progress.steps, progress.memory_bound, samples


@pytest.mark.parametrize("amp", [False, True], ids=["plain", "scaled"])
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_loop_alone_goes_on(moment: str, amp: bool) -> None:
    calm = trained(moment, 1000, amp=amp)
    set_session(None)
    outputs, refused, steps, bound, samples = trained(moment, 9, amp=amp)
    assert bound == 8, "32 and 16 samples are refused, 8 fit"
    if moment == "backward":
        assert refused == 3, "once with 32, in both micro-batches with 16"
    assert (steps, samples) == (6, 2 * SAMPLES) == (calm[2], calm[4])
    assert outputs == pytest.approx(calm[0], abs=1e-5)


def same(found: tuple[list[float], int, int, int | None, int], calm: list[float]) -> bool:
    """Whether memory has run out, and nothing else is other than without."""
    outputs, _, steps, bound, samples = found
    return bound == 8 and (steps, samples) == (6, 2 * SAMPLES) and outputs == pytest.approx(calm, abs=1e-5)


@pytest.fixture(scope="module")
def calm() -> list[float]:
    """What the model gives where memory does not run out."""
    set_session(None)
    return trained("forward", 1000)[0]


@pytest.mark.parametrize("moment", ["forward", "backward"])
def test_so_it_does_with_shards(moment: str, calm: list[float]) -> None:
    assert same(trained(moment, 9, sharded=True), calm)


TOGETHER = [
    ("forward", None, 1),
    *(
        pytest.param(moment, strategy, rank, marks=pytest.mark.thorough)
        for moment in ("forward", "backward")
        for strategy in (None, "zero1", "zero2")
        for rank in (1, None)
    ),
]


@pytest.mark.parametrize(("moment", "strategy", "rank"), TOGETHER)
def test_so_it_does_under_torchrun(
    ranks: Ranks, calm: list[float], moment: str, strategy: str | None, rank: int | None
) -> None:
    """On one rank, which the others hear of with the step's own reductions, and on all."""
    assert all(same(found, calm) for found in ranks.run(trained, moment, 9, 32, rank, strategy, world=2))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("moment", "kind"),
    [
        *((moment, kind) for moment in MOMENTS for kind in ("replicated", "zero2")),
        *((moment, "sharded") for moment in ("forward", "backward")),
    ],
)
@pytest.mark.parametrize("rank", [1, None], ids=["one rank", "all"])
def test_so_it_does_in_a_group_that_may_change(moment: str, kind: str, rank: int | None, calm: list[float]) -> None:
    """What has no common way out, as an update that others have made, has the group formed anew."""
    strategy = "zero2" if kind == "zero2" else None
    outcome = run_job(lambda: trained(moment, 9, 32, rank, strategy, sharded=kind == "sharded"), [], first=(1, 2))
    assert len(outcome.results) == 2
    assert all(same(found, calm) for found in outcome.results.values())


class Starved(torch.optim.SGD):
    """Has no room for the state of an update after more than ``room`` samples."""

    def __init__(self, net: Net) -> None:
        super().__init__(net.parameters(), lr=0.01)
        self._net = net

    def step(self, closure: Any = None) -> Any:
        """As the class says."""
        self._net.memory.take("update", self._net.seen)
        return super().step(closure)


@pytest.mark.thorough
def test_updates_of_larger_batches_fail_repeatedly() -> None:
    """One of two workers; the other makes the updates, which tells nothing about the first one's memory."""

    def train() -> tuple[int, int | None, float]:
        net = Net(Allocator("update", 9, 1))
        optimizer = Starved(net)
        model = er.AdaptiveDataParallel(net, optimizer, scaling_rule="none")
        loader, total = er.AdaptiveDataLoader(rows(), batch_size=[(0, 16), (0.5, 64)], seed=1), 0.0
        for _ in er.remaining_epochs_until(4):
            seen = er.Accumulator()
            for x, y in loader:
                optimizer.zero_grad()
                plain(model, optimizer, x, y)
                seen["samples"] += len(x)
            total += seen["samples"]
        return net.memory.refused, current_session().progress.memory_bound, total

    found = run_job(train, [], first=(1, 2)).results.values()
    assert [each[1:] for each in found] == [(8, 4 * SAMPLES)] * 2
    assert sum(each[0] for each in found) == 2, "32 samples, and then 16"


class Doubling(Policy):
    """Sets twice the batch after every second step."""

    def after_step(self, view: PolicyView) -> Request | None:
        """As the class says."""
        return SetBatch(min(2 * view.batch_size, SAMPLES)) if view.step % 2 == 0 else None


@pytest.mark.parametrize("accumulates", [True, False])
def test_a_batch_that_doubles_ends_where_memory_does(accumulates: bool) -> None:
    adapt = {"max_batch_size": SAMPLES, "gradient_accumulation": accumulates}
    _, refused, steps, bound, samples = trained("backward", 20, 8, epochs=6, adapt=adapt, policy=Doubling())
    assert samples == 6 * SAMPLES and bound == 16, "16 fit, 32 do not"
    assert refused == 1, "what a policy holds is not tried once more"
    if accumulates:
        assert steps < 20, "most of them of 96 samples"
    else:
        assert steps == 38, "as large as fits"


def test_so_does_a_ramp() -> None:
    _, refused, _, bound, samples = trained("forward", 20, [(0, 8), (0.5, 64)], epochs=4)
    assert (samples, bound) == (4 * SAMPLES, 16)
    assert refused <= 6, "64 and 32 samples, and parts of 64 and of both micro-batches of 32"


@pytest.mark.parametrize("strategy", ["local_sgd", "powersgd"])
def test_so_it_does_alone_under_other_strategies(strategy: str) -> None:
    assert trained("forward", 20, 32, strategy=strategy)[3:] == (16, 2 * SAMPLES)


def test_an_evaluation_gives_what_it_would_give() -> None:
    memory = Allocator("forward", 9)
    net = Net(memory)
    model = er.AdaptiveDataParallel(net, torch.optim.SGD(net.parameters(), lr=0.1))
    model.eval()
    x = rows().tensors[0]
    with torch.no_grad():
        found = model(x)
    assert memory.refused == 4, "96, 48, 24 and 12 samples"
    memory.room = 1000
    assert torch.equal(found, model(x)) or torch.allclose(found, model(x), atol=1e-6)


def test_outputs_that_parts_do_not_give_are_named() -> None:
    class Mean(torch.nn.Module):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            if len(x) > 4:
                raise torch.OutOfMemoryError("out of memory")
            return x.mean()

    mean = Mean()
    with pytest.raises(torch.OutOfMemoryError, match="its output for a part of a batch differs from that"):
        in_parts(mean, (torch.ones(16),), {}, exact=True)
    assert mean.calls == 1 + 4, "of 8 samples, and the parts that fit"


def evaluated(rank: int | None, room: int = 30) -> list[float]:
    """What a sharded model gives for all rows at once, after an epoch; memory ends on `rank`, or on all."""
    net = Net(Allocator("forward", room, rank))
    for each in (net.first, net.second, net):
        er.fully_shard(each)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    model = er.AdaptiveDataParallel(net, optimizer, scaling_rule="none")
    for _ in er.remaining_epochs_until(1):
        for x, y in er.AdaptiveDataLoader(rows(), batch_size=16, seed=1):
            optimizer.zero_grad()
            (model(x) - y).square().mean().backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            found: list[float] = model(rows().tensors[0]).flatten().tolist()
    return found


def test_ranks_evaluate_a_sharded_model_in_parts_together(ranks: Ranks) -> None:
    calm = evaluated(None, SAMPLES)
    for found in ranks.run(evaluated, None, world=2):
        assert found == pytest.approx(calm, abs=1e-5)
    with pytest.raises(RankFailedError, match="rank 1 runs out of memory in an evaluation, and calls model 0"):
        ranks.run(evaluated, 1, world=2)


def test_what_cannot_be_smaller_is_raised() -> None:
    with pytest.raises(torch.OutOfMemoryError, match="Net runs out of memory with 4 samples"):
        trained("forward", 0, 4)
    set_session(None)
    with pytest.raises(torch.OutOfMemoryError, match="with 8 samples"):
        trained("forward", 4, 16, adapt={"max_batch_size": 32, "local_bsz_bounds": (8, 32)})


@pytest.mark.parametrize(
    ("error", "is_memory"),
    [
        (RuntimeError("CUDA error: out of memory\nCompile with `TORCH_USE_CUDA_DSA`"), True),
        (RuntimeError("CUDA driver error: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), True),
        (RuntimeError("MPS backend out of memory (MPS allocated: 1 GB)"), True),
        (RuntimeError("backend='inductor' raised:\nOutOfMemoryError: CUDA out of memory. Tried to allocate"), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate"), True),
        (RuntimeError("std::bad_alloc"), True),
        (MemoryError(), True),
        (RuntimeError("out of resource: shared memory, Required: 262144, Hardware limit: 232448"), False),
        (RuntimeError("NCCL error: unhandled cuda error. Last error:\nCuda failure 'out of memory'"), False),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (RuntimeError("rank 1 runs out of memory in an evaluation, and calls model 0 for parts of its batch"), False),
        (ValueError("CUDA out of memory"), False),
    ],
)
def test_errors_that_mean_memory(error: Exception, is_memory: bool) -> None:
    assert is_out_of_memory(error) == is_memory


Step = Callable[[Any, Any, Tensor, Tensor], None]


def stepped(net: Net, step: Step, batch_size: int = 32) -> tuple[int, int, int | None]:
    """Refusals, steps and the bound, after an epoch of a loop that runs ``step``."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    model = er.AdaptiveDataParallel(net, optimizer, scaling_rule="none")
    loader = er.AdaptiveDataLoader(rows(), batch_size=batch_size, seed=1)
    for _ in er.remaining_epochs_until(1):
        for x, y in loader:
            optimizer.zero_grad()
            step(model, optimizer, x, y)
    progress = current_session().progress
    return net.memory.refused, progress.steps, progress.memory_bound


def penalised(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> None:
    """A step whose loss contains the gradient with respect to the data."""
    x = x.clone().requires_grad_()
    output = model(x)
    (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    (slope.norm(dim=1) - 1).square().mean().backward()
    optimizer.step()


def in_place(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> None:
    """A step that changes what the model gives."""
    output = model(x)
    output -= y
    output.square().mean().backward()
    optimizer.step()


def recomputed(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> None:
    """A step whose backward pass calls the model once more."""
    (checkpoint(model, x, use_reentrant=False) - y).square().mean().backward()
    optimizer.step()


def from_fields(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> None:
    """A step of a model with a dataclass for its output."""
    (model(x).values - y).square().mean().backward()
    optimizer.step()


class Late(Allocator):
    """Has no room in every second forward pass, which the backward pass makes."""

    passes = 0

    def take(self, moment: str, samples: int) -> None:
        """As the class says."""
        self.passes += moment == "forward"
        if self.passes % 2 == 0:
            super().take(moment, samples)


@dataclasses.dataclass(frozen=True)
class Output:
    """Of a model."""

    values: Tensor
    name: str = "output"


class WithFields(Net):
    """Gives a dataclass."""

    def forward(self, x: Tensor) -> Any:
        """As the class says."""
        return Output(super().forward(x))


@pytest.mark.parametrize(
    ("kind", "allocator", "step"),
    [
        (Net, Allocator, penalised),
        (Net, Allocator, in_place),
        (Net, Late, recomputed),
        (WithFields, Allocator, from_fields),
    ],
    ids=["gradient penalty", "in place", "checkpoint", "dataclass"],
)
def test_loops_get_what_they_ask_in_lost_steps(kind: type[Net], allocator: type[Allocator], step: Step) -> None:
    refused, steps, bound = stepped(kind(allocator("forward", 20)), step)
    assert refused > 0 and (steps, bound) == (3, 16)


class Normed(Net):
    """Normalises by its batch, of which it needs two samples."""

    def __init__(self, memory: Allocator) -> None:
        super().__init__(memory)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """As the class says."""
        return super().forward(self.norm(x))


def plain(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> None:
    """A step as any."""
    (model(x) - y).square().mean().backward()
    optimizer.step()


def test_no_part_is_one_sample_where_two_fit() -> None:
    _, steps, bound = stepped(Normed(Allocator("forward", 3)), plain, 10)
    assert (steps, bound) == (10, 2), "parts of 10 samples in threes would leave one"
    set_session(None)
    with pytest.raises(torch.OutOfMemoryError):
        stepped(Normed(Allocator("forward", 1)), plain, 2)


def test_steps_that_cannot_be_cut_are_raised() -> None:
    """Three samples make no two parts of two."""
    with pytest.raises(torch.OutOfMemoryError, match="at backward with 3 samples"):
        stepped(Normed(Allocator("backward", 2)), plain, 3)


def test_arguments_that_cannot_be_cut_are_named() -> None:
    class Whole(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.reshape(32, WIDTH))

    with pytest.raises(torch.OutOfMemoryError, match="Whole runs out of memory with 32 samples, and cannot be called"):
        stepped(Whole(Allocator("forward", 20)), plain)


@pytest.mark.parametrize("accumulates", [True, False])
def test_the_bound_stays_at_the_minimum(accumulates: bool) -> None:
    adapt = {"max_batch_size": 64, "local_bsz_bounds": (5, 16), "gradient_accumulation": accumulates}
    assert trained("forward", 6, 16, adapt=adapt)[3:] == (5, 2 * SAMPLES)


def trained_by_two_loaders(room: int, rank: int | None = None) -> tuple[list[float], int, int, int | None]:
    """What the model gives after steps of two loaders, of which the first leads; refusals, steps and the bound."""
    memory = Allocator("forward", room, rank)
    net = Net(memory)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    model = er.AdaptiveDataParallel(net, optimizer, scaling_rule="none")
    loaders = [er.AdaptiveDataLoader(rows(), batch_size=size, seed=1) for size in (8, 32)]
    for _ in er.remaining_epochs_until(1):
        for loader in loaders:
            for x, y in loader:
                optimizer.zero_grad()
                plain(model, optimizer, x, y)
    progress, refused, memory.room = current_session().progress, memory.refused, SAMPLES
    model.eval()
    with torch.no_grad():
        outputs = model(rows().tensors[0])
    return outputs.flatten().tolist(), refused, progress.steps, progress.memory_bound


def test_steps_of_every_loader_are_drawn_again(ranks: Ranks) -> None:
    calm = trained_by_two_loaders(SAMPLES)
    set_session(None)
    for found in (trained_by_two_loaders(9), *ranks.run(trained_by_two_loaders, 9, 1, world=2)):
        assert found[2:] == (15, 8) and found[0] == pytest.approx(calm[0], abs=1e-5)


def test_a_step_with_one_update_is_drawn_in_parts() -> None:
    """The first model has its update from a batch that a ramp has enlarged; the second has no room for it."""
    memory = Allocator("forward", 20)
    nets = [Net(Allocator("forward", SAMPLES)), Net(memory)]
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.01) for net in nets]
    models = [er.AdaptiveDataParallel(*each, scaling_rule="none") for each in zip(nets, optimizers, strict=True)]
    loader = er.AdaptiveDataLoader(rows(), batch_size=[(0, 8), (0.5, 64)], seed=1)
    samples, drawn = list[int](), 0
    for _ in er.remaining_epochs_until(2):
        totals = er.Accumulator()
        for x, y in loader:
            drawn += 1
            assert drawn < 100, "the same step is drawn again and again"
            for model, optimizer in zip(models, optimizers, strict=True):
                optimizer.zero_grad()
                plain(model, optimizer, x, y)
            totals["samples"] += len(x)
        samples.append(int(totals["samples"]))
    assert (samples, current_session().progress.memory_bound) == ([SAMPLES, SAMPLES], 16)
    assert memory.refused == 4, "64 samples and 32, and the first halves that lost outputs are made of"


class Similarity(nn.Module):
    """Of each sample with each."""

    def forward(self, x: Tensor) -> Tensor:
        """As the class says."""
        return x @ x.T


@pytest.mark.parametrize(
    ("net", "x"),
    [
        (nn.LSTM(4, 5), torch.randn(12, 3, 4)),  # its first dimension is time
        (nn.BatchNorm1d(3, track_running_stats=False), torch.randn(12, 3)),
        (nn.Softmax(0), torch.randn(12, 3)),
        (Similarity(), torch.randn(12, 3)),
    ],
    ids=["time first", "batch statistics", "softmax", "similarity"],
)
def test_an_evaluation_refuses_parts_that_differ(net: nn.Module, x: Tensor) -> None:
    class Small(nn.Module):
        def forward(self, x: Tensor) -> Any:
            if len(x) > 6:
                raise torch.OutOfMemoryError("out of memory")
            return net(x)

    with pytest.raises(torch.OutOfMemoryError, match=r"differs from that for the whole batch|cannot be called for"):
        in_parts(Small(), (x,), {}, exact=True)


def test_an_evaluation_tolerates_few_labels_changed_by_rounding() -> None:
    class Labels(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if len(x) > 6:
                raise torch.OutOfMemoryError("out of memory")
            found = x.argmax(1)
            found[:, 0] += len(x) == 1
            return found

    assert in_parts(Labels(), (torch.randn(12, 3, 500),), {}, exact=True).shape == (12, 500)
    with pytest.raises(torch.OutOfMemoryError, match="differs from that for the whole batch"):
        in_parts(Labels(), (torch.randn(12, 3, 50),), {}, exact=True)
