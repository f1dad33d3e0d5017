"""Collectives that a train loop makes: the same results on every rank, however the group changes around them."""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import elastic_ray as er
from elastic_ray.communication.communicator import CommunicationFailedError, Communicator
from elastic_ray.loop.api import current_session
from elastic_ray.run.current import set_session
from elastic_ray.state.tree import UnsafeStateError, from_bytes, to_bytes
from tests.loop.changing import Change, Kill, Outcome, run_job
from tests.loop.small_net import BATCH, EPOCHS, SAMPLES, STEPS, net, rows, weights
from tests.loop.trainee import Trainee, numbers

PER_EPOCH = SAMPLES // BATCH


class Program:
    """A loop that makes collectives in every place, and notes what they gave."""

    def __init__(self, order: Sequence[str] = ("sum", "gather", "broadcast", "barrier")) -> None:
        self.order = order
        self.noted: dict[tuple[Any, ...], dict[str, Any]] = collections.defaultdict(dict)
        self._lock = threading.Lock()

    def note(self, place: tuple[Any, ...], value: Any) -> Any:
        """What this worker has been given in a place; not while it only catches up."""
        session = current_session()
        if not session.ledger.replays_passes:
            with self._lock:
                self.noted[place][session.worker] = value
        return value

    def between(self, place: tuple[Any, ...], rank: int) -> None:
        """One of each, in the order of the test."""
        for kind in self.order:
            match kind:
                case "sum":
                    self.note((*place, kind), er.all_reduce(rank + 1.5))
                case "gather":
                    mine = {"rank": rank, "tensor": torch.arange(rank + 1)}
                    told = er.all_gather(mine)
                    self.note((*place, kind), [(each["rank"], each["tensor"].tolist()) for each in told])  # type: ignore[attr-defined]
                case "broadcast":
                    self.note((*place, kind), er.broadcast([rank, f"by {current_session().worker}"]))
                case "barrier":
                    er.barrier()

    def train(self) -> torch.Tensor:
        """The train function."""
        assert er.all_gather("alone") == ["alone"] and er.all_reduce(3) == 3 and er.broadcast(None) is None
        er.barrier()
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
        wrapped = er.AdaptiveDataParallel(model, optimizer, scaling_rule="none")
        loader = er.AdaptiveDataLoader(rows(), batch_size=BATCH, seed=3)
        check = er.AdaptiveDataLoader(rows(), batch_size=BATCH, shuffle=False)
        for epoch in er.remaining_epochs_until(EPOCHS):
            self.between((epoch, "begin"), er.get_context().get_world_rank())
            for (x,) in loader:
                step = er.get_context().get_global_step()
                self.note((epoch, step, "forward"), er.all_reduce(len(x)))
                optimizer.zero_grad()
                loss = wrapped(x).square().mean()
                loss.backward()
                self.note((epoch, step, "backward"), er.all_reduce(loss.detach(), "max"))
                optimizer.step()
                er.barrier()
            self.between((epoch, "trained"), er.get_context().get_world_rank())
            for (_,) in check:
                er.barrier()
            self.between((epoch, "checked"), er.get_context().get_world_rank())
        self.between(("end",), er.get_context().get_world_rank())
        return weights(model)


def run(script: Sequence[Any], first: Sequence[int], program: Program | None = None) -> tuple[Program, Outcome]:
    """Run the program; all who noted a result between steps noted the same."""
    program = program or Program()
    outcome = run_job(program.train, script, first=first)
    assert sorted(outcome.results) == sorted(outcome.groups[-1])
    for place, found in program.noted.items():
        if len(place) < 3 or place[2] not in ("forward", "backward"):
            assert all(value == next(iter(found.values())) for value in found.values()), (place, found)
    for kind in program.order:
        if kind != "barrier":
            assert set(outcome.results) == {int(name[1:]) for name in program.noted["end", kind]}
    undisturbed = run_job(Program().train).results[1]
    for found in outcome.results.values():
        torch.testing.assert_close(found, undisturbed, rtol=0, atol=1e-9)
    return program, outcome


def test_every_rank_has_the_same_results_joiners_too() -> None:
    program, _ = run([Change(2, (1, 2)), Change(PER_EPOCH - 1, (1, 2, 3)), Change(9, (2, 3))], first=(1,))
    for place, found in program.noted.items():
        if place[2:] == ("forward",):
            assert set(found.values()) == {BATCH}, "samples of a whole step"
        if place[2:] == ("backward",):
            assert len(set(map(float, found.values()))) == 1
    assert set(program.noted[0, "trained", "sum"]) == {"w1", "w2", "w3"}, "whoever joins at a pass's end takes part"
    assert program.noted[0, "trained", "sum"]["w3"] == 1.5 + 2.5 + 3.5
    assert program.noted["end", "gather"]["w2"] == [(0, [0]), (1, [0, 1])]
    assert program.noted["end", "broadcast"]["w3"] == [0, "by w2"]


ORDERS = [("sum", "gather", "broadcast", "barrier"), ("barrier", "broadcast", "gather", "sum"), ("gather", "barrier")]


