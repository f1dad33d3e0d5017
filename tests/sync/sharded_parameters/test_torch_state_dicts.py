"""``torch.distributed.checkpoint.state_dict`` where parameters or optimizer states lie with several ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

import elastic_ray as er
from elastic_ray.communication.communicator import CommunicationFailedError
from elastic_ray.sync import ShardedEmbedding
from tests.loop.changing import Kill, run_job
from tests.sync.sharded_parameters.sharded import Net, data, sharded_net, train_an_epoch

FULL = StateDictOptions(full_state_dict=True)
ON_RANK_0 = StateDictOptions(full_state_dict=True, cpu_offload=True)
OF_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)

KINDS: dict[str, tuple[Callable[[], Net], dict[str, Any], tuple[int, ...]]] = {
    "sharded": (sharded_net, {}, (1, 2)),
    "HSDP": (lambda: sharded_net(shard_size=2), {}, (1, 2, 3, 4)),
    "zero1": (Net, {"strategy": "zero1"}, (1, 2, 3)),
    "zero2": (Net, {"strategy": "zero2"}, (1, 2, 3)),
}


def made(kind: str = "sharded") -> tuple[Any, torch.optim.Optimizer]:
    build, options, _ = KINDS[kind]
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return er.AdaptiveDataParallel(model, optimizer, scaling_rule="none", **options), optimizer


def rank() -> int:
    return er.get_context().get_world_rank()


def trained_alone() -> tuple[dict[str, Any], Any]:
    """The state dicts of a model that is not ours after one step."""
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(data()[:4][0]).sum().backward()
    optimizer.step()
    return get_state_dict(model, optimizer)


def same(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def by_name(wrapped: Any, state: Any) -> dict[str, Any]:
    names = [name for name, _ in wrapped.module.named_parameters()]
    return {names[index]: value for index, value in state["state"].items()}


@pytest.mark.parametrize("kind", KINDS)
def test_the_whole_comes_to_the_ranks_that_torch_promises(kind: str) -> None:
    def train() -> Any:
        wrapped, optimizer = made(kind)
        for _ in er.remaining_epochs_until(1):
            for step, (x, y) in enumerate(er.AdaptiveDataLoader(data(), batch_size=24, seed=3)):
                nn.functional.cross_entropy(wrapped(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()  # without gradients torch would step an optimizer that seems to have no state
                if step == 1:
                    plain = wrapped.module.state_dict(), by_name(wrapped, optimizer.state_dict())
                    found = get_state_dict(wrapped, optimizer, options=FULL)
                    alone = get_model_state_dict(wrapped.module, options=FULL)
                    states = get_optimizer_state_dict(wrapped, optimizer, options=FULL)
                    first = get_state_dict(wrapped, optimizer, options=ON_RANK_0)
                    kept = by_name(wrapped, optimizer.state_dict())
        return rank(), plain, found, alone, states, first, kept

    results = sorted(run_job(train, first=KINDS[kind][2]).results.values(), key=lambda each: each[0])
    (_, (weights, states), *_, kept), sharded = results[0], kind in ("sharded", "HSDP")
    assert len(weights) == 18 and len(states) == 17
    same(kept, states)
    for number, _, found, alone, of_optimizer, first, _ in results:
        same(found[0], weights)
        same(alone, weights)
        same(found[1]["state"], states)
        same(of_optimizer["state"], states)
        if number == 0:
            same(first[0], weights)
            same(first[1]["state"], states)
        else:
            # Of replicas torch gives whole weights to all ranks where it knows of no group, as outside of a job.
            assert first[1] == {} and (first[0] == {} or not (sharded or torch.distributed.is_initialized()))


@pytest.mark.parametrize("kind", ["zero1", "zero2"])
def test_without_options_states_of_replicas_come_to_all_ranks(kind: str) -> None:
    def train() -> Any:
        wrapped, optimizer = made(kind)
        train_an_epoch(wrapped, optimizer)
        return by_name(wrapped, optimizer.state_dict()), get_optimizer_state_dict(wrapped, optimizer)["state"]

    results = list(run_job(train, first=(1, 2, 3)).results.values())
    (whole,) = [given for given, _ in results if given]
    for _, found in results:
        same(found, whole)


@pytest.mark.parametrize("workers", [(1,), (1, 2)])
@pytest.mark.parametrize("options", [None, StateDictOptions(cpu_offload=True)])
def test_shards_are_refused_by_the_functions_name_everywhere(
    workers: tuple[int, ...], options: StateDictOptions | None
) -> None:
    def train() -> None:
        wrapped, optimizer = made()
        train_an_epoch(wrapped, optimizer)
        way = "of a sharded model must be given options=StateDictOptions.full_state_dict=True"
        with pytest.raises(RuntimeError, match=f"^get_model_state_dict.. {way}"):
            get_model_state_dict(wrapped.module, options=options)
        with pytest.raises(RuntimeError, match=f"^get_optimizer_state_dict.. {way}"):
            get_optimizer_state_dict(wrapped, optimizer, options=options)
        with pytest.raises(RuntimeError, match=f"^get_state_dict.. {way}"):
            get_state_dict(wrapped, optimizer, options=options)

    assert len(run_job(train, first=workers).results) == len(workers)


@pytest.mark.parametrize("options", [None, FULL, ON_RANK_0, OF_RANK_0], ids=["none", "full", "offload", "broadcast"])
@pytest.mark.parametrize("kind", KINDS)
def test_whole_tensors_are_loaded(kind: str, options: StateDictOptions | None) -> None:
    def train() -> Any:
        wrapped, optimizer = made(kind)
        train_an_epoch(wrapped, optimizer)
        weights, states = trained_alone() if options is not OF_RANK_0 or rank() == 0 else ({}, {})
        set_model_state_dict(wrapped, weights, options=options)
        set_optimizer_state_dict(wrapped, optimizer, states, options=options)
        return get_state_dict(wrapped, optimizer, options=FULL)

    weights, states = trained_alone()
    for found in run_job(train, first=KINDS[kind][2]).results.values():
        same(found[0], weights)
        same(found[1]["state"], states["state"])


@pytest.mark.parametrize("kind", KINDS)
def test_rank_0_shares_what_it_loads_before_first_epoch(kind: str) -> None:
    def train() -> Any:
        wrapped, optimizer = made(kind)
        weights, states = trained_alone()
        set_state_dict(wrapped, optimizer, model_state_dict=weights, optim_state_dict=states, options=OF_RANK_0)
        for _ in er.remaining_epochs_until(1):
            for _ in er.AdaptiveDataLoader(data(), batch_size=48, seed=3):
                found = get_state_dict(wrapped, optimizer, options=FULL)
        return found

    weights, states = trained_alone()
    for found in run_job(train, first=KINDS[kind][2]).results.values():
        same(found[0], weights)
        same(found[1]["state"], states["state"])


def test_what_cannot_be_loaded_is_refused() -> None:
    def train() -> None:
        wrapped, optimizer = made()
        train_an_epoch(wrapped, optimizer)
        with pytest.raises(RuntimeError, match=r"got an empty state dict on rank .: .*broadcast_from_rank0=True"):
            set_model_state_dict(wrapped, {}, options=ON_RANK_0)
        with pytest.raises(RuntimeError, match=r"got an empty state dict on rank .: .*broadcast_from_rank0=True"):
            set_optimizer_state_dict(wrapped, optimizer, {}, options=ON_RANK_0)
        flat = get_optimizer_state_dict(
            wrapped, optimizer, options=StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=True)
        )
        with pytest.raises(RuntimeError, match=r"^set_optimizer_state_dict.. cannot load a flat state dict"):
            set_optimizer_state_dict(wrapped, optimizer, flat, options=FULL)

    assert len(run_job(train, first=(1, 2)).results) == 2


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_without_a_state_get_rank_0s_first(kind: str) -> None:
    def train() -> Any:
        wrapped, optimizer = made(kind)
        weights, states = trained_alone() if rank() == 0 else ({}, {})
        set_state_dict(wrapped, optimizer, model_state_dict=weights, optim_state_dict=states, options=OF_RANK_0)
        for _ in er.remaining_epochs_until(1):
            for _ in er.AdaptiveDataLoader(data(), batch_size=48, seed=3):
                found = get_state_dict(wrapped, optimizer, options=FULL)
        return found

    weights, states = trained_alone()
    for found in run_job(train, first=KINDS[kind][2]).results.values():
        same(found[0], weights)
        same(found[1]["state"], states["state"])


@pytest.mark.parametrize("kind", KINDS)
def test_module_within_a_model_is_given_whole_or_refused(kind: str) -> None:
    def train() -> Any:
        wrapped, optimizer = made(kind)
        train_an_epoch(wrapped, optimizer)
        part = wrapped.module.blocks[0]
        if kind in ("sharded", "HSDP"):
            way = "_model_state_dict.. of a FSDPBlock within a sharded model is not supported: give the whole model"
            with pytest.raises(RuntimeError, match=f"^get{way}"):
                get_model_state_dict(part, options=FULL)
            with pytest.raises(RuntimeError, match=f"^set{way}"):
                set_model_state_dict(part, {"down.bias": torch.zeros(7)}, options=FULL)
            found = None
        else:
            found = get_model_state_dict(part, options=FULL)
        whole = get_model_state_dict(wrapped, options=FULL)
        return found, {name[9:]: value for name, value in whole.items() if name.startswith("blocks.0.")}

    for found, wanted in run_job(train, first=KINDS[kind][2]).results.values():
        assert len(wanted) == 6
        if found is not None:
            same(found, wanted)


class Looked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.last = ShardedEmbedding(11, 4, seed=1), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.last(self.table((x[:, 0].abs() * 4).long().clamp(max=10)))
        return result


def test_models_with_tables_are_refused_with_the_way_out() -> None:
    def train() -> Any:
        model = Looked()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        wrapped = er.AdaptiveDataParallel(model, optimizer, scaling_rule="none")
        train_an_epoch(wrapped, optimizer)
        plain, way = model.state_dict(), "with a ShardedEmbedding is not supported: call state_dict"
        for each in (wrapped, model):
            with pytest.raises(RuntimeError, match=f"^get_model_state_dict.. of a {type(each).__name__} {way}"):
                get_model_state_dict(each, options=FULL)
            with pytest.raises(RuntimeError, match=f"^set_model_state_dict.. of a {type(each).__name__} {way}"):
                set_model_state_dict(each, plain, options=FULL)
        same(get_model_state_dict(model.last), {name: plain[f"last.{name}"] for name in ("weight", "bias")})
        return True

    assert len(run_job(train, first=(1, 2)).results) == 2


def test_a_module_imported_after_wrapping_and_a_tiles_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib
    import sys

    name = "torch.distributed.checkpoint.state_dict"
    monkeypatch.delitem(sys.modules, name)

    def train() -> Any:
        wrapped, optimizer = plain_one()
        seen = []
        for _ in er.remaining_epochs_until(1):
            for step, (x, y) in enumerate(er.AdaptiveDataLoader(data(), batch_size=12, seed=3)):
                nn.functional.cross_entropy(wrapped(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
                if step == 2:
                    wrapped.set_strategy("zero1")
                if step == 5:
                    functions = importlib.import_module(name)
                    options = functions.StateDictOptions(full_state_dict=True)
                    before = by_name(wrapped, optimizer.state_dict())
                    seen = [before, functions.get_optimizer_state_dict(wrapped, optimizer, options=options)["state"]]
        return seen

    def plain_one() -> Any:
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        return er.AdaptiveDataParallel(model, optimizer, scaling_rule="none"), optimizer

    results = list(run_job(train, first=(1, 2, 3)).results.values())
    (whole,) = [before for before, _ in results if before]
    assert len(whole) == 17
    for _, found in results:
        same(found, whole)


@pytest.mark.parametrize("moment", ["collective", "after_collective"])
def test_a_state_lost_with_rank_0_is_an_error(moment: str) -> None:
    def train() -> Any:
        wrapped, optimizer = made()
        train_an_epoch(wrapped, optimizer)
        return get_state_dict(wrapped, optimizer, options=FULL)

    with pytest.raises(CommunicationFailedError, match="rank 0, which had the whole state, was lost before it had"):
        run_job(train, [Kill(8, 1, moment)], first=(1, 2))
