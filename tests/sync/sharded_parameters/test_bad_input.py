"""What cannot be sharded, or not trained so, is said before the first step, with the way out."""

from __future__ import annotations

import copy
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import elastic_ray as er
from elastic_ray.communication.communicator import CommunicationFailedError
from elastic_ray.consensus.intents import RanksDisagreeError
from elastic_ray.state.layout import ReplicasDifferError
from elastic_ray.sync.checks import StrategyError
from elastic_ray.sync.sharded_parameters import fsdp_fields
from elastic_ray.sync.sharded_parameters.process_group import mesh_of_one
from tests.loop.changing import Change, run_job
from tests.sync.sharded_parameters.sharded import CLOSE, Case, Net, Run, data, run, sharded_net


class _Scalar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))


class _Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(2, 2), nn.Linear(2, 2, dtype=torch.bfloat16)


def _turned() -> nn.Module:
    layer = nn.Linear(2, 3)
    layer.weight = nn.Parameter(torch.ones(2, 3).t())
    return layer


def _partly(shard_size: int) -> nn.Module:
    model = Net()
    er.fully_shard(model.blocks[0], shard_size=shard_size)
    return model


def _two_sizes() -> tuple[Any, Any]:
    model = nn.Sequential(*(er.fully_shard(nn.Linear(2, 2), shard_size=size) for size in (2, 3)))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def _hooked(register: str) -> nn.Module:
    layer = nn.Linear(2, 2)
    getattr(layer.weight, register)(lambda given: None)
    return layer


