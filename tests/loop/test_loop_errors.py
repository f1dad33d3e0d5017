"""What a loop may get wrong, and that the error names the way out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset

import elastic_ray as er
from elastic_ray.batch.reports import LoaderInfo
from elastic_ray.loop.api import current_session
from elastic_ray.membership.worker_side import WorkerMembership
from elastic_ray.run.current import set_session
from elastic_ray.session.session import Session
from elastic_ray.standalone.session import StandaloneController
from tests.loop.changing import Change, run_job
from tests.loop.ranks import RankFailedError, Ranks


@pytest.fixture(autouse=True)
def own_session(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Each test runs alone, whatever the environment says."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    set_session(None)
    yield
    set_session(None)


def numbers(count: int) -> TensorDataset:
    """0..count-1."""
    return TensorDataset(torch.arange(float(count))[:, None])


class Stream(IterableDataset[Any]):
    """Never read."""

    def __iter__(self) -> Any:
        raise AssertionError


def parts() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and its optimizer."""
    model = nn.Linear(1, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


# -- the loader ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dataset", "options", "error", "words"),
    [
        (numbers(0), {"batch_size": 1}, ValueError, "at least 1 sample"),
        (
            numbers(5),
            {"batch_size": 6, "drop_last": True},
            ValueError,
            r"at most the 5 samples .* nothing is left.*got 6",
        ),
        (numbers(5), {"batch_size": 0}, ValueError, "batch_size must be 1 or more"),
        (numbers(5), {"batch_size": 2.0}, TypeError, "batch_size must be a whole number"),
        (numbers(5), {"batch_size": None}, TypeError, "got None: .* items are batches already, pass batch_size="),
        (numbers(5), {"batch_size": 2, "persistent_workers": True}, ValueError, "needs num_workers > 0"),
        (numbers(5), {"batch_sampler": [[0]]}, ValueError, "batch_sampler cannot be set .* whole_batches=True"),
        (
            numbers(5),
            {"batch_sampler": [[0]], "whole_batches": True, "batch_size": 2},
            ValueError,
            "excludes batch_size",
        ),
        (numbers(5), {"batch_size": 2, "sampler": [1], "shuffle": True}, ValueError, "exclude each other: the sampler"),
        (numbers(5), {"batch_size": 2, "generator": torch.Generator()}, ValueError, "pass seed="),
        (numbers(5), {"batch_size": 2, "seed": -1}, ValueError, "seed must be"),
        (Stream(), {"batch_size": 2, "shuffle": True}, ValueError, "shuffle=True cannot be used with an iterable"),
        (Stream(), {"batch_size": 2, "whole_batches": True}, ValueError, "whole_batches=True cannot be used"),
        (numbers(5), {"batch_size": 2, "sampler": iter([1])}, TypeError, "one-time iterator"),
        (object(), {"batch_size": 2}, TypeError, "must have a length"),
    ],
)
def test_a_loader_refuses(dataset: Any, options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        er.AdaptiveDataLoader(dataset, **options)


@pytest.mark.parametrize("name", ["collate_fn", "num_workers", "sampler", "dataset", "batch_size"])
def test_a_loader_s_options_cannot_be_replaced(name: str) -> None:
    loader = er.AdaptiveDataLoader(numbers(5), batch_size=2)
    with pytest.raises(AttributeError, match=f"^{name} cannot be changed .* make another loader"):
        setattr(loader, name, None)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"max_batch_size": 11}, ValueError, "max_batch_size must be at most an epoch's 10 samples"),
        ({"max_batch_size": 3}, ValueError, r"max_batch_size must be at least batch_size \(4\)"),
        ({"max_batch_size": 8, "local_bsz_bounds": (5, 8)}, ValueError, "must not exclude batch_size=4"),
        ({"max_batch_size": 8, "local_bsz_bounds": (1, 2)}, ValueError, "set gradient_accumulation=True"),
        ({"max_batch_size": 8, "local_bsz_bounds": (4, 2)}, ValueError, "least <= largest"),
    ],
)
def test_autoscaling_refuses(arguments: dict[str, Any], error: type[Exception], words: str) -> None:
    loader = er.AdaptiveDataLoader(numbers(10), batch_size=4)
    with pytest.raises(error, match=words):
        loader.autoscale_batch_size(**arguments)


