"""State of sharded tables: whole and of no size of group; evaluation; what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import elastic_ray as er
from elastic_ray.run.current import session_of_thread, set_session
from elastic_ray.sync import RowAdagrad, RowAdam, RowSGD, ShardedEmbedding, StrategyError
from tests.loop.changing import Kill, run_job
from tests.loop.ranks import Ranks
from tests.sync.sharded.tables import Case, assert_same
from tests.sync.tables import ROWS, WIDTH, data


class Trainee:
    """A model in training, from a state or from the beginning."""

    def __init__(self, case: Case, states: dict[str, Any] | None = None) -> None:
        self.model = case.sharded()
        self.optimizer = case.make(self.model)
        self.wrapped = er.AdaptiveDataParallel(self.model, self.optimizer, scaling_rule="none")
        if states is not None:
            session = session_of_thread()
            assert session is not None
            session.states.resume(states, loaded=True)

    def train(self, epochs: int = 1) -> None:
        """Train and evaluate."""
        loader = er.AdaptiveDataLoader(data(), batch_size=8, seed=3, drop_last=True)
        evaluation = er.AdaptiveDataLoader(data(), batch_size=7)
        for _ in er.remaining_epochs_until(epochs):
            for ids, classes in loader:
                self.optimizer.zero_grad()
                nn.functional.cross_entropy(self.wrapped(ids), classes).backward()
                self.optimizer.step()
            self.wrapped.eval()
            with torch.no_grad():
                right = er.Accumulator()
                for ids, classes in evaluation:
                    right["n"] += len(ids)
                    right["right"] += float((self.wrapped(ids).argmax(1) == classes).sum())
            self.wrapped.train()

    @property
    def rows(self) -> dict[str, Tensor]:
        """The whole table with its state."""
        return self.model.table.row_state_dict()


def saved(case: Case) -> tuple[Any, Any, Any]:
    """Train; returns what an automatic checkpoint holds, what `state_dict()` gives, and the table's state."""
    trainee = Trainee(case)
    trainee.train()
    session = session_of_thread()
    assert session is not None
    session.registry.prepare_to_save()
    return session.states.capture_to_save(), trainee.model.state_dict(), trainee.rows


def resumed(case: Case, states: Any) -> dict[str, Tensor]:
    """Continue from an automatic checkpoint to the end of the second epoch."""
    trainee = Trainee(case, states)
    trainee.train(2)
    return {**trainee.rows, "bias": trainee.model.net.bias.detach()}


def adam_in_both() -> tuple[Tensor, Tensor]:
    """A table's rows after RowAdam, and torch's after SparseAdam."""
    table = ShardedEmbedding(30, 3, optimizer=RowAdam(lr_factor=0.5), seed=1)
    theirs = nn.Embedding(30, 3, sparse=True)
    theirs.load_state_dict(table.state_dict())
    model = nn.Sequential(table, nn.Linear(3, 1))
    with torch.no_grad():
        model[1].weight.fill_(0.7)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    sparse = torch.optim.SparseAdam(theirs.parameters(), lr=0.1)
    wrapped = er.AdaptiveDataParallel(model, optimizer, scaling_rule="none")
    model[1].requires_grad_(False)
    model[1].bias.requires_grad_(True)
    loader = er.AdaptiveDataLoader(torch.arange(40) ** 2 % 30, batch_size=8, seed=3)
    for _ in er.remaining_epochs_until(2):
        for ids in loader:
            wrapped(ids).square().mean().backward()
            sparse.zero_grad()
            model[1](theirs(ids)).square().mean().backward()
            optimizer.step()
            sparse.step()
            optimizer.zero_grad()
    return table.state_dict()["weight"], theirs.weight.detach()


@pytest.mark.thorough
def test_adam_is_torch_s_sparse_adam(ranks: Ranks) -> None:
    found, wanted = ranks.run(adam_in_both)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)


@pytest.mark.matrix(every=2)
@pytest.mark.thorough
@pytest.mark.parametrize("case", [Case("adagrad"), Case(copies=1)], ids=["two owners", "one owner"])
def test_a_checkpoint_continues_in_a_group_of_any_size(ranks: Ranks, case: Case) -> None:
    results = ranks.run(saved, case, world=3)
    states, weights, rows = results[0]
    whole = nn.Embedding(ROWS, WIDTH)
    whole.load_state_dict({"weight": weights["table.weight"]})
    assert torch.equal(rows["weight"], weights["table.weight"]) and rows["step"] == 3
    assert rows.keys() == {"weight", "step", *({"sum"} if case.optimizer == "adagrad" else ())}
    assert results[1][1]["table.weight"].shape == (0, WIDTH)
    assert "whole" not in results[1][0]["rows/0/0"]  # only rank 0 can save, and only it holds the whole
    alone, found = ranks.run(resumed, case, states), ranks.run(resumed, case, states, world=2)[0]
    assert found.pop("step") == alone.pop("step") == 6
    assert_same(found, alone)