def _sharded_twice() -> nn.Module:
    return er.fully_shard(nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("module", "options", "error", "text"),
    [
        (_Scalar, {}, ValueError, r"_Scalar\.scale has the shape \(\).*torch\.nn\.Parameter\(torch\.ones\(1\)\)"),
        (_Mixed, {}, ValueError, r"one dtype, but in _Mixed .*other\.weight is torch\.bfloat16"),
        (_turned, {}, ValueError, r"Linear\.weight is not contiguous"),
        (_sharded_twice, {}, ValueError, "sharded already"),
        (lambda: nn.ModuleList([nn.Linear(2, 2)]), {}, ValueError, "does not support containers"),
        (lambda: "model", {}, TypeError, "module must be a torch.nn.Module, but got str"),
        (
            lambda: [nn.Linear(2, 2), nn.Linear(2, 2)],
            {},
            TypeError,
            "one torch.nn.Module, but got a list of 2: shard each",
        ),
        *(
            (lambda register=register: _hooked(register), {}, ValueError, r"Linear\.weight has a hook .* never be")
            for register in ("register_hook", "register_post_accumulate_grad_hook")
        ),
        (Net, {"mesh": None}, TypeError, "has no mesh=.*the group is the job's"),
        (Net, {"offload_policy": None}, TypeError, "has no offload_policy=.*stay on the device"),
        (Net, {"shard": 1}, TypeError, "no argument 'shard'; it has module"),
        (Net, {"reshard_after_forward": 2}, TypeError, "True, False or None, but got 2"),
        (Net, {"shard_size": 1}, ValueError, "shard_size must be 2 or more, or None.*but got 1"),
        (Net, {"shard_size": 2.0}, TypeError, "shard_size must be a number of workers or None, but got 2.0"),
        (
            lambda: _partly(4),
            {"shard_size": 2},
            ValueError,
            r"the same for all modules of a model, but is 4 for blocks\.0 of Net, and here 2",
        ),
        (lambda: _partly(4), {}, ValueError, r"but is 4 for blocks\.0 of Net, and here None"),
        (Net, {"mp_policy": torch.bfloat16}, TypeError, "MixedPrecisionPolicy, but got dtype"),
    ],
)
def test_what_cannot_be_sharded(module: Any, options: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        er.fully_shard(module(), **options)


def _before() -> tuple[Any, Any]:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return er.fully_shard(model), optimizer


def _in_part() -> tuple[Any, Any]:
    model = Net()
    er.fully_shard(model.blocks[0])
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def _by_torch() -> tuple[Any, Any]:
    model = Net()
    mesh = copy.copy(mesh_of_one("cpu"))
    object.__setattr__(mesh, "_mesh_dim_names", ("own",))
    fully_shard(model, mesh=mesh)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def _with(change: Any) -> tuple[Any, Any]:
    model = sharded_net()
    change(model)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def _tie(model: Any) -> None:
    model.blocks[1].up.weight = model.blocks[0].up.weight


def _replace(model: Any) -> None:
    model.last.weight = nn.Parameter(model.last.weight.detach() * 2)


def _good(optimizer: Any = torch.optim.SGD) -> tuple[Any, Any]:
    model = sharded_net()
    return model, optimizer(model.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("make", "options", "error", "text"),
    [
        (_before, {}, ValueError, r"before the model was sharded.*make it after fully_shard\(model\)"),
        (_in_part, {}, StrategyError, r"first\.weight.* are not: call elastic_ray\.fully_shard\(model\)"),
        (_by_torch, {}, StrategyError, "by torch's fully_shard or in an earlier run"),
        (_two_sizes, {}, ValueError, "shard_size must be the same for all modules.* is 2 for 0 and 3 for 1"),
        (_good, {"strategy": "zero1"}, StrategyError, "strategy must be left out.*'zero1'"),
        (lambda: _with(_tie), {}, StrategyError, r"blocks\.1\.up\.weight is not the parameter .* before fully_shard"),
        (lambda: _with(_replace), {}, StrategyError, r"last\.weight is not the parameter .*load_state_dict\(\)"),
        (
            lambda: _with(lambda model: model.blocks[0].set_gradient_divide_factor(1.0)),
            {},
            StrategyError,
            r"set_gradient_divide_factor\(\) is not supported .*scale the loss",
        ),
        (lambda: _good(torch.optim.Adafactor), {}, StrategyError, "Adafactor cannot step a sharded model"),
    ],
)
def test_what_cannot_be_trained(make: Any, options: dict[str, Any], error: type[Exception], text: str) -> None:
    model, optimizer = make()
    with pytest.raises(error, match=text):
        er.AdaptiveDataParallel(model, optimizer, **options)


def test_a_scaler_is_refused() -> None:
    model, optimizer = _good()
    with pytest.raises(StrategyError, match="Train in bfloat16"):
        er.AdaptiveDataParallel(model, optimizer, grad_scaler=torch.amp.GradScaler("cpu"))


def test_a_wrapped_model_cannot_be_sharded_any_more() -> None:
    model = Net()
    wrapped = er.AdaptiveDataParallel(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ValueError, match="call fully_shard first"):
        er.fully_shard(wrapped)


def test_a_sharded_model_has_no_strategy_to_change() -> None:
    model, optimizer = _good()
    wrapped = er.AdaptiveDataParallel(model, optimizer)
    assert wrapped.strategy.name == "fully_shard"
    for call in (lambda: wrapped.set_strategy("zero1"), wrapped.explain_strategy):
        with pytest.raises(StrategyError, match="parameters of this model are sharded"):
            call()
    with pytest.raises(RuntimeError, match="no_sync"):
        wrapped.no_sync()


@pytest.mark.parametrize(
    ("setter", "value"),
    [
        ("set_gradient_divide_factor", 4.0),
        ("set_all_reduce_hook", print),
        ("set_custom_reduce_scatter", None),
        ("set_force_sum_reduction_for_comms", False),
    ],
)
def test_how_gradients_are_reduced_is_not_to_be_changed(setter: str, value: Any) -> None:
    model, optimizer = _good()
    er.AdaptiveDataParallel(model, optimizer)
    with pytest.raises(StrategyError, match=rf"{setter}\(\) is not supported .* Leave it out"):
        getattr(model.blocks[0], setter)(value)


@pytest.mark.parametrize(("names", "owner"), [("_PARAM", "FSDPParam"), ("_DISPATCHER", "OpDispatcher")])
def test_a_torch_whose_fields_have_moved_is_named(monkeypatch: pytest.MonkeyPatch, names: str, owner: str) -> None:
    er.fully_shard(nn.Linear(2, 2))
    monkeypatch.setattr(fsdp_fields, names, (*getattr(fsdp_fields, names), "_moved"))
    fsdp_fields._missing_fields.cache_clear()
    try:
        with pytest.raises(fsdp_fields.UnknownTorchError, match=rf"torch {torch.__version__[:4]}.* no {owner}\._moved"):
            er.fully_shard(nn.Linear(2, 2))
    finally:
        monkeypatch.undo()
        fsdp_fields._missing_fields.cache_clear()


_MOVED = """
import sys, torch, torch.distributed.fsdp
sys.modules["torch.distributed.fsdp._fully_shard._fsdp_common"] = None
import elastic_ray as er
for strategy in ("all_reduce", "zero1"):
    net = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = er.AdaptiveDataParallel(net, optimizer, strategy=strategy)
    loader = er.AdaptiveDataLoader([torch.ones(2)] * 4, batch_size=2)
    for _ in er.remaining_epochs_until(1):
        for x in loader:
            model(x).sum().backward()
            optimizer.step()
try:
    er.fully_shard(torch.nn.Linear(2, 2))
except RuntimeError as error:
    print(type(error).__name__, error)
"""


def test_a_torch_without_private_modules_trains_unsharded() -> None:
    run = subprocess.run([sys.executable, "-c", _MOVED], capture_output=True, text=True, timeout=120, check=False)
    assert run.stdout.startswith("UnknownTorchError"), run.stderr
    assert "there is no torch.distributed.fsdp._fully_shard._fsdp_common. Install" in run.stdout


class _Branching(Net):
    """A model that leaves a block out where it is told to."""

    left_out = -1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for number, block in enumerate(self.blocks):
            x = x if number == self.left_out else block(x)
        return self.last(x) * self.scale


@pytest.mark.matrix(every=1)
@pytest.mark.parametrize(
    ("block", "everywhere"),
    [(0, False), (1, True), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((0, True), (1, False)))],
)
def test_ranks_on_other_branches_are_found_before_they_meet(block: int, everywhere: bool) -> None:
    """All blocks are of one size: what one rank gathers of the first, another must not take for the second."""

    def trained() -> list[torch.Tensor]:
        model = _Branching()
        for each in model.blocks:
            er.fully_shard(each)
        er.fully_shard(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        wrapped = er.AdaptiveDataParallel(model, optimizer, scaling_rule="none")
        for _ in er.remaining_epochs_until(1):
            for x, y in er.AdaptiveDataLoader(data(), batch_size=12, seed=3):
                step, rank = er.get_context().get_global_step(), er.get_context().get_world_rank()
                model.left_out = block if step in (3, 5) and (everywhere or rank) else -1
                optimizer.zero_grad()
                nn.functional.cross_entropy(wrapped(x), y).backward()
                optimizer.step()
        return [p.detach().clone() for p in model.state_dict().values()]

    if not everywhere:
        with pytest.raises(RanksDisagreeError, match="another part of model 0"):
            run_job(trained, [], first=(1, 2))
        return
    found, wanted = run_job(trained, [], first=(1, 2)).results[1], run_job(trained, [], first=(1,)).results[1]
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=CLOSE)


