"""Models that are built on the meta device: what they begin with, and what no worker ever holds."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import elastic_ray as er
from elastic_ray.communication.communicator import CommunicationFailedError
from elastic_ray.consensus.intents import RanksDisagreeError
from elastic_ray.run.current import session_of_thread
from elastic_ray.state.layout import ReplicasDifferError
from elastic_ray.sync.checks import StrategyError
from elastic_ray.sync.sharded_parameters.deferred_initialisation import initialise
from tests.loop.changing import Change, Kill, run_job
from tests.sync.sharded_parameters.live import Live
from tests.sync.sharded_parameters.sharded import Case, Net, check, data, meta_net, sharded_net


def test_a_model_without_memory_trains_as_one_in_memory() -> None:
    check(Case(meta=True), [Change(3, (1, 2, 3, 4)), Change(7, (2, 3, 4))], (1, 2))


@pytest.mark.matrix(every=1)
@pytest.mark.parametrize("joins", [(), (5,)])
def test_first_group_that_breaks_while_rows_move_begins_again(joins: tuple[int, ...]) -> None:
    """Each has made rows by then, which lie with no second worker."""
    found = check(Case(meta=True), [Kill(0, 2, "rows", joins=joins)], (1, 2, 3, 4))
    assert found.groups == [(1, 2, 3, 4), (1, 3, 4, *joins)]


def test_what_an_optimizer_keeps_from_its_start_is_cut() -> None:
    check(Case(meta=True, optimizer="adagrad"), [Kill(5, 2, "vote", joins=(4,))], (1, 2, 3))


class _Angles(nn.Module):
    """Holds a buffer alone, which is not saved."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("angles", torch.empty(width), persistent=False)
        if not self.angles.is_meta:
            self.reset_parameters()

    def reset_parameters(self) -> None:
        self.angles = 1.0 / 100 ** (torch.arange(len(self.angles)) / len(self.angles))  # type: ignore[has-type]

    def forward(self, x: Tensor) -> Tensor:
        return x + self.angles


class _Tied(nn.Module):
    """Embedding and head share a parameter; the head's bias is its own."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.angles, self.norm = nn.Embedding(11, 6), _Angles(6), nn.BatchNorm1d(6)
        self.body = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 6))
        self.head = nn.Linear(6, 11)
        self.head.weight = self.words.weight

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.body(self.norm(self.angles(self.words(words)))))


def _in_memory(seed: int) -> _Tied:
    torch.manual_seed(seed)
    return _Tied()


@pytest.mark.parametrize("workers", [(1,), (1, 2, 3, 4)])
def test_it_begins_with_the_seeds_bits_at_any_size(workers: tuple[int, ...]) -> None:
    wanted = _in_memory(5)
    torch.manual_seed(5)

    def trained() -> tuple[dict[str, Tensor], Tensor]:
        with torch.device("meta"):
            model = _Tied()
        er.fully_shard(model.body, device="cpu")
        er.fully_shard(model, device="cpu")
        assert model.head.weight is model.words.weight
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        wrapped = er.AdaptiveDataParallel(model, optimizer, scaling_rule="none")
        loader = er.AdaptiveDataLoader(TensorDataset(torch.arange(12) % 11), batch_size=12)
        for _ in er.remaining_epochs_until(1):
            for (words,) in loader:
                begun = {key: value.clone() for key, value in model.state_dict().items()}
                wrapped(words).logsumexp(1).mean().backward()
                optimizer.step()
        return begun, model.angles.angles

    for worker, (begun, angles) in run_job(trained, first=workers).results.items():
        assert torch.equal(angles, wanted.angles.angles)
        for key, value in wanted.state_dict().items():
            if worker == 1 or key in dict(wanted.named_buffers()):
                assert torch.equal(begun[key], value), key


def _peaks(device: str, workers: int) -> tuple[float, float]:
    """Until the first step begins, and until its update, in whole models; the largest of a worker's."""

    def trained() -> tuple[float, float]:
        with Live() as live:
            with torch.device(device):
                model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(16)))
            whole = sum(p.numel() for p in model.parameters()) * 4
            for block in model:
                er.fully_shard(block)
            er.fully_shard(model)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            wrapped = er.AdaptiveDataParallel(model, optimizer, scaling_rule="none")
            loader = er.AdaptiveDataLoader(
                TensorDataset(torch.randn(8, 64, generator=torch.Generator().manual_seed(0))), batch_size=8
            )
            for _ in er.remaining_epochs_until(1):
                for (x,) in loader:
                    begun = live.peak
                    wrapped(x).pow(2).mean().backward()
                    peak = live.peak
                    optimizer.step()
        return begun / whole, peak / whole

    return max(run_job(trained, first=tuple(range(1, workers + 1))).results.values())


