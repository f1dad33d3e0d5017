"""One worker takes some steps in two halves where layers do not show its noise: what loops, loaders and models see."""

from __future__ import annotations

import dataclasses
import gc
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset

import elastic_ray as er
from elastic_ray.batch.halving import UNHALVED_STEPS, Halving
from elastic_ray.batch.limits import BatchChoice
from elastic_ray.loop.api import current_session
from elastic_ray.membership.messages import BatchProposal
from elastic_ray.monitoring import Monitor
from tests.loop.changing import run_job
from tests.loop.noisy import GROUPS, changing, job, ratio, trained
from tests.loop.ranks import Ranks
from tests.loop.trainee import Trainee

SAMPLES = 90
torch.set_num_threads(1)


class Counted(IterableDataset[Any]):
    """A stream of 0..SAMPLES-1."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(SAMPLES))


@dataclasses.dataclass
class Batch:
    """One micro-batch as the loop sees it."""

    indices: list[int]
    step: int
    micro_steps: int
    left: int | None
    last: bool


def walked(
    batch: int = 6,
    *,
    stream: bool = False,
    drop_last: bool = False,
    wish: tuple[int, int] | None = None,
    epochs: int = 2,
    workers: int = 0,
    persistent: bool = False,
    most: int = SAMPLES,
) -> list[list[Batch]]:
    """All micro-batches of each epoch; the batch is another after some step where that is wished."""
    options: dict[str, Any] = {"num_workers": workers, "persistent_workers": persistent} if workers else {}
    if not stream:
        options |= {"drop_last": drop_last, "seed": 3}
    data = Counted() if stream else TensorDataset(torch.arange(SAMPLES))
    loader = er.AdaptiveDataLoader(data, batch_size=batch, **options)
    loader.autoscale_batch_size(most, local_bsz_bounds=(1, most))
    session, trainee, epochs_seen = current_session(), Trainee(), []
    session.registry.need_halves()
    for _ in er.remaining_epochs_until(epochs):
        seen: list[Batch] = []
        for drawn in loader:
            x = drawn if stream else drawn[0]
            step = session.ledger.outermost
            assert step is not None
            if wish is not None and session.progress.steps == wish[0]:
                choice = BatchChoice(atomic_bsz=wish[1])
                session.membership.post(BatchProposal(generation=session.membership.generation, batch=choice))
            seen.append(
                Batch(x.tolist(), session.progress.steps, step.micro_steps, loader.batches_left, loader.on_last_batch)
            )
            trainee.train(x)
        epochs_seen.append(seen)
    return epochs_seen


def check_epochs(epochs: list[list[Batch]]) -> None:
    """Each sample once; halves next to each other and as equal as can be; and some steps are halved."""
    for seen in epochs:
        assert sorted(index for each in seen for index in each.indices) == list(range(SAMPLES))
        by_step: dict[int, list[Batch]] = {}
        for each in seen:
            by_step.setdefault(each.step, []).append(each)
        for step in by_step.values():
            assert len(step) == step[0].micro_steps
            assert len({len(each.indices) for each in step}) == 1 or step[0].micro_steps == 2
            assert abs(len(step[0].indices) - len(step[-1].indices)) <= 1
    assert any(each.micro_steps == 2 for seen in epochs for each in seen)


@pytest.mark.parametrize("batch", [4, 5, 6, 7, 16, 45])
@pytest.mark.parametrize("stream", [False, True])
def test_epoch_uses_each_sample_once_though_steps_are_halved(batch: int, stream: bool) -> None:
    epochs = job(lambda: walked(batch, stream=stream))
    check_epochs(epochs)
    steps = [(each.step, each.micro_steps) for seen in epochs for each in seen]
    halving = Halving(since=UNHALVED_STEPS, adapts=True)
    for step, micro_steps in steps:
        samples = sum(len(each.indices) for seen in epochs for each in seen if each.step == step)
        assert micro_steps == 1 + halving.due(step, samples)


@pytest.mark.parametrize("wish", [(3, 11), (4, 8), (8, 5), (9, 12)])
@pytest.mark.parametrize("stream", [False, True])
def test_so_it_does_where_the_batch_changes(wish: tuple[int, int], stream: bool) -> None:
    epochs = job(lambda: walked(6, stream=stream, wish=wish))
    check_epochs(epochs)
    first = min(each.step for seen in epochs for each in seen if len(each.indices) * each.micro_steps >= wish[1] - 1)
    changed = next(each for seen in epochs for each in seen if each.step == max(first, wish[0] + 1) + UNHALVED_STEPS)
    assert changed.micro_steps == 2, "most is to be learnt after a change"


@pytest.mark.matrix(every=3)
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_what_worker_processes_fetch_ahead_is_cut_alike(ranks: Ranks, workers: int, persistent: bool) -> None:
    if persistent and not workers:
        pytest.skip("there are none that could persist")
    for wish in (None, (5, 9)):
        check_epochs(ranks.run(halves_in_workers, workers, persistent, wish))


def halves_in_workers(workers: int, persistent: bool, wish: tuple[int, int] | None) -> list[list[Batch]]:
    return walked(6, workers=workers, persistent=persistent, wish=wish, epochs=3)


def test_a_job_that_keeps_its_batch_halves_none() -> None:
    for fixed in (True, False):
        epochs = run_job(lambda: walked(6), first=(1,), fixed_batch=fixed).results[1]
        assert any(each.micro_steps > 1 for seen in epochs for each in seen) != fixed


def test_a_second_update_on_halves_is_as_large(ranks: Ranks) -> None:
    """Critics, PPO: several updates on one batch. The first half of a batch updates nothing."""
    halved, whole = ranks.run(updates_on_a_batch, True), ranks.run(updates_on_a_batch, False)
    assert halved == pytest.approx(whole, rel=0.35), "not half as large"


def updates_on_a_batch(adapts: bool) -> list[float]:
    """Norms of the gradients of the second updates, at a rate of nearly nothing."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    wrapped = er.AdaptiveDataParallel(model, optimizer)
    x = torch.ones(48, 4) + 0.1 * torch.randn(48, 4, generator=torch.Generator().manual_seed(1))
    loader = er.AdaptiveDataLoader(TensorDataset(x), batch_size=8, seed=0)
    if adapts:
        loader.autoscale_batch_size(16)
    current_session().registry.need_halves()
    norms: list[float] = []
    for _ in er.remaining_epochs_until(1):
        for (rows,) in loader:
            for _update in range(2):
                optimizer.zero_grad()
                wrapped(rows).mean().backward()
                optimizer.step()
            if (step := current_session().ledger.outermost) is not None and step.is_last_micro:
                assert model.weight.grad is not None
                norms.append(float(model.weight.grad.norm()))
    return norms