def evaluated(case: Case, whole: bool) -> int:
    """Evaluate with a loader of whole batches or of shares."""
    trainee = Trainee(case)
    trainee.train()
    trainee.wrapped.eval()
    seen = 0
    with torch.no_grad():
        for ids, _ in er.AdaptiveDataLoader(data(), batch_size=5, whole_batches=whole):
            trainee.wrapped(ids)
            seen += len(ids)
    return seen


def test_loader_of_whole_batches_is_refused_whatever_the_group() -> None:
    assert sum(run_job(lambda: evaluated(Case(copies=1), False), first=(1, 2)).results.values()) == 25
    for workers in ((1,), (1, 2, 3)):  # also where all hold all rows: the group may grow
        with pytest.raises(RuntimeError, match="cannot be called in a pass over whole_batches=True"):
            run_job(lambda: evaluated(Case(), True), first=workers)


def state_of_one_rank() -> None:
    """Only rank 0 asks for the state."""
    trainee = Trainee(Case(copies=1))
    trainee.train()
    if er.get_context().get_world_rank() == 0:
        trainee.model.state_dict()
    trainee.train(2)


def test_state_asked_for_by_one_rank_is_an_error() -> None:
    with pytest.raises(er.errors.RanksDisagreeError, match="rank 0 fetches the whole of ShardedEmbedding 0 of model 0"):
        run_job(state_of_one_rank, first=(1, 2))


def clears(zero: bool) -> Tensor:
    """Another loss goes through the table first, and its gradients are cleared or not."""
    trainee = Trainee(Case())
    for _ in er.remaining_epochs_until(1):
        for ids, classes in er.AdaptiveDataLoader(data(), batch_size=8, seed=3, drop_last=True):
            trainee.optimizer.zero_grad()
            trainee.wrapped(ids).square().mean().backward()
            if zero:
                trainee.optimizer.zero_grad()
            nn.functional.cross_entropy(trainee.wrapped(ids), classes).backward()
            trainee.optimizer.step()
    return trainee.rows["weight"]


@pytest.mark.thorough
def test_cleared_gradients_of_rows_do_not_count(ranks: Ranks) -> None:
    for zero in (True, False):
        alone, two = ranks.run(clears, zero), ranks.run(clears, zero, world=2)[0]
        torch.testing.assert_close(two, alone, rtol=0, atol=1e-5)
        trained = ranks.run(saved, Case())[2]["weight"]
        assert torch.allclose(alone, trained, atol=1e-5) == zero


def steps_of_several() -> None:
    """Gradients of two steps are added up by hand."""
    trainee = Trainee(Case())
    for _ in er.remaining_epochs_until(1):
        for number, (ids, _) in enumerate(er.AdaptiveDataLoader(data(), batch_size=8, drop_last=True)):
            trainee.wrapped(ids).square().mean().backward()
            if number % 2:
                trainee.optimizer.step()


def test_gradients_added_up_by_hand_are_refused() -> None:
    with pytest.raises(RuntimeError, match="cannot be added up over several steps of a loader"):
        run_job(steps_of_several, first=(1, 2))


def frozen(case: Case) -> Tensor:
    """Only the table is trained."""
    trainee = Trainee(case)
    trainee.model.net.requires_grad_(False)
    trainee.train()
    return trainee.rows["weight"]


def test_rows_whose_gradients_could_not_travel_are_told() -> None:
    begun = Case().weight()
    assert not torch.equal(run_job(lambda: frozen(Case()), first=(1,)).results[1], begun)
    with pytest.raises(RuntimeError, match="let one parameter of the wrapped model at least take part"):
        run_job(lambda: frozen(Case()), first=(1, 2))


def half_way() -> list[tuple[int, ...]]:
    """Shapes of state in each step; then another table is loaded."""
    trainee, ones = Trainee(Case()), torch.ones(ROWS, WIDTH)
    shapes = []
    for _ in er.remaining_epochs_until(1):
        for ids, classes in er.AdaptiveDataLoader(data(), batch_size=8, seed=3, drop_last=True):
            trainee.optimizer.zero_grad()
            nn.functional.cross_entropy(trainee.wrapped(ids), classes).backward()
            trainee.optimizer.step()
            with pytest.raises(RuntimeError, match="before the first epoch, or between loops"):
                trainee.model.table.load_state_dict({"weight": ones})
            shapes.append(tuple(trainee.model.table.state_dict()["weight"].shape))
    trainee.model.table.load_state_dict({"weight": ones})
    weight = trainee.model.table.state_dict()["weight"]
    assert er.get_context().get_world_rank() or torch.equal(weight, ones)
    return shapes


def test_state_is_asked_for_in_training_and_lost_steps() -> None:
    outcome = run_job(half_way, [Kill(1, 3, "after_step")], first=(1, 2, 3))
    whole = (ROWS, WIDTH)
    assert outcome.results[1] in ([whole, (0, WIDTH), whole, whole], [whole, (0, WIDTH), whole]), outcome.results[1]
    assert any("in a step that is lost, has no rows" in text for _, text, _ in outcome.told)
    assert set(outcome.results[2]) == {(0, WIDTH)}