def test_only_one_loader_adapts_and_only_before_training() -> None:
    first, second = (er.AdaptiveDataLoader(numbers(10), batch_size=4) for _ in range(2))
    first.autoscale_batch_size(8)
    with pytest.raises(RuntimeError, match="only one AdaptiveDataLoader"):
        second.autoscale_batch_size(8)
    list(first)
    with pytest.raises(RuntimeError, match="before the first epoch"):
        first.autoscale_batch_size(8)


def elastic_session() -> None:
    """A session as a trainer makes it."""
    membership = WorkerMembership("0", lambda plan, rank: None, lambda generation, cause: None)
    set_session(Session("0", membership, StandaloneController(1, membership.post), elastic=True))


def test_an_elastic_loop_needs_its_epochs() -> None:
    elastic_session()
    loader = er.AdaptiveDataLoader(numbers(4), batch_size=2)
    with pytest.raises(RuntimeError, match=r"inside `for epoch in elastic_ray\.remaining_.*torch's DataLoader"):
        next(iter(loader))


def test_a_train_function_that_never_trains_is_told() -> None:
    elastic_session()
    with pytest.raises(RuntimeError, match=r"must iterate an elastic_ray\.AdaptiveDataLoader"):
        current_session().finish()


@pytest.mark.parametrize(("epochs", "error"), [(-1, ValueError), (1.5, TypeError), (True, TypeError)])
def test_epochs_are_a_count(epochs: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="epochs must be"):
        er.remaining_epochs_until(epochs)


# -- the model -----------------------------------------------------------------------------------------------


def test_the_optimizer_must_hold_the_model_s_parameters() -> None:
    model, optimizer = parts()
    stranger = torch.optim.SGD([*model.parameters(), nn.Parameter(torch.zeros(1))], lr=0.1)
    with pytest.raises(ValueError, match=r"1 of its parameters belong elsewhere.*Are they of the loss .*module\.loss"):
        er.AdaptiveDataParallel(model, stranger)
    partial = torch.optim.SGD([model.weight], lr=0.1)
    with pytest.raises(ValueError, match=r"1 are missing.*requires_grad_\(False\)"):
        er.AdaptiveDataParallel(model, partial)
    with pytest.raises(ValueError, match="must have at least one parameter"):
        er.AdaptiveDataParallel(model.requires_grad_(False), optimizer)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (lambda m, o: (lambda x: x, o), "module must be a torch.nn.Module"),
        (lambda m, o: (m, m.parameters()), "optimizer must be a torch.optim.Optimizer"),
        (lambda m, o: (er.AdaptiveDataParallel(m, o), o), "got one wrapped in AdaptiveDataParallel already"),
        (lambda m, o: (m, o, None, None, 3), "learning-rate rule must be a name or an object"),
    ],
)
def test_a_wrapper_refuses(arguments: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        er.AdaptiveDataParallel(*arguments(*parts()))


def test_an_unknown_rule_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"adamscale, adascale.*but got 'adagrad'"):
        er.AdaptiveDataParallel(*parts(), scaling_rule="adagrad")


def test_a_scheduler_must_be_handed_over() -> None:
    model, optimizer = parts()
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    er.AdaptiveDataParallel(model, optimizer)
    with pytest.raises(ValueError, match="lr_scheduler="):
        next(iter(er.remaining_epochs_until(1)))


def test_a_model_is_converted_before_it_is_wrapped() -> None:
    er.AdaptiveDataParallel(*parts()).double()
    with pytest.raises(ValueError, match=r"weight \(float64 on cpu\), bias .*another dtype.* wrap last"):
        next(iter(er.remaining_epochs_until(1)))


def test_frozen_parts_may_be_converted_after_wrapping() -> None:
    def train() -> torch.Tensor:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(1, 1).requires_grad_(False), nn.Linear(1, 1))
        optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
        wrapped = er.AdaptiveDataParallel(model, optimizer, scaling_rule="none")
        model[0].double()
        model[0].register_forward_hook(lambda module, given, output: output.float())
        for _ in er.remaining_epochs_until(2):
            for (x,) in er.AdaptiveDataLoader(TensorDataset(torch.ones(12, 1).double()), batch_size=4):
                optimizer.zero_grad()
                wrapped(x).square().mean().backward()
                optimizer.step()
        assert model[0].weight.dtype == torch.float64
        return model[1].weight.detach().clone()

    (alone,) = run_job(train).results.values()
    for found in run_job(train, [Change(2, (1, 2))]).results.values():
        torch.testing.assert_close(found, alone)