def test_the_first_half_is_let_go_after_its_step(ranks: Ranks) -> None:
    """What is left of the model's size are its parameters."""
    assert ranks.run(large_tensors, True) == ranks.run(large_tensors, False) == 1


def large_tensors(adapts: bool) -> int:
    """How many storages of a large layer's size there are in the step after one that is halved if it adapts."""
    model = nn.Linear(128, 512)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    wrapped = er.AdaptiveDataParallel(model, optimizer)
    loader = er.AdaptiveDataLoader(TensorDataset(torch.randn(32, 128)), batch_size=8, seed=0)
    if adapts:
        loader.autoscale_batch_size(16)
    current_session().registry.need_halves()
    for _ in er.remaining_epochs_until(1):
        for (x,) in loader:
            optimizer.zero_grad()
            out = wrapped(x)
            if current_session().progress.steps == 3:
                break
            out.square().mean().backward()
            optimizer.step()
    found = (each for each in gc.get_objects() if isinstance(each, torch.Tensor) and each.numel() >= 128 * 512)
    return len({each.untyped_storage().data_ptr() for each in found})


@pytest.mark.parametrize("batch", [1, 2, 3])
def test_a_batch_without_two_halves_is_left_whole(batch: int) -> None:
    for seen in job(lambda: walked(batch)):
        assert sorted(index for each in seen for index in each.indices) == list(range(SAMPLES))
        assert all(each.micro_steps == 1 for each in seen)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("batch", [4, 7, 16])
def test_the_loader_knows_what_is_left_of_a_pass(batch: int, drop_last: bool) -> None:
    full, rest = divmod(SAMPLES, batch)
    for seen in job(lambda: walked(batch, drop_last=drop_last)):
        used = sum(len(each.indices) for each in seen)
        assert used == (full * batch if drop_last else SAMPLES)
        assert len({each.step for each in seen}) == full + (rest > 0 and not drop_last)
        assert [each.last for each in seen] == [False] * (len(seen) - 1) + [True]
        exact = list(range(len(seen) - 1, -1, -1))
        found = [each.left for each in seen]
        if drop_last or not rest:
            assert found == exact
        else:  # the last step may be too small for halves
            assert all(one is not None and 0 <= one - other <= 1 for one, other in zip(found, exact, strict=True))


