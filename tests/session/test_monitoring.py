"""What a worker measures of its steps, and how it travels; requests, and estimators of the variance."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_ray.communication.communicator import Communicator
from elastic_ray.monitoring import GradientNorms, GradientVariance, Monitor, StepMeasures, WorkerMeasures
from elastic_ray.monitoring.measures import FIELDS, packed, unpacked
from elastic_ray.monitoring.monitoring import Monitoring, StepMeter, device_bytes, host_bytes
from elastic_ray.sync.statistics.gradient_meter import GradientMeter
from elastic_ray.sync.statistics.noise_scale import estimate
from elastic_ray.sync.statistics.update_norms import with_update_norms
from placement.goodput.model import NoiseScale

sizes = st.floats(0, 2**30, width=32)


class Clock:
    """Moves when it is told to."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Worker:
    """A meter, in a group of as many as report; each step computes, waits for data and for the others."""

    def __init__(self) -> None:
        self.clock, self.traffic = Clock(), {"all_reduce": 0, "send": 0}
        self.meter = StepMeter(self.clock, lambda: self.traffic)
        self.meter.ask()
        self.meter.start()

    def step(
        self, *, compute_s: float, data_s: float = 0.0, sync_s: float = 0.0, sent: int = 0, ends: bool = True
    ) -> Any:
        self.meter.start_step()
        self.clock.now_s += data_s
        self.meter.waited_for_data(data_s)
        self.clock.now_s += compute_s
        row = self.meter.values(0, 1)
        self.traffic["all_reduce"] += sent
        self.clock.now_s += sync_s
        self.meter.conclude(row, 1)
        if ends:
            self.meter.end_step()
        return self.meter.workers[0]


@given(st.lists(st.builds(WorkerMeasures, **dict.fromkeys(FIELDS, sizes)), min_size=1, max_size=5))
def test_rows_of_all_ranks_add_up_to_each_ones(measures: list[WorkerMeasures]) -> None:
    world = len(measures)
    rows = [torch.tensor(packed(own, rank, world), dtype=torch.float32) for rank, own in enumerate(measures)]
    assert unpacked(torch.stack(rows).sum(0).tolist(), world) == tuple(measures)


@given(st.integers(0, 2**24))
def test_bytes_of_float32_gradients_travel_exactly_to_64_mib(elements: int) -> None:
    own = WorkerMeasures(all_reduce_mib=4 * elements / 2**20)
    [found] = unpacked(torch.tensor(packed(own, 0, 1), dtype=torch.float32).tolist(), 1)
    assert found.all_reduce_mib * 2**20 == 4 * elements


def test_a_step_s_tail_is_told_by_the_next() -> None:
    worker = Worker()
    first = worker.step(compute_s=2.0, data_s=1.0, sync_s=0.5, sent=2**20)
    assert (first.compute_s, first.data_s, first.sync_s, first.step_s, first.wire_mib) == (2.0, 1.0, 0.0, 0.0, 0.0)
    worker.traffic["send"] += 2**19  # between the steps: it counts in the next one
    second = worker.step(compute_s=3.0, sync_s=0.25)
    assert (second.compute_s, second.data_s, second.sync_s, second.wire_mib) == (3.0, 0.0, 0.5, 1.0)
    third = worker.step(compute_s=1.0)
    assert (third.sync_s, third.step_s, third.send_mib, third.all_reduce_mib) == (0.25, 3.25, 0.5, 0.0)
    assert third.wire_mib_per_s == pytest.approx(0.5 / 3.25)
    assert third.host_mib == pytest.approx(host_bytes() / 2**20, rel=0.2) and third.device_mib == 0.0


def test_waits_of_several_reductions_add_up_without_gaps_between() -> None:
    worker = Worker()
    worker.step(compute_s=1.0, sync_s=0.5, ends=False)
    worker.clock.now_s += 10.0
    row = worker.meter.values(0, 1)
    worker.clock.now_s += 0.25
    worker.meter.conclude(row, 1)
    worker.meter.end_step()
    assert worker.step(compute_s=1.0).sync_s == 0.75


def test_nothing_of_another_group_counts() -> None:
    worker = Worker()
    worker.step(compute_s=1.0, sync_s=5.0, sent=2**20)
    worker.step(compute_s=1.0, sync_s=5.0, sent=2**20, ends=False)
    worker.traffic = {"all_reduce": 7 * 2**20}  # what entering it took
    worker.meter.start()
    assert worker.meter.workers == ()
    found = worker.step(compute_s=1.0, sent=2**21)
    assert (found.sync_s, found.step_s, found.wire_mib) == (0.0, 0.0, 0.0)
    assert worker.step(compute_s=1.0).wire_mib == 2.0


def test_nothing_is_read_or_sent_unasked() -> None:
    def never() -> Any:
        raise AssertionError

    meter = StepMeter(never, never)
    meter.start_step()
    meter.end_step()
    assert meter.size(3) == 0 and meter.values(0, 3) == () and not meter.on
    meter.conclude((), 3)
    assert meter.workers == ()


