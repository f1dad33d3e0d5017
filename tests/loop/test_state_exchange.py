"""What one rank tells another of its state: tensors and plain values, and nothing that could run."""

from __future__ import annotations

import collections
import concurrent.futures
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import elastic_ray as er
from elastic_ray.communication.communicator import CommunicationFailedError, Communicator
from elastic_ray.state.codec import SparseIndex, TensorIndex, encode
from elastic_ray.state.progress import RunProgress
from elastic_ray.state.shared_state import SharedState
from elastic_ray.state.tree import (
    DictState,
    ModuleState,
    OptimizerState,
    UnsafeStateError,
    check_plain,
    pack,
    receive_state,
    send_state,
)
from elastic_ray.steps.ledger import StepLedger
from tests.loop.alone import session_of
from tests.loop.plain_values import Thing, alike
from tests.membership.groups import local_controller, member

# -- between ranks -----------------------------------------------------------------------------------------------------


def between_ranks(first: Callable[[Communicator], Any], second: Callable[[Communicator], Any]) -> list[Any]:
    """What two ranks of one group return."""
    with local_controller() as controller, concurrent.futures.ThreadPoolExecutor(2) as pool:
        works = [
            pool.submit(lambda rank=rank, work=work: work(member(controller, rank, 2)))
            for rank, work in enumerate((first, second))
        ]
        return [work.result(60) for work in works]


@pytest.fixture(scope="module")
def connected() -> Any:
    """Two ranks of one group, for many exchanges."""
    with local_controller() as controller, concurrent.futures.ThreadPoolExecutor(2) as pool:
        ranks = list(pool.map(lambda rank: member(controller, rank, 2), range(2)))

        def exchange(states: dict[str, Any]) -> dict[str, Any]:
            sent = pool.submit(send_state, ranks[0], 1, states)
            received = pool.submit(receive_state, ranks[1], 0, lambda key: None)
            sent.result(60)
            return received.result(60)[0]

        yield exchange