def lengths() -> list[tuple[int, int]]:
    """The loader's length and the steps of each epoch."""
    loader = er.AdaptiveDataLoader(TensorDataset(torch.arange(SAMPLES)), batch_size=8)
    loader.autoscale_batch_size(64)
    trainee, found = Trainee(), []
    for _ in er.remaining_epochs_until(2):
        before = er.get_context().get_global_step()
        for (x,) in loader:
            trainee.train(x)
        found.append((len(loader), er.get_context().get_global_step() - before))
    return found


def test_the_length_is_in_steps() -> None:
    assert job(lengths) == [(12, 12)] * 2


# -- gradients ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [{}, {"optimizer": "adam"}, {"clip": True}, {"weighed": True}],
    ids=str,
)
def test_the_halves_make_the_step_s_gradient(options: dict[str, Any]) -> None:
    halved = trained(**options)
    whole = trained(adapts=False, **options)
    assert 2 in halved.micro_steps and set(whole.micro_steps) == {1}
    # Once Adam's second moments are warm, noise is in its units, and what was found in others before is dropped.
    dropped = int(options.get("optimizer") == "adam")
    assert whole.noise[-1] is None and halved.updates[-1] == halved.micro_steps.count(2) - dropped
    torch.testing.assert_close(halved.parameters, whole.parameters, rtol=1e-9, atol=1e-12)
    ratio(halved.noise[-1])


KINDS: list[dict[str, Any]] = [
    {"amp": True},
    {"strategy": "zero1"},
    {"strategy": "zero2"},
    {"strategy": "int8"},
    {"strategy": "bf16"},
    {"strategy": "partitioned_ar"},
    {"sharded": True},
]


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_every_kind_of_model_finds_the_same_noise(kind: dict[str, Any], optimizer: str) -> None:
    """As many estimates, and the same numbers, as a plain replica."""
    found, plain = trained(optimizer=optimizer, **kind), trained(optimizer=optimizer)
    assert found.updates == plain.updates
    assert found.updates[UNHALVED_STEPS] == 1, "the first step that may be is halved"
    assert found.micro_steps == plain.micro_steps
    for one, other in zip(found.noise[UNHALVED_STEPS:], plain.noise[UNHALVED_STEPS:], strict=True):
        assert one is not None and other is not None
        # Preconditioners are bfloat16, and made of what rounding left of the same gradients.
        assert one.sqr == pytest.approx(other.sqr, rel=1e-4 if optimizer == "sgd" else 0.03)
        assert one.var == pytest.approx(other.var, rel=1e-4 if optimizer == "sgd" else 0.03)
    torch.testing.assert_close(found.parameters, plain.parameters, rtol=1e-5, atol=1e-7)


def test_a_model_that_gives_no_statistics_has_no_halves() -> None:
    found = trained(strategy="local_sgd", adapts=False, monitor=Monitor(noise_every=1))
    assert set(found.micro_steps) == {1} and found.noise[-1] is None


def test_frozen_parameters_are_no_part_of_it() -> None:
    found = trained(frozen=True)
    ratio(found.noise[-1])
    assert found.updates[-1] == found.micro_steps.count(2)


def test_model_with_batch_norm_has_no_one_sample_half() -> None:
    found = trained(norm=True)
    ratio(found.noise[-1])
    found = trained(norm=True, batch=3)
    assert set(found.micro_steps) == {1} and found.noise[-1] is None
    found = trained(norm=True, batch=31)  # the last step of an epoch has three samples
    assert 2 in found.micro_steps and found.micro_steps[3::4] == [1, 1]


def test_loss_that_is_sum_has_same_noise_to_signal() -> None:
    """At equal weights: its gradient is that of the mean times the samples of a half."""
    quiet = 0, UNHALVED_STEPS
    mean, total = (trained(epochs=1, batch=24, quiet=quiet, sums=sums).noise[UNHALVED_STEPS] for sums in (False, True))
    assert mean is not None and total is not None
    assert total.var == pytest.approx(mean.var * 12**2) and total.sqr == pytest.approx(mean.sqr * 12**2)


@pytest.mark.parametrize("amp", [False, True])
def test_a_step_that_is_not_finite_says_nothing(amp: bool) -> None:
    found = trained(bad=(2, 6), amp=amp, nonfinite="warn" if amp else "skip")
    assert found.parameters.isfinite().all()
    ratio(found.noise[-1])
    assert found.updates[-1] < found.micro_steps.count(2), "the halved steps without a number are left out"
    assert all(noise is None or math.isfinite(noise.var + noise.sqr) for noise in found.noise)