def test_requests_are_joined_to_the_more_frequent_one() -> None:
    monitoring = Monitoring()
    monitoring.ask(Monitor(variance_every=8, noise_every=4))
    assert not monitoring.meter.on
    monitoring.ask(Monitor(variance_every=16, norms_every=2, workers=True))
    assert monitoring.request == Monitor(noise_every=4, variance_every=8, norms_every=2, workers=True)
    assert monitoring.meter.on and monitoring.measures() == StepMeasures()
    monitoring.add_model(lambda: StepMeasures(initial_batch_size=3))
    assert monitoring.measures().initial_batch_size == 3


@pytest.mark.parametrize("name", ["noise_every", "variance_every", "norms_every"])
def test_an_interval_is_a_number_of_steps(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be a whole number of steps or None, 1 or more, but got 0"):
        Monitor(**{name: 0})
    for bad in (2.0, True, "8"):
        with pytest.raises(TypeError, match=f"{name} must be a whole number"):
            Monitor(**{name: bad})


def test_what_follows_from_measures() -> None:
    variance = GradientVariance(step=3, batch_size=8, groups=(3.0, 5.0))
    norms = GradientNorms(step=3, gradients=(3.0, 4.0), updates=(5.0, 12.0))
    assert (variance.total, variance.of_step, norms.gradient, norms.update) == (8.0, 1.0, 5.0, 13.0)
    known = StepMeasures(noise=NoiseScale(sqr=0.5, var=2.0), initial_batch_size=16)
    assert known.noise_batch == 64.0 and StepMeasures().noise_batch is None


def test_memory_of_a_process_is_there() -> None:
    before = host_bytes()
    kept = torch.ones(2**24)
    assert host_bytes() - before > kept.nbytes / 2 and device_bytes() == 0


# -- estimators ------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 6), min_size=2, max_size=4),
    st.integers(0, 2**31),
)
def test_variance_of_unequal_shares_is_weighted_and_adds_up(shares: list[int], seed: int) -> None:
    """(K - 1) var = sum n_i ||g_i - g||^2, whatever the shares are, and sqr + var / N = ||g||^2."""
    generator = torch.Generator().manual_seed(seed)
    found = [torch.randn(7, generator=generator, dtype=torch.float64) for _ in shares]
    count = sum(shares)
    weights = [share / count for share in shares]
    mean = sum((w * g for w, g in zip(weights, found, strict=True)), torch.zeros(7, dtype=torch.float64))
    norms = sum(w * float(g.square().sum()) for w, g in zip(weights, found, strict=True))
    noise = estimate(
        mean_sq_norm=norms, sq_norm_of_mean=float(mean.square().sum()), samples=len(shares), scale=float(count)
    )
    spread = sum(n * float((g - mean).square().sum()) for n, g in zip(shares, found, strict=True))
    assert noise.var * (len(shares) - 1) == pytest.approx(spread)
    assert noise.sqr + noise.var / count == pytest.approx(float(mean.square().sum()))


@pytest.mark.parametrize("shares", [(4, 4), (7, 1), (1, 2, 9), (1, 1, 1, 1, 4)])
def test_the_estimators_are_unbiased_for_equal_and_unequal_shares(shares: tuple[int, ...]) -> None:
    """Over 40,000 draws, within four standard errors."""
    generator, draws, dim = torch.Generator().manual_seed(3), 40_000, 3
    signal = torch.tensor([0.7, -0.2, 0.4], dtype=torch.float64)
    spread = torch.tensor([1.0, 0.5, 2.0], dtype=torch.float64)
    count = sum(shares)
    pieces = [
        signal + spread * torch.randn(draws, dim, generator=generator, dtype=torch.float64) / math.sqrt(share)
        for share in shares
    ]
    mean = sum(share / count * piece for share, piece in zip(shares, pieces, strict=True))
    norms = sum(share / count * piece.square().sum(1) for share, piece in zip(shares, pieces, strict=True))
    of_mean = torch.as_tensor(mean).square().sum(1)
    samples = len(shares)
    variances = (norms - of_mean) * count / (samples - 1)
    signals = (samples * of_mean - norms) / (samples - 1)
    for found, wanted in ((variances, float(spread.square().sum())), (signals, float(signal.square().sum()))):
        error = float(found.std()) / math.sqrt(draws)
        assert abs(float(found.mean()) - wanted) < 4 * error


# -- what rank 0 tells the others ------------------------------------------------------------------------------------


def meters(monitor: Monitor, count: int) -> list[GradientMeter]:
    made = [GradientMeter(lambda: monitor) for _ in range(count)]
    for meter in made:
        meter.rebuilt(2)
    return made