@pytest.mark.thorough
def test_no_worker_ever_holds_the_whole_model() -> None:
    begun, stepped = _peaks("meta", 8)
    assert begun < 0.6, "two shards, each twice while it moves, and one layer"
    assert stepped < 1, "and the gathered layers, and gradients"
    assert min(_peaks("cpu", 1)) >= 1, "as is seen of a model that is built in memory"


Look = Callable[[Net, Any, int], Any]


def _two_passes(meta: bool, behind: Look, *, first: Look = lambda model, optimizer, rank: None) -> Callable[[], Any]:
    """A train function that calls something after the first of two passes of each epoch; what it gave last.

    Args:
        meta: whether the model is built without memory.
        behind: is called so; takes the model, what holds its shards, and this rank.
        first: is called in the first step.
    """

    def train() -> Any:
        model = meta_net() if meta else sharded_net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        wrapped = er.AdaptiveDataParallel(model, optimizer, scaling_rule="none")
        loaders = [er.AdaptiveDataLoader(data(), batch_size=12, seed=seed) for seed in (3, 4)]
        for _ in er.remaining_epochs_until(2):
            for number, loader in enumerate(loaders):
                for x, y in loader:
                    if er.get_context().get_global_step() == 0:
                        first(model, wrapped._steps[0].tiles.shards, er.get_context().get_world_rank())
                    optimizer.zero_grad()
                    nn.functional.cross_entropy(wrapped(x), y).backward()
                    optimizer.step()
                if number == 0:
                    found = behind(model, wrapped._steps[0].tiles.shards, er.get_context().get_world_rank())
        return found

    return train


@pytest.mark.matrix(every=1)
@pytest.mark.parametrize("meta", [False, True])
def test_rank_0_has_the_whole_after_a_pass(meta: bool) -> None:
    def behind(model: Net, optimizer: Any, rank: int) -> tuple[bool, bool, int]:
        at_once = optimizer.settled
        kept = model.state_dict() if meta or rank == 0 else {}
        return at_once, optimizer.settled, len(kept)

    found = run_job(_two_passes(meta, behind), first=(1, 2, 3)).results
    whole, buffers = len(Net().state_dict()), 1
    others = (False, False, buffers if meta else 0)
    assert found == {1: (not meta, True, whole), 2: others, 3: others}


@pytest.mark.matrix(every=1)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("what", ["model", "optimizer"])
def test_one_rank_asking_alone_after_a_pass_is_refused(rank: int, what: str) -> None:
    told: dict[int, str] = {}

    def behind(model: Net, optimizer: Any, own: int) -> None:
        if own == rank:
            try:
                model.state_dict() if what == "model" else optimizer.whole_states()
            except RanksDisagreeError as error:
                told[own] = str(error)
                raise

    train = _two_passes(True, behind)

    def watched() -> None:
        try:
            train()
        except RanksDisagreeError as error:
            told[er.get_context().get_world_rank()] = str(error)
            raise

    with pytest.raises(RanksDisagreeError):
        run_job(watched, first=(1, 2, 3))
    deadline_s = time.monotonic() + 20.0
    while len(told) < 3 and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert set(told) == {0, 1, 2}
    for text in told.values():
        assert f"rank {rank} asks for the whole state (call state_dict() on all ranks" in text


@pytest.mark.matrix(every=1)
@pytest.mark.parametrize("meta", [False, True])
def test_joiner_goes_by_the_place_where_all_have_asked(meta: bool) -> None:
    """It enters in the second pass, with the code between the passes still before it."""

    def behind(model: Net, optimizer: Any, rank: int) -> tuple[int, int]:
        return rank, len(model.state_dict())

    found = run_job(_two_passes(meta, behind), [Change(11, (1, 2, 3))], first=(1, 2)).results
    assert sorted(found.values()) == [(0, len(Net().state_dict())), (1, 1), (2, 1)]


def test_what_changes_rows_is_found_without_gathering() -> None:
    def first(model: Net, optimizer: Any, rank: int) -> None:
        if rank == 1:
            model.last.weight.data.mul_(2.0)

    train = _two_passes(True, lambda model, optimizer, rank: None, first=first)
    with pytest.raises((ReplicasDifferError, CommunicationFailedError), match=r"rank 1 owns differ.*rank 0"):
        run_job(train, first=(1, 2))


@pytest.mark.parametrize(("script", "workers"), [([Change(3, (1, 2))], (1,)), ([], (1, 2))])
def test_ranks_of_which_one_was_in_memory_ask_too(script: list[Change], workers: tuple[int, ...]) -> None:
    begun: list[bool] = []

    def first(model: Net, optimizer: Any, rank: int) -> None:
        begun.append(optimizer.settled)

    def behind(model: Net, optimizer: Any, rank: int) -> tuple[bool, int]:
        return optimizer.settled, len(model.state_dict())

    def train() -> Any:
        session = session_of_thread()
        assert session is not None
        return _two_passes(session.worker != "w1", behind, first=first)()

    found = run_job(train, script, first=workers).results
    assert found == {1: (False, len(Net().state_dict())), 2: (False, 1)}
    assert begun == ([True] if len(workers) == 1 else [False, False]), "one worker alone holds all"