def wrap(table: ShardedEmbedding, optimizer: Any = None, **options: Any) -> er.AdaptiveDataParallel:
    """A small model with the table, wrapped in a run of its own."""
    set_session(None)
    model = nn.Sequential(table, nn.Linear(2, 1))
    make = optimizer or (lambda params: torch.optim.SGD(params, lr=0.1))
    return er.AdaptiveDataParallel(model, make(model.parameters()), **options)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), r"SGD\(momentum=0.9\) would"),
        (lambda p: torch.optim.AdamW(p), "AdamW"),
        (lambda p: torch.optim.Adagrad(p, weight_decay=0.1), "weight_decay=0.1"),
    ],
)
def test_optimizers_without_row_rules_are_refused_unless_chosen(make: Any, text: str) -> None:
    with pytest.raises(StrategyError, match=text):
        wrap(ShardedEmbedding(9, 2), make)
    wrap(ShardedEmbedding(9, 2, optimizer="adagrad"), make)


def test_what_cannot_be_served_is_refused_when_wrapping() -> None:
    with pytest.raises(StrategyError, match="strategy 'local_sgd' averages models"):
        wrap(ShardedEmbedding(9, 2), strategy="local_sgd")
    with pytest.raises(StrategyError, match="grad_scaler is not supported"):
        wrap(ShardedEmbedding(9, 2), grad_scaler=torch.amp.GradScaler("cpu"))
    with pytest.raises(RuntimeError, match="no_sync"):
        wrap(ShardedEmbedding(9, 2)).no_sync()
    table = ShardedEmbedding(9, 2)
    wrap(table)
    with pytest.raises(ValueError, match="must belong to one model"):
        er.AdaptiveDataParallel(
            (model := nn.Sequential(table, nn.Linear(2, 1))), torch.optim.SGD(model.parameters(), lr=0.1)
        )


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"num_embeddings": 0}, "num_embeddings must be"),
        ({"embedding_dim": 1.5}, "embedding_dim must be"),
        ({"copies": 3}, "copies must be"),
        ({"mode": "max"}, "mode must be one of sum, mean"),
        ({"padding_idx": 9}, "padding_idx must be within num_embeddings=9"),
        ({"dtype": torch.int64}, "dtype must be floating"),
        ({"std": -1.0}, "std must be 0 or more"),
        ({"optimizer": "lamb"}, "one of sgd, adagrad, adam, but got 'lamb'"),
        ({"optimizer": torch.optim.SGD}, "must be a rule for rows"),
        ({"max_norm": 1.0}, "max_norm=1.0 is not supported"),
        ({"scale_grad_by_freq": True}, "scale_grad_by_freq=True is not supported"),
        ({"width": 3}, "no argument 'width'"),
    ],
)
def test_bad_arguments_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises((ValueError, TypeError), match=text):
        ShardedEmbedding(**{"num_embeddings": 9, "embedding_dim": 2, **options})


@pytest.mark.parametrize(
    ("rule", "options", "text"),
    [
        (RowSGD, {"lr_factor": 0.0}, "lr_factor must be more than 0"),
        (RowAdagrad, {"eps": -1.0}, "eps must be 0 or more"),
        (RowAdam, {"betas": (0.9, 1.0)}, "betas must be two numbers"),
    ],
)
def test_bad_rules_are_refused(rule: Any, options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        rule(**options)


def test_outside_of_model_it_can_be_loaded_and_evaluated() -> None:
    table, plain = ShardedEmbedding(9, 2, padding_idx=0), nn.Embedding(9, 2, padding_idx=0)
    assert not table.state_dict()["weight"][0].any()
    table.load_state_dict(plain.state_dict())
    with torch.no_grad():
        assert torch.equal(table(torch.tensor([[1, 8], [0, 1]])), plain(torch.tensor([[1, 8], [0, 1]])))
    with pytest.raises(RuntimeError, match=r"wrapped: model = elastic_ray\.AdaptiveDataParallel"):
        table(torch.tensor([1]))
    with pytest.raises(IndexError, match="ids must be from 0 to below num_embeddings=9, but are from 3 to 9"):
        table(torch.tensor([3, 9]))
    with pytest.raises(RuntimeError, match=r"weight must have shape \(9, 2\)"):
        table.load_state_dict({"weight": torch.zeros(8, 2)})
    with pytest.raises(RuntimeError, match="rows have state once the model is wrapped"):
        table.row_state_dict()


@given(st.integers(0, 3), st.integers(1, 40))
def test_seeded_rows_are_the_same_whoever_makes_them(seed: int, rows: int) -> None:
    first, second = (ShardedEmbedding(rows, 3, seed=seed).state_dict()["weight"] for _ in range(2))
    assert torch.equal(first, second) and first.shape == (rows, 3)