@given(st.integers(0, 2**33), st.booleans(), st.booleans())
def test_all_ranks_know_what_rank_0_sent_in_float32(step: int, variance: bool, norms: bool) -> None:
    monitor = Monitor(variance_every=1 if variance else None, norms_every=1 if norms else None)
    first, other = meters(monitor, 2)
    for meter in (first, other):
        meter.set_shared(first.shared_values())
        assert meter.known.variance is None and meter.known.norms is None
    first.start_step(step)
    if variance:
        first.set_variance(Step(), [3.0, 5.0], [2.0, 1.0], gradients=2)
    if norms:
        first.set_norms([4.0, 9.0])
    first.applied(replicas=2)
    first.updated((0.5, 0.25))
    values = torch.tensor(first.shared_values(), dtype=torch.float32).tolist()
    assert len(values) == first.shared_size(2)
    for meter in (first, other):
        meter.set_shared(values)
        assert meter.known.variance == (
            GradientVariance(step=step, batch_size=8, groups=(8.0, 32.0)) if variance else None
        )
        assert meter.known.norms == (
            GradientNorms(step=step, gradients=(2.0, 3.0), updates=(0.5, 0.25)) if norms else None
        )
    other.own = other.known
    assert other.shared_values() == first.shared_values(), "should it become rank 0"
    first.enter_group()
    assert first.known.variance is None and first.known.norms is None


class Step:
    """Eight samples."""

    count = 8


def test_what_is_not_applied_does_not_count() -> None:
    [meter] = meters(Monitor(variance_every=1, norms_every=1), 1)
    meter.start_step(0)
    meter.set_variance(Step(), [3.0, 5.0], [2.0, 1.0], gradients=2)
    meter.set_norms([4.0, 9.0])
    meter.invalidate()
    assert not meter.wants_update
    meter.applied(replicas=1)
    meter.updated((1.0, 1.0))
    assert meter.known.variance is None and meter.known.norms is None
    meter.start_step(1)
    meter.set_variance(Step(), [3.0, math.inf], [2.0, 1.0], gradients=2)
    meter.applied(replicas=1)
    assert meter.known.variance is None


def test_compressed_gradients_are_measured_in_the_next_plain_step() -> None:
    [meter] = meters(Monitor(variance_every=5, norms_every=48), 1)
    seen = []
    for step in range(0, 200, 32):
        meter.start_step(step)
        seen.append((meter.wants_variance(2, 32, halved=False), meter.wants_norms(32)))
    assert seen == [(True, step % 48 < 32) for step in range(0, 200, 32)]


def test_one_gradient_has_variance_where_its_step_was_halved() -> None:
    [meter] = meters(Monitor(variance_every=5), 1)
    meter.start_step(3)
    assert [meter.wants_variance(*asked, halved=halved) for *asked, halved in ((1, 1, False), (2, 1, False))] == [0, 0]
    assert meter.wants_variance(2, 1, halved=True)
    [unasked] = meters(Monitor(norms_every=5), 1)
    assert not unasked.wants_variance(2, 1, halved=True)


# -- update norms ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"momentum": 0.9},
        {"momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1},
        {"momentum": 0.9, "nesterov": True},
        {"weight_decay": 0.1},
        {"momentum": 0.9, "maximize": True},
    ],
)
def test_an_update_s_norm_is_how_far_parameters_moved(options: dict[str, Any]) -> None:
    torch.manual_seed(2)
    params = [torch.nn.Parameter(torch.randn(4, 3, dtype=torch.float64)) for _ in range(3)]
    groups = [params[:2], params[2:]]
    optimizer = torch.optim.SGD([{"params": groups[0]}, {"params": groups[1], "lr": 0.01}], lr=0.3, **options)
    for step in range(3):
        for p in params:
            p.grad = torch.randn_like(p)
        if step == 1:
            params[0].grad = None
        before = [p.detach().clone() for p in params]
        result, norms = with_update_norms(optimizer, groups, optimizer.step)
        moved = [float((p.detach() - old).square().sum()) for p, old in zip(params, before, strict=True)]
        assert result is None
        assert norms == pytest.approx((math.sqrt(moved[0] + moved[1]), math.sqrt(moved[2])), rel=1e-12)


def test_a_hook_that_moves_parameters_counts() -> None:
    p = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([p], lr=0.1)
    optimizer.register_step_post_hook(lambda *_: p.data.fill_(3.0))
    p.grad = torch.ones(4)
    assert with_update_norms(optimizer, [[p]], optimizer.step)[1] == (4.0,)


# -- bytes -----------------------------------------------------------------------------------------------------------


def test_traffic_counts_what_is_handed_over_not_what_comes() -> None:
    alone = Communicator(None, "g", rank=0, world_size=1, timeout_s=1, form_timeout_s=1, host="127.0.0.1")
    assert set(alone.traffic.values()) == {0}
    assert {f"{name}_mib" for name in alone.traffic} <= {field.name for field in dataclasses.fields(WorkerMeasures)}