class Trained:
    """A small model with its optimizer and scheduler, trained for some steps."""

    def __init__(self, make_optimizer: Any, make_scheduler: Any = None) -> None:
        torch.manual_seed(0)
        self.model: Any = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2))
        self.optimizer = make_optimizer(self.model)
        self.scheduler = make_scheduler(self.optimizer) if make_scheduler else None
        self.states: dict[str, Any] = {
            "model/0": ModuleState(self.model),
            "optimizer/0": OptimizerState(self.optimizer),
        }
        if self.scheduler is not None:
            self.states["lr_scheduler/0/0"] = DictState(self.scheduler)

    def train(self, steps: int) -> None:
        for step in range(steps):
            inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))

            def closure(inputs: torch.Tensor = inputs) -> torch.Tensor:
                self.optimizer.zero_grad()
                loss = self.model(inputs).square().mean()
                loss.backward()
                return loss

            loss = self.optimizer.step(closure)
            if isinstance(self.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
                self.scheduler.step(float(loss.detach()))
            elif self.scheduler is not None:
                self.scheduler.step()

    def capture(self) -> dict[str, Any]:
        return {name: state.capture() for name, state in self.states.items()}


def assert_same(one: Any, other: Any) -> None:
    skeletons, tensors = zip(*(pack(each) for each in (one, other)), strict=True)
    assert alike(skeletons[0], skeletons[1])
    assert all(torch.equal(a, b) for a, b in zip(*tensors, strict=True))


def check_exchange(exchange: Any, make: Callable[[], Trained]) -> None:
    """A newcomer that receives a trained state continues as its source does."""
    source, newcomer = make(), make()
    source.train(6)
    assert source.states.keys() == newcomer.states.keys()
    received = exchange(source.capture())
    for name, state in newcomer.states.items():
        state.restore(received[name])
    assert_same(newcomer.capture(), source.capture())
    source.train(6)
    newcomer.train(6)
    assert_same(newcomer.capture(), source.capture())


def _optimizers() -> list[str]:
    every = [name for name in dir(torch.optim) if isinstance(getattr(torch.optim, name), type)]
    return [name for name in every if name not in ("Optimizer", "SparseAdam")]  # this one takes sparse gradients only


@pytest.mark.parametrize("name", _optimizers())
def test_every_optimizer_of_torch(name: str, connected: Any) -> None:
    def make(model: Any) -> Any:
        matrices = [p for p in model.parameters() if p.ndim == 2]  # all that Muon takes
        options = {"momentum": 0.9} if name == "SGD" else {}
        return getattr(torch.optim, name)(matrices if name == "Muon" else model.parameters(), lr=0.01, **options)

    check_exchange(connected, lambda: Trained(make))


@pytest.mark.parametrize("size", [3, 300])  # small ones travel together
def test_dense_tensors_lie_in_memory_as_they_did(size: int, connected: Any) -> None:
    """Linear algebra leaves columns side by side, and products are rounded by how a matrix lies."""
    images = torch.randn(2, 4, size, size).to(memory_format=torch.channels_last)
    dense = {"inverse": torch.linalg.inv(torch.randn(size, size)), "images": images, "row": torch.randn(size)}
    received = connected({"x": {**dense, "part": torch.randn(size, size)[:, ::2]}})["x"]
    for name, tensor in dense.items():
        assert received[name].stride() == tensor.stride() and torch.equal(received[name], tensor), name
    assert received["part"].is_contiguous()


def test_sparse_tensors(connected: Any) -> None:
    torch.manual_seed(0)
    layer = torch.nn.Embedding(7, 3, sparse=True)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        layer(torch.tensor([1, 5, 5])).sum().backward()
        optimizer.step()
    buffer = optimizer.state[layer.weight]["momentum_buffer"]
    none = torch.sparse_coo_tensor(torch.zeros(1, 0, dtype=torch.int64), torch.zeros(0, 3), (7, 3))
    received = connected({"optimizer/0": OptimizerState(optimizer).capture(), "none": {"a": [none]}})
    found = received["optimizer/0"]["state"][0]["momentum_buffer"]
    assert found.is_sparse and found.is_coalesced() and found.shape == buffer.shape
    assert torch.equal(found.to_dense(), buffer.to_dense())
    assert torch.equal(received["none"]["a"][0].to_dense(), torch.zeros(7, 3))


class Scale:
    """A callable of the user's with plain state, as LambdaLR's documentation has it."""

    def __init__(self) -> None:
        self.power = 0.9

    def __call__(self, epoch: int) -> float:
        return self.power**epoch


def _sequential(optimizer: Any) -> Any:
    schedulers = torch.optim.lr_scheduler
    warm, then = schedulers.LinearLR(optimizer, 0.1, total_iters=3), schedulers.StepLR(optimizer, 2)
    return schedulers.SequentialLR(optimizer, [warm, then], milestones=[4])


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "StepLR": lambda o: torch.optim.lr_scheduler.StepLR(o, 3),
    "MultiStepLR": lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [3, 3, 8]),
    "ExponentialLR": lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.9),
    "OneCycleLR": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=40),
    "CyclicLR": lambda o: torch.optim.lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=3),
    "SequentialLR": _sequential,
    "ChainedScheduler": lambda o: torch.optim.lr_scheduler.ChainedScheduler([SCHEDULERS["StepLR"](o)], optimizer=o),
    "ReduceLROnPlateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "CosineAnnealingLR": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 10),
    "CosineAnnealingWarmRestarts": lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "LinearLR": lambda o: torch.optim.lr_scheduler.LinearLR(o),
    "PolynomialLR": lambda o: torch.optim.lr_scheduler.PolynomialLR(o, 10),
    "ConstantLR": lambda o: torch.optim.lr_scheduler.ConstantLR(o),
    "MultiplicativeLR": lambda o: torch.optim.lr_scheduler.MultiplicativeLR(o, lambda epoch: 0.95),
    "LambdaLR": lambda o: torch.optim.lr_scheduler.LambdaLR(o, [lambda epoch: 0.9**epoch]),
    "LambdaLR of a callable": lambda o: torch.optim.lr_scheduler.LambdaLR(o, Scale()),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, swa_lr=0.05),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_scheduler_of_torch(name: str, connected: Any) -> None:
    check_exchange(
        connected,
        lambda: Trained(lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9), SCHEDULERS[name]),
    )