@pytest.mark.matrix(every=6)
@pytest.mark.parametrize("moment", ["collective", "after_collective"])
@pytest.mark.parametrize("step", [0, 4, PER_EPOCH, STEPS])
@pytest.mark.parametrize("order", ORDERS, ids="-".join)
def test_a_lost_rank_changes_no_result(step: int, moment: str, order: Sequence[str]) -> None:
    _, outcome = run([Kill(step, 2, moment)], (1, 2, 3), Program(order))
    assert outcome.groups[-1] == (1, 3)


@pytest.mark.matrix(every=4)
@pytest.mark.parametrize("moment", ["collective", "after_collective"])
@pytest.mark.parametrize("order", ORDERS, ids="-".join)
@pytest.mark.parametrize("earlier", [0, 3])
def test_one_is_lost_while_another_joins(moment: str, order: Sequence[str], earlier: int) -> None:
    """The newcomer enters within code that the others have half run: what they have results of is not made again."""

    class Later(Program):
        def between(self, place: tuple[Any, ...], rank: int) -> None:
            for number in range(earlier):
                self.note((*place, number), er.all_gather(f"{rank} {number}"))
            current_session().moment("receiving")
            super().between(place, rank)

    program, outcome = run([Kill(PER_EPOCH, 2, moment, joins=(4,))], (1, 2, 3), Later(order))
    assert outcome.groups[-1] == (1, 3, 4)
    first = next(kind for kind in (*range(earlier), *order) if kind != "barrier")
    assert "w4" in program.noted[0, "trained", first], "it runs the code after the pass like the others"


class Counter:
    """Counts what user code does between steps."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


@pytest.mark.matrix(every=2)
@pytest.mark.parametrize("passes", [0, 1, 2])
@pytest.mark.parametrize("when", [0, 2])
def test_what_a_newcomer_repeats_counts_once(when: int, passes: int) -> None:
    """It enters in a collective: schedulers and counters that moved before it have moved in the state it has got."""

    def train() -> tuple[float, int, torch.Tensor]:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        wrapped = er.AdaptiveDataParallel(model, optimizer, lr_scheduler=scheduler)
        loader = er.AdaptiveDataLoader(rows(), batch_size=BATCH, seed=3)
        check = er.AdaptiveDataLoader(rows(), batch_size=BATCH, shuffle=False)
        counter = Counter()
        er.register_state("counter", counter)
        for _ in er.remaining_epochs_until(2):
            sums = er.Accumulator()
            for (x,) in loader if passes else ():
                optimizer.zero_grad()
                wrapped(x).square().mean().backward()
                optimizer.step()
            for _ in check if passes > 1 else ():
                sums["checked"] += 1
            for number in range(3):
                if number == when:
                    scheduler.step()
                counter.count += 1
                current_session().moment(f"call {number}")
                er.barrier()
        return optimizer.param_groups[0]["lr"], counter.count, weights(model)

    step = (0, PER_EPOCH, 2 * PER_EPOCH)[passes]
    alone = run_job(train).results[1]
    for call in range(3):
        outcome = run_job(train, [Kill(step, 2, f"call {call}", joins=(3,))], first=(1, 2))
        assert outcome.groups == [(1, 2), (1, 3)]
        for rate, count, found in outcome.results.values():
            assert (rate, count) == alone[:2]
            torch.testing.assert_close(found, alone[2])


def test_a_rank_that_missed_one_is_given_its_result() -> None:
    """Rank 1's collective breaks when the others have its result; they are in the next one meanwhile."""
    performed: dict[str, list[int]] = collections.defaultdict(list)
    broken, known = threading.Event(), threading.Event()

    def numbered(number: int) -> int:
        session = current_session()

        def perform(communicator: Communicator) -> bytes:
            performed[session.worker].append(number)
            total = sum(value for (value,) in communicator.gather_ints([10**communicator.rank]))
            if session.worker == "w2" and session.progress.steps == PER_EPOCH and not broken.is_set():
                broken.set()
                raise CommunicationFailedError("a connection broke at the end")
            if session.worker == "w1" and session.progress.steps == PER_EPOCH:
                known.set()
            if session.worker == "w3" and session.progress.steps == PER_EPOCH:
                assert broken.wait(30.0)
                assert known.wait(30.0)
            return to_bytes(total)

        return int(from_bytes(session.collectives.call("numbered", number, perform, lambda: to_bytes(-1))))

    class Numbered(Program):
        def between(self, place: tuple[Any, ...], rank: int) -> None:
            for number in range(3):
                self.note((*place, number), numbered(number))
            super().between(place, rank)

    program, _ = run([Kill(PER_EPOCH, 3, "after_collective")], (1, 2, 3), Numbered())
    assert broken.is_set() and set(program.noted[0, "trained", 0].values()) == {111}
    assert set(program.noted[0, "trained", 1].values()) == {11}