@pytest.mark.parametrize("quiet", [(0, 6), (5, 14), (0, 100)])
def test_a_gradient_of_zero_for_a_while_says_nothing(quiet: tuple[int, int]) -> None:
    found = trained(quiet=quiet)
    zero = range(quiet[0], min(quiet[1], len(found.noise)))
    if quiet[0] == 0:
        assert all(found.noise[number] is None for number in zero)
    else:
        assert {found.updates[number] for number in zero} == {found.updates[quiet[0] - 1]}
    if quiet[1] < len(found.noise):
        ratio(found.noise[-1])


@pytest.mark.parametrize("every", [1, 5])
def test_monitor_has_halves_made_of_batch_that_is_fixed(every: int) -> None:
    found = trained(adapts=False, monitor=Monitor(noise_every=every))
    assert found.micro_steps == [
        2 if number >= UNHALVED_STEPS and number % every == 0 else 1 for number in range(len(found.micro_steps))
    ]
    assert found.updates[-1] == found.micro_steps.count(2)
    assert found.measures.noise == found.noise[-1] and found.measures.noise_batch is not None
    torch.testing.assert_close(found.parameters, trained(adapts=False).parameters, rtol=1e-9, atol=1e-12)


# -- changes of the group ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("script", list(GROUPS))
def test_the_estimate_outlives_a_change_of_the_group(script: str) -> None:
    first = (1,) if script.startswith("1 ") else (1, 2)
    found = job(changing, GROUPS[script], first)
    assert {world for world, *_ in found} == {1, 2}
    updates = [number for *_, number, _ in found]
    assert updates == sorted(updates), "nothing is begun anew"
    for (world, micro_steps, number, noise), before in zip(found[1:], found, strict=False):
        assert micro_steps <= (2 if world == 1 else 1)
        if world != before[0] and before[3] is not None:
            assert noise is not None and 0.4 < noise.var / before[3].var < 2.5
            assert number <= before[2] + 2
    assert any(micro_steps == 2 for world, micro_steps, *_ in found if world == 1), "one worker alone measures it, too"
    assert found[-1][3] is not None


def added_up(adapts: bool, every: int, by_number: bool) -> tuple[list[list[float]], int]:
    """Parameters after each update of a loop that adds gradients up over several steps; how many steps were halved."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    wrapped = er.AdaptiveDataParallel(model, optimizer, scaling_rule="none")
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(SAMPLES, 3, generator=generator).double(), torch.arange(SAMPLES) % 2)
    loader = er.AdaptiveDataLoader(data, batch_size=6, seed=3)
    if adapts:
        loader.autoscale_batch_size(7)
    current_session().registry.need_halves()
    found, halved, number = list[list[float]](), 0, 0
    for _ in er.remaining_epochs_until(3):
        for x, y in loader:
            number += 1
            step = current_session().ledger.outermost
            assert step is not None
            halved += step.halved
            nn.functional.cross_entropy(wrapped(x), y).backward()
            if (number if by_number else current_session().progress.steps + 1) % every == 0:
                optimizer.step()
                optimizer.zero_grad()
                found.append(model.weight.detach().flatten().tolist())
    return found, halved


@pytest.mark.matrix(every=3)
@pytest.mark.thorough
@pytest.mark.parametrize("by_number", [False, True])
@pytest.mark.parametrize("every", [2, 3])
def test_a_loop_that_adds_up_gradients_has_no_halves(ranks: Ranks, every: int, by_number: bool) -> None:
    found, halved = ranks.run(added_up, True, every, by_number)
    assert halved == 0
    assert found == ranks.run(added_up, False, every, by_number)[0]


def held_bytes() -> int:
    """Of all tensors that Python knows, each storage once."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if type(each) in (torch.Tensor, nn.Parameter)]
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}
    return sum(storages.values())


@pytest.mark.parametrize(("adapts", "halves"), [(False, True), (True, True), (True, False)])
def test_no_copy_of_a_gradient_outlives_its_step(adapts: bool, halves: bool) -> None:
    model = nn.Sequential(nn.Linear(64, 4096), nn.Linear(4096, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    wrapped = er.AdaptiveDataParallel(model, optimizer)
    loader = er.AdaptiveDataLoader(TensorDataset(torch.randn(1024, 64)), batch_size=32, seed=0)
    if adapts:
        loader.autoscale_batch_size(64)
    if halves:
        current_session().registry.need_halves()
    before, halved = held_bytes(), False
    for _ in er.remaining_epochs_until(2):
        for (x,) in loader:
            step: Any = current_session().ledger.outermost
            halved = halved or step.halved
            optimizer.zero_grad()
            wrapped(x).square().mean().backward()
            optimizer.step()
    optimizer.zero_grad()
    assert halved == (adapts and halves)
    assert held_bytes() - before < 0.02 * sum(4 * p.numel() for p in model.parameters())