def test_a_milestone_that_counts_twice_still_does(connected: Any) -> None:
    trained = Trained(lambda m: torch.optim.SGD(m.parameters(), lr=0.05), SCHEDULERS["MultiStepLR"])
    milestones = connected(trained.capture())["lr_scheduler/0/0"]["milestones"]
    assert type(milestones) is collections.Counter and milestones == {3: 2, 8: 1}


def test_learning_rates_that_numpy_made_and_tensors(connected: Any) -> None:
    rates = [np.float64(0.01), np.float32(0.02)]
    check_exchange(
        connected,
        lambda: Trained(
            lambda m: torch.optim.AdamW(
                [{"params": [p], "lr": rates[i % 2]} for i, p in enumerate(m.parameters())],
                amsgrad=True,
            )
        ),
    )
    check_exchange(
        connected, lambda: Trained(lambda m: torch.optim.Adam(m.parameters(), lr=torch.tensor(0.01), capturable=False))
    )


def test_a_gradient_scaler(connected: Any) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
    scaler.scale(torch.ones(1, requires_grad=True).sum())
    state = scaler.state_dict()
    assert alike(connected({"grad_scaler/0": state})["grad_scaler/0"], state)


# -- what is no state --------------------------------------------------------------------------------------------------


class Evil:
    """Leaves a mark when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._mark),)


def send_header(communicator: Communicator, content: bytes, claimed: int | None = None) -> None:
    header = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    size = torch.tensor([len(content) if claimed is None else claimed])
    works = [communicator.send(size, 1, 7)]
    if claimed is None:
        works.append(communicator.send(header, 1, 7))
    communicator.wait_all(works)


def outcome_of(sender: Callable[[Communicator], None]) -> Any:
    def receive(communicator: Communicator) -> Any:
        try:
            return receive_state(communicator, 0, lambda key: None)
        except CommunicationFailedError as error:
            assert communicator.broken
            return error

    return between_ranks(sender, receive)[1]


def test_a_pickle_in_place_of_a_state_is_refused(tmp_path: Path) -> None:
    mark = tmp_path / "executed"
    pickled = pickle.dumps(({"run": Evil(mark)}, []))
    refused = outcome_of(lambda communicator: send_header(communicator, pickled))
    assert isinstance(refused, CommunicationFailedError) and "rank 0 sent what is no state" in str(refused)
    assert not mark.exists()
    pickle.loads(pickled)
    assert mark.exists(), "else the test would see nothing"


@pytest.mark.parametrize("size", [-1, 0, 10**15])
def test_a_header_of_an_impossible_size_is_refused(size: int) -> None:
    refused = outcome_of(lambda communicator: send_header(communicator, b"-", claimed=size))
    assert isinstance(refused, CommunicationFailedError) and f"a header of {size} bytes" in str(refused)


@pytest.mark.parametrize(
    "told",
    [
        ["not", "states"],
        ({"a": TensorIndex(1)}, [((2,), "float32", False, ())]),
        ({}, [((-1,), "float32", False, ())]),
        ({}, [((2**60,), "float32", False, ())]),
        ({}, [((1,), "load", False, ())]),
        ({}, [((1,) * 100, "float32", False, ())]),
        ({"a": TensorIndex(0)}, [((2, 2), "float32", False, (0, 2))]),
    ],
)
def test_other_values_in_place_of_a_state_are_refused(told: Any) -> None:
    refused = outcome_of(lambda communicator: send_header(communicator, encode(told)))
    assert isinstance(refused, CommunicationFailedError), refused


@pytest.mark.parametrize("rows", [[5, 1], [1, 2**40], [-1, 1], [1, 1]])
def test_a_sparse_tensor_that_points_elsewhere_is_refused(rows: list[int]) -> None:
    def send(communicator: Communicator) -> None:
        skeleton = {"a": SparseIndex(TensorIndex(0), TensorIndex(1), (3, 2))}
        specs = [((1, 2), "int64", False, ()), ((2, 2), "float32", False, ())]
        send_header(communicator, encode((skeleton, specs)))
        content = torch.cat([torch.tensor([rows]).reshape(-1).view(torch.uint8), torch.ones(4).view(torch.uint8)])
        communicator.wait_all([communicator.receive(torch.zeros(1), 1, 7), communicator.send(content, 1, 7)])

    refused = outcome_of(send)
    assert isinstance(refused, CommunicationFailedError) and "no state" in str(refused), refused


# -- what a user's loop learns -----------------------------------------------------------------------------------------


class Odd(torch.optim.lr_scheduler.StepLR):
    """A scheduler whose state has what only its own code can build."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "thing": Thing()}