@pytest.mark.parametrize(
    ("values", "op", "expected"),
    [
        ((1, 2), "sum", 3),
        ((1, 2), "mean", 1.5),
        ((2**40, 1), "max", 2**40),
        ((0.25, 4.0), "min", 0.25),
        ((True, False), "sum", 1),
        ((torch.tensor([1, 2]), torch.tensor([5, 0])), "max", torch.tensor([5, 2])),
        ((torch.tensor([1, 2]), torch.tensor([2, 2])), "mean", torch.tensor([1.5, 2.0])),
        ((torch.tensor([True, False]), torch.tensor([True, False])), "sum", torch.tensor([True, False])),
        ((torch.ones(2, 2).bfloat16(), torch.ones(2, 2).bfloat16()), "sum", torch.full((2, 2), 2.0).bfloat16()),
        ((torch.tensor(3.0).half(), torch.tensor(1.0).half()), "mean", torch.tensor(2.0).half()),
        ((torch.ones(3, 2).t(), torch.ones(3, 2).t()), "sum", torch.full((2, 3), 2.0)),
        ((torch.zeros(0, 3), torch.zeros(0, 3)), "sum", torch.zeros(0, 3)),
    ],
)
def test_what_is_reduced(values: Sequence[Any], op: Any, expected: Any) -> None:
    def reduced() -> Any:
        mine = values[er.get_context().get_world_rank()]
        found = er.all_reduce(mine, op)
        assert found is not mine
        return found

    for found in run_job(lambda: _after_an_epoch(reduced), first=(1, 2)).results.values():
        if isinstance(expected, torch.Tensor):
            assert found.dtype == expected.dtype and torch.equal(found, expected)
        else:
            assert type(found) is type(expected) and found == expected


def _after_an_epoch(then: Callable[[], Any]) -> Any:
    loader = er.AdaptiveDataLoader(rows(), batch_size=BATCH)
    for _ in er.remaining_epochs_until(1):
        for _ in loader:
            pass
    return then()


def test_ranks_that_make_different_calls_are_told() -> None:
    def different() -> Any:
        return er.barrier() if er.get_context().get_world_rank() else er.all_gather(1)

    with pytest.raises(er.errors.RanksDisagreeError, match="makes a collective of its own, number 1 between steps"):
        run_job(lambda: _after_an_epoch(different), first=(1, 2))

    def shapes() -> Any:
        return er.all_reduce(torch.zeros(2 + er.get_context().get_world_rank()))

    with pytest.raises(er.errors.RanksDisagreeError, match="makes a collective of its own"):
        run_job(lambda: _after_an_epoch(shapes), first=(1, 2))

    def returns() -> Any:
        return er.barrier() if er.get_context().get_world_rank() else None

    with pytest.raises(er.errors.RanksDisagreeError, match="has returned from the train function"):
        run_job(lambda: _after_an_epoch(returns), first=(1, 2))


class Unsafe:
    """Could only be pickled."""


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (
            lambda: er.all_reduce(1, "product"),
            ValueError,
            "op must be one of 'sum', 'mean', 'min', 'max', but got 'produ",
        ),
        (lambda: er.all_reduce("1"), TypeError, "number or a tensor, but got str"),
        (
            lambda: er.all_reduce(torch.eye(2).to_sparse()),
            TypeError,
            "dense tensor, but its layout is torch.sparse_coo",
        ),
        (
            lambda: er.all_gather({"a": Unsafe()}),
            UnsafeStateError,
            r"nothing is pickled, but of this value \['a'\] is a .*Unsafe",
        ),
        (lambda: er.broadcast(Unsafe()), UnsafeStateError, "nothing is pickled"),
        (lambda: er.broadcast(1, src=-1), ValueError, "src must be a rank, from 0, but got -1"),
        (lambda: er.broadcast(1, src=True), ValueError, "src must be a rank, from 0, but got True"),
    ],
)
def test_what_makes_no_sense_is_refused(call: Callable[[], Any], error: type[Exception], says: str) -> None:
    set_session(None)
    with pytest.raises(error, match=says):
        call()


def test_a_rank_that_there_is_not_is_refused() -> None:
    with pytest.raises(ValueError, match="src must be a rank of the 2 that there are, but got 2"):
        run_job(lambda: _after_an_epoch(lambda: er.broadcast(1, src=2)), first=(1, 2))


@pytest.mark.parametrize(
    "content", [b"", b"12345678", to_bytes([1])[:-1], to_bytes(torch.ones(3))[:-1], to_bytes(1) + b"x"]
)
def test_bytes_of_a_stranger_are_no_value(content: bytes) -> None:
    with pytest.raises(ValueError, match="an invalid value"):
        from_bytes(content)


def test_who_has_left_is_alone_on_the_way_out() -> None:
    found: dict[str, Any] = {}

    def train() -> None:
        trainee, loader = Trainee(), er.AdaptiveDataLoader(numbers(64), batch_size=4)
        session = current_session()
        try:
            for _ in er.remaining_epochs_until(1):
                for (x,) in loader:
                    trainee.train(x)
        finally:
            found[session.worker] = session.group.world_size, er.all_reduce(session.rank + 1.0)

    outcome = run_job(train, [Change(5, (1,))], first=(1, 2))
    assert outcome.groups == [(1, 2), (1,)] and found["w2"] == (1, 1.0)