class _Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))


class _Idle(_Bare):
    def reset_parameters(self) -> None: ...


def _meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


@pytest.mark.parametrize(
    ("make", "options", "error", "text"),
    [
        (
            lambda: nn.Sequential(nn.Tanh(), _Bare()),
            {},
            ValueError,
            r"1 \(_Bare\) holds scale on the meta device",
        ),
        (_Bare, {"param_init_fn": 3}, TypeError, "param_init_fn must be a function .* but got 3"),
        (lambda: nn.Linear(2, 2), {"device": "meta"}, ValueError, "one with memory.*but got 'meta'"),
    ],
)
def test_what_cannot_be_initialised_is_named(make: Any, options: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        er.fully_shard(_meta(make), **options)


def _loop(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    er.AdaptiveDataParallel(model, optimizer, scaling_rule="none")
    for _ in er.remaining_epochs_until(1):
        for _ in er.AdaptiveDataLoader(
            TensorDataset(torch.randn(4, 2, generator=torch.Generator().manual_seed(0))), batch_size=4
        ):
            pass


def test_what_initialisation_leaves_as_it_was_is_an_error() -> None:
    with pytest.raises(ValueError, match="initialisation of _Idle must fill scale"):
        run_job(lambda: _loop(er.fully_shard(_meta(_Idle), device="cpu")))


def test_an_initialisation_that_writes_into_another_module_is_named() -> None:
    def reach(module: nn.Module) -> None:
        for each in module.parameters(recurse=False):
            nn.init.ones_(each)
        nn.init.ones_(model[1].weight)

    model: Any = _meta(lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    with pytest.raises(ValueError, match=r"wrote into 1\.weight of another"):
        run_job(lambda: _loop(er.fully_shard(model, param_init_fn=reach, device="cpu")))


def test_before_first_loop_there_is_nothing_to_compute_with() -> None:
    model = meta_net()
    with pytest.raises(RuntimeError, match="gets its shards when its first loop"):
        model.load_state_dict(Net().state_dict())
    wrapped = er.AdaptiveDataParallel(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for call in (
        lambda: wrapped(torch.ones(2, 13)),
        model.state_dict,
        lambda: model.load_state_dict(Net().state_dict()),
    ):
        with pytest.raises(RuntimeError, match="gets its shards when its first loop"):
            call()


def test_a_model_is_built_without_memory_whole_or_never() -> None:
    model = nn.Sequential(_meta(lambda: nn.Linear(2, 2)), nn.Linear(2, 2))
    er.fully_shard(model[0], device="cpu")
    er.fully_shard(model[1])
    er.fully_shard(model)
    with pytest.raises(StrategyError, match="2 of 4 parameters were built on the meta device"):
        er.AdaptiveDataParallel(model, torch.optim.SGD(model.parameters(), lr=0.1))


class _Masked(nn.Module):
    """Holds nothing itself but a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(2, 2)
        self.register_buffer("mask", torch.ones(2))

    def reset_parameters(self) -> None:
        self.mask.fill_(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) * self.mask


def test_buffers_beside_parameters_that_are_sharded_already_are_filled() -> None:
    def trained() -> tuple[Tensor, str]:
        model = _meta(_Masked)
        er.fully_shard(model.body, device="cpu")
        _loop(er.fully_shard(model, device="cpu"))
        return model.mask, model.mask.device.type  # type: ignore[return-value]

    for mask, device in run_job(trained, first=(1, 2)).results.values():
        assert device == "cpu" and torch.equal(mask, torch.ones(2))


def test_buffer_without_memory_beside_parameters_in_memory_is_refused() -> None:
    model = _Masked()
    model.register_buffer("mask", torch.ones(2, device="meta"))
    with pytest.raises(ValueError, match=r"_Masked\.mask is on the meta device, but parameters are on cpu"):
        er.fully_shard(model)


@pytest.mark.parametrize("options", [{"device": "cpu"}, {"param_init_fn": nn.init.ones_}])
def test_what_is_for_meta_models_is_not_ignored_elsewhere(options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(ValueError, match=f"{name} is for modules that were built on the meta device, but Linear has"):
        er.fully_shard(nn.Linear(2, 2), **options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="looks at what torch keeps for GPUs that are not there yet")
def test_generators_of_other_devices_are_left_alone() -> None:
    torch.cuda.manual_seed_all(7)
    queued = torch.cuda._lazy_seed_tracker.manual_seed_all_cb
    initialise(nn.Linear(2, 2), [], 3, lambda place, value: None)
    assert queued and torch.cuda._lazy_seed_tracker.manual_seed_all_cb is queued