class Round(torch.optim.lr_scheduler.StepLR):
    """A scheduler whose state holds itself."""

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = super().state_dict()
        return {**state, "history": [state]} if state.setdefault("all", state) else {}


@pytest.mark.parametrize(
    ("scheduler", "text"),
    [
        (Odd, r"'lr_scheduler/0/0'.*\['thing'\] is a .*Thing.*load_state_dict"),
        (Round, r"'lr_scheduler/0/0'.*\['all'\]\['all'\].* nested deeper than 100 levels, or holds itself"),
    ],
)
def test_a_state_that_cannot_be_sent_is_named_first(scheduler: Any, text: str) -> None:
    session = session_of()
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    er.AdaptiveDataParallel(model, optimizer, lr_scheduler=scheduler(optimizer, 3))
    with pytest.raises(UnsafeStateError, match=text):
        session.sync_point()
    assert session.membership.generation == 0


def test_an_optimizer_whose_options_hold_themselves_is_named() -> None:
    options: dict[str, Any] = {}
    options["own"] = [(options,)]
    optimizer = torch.optim.SGD([{"params": [torch.nn.Parameter(torch.zeros(1))], "options": options}], lr=0.1)
    with pytest.raises(UnsafeStateError, match=r"'optimizer/0'.*\['own'\]\[0\]\[0\]\['own'\].*or holds itself"):
        check_plain({"optimizer/0": OptimizerState(optimizer).capture()})


# -- passes ------------------------------------------------------------------------------------------------------------


class NothingDrifts:
    """Replicas that are always averaged."""

    marker = 0

    def reconcile(self, communicator: Communicator, marker: int, *, holds: bool) -> None: ...


def entered_after(steps: int, passes: int) -> Callable[[Communicator], tuple[int, int, int]]:
    """What a rank that stands there hears of ended passes, and where it stands after the exchange."""

    def enter(communicator: Communicator) -> tuple[int, int, int]:
        states = SharedState(RunProgress(loader_steps=steps, ended_passes=passes))
        states.complete = True
        found = states.exchange(communicator, NothingDrifts(), None, StepLedger(states))
        return found.passes, states.progress.loader_steps, states.progress.ended_passes

    return enter


def test_ended_passes_are_those_of_the_furthest_rank() -> None:
    """It has left its pass in a step that another rank has committed, and continues where that one is."""
    assert between_ranks(entered_after(3, 1), entered_after(4, 0)) == [(0, 4, 0)] * 2
    assert between_ranks(entered_after(4, 1), entered_after(4, 0)) == [(1, 4, 1), (1, 4, 0)]