def test_a_loop_may_keep_its_first_rates_itself() -> None:
    model, optimizer = parts()
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    er.AdaptiveDataParallel(model, optimizer)
    assert next(iter(er.remaining_epochs_until(1))) == 0


def test_models_are_wrapped_before_training() -> None:
    def within_an_epoch() -> None:
        for _epoch in er.remaining_epochs_until(2):
            er.AdaptiveDataParallel(*parts())

    def within_a_step() -> None:
        for _batch in er.AdaptiveDataLoader(numbers(4), batch_size=2):
            er.AdaptiveDataParallel(*parts())

    for wraps in (within_an_epoch, within_a_step):
        with pytest.raises(RuntimeError, match="before the first epoch"):
            wraps()


def test_job_that_wraps_model_per_fold_is_told_way() -> None:
    elastic_session()
    current_session().run.synced = True
    with pytest.raises(RuntimeError, match=r"fold, epoch = divmod\(count, epochs\)"):
        er.AdaptiveDataParallel(*parts())


def test_optimizers_that_call_a_closure_several_times_are_refused() -> None:
    model, _ = parts()
    with pytest.raises(ValueError, match="calls the closure several times"):
        er.AdaptiveDataParallel(model, torch.optim.LBFGS(model.parameters()))


def test_models_that_are_spread_over_devices_already_are_refused() -> None:
    model, optimizer = parts()
    with pytest.raises(TypeError, match="got a DataParallel: each worker trains on one device"):
        er.AdaptiveDataParallel(torch.nn.DataParallel(model), optimizer)


def test_a_scheduler_made_after_wrapping_is_told_the_way() -> None:
    model, optimizer = parts()
    er.AdaptiveDataParallel(model, optimizer)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with pytest.raises(ValueError, match=r"make it before the model is wrapped.*lr_scheduler="):
        list(er.remaining_epochs_until(1))


# -- sums ----------------------------------------------------------------------------------------------------


def test_sums_are_added_to_inside_loops() -> None:
    loader = er.AdaptiveDataLoader(numbers(4), batch_size=2)
    totals = er.Accumulator()
    with pytest.raises(RuntimeError, match="inside a loop over an AdaptiveDataLoader"):
        totals["x"] += 1
    for _batch in loader:
        with pytest.raises(TypeError, match=r"accumulator\['x'\] \+= value"):
            totals["x"] = 1.0
        totals["x"] += 1
    assert dict(totals) == {"x": 2.0}
    totals.reset()
    assert len(totals) == 0


def different_names(_: int) -> None:
    """Each rank adds to a name of its own."""
    loader = er.AdaptiveDataLoader(numbers(8), batch_size=4, shuffle=False)
    totals = er.Accumulator()
    for _epoch in er.remaining_epochs_until(1):
        for _batch in loader:
            totals[f"rank {er.get_context().get_world_rank()}"] += 1.0


def only_one(_: int) -> None:
    """Rank 1 adds nothing."""
    loader = er.AdaptiveDataLoader(numbers(8), batch_size=4, shuffle=False)
    totals = er.Accumulator()
    for _epoch in er.remaining_epochs_until(1):
        for _batch in loader:
            if er.get_context().get_world_rank() == 0:
                totals["x"] += 1.0


@pytest.mark.parametrize("function", [different_names, only_one])
def test_ranks_that_add_to_different_sums_are_told(ranks: Ranks, function: Any) -> None:
    with pytest.raises(RankFailedError, match="must add to the same names"):
        ranks.run(function, 0, world=2)


# -- what the job learns -------------------------------------------------------------------------------------


def test_the_adaptive_loader_speaks_for_the_job() -> None:
    er.AdaptiveDataLoader(numbers(9), batch_size=9, shuffle=False)
    loader = er.AdaptiveDataLoader(numbers(40), batch_size=8)
    loader.autoscale_batch_size(32, local_bsz_bounds=(4, 8), gradient_accumulation=True)
    info = current_session().registry.loaders.info
    assert isinstance(info, LoaderInfo)
    assert (info.dataset_size, info.max_workers) == (40, 8)