def _on_one(do: Any) -> Any:
    def between(run: Run, step: int) -> None:
        if step == 3 and er.get_context().get_world_rank() == 1:
            do(run)

    return between


@pytest.mark.matrix(every=1)
@pytest.mark.parametrize(
    ("do", "error", "text"),
    [
        (lambda run: run.wrapped(torch.zeros(2, 13)).sum().backward(), RanksDisagreeError, "model 0"),
        (
            lambda run: run.optimizer.state_dict(),
            RanksDisagreeError,
            "asks for the whole state .*on all ranks.* of model 0",
        ),
        (
            lambda run: run.model.state_dict(),
            RanksDisagreeError,
            "asks for the whole state .*on all ranks.* of model 0",
        ),
        (
            lambda run: run.model.last.weight.full_tensor(),
            RanksDisagreeError,
            "gathers or reduces another part of model 0",
        ),
        (lambda run: run.model.last.weight.data.mul_(2.0), ReplicasDifferError, "rank 1 owns differ.*rank 0"),
        (
            lambda run: run.optimizer.param_groups[0].update(lr=0.5),
            RanksDisagreeError,
            "steps the optimizer .*which parameters have a gradient, and learning rates: [0-9a-f]{8}",
        ),
    ],
    ids=["calls", "optimizer state", "model state", "tensor", "changes rows", "learning rate"],
)
def test_one_rank_that_does_otherwise_is_found_out(do: Any, error: type[Exception], text: str) -> None:
    for meta in (False, True):
        with pytest.raises((error, CommunicationFailedError), match=text):
            run(Case(clip=False, meta=meta, between=_on_one(do)), [], (1, 2))


def test_weights_loaded_by_one_rank_are_found_before_updates() -> None:
    """Also where the group changes after it, and one worker is left."""
    do = _on_one(lambda run: run.model.load_state_dict({k: v + 1 for k, v in Net().state_dict().items()}))
    with pytest.raises((ReplicasDifferError, CommunicationFailedError), match=r"rank \d owns differ"):
        run(Case(clip=False, between=do), [Change(3, (1,))], (1, 2))


def test_weights_are_not_assigned_behind_the_optimizers_back() -> None:
    def between(run: Run, step: int) -> None:
        run.model.load_state_dict(Net().state_dict(), assign=True)

    with pytest.raises(RuntimeError, match=r"would put other parameters.* leave assign=True out"):
        run(Case(between=between), [], (1,))


def test_hooks_that_torch_would_not_call_are_refused() -> None:
    def between(run: Run, step: int) -> None:
        run.model.last.weight.register_hook(lambda grad: grad * 0.5)

    with pytest.raises(
        ValueError, match=r"last\.weight has a hook .*does not call .*register_post_accumulate_grad_hook"
    ):
        run(Case(between=between), [], (1,))


def test_whole_batches_are_refused_also_by_one_worker() -> None:
    def between(run: Run, step: int) -> None:
        if step == 2:
            for x, _ in er.AdaptiveDataLoader(run.dataset, batch_size=5, whole_batches=True):
                run.wrapped(x)

    with pytest.raises(RuntimeError, match="whole_batches"):
        run(Case(between=between), [], (1,))


def test_gradients_of_gradients_are_refused() -> None:
    def between(run: Run, step: int) -> None:
        x = torch.ones(2, 13, requires_grad=True)
        torch.autograd.grad(run.wrapped(x).sum(), x, create_graph=True)

    with pytest.raises(RuntimeError, match="create_graph=True is not supported for a sharded model"):
        run(Case(between=between), [], (1,))


def test_mixed_precision_is_torchs() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    found = run(Case(options=(("mp_policy", policy),)), [], (1, 2, 3))
    whole = next(own for own in found.results.values() if own.rank == 0)
    assert {value.dtype for value in whole.parameters.values()} == {torch.float32}
    assert whole.losses[1] < whole.losses[0]


def test_gradients_from_no_backward_pass_are_refused() -> None:
    """Zeroed ones are not."""

    def between(run: Run, step: int) -> None:
        if step in (2, 3):
            run.optimizer.zero_grad(set_to_none=False)
            for p in run.model.parameters():
                p.grad = torch.zeros_like(p) if step == 2 else p.detach().clone()
            run.optimizer.step()
            assert step == 2, "it was to be refused"

    with pytest.raises(RuntimeError, match=r"no backward\(\) pass has averaged.*Call backward\(\) on a loss"):
        run(Case(clip=False, between=between), [], (1, 2))
