"""Strategies that are chosen, or set, while several ranks train: over real gloo groups."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from elastic_ray.loop.api import current_session
from elastic_ray.membership.messages import StrategiesKnown
from elastic_ray.sync import AllReduce, Auto, StrategyError
from elastic_ray.sync.spec import Rows
from placement.cluster.jobs import FoundStrategy
from tests.loop.changing import Change, Kill, Outcome, run_job
from tests.loop.ranks import RankFailedError, Ranks
from tests.sync.switching import Trainee

SMALL = AllReduce(bucket_bytes=4096)


class Told:
    """What the job's user is told."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str, dict[str, Any]]] = []
        current_session().controller.notify = lambda *event: self.events.append(event)


def choosing(sparse: bool) -> Any:
    trainee = Trainee("auto", sparse=sparse)
    told = Told()
    keys: list[str | None] = []
    trainee.train(lambda trainee, step: keys.append(current_session().registry.strategy_key), epochs=7)
    table = trainee.wrapped.explain_strategy()
    return trainee.parameters, trainee.wrapped.strategy, trainee.used, told.events, table, str(table), keys


def plainly(sparse: bool, strategy: Any, epochs: int) -> Any:
    trainee = Trainee(strategy, sparse=sparse)
    trainee.train(epochs=epochs)
    return trainee.parameters


@pytest.mark.matrix(every=2)
@pytest.mark.thorough
@pytest.mark.parametrize("sparse", [False, True])
def test_auto_measures_tries_and_keeps_one_on_all_ranks(ranks: Ranks, sparse: bool) -> None:
    ours, theirs = ranks.run(choosing, sparse, world=2)
    parameters, strategy, used, events, table, text, keys = ours
    assert torch.equal(parameters, theirs[0]) and strategy == theirs[1] and used == theirs[2]
    # The table's rows travel: a twentieth of it is touched, and all of it would take many times as long.
    rules = {rule.pattern: rule.sync for rule in strategy.rules}
    assert not sparse or isinstance(rules["table.weight"], Rows)
    assert len(set(used)) > 1 or sparse, "several were tried"
    strategies = [event for event in events if event[0] == "strategy"]
    assert len(strategies) == 1 and not theirs[3]
    _, told, detail = strategies[0]
    assert (
        "kept" in detail["table"]
        and "2 workers" in told
        and strategy.name in told
        and detail["strategy"] == strategy.name
    )
    assert set(detail["measured_s"]) <= set(detail["considered"]) and strategy.name in detail["measured_s"]
    assert table.candidates and sum(row.chosen for row in table.candidates) == 1
    assert table.reason in told and table.measured_s and table.rows
    assert all(row.measured_s is not None for row in table.rows)
    assert strategy.name in text and "table.weight" in text
    assert keys[0] is None and keys[-1] is not None and keys[-1].startswith("auto/")
    assert keys.index(keys[-1]) > 10, "steps of measuring count for nobody"
    plain = ranks.run(plainly, sparse, "parallax" if sparse else "all_reduce", 7, world=2)[0]
    assert (parameters - plain).abs().max() < 1e-5


def setting(given: list[Any]) -> Any:
    trainee = Trainee("all_reduce")

    def between(trainee: Trainee, step: int) -> None:
        if step % 7 == 3:
            trainee.wrapped.set_strategy(given[step // 7 % len(given)])

    trainee.train(between)
    return trainee.parameters, trainee.used, trainee.wrapped.explain_strategy()


@pytest.mark.thorough
def test_a_strategy_is_set_between_two_steps(ranks: Ranks) -> None:
    given = [SMALL, "parallax", "all_reduce", "auto"]
    (ours, used, table), (theirs, _, _) = ranks.run(setting, given, world=2)
    assert torch.equal(ours, theirs)
    assert used[2:5] == ["all_reduce", "all_reduce", "all_reduce"] and used[10] == "parallax"
    assert {"all_reduce", "parallax"} <= set(used)
    plain = ranks.run(plainly, False, None, 4, world=2)[0]
    assert (ours - plain).abs().max() < 1e-5
    assert table.rows and table.measured_s is not None


def routed() -> Any:
    trainee, told = Trainee("parallax"), Told()
    registry, refused = current_session().registry, []

    def between(trainee: Trainee, step: int) -> None:
        if step in (2, 5):
            registry.gradients_of(0).set_topology(("ring", "two_level")[step == 5])
        if step == 8:
            trainee.wrapped.set_strategy("bf16")
        if step == 10:
            with pytest.raises(StrategyError) as caught:
                registry.gradients_of(0).set_topology("tree")
            refused.append(str(caught.value))

    trainee.train(between, epochs=1)
    return trainee.parameters, trainee.used, refused, [event for event in told.events if event[0] == "strategy"]


@pytest.mark.thorough
def test_topology_is_set_alone_and_falls_back_aloud(ranks: Ranks) -> None:
    (ours, used, refused, told), (theirs, *_) = ranks.run(routed, world=2)
    assert torch.equal(ours, theirs)
    names = list(dict.fromkeys(used))
    assert names == ["parallax", "parallax by ring", "parallax by two_level", "bf16"]
    assert "one part and the native wire" in refused[0]
    assert len(told) == 1 and "on one node, so two_level is all_reduce" in told[0][1]


class OfAnyForm(dict[str, FoundStrategy]):
    """What won in a group of any form."""

    def get(self, form: str, default: Any = None) -> FoundStrategy:
        return FoundStrategy(name="all_reduce", step_s=0.01)


def knowing() -> Any:
    session, trainee = current_session(), Trainee("auto")

    def between(trainee: Trainee, step: int) -> None:
        if step == 1:
            session.membership.post(StrategiesKnown(strategies=OfAnyForm()))

    trainee.train(between, epochs=1)
    return trainee.used


@pytest.mark.thorough
def test_what_rank_0_hears_ends_a_race_everywhere(ranks: Ranks) -> None:
    used, others = ranks.run(knowing, world=2)
    assert used == others
    assert used[3:7] == ["all_reduce"] * 4, "until a step turns out to take another time than was said"


def alone() -> Any:
    trainee = Trainee("auto")
    refused = []
    for wrong in ("fastest", "powersgd.json", 5):
        with pytest.raises((StrategyError, TypeError)) as caught:
            trainee.wrapped.set_strategy(wrong)
        refused.append(str(caught.value))
    trainee.train(epochs=1)
    return trainee.used, trainee.wrapped.explain_strategy(), refused


def test_one_worker_has_nothing_to_choose(ranks: Ranks) -> None:
    used, table, refused = ranks.run(alone)
    assert set(used) == {"auto"} and table.workers == 1 and not table.candidates and str(table)
    assert "all_reduce" in refused[0] and "cannot be read" in refused[1] and "5" in refused[2]


def explained() -> Any:
    """Strategies by hand; what each is said to send."""
    trainee = Trainee("auto")
    trainee.train(epochs=1)
    return {name: _explained(trainee, name) for name in ("all_reduce", "bf16", "int8", "powersgd", "ps", "local_sgd")}


def _explained(trainee: Trainee, name: str) -> Any:
    trainee.wrapped.set_strategy(name)
    trainee.wrapped(torch.arange(20)[:, None])
    table = trainee.wrapped.explain_strategy()
    return sum(row.sent_nbytes for row in table.rows), str(table)


def test_what_each_strategy_sends_is_shown(ranks: Ranks) -> None:
    found = ranks.run(explained, world=2)[0]
    whole = found["all_reduce"][0]
    shares = {name: sent / whole for name, (sent, _) in found.items()}
    assert shares["bf16"] == shares["ps"] / 2 == 0.5 and shares["int8"] == shares["local_sgd"] == 0.25
    assert 0 < shares["powersgd"] < 0.25
    assert all("MiB sent" in text for _, text in found.values())


def differing(given: Any) -> Any:
    rank = current_session().group.rank_info.rank
    trainee = Trainee("all_reduce")

    def between(trainee: Trainee, step: int) -> None:
        if step == 5 and given[rank] is not None:
            trainee.wrapped.set_strategy(given[rank])

    began_s = time.monotonic()
    try:
        trainee.train(between)
    except RuntimeError as error:
        return type(error).__name__, str(error), time.monotonic() - began_s
    return None


@pytest.mark.matrix(every=1)
@pytest.mark.parametrize(
    ("given", "named"),
    [
        (("ps", "parallax"), ("ps", "parallax")),
        ((SMALL, None), ("all_reduce", "all_reduce")),
        (("auto", None), ("auto", "all_reduce")),
        (("auto", Auto(steps=20)), ("auto", "auto")),
    ],
)
def test_ranks_that_differ_learn_it(ranks: Ranks, given: Any, named: Any) -> None:
    for kind, text, took_s in ranks.run(differing, given, world=2):
        assert all(f"rank {rank} reduces" in text and f"strategy {name!r}" in text for rank, name in enumerate(named))
        assert kind == "RanksDisagreeError" and "in step 5" in text and "strategy" in text
        assert took_s < 60


@pytest.mark.thorough
def test_a_rank_that_averages_among_others_learns_it(ranks: Ranks) -> None:
    for kind, text, took_s in ranks.run(differing, ("local_sgd", "bf16"), world=2):
        assert "rank 0 has come to the end of a step, and averages models" in text and "rank 1 reduces" in text
        assert kind == "RanksDisagreeError" and "in step 5" in text and took_s < 60


def two_models() -> Any:
    first, second = Trainee("auto"), Trainee("auto")
    together: list[int] = []

    def between(trainee: Trainee, step: int) -> None:
        models = [trainee.wrapped for trainee in (first, second)]
        together.append(sum(each.strategy.name != "auto" and not each.explain_strategy().reason for each in models))
        second.optimizer.zero_grad()
        second.wrapped(torch.arange(20)[:, None]).square().mean().backward()
        second.optimizer.step()

    first.train(between, epochs=14)
    return max(together), [t.wrapped.explain_strategy().reason for t in (first, second)], first.parameters


@pytest.mark.thorough
def test_models_choose_one_after_the_other(ranks: Ranks) -> None:
    (most, reasons, parameters), theirs = ranks.run(two_models, world=2)
    assert most == 1 and all(reasons) and reasons == theirs[1]
    assert torch.equal(parameters, theirs[2])


def growing() -> Any:
    trainee = Trainee("auto")
    trainee.train(epochs=17)
    return trainee.parameters, trainee.wrapped.strategy, trainee.wrapped.explain_strategy()


def _alike(outcome: Outcome) -> None:
    first, *others = outcome.results.values()
    for other in others:
        assert torch.equal(first[0], other[0]) and first[1] == other[1] and first[2].reason == other[2].reason


@pytest.mark.thorough
def test_another_size_is_measured_anew_a_known_one_not() -> None:
    outcome = run_job(growing, [Change(110, (1, 2, 3)), Change(240, (1, 2))], first=(1, 2))
    assert set(outcome.results) == {1, 2}
    _alike(outcome)
    told = [text for kind, text, _ in outcome.told if kind == "strategy"]
    assert [text.split()[2] for text in told] == ["2", "3", "2"], told
    assert told[0] == told[2], "what was found for two workers holds again"


@pytest.mark.thorough
@pytest.mark.parametrize("moment", ["allreduce", "edge", "after_step"])
@pytest.mark.parametrize("step", [34, 28, 4])
@pytest.mark.matrix(every=10)
def test_a_worker_that_dies_in_the_middle_of_measuring(moment: str, step: int) -> None:
    outcome = run_job(growing, [Kill(step, 3, moment), Change(step + 20, (1, 2, 4))], first=(1, 2, 3))
    assert set(outcome.results) == {1, 2, 4}
    _alike(outcome)
    assert any(kind == "strategy" for kind, _, _ in outcome.told)


def test_a_disagreement_is_an_error_of_the_ranks(ranks: Ranks) -> None:
    with pytest.raises(RankFailedError, match="StrategyError"):
        ranks.run(_refused, world=2)


def _refused() -> None:
    Trainee("all_reduce").wrapped.set_strategy("no such")


def on_two_nodes() -> Any:
    trainee = Trainee("all_reduce")

    def between(trainee: Trainee, step: int) -> None:
        if step == 2:
            current_session().group.nodes = ("a", "a", "b")
            trainee.wrapped.set_strategy(AllReduce(topology="two_level", bucket_bytes=1024))

    trainee.train(between, epochs=1)
    return trainee.parameters, trainee.used


@pytest.mark.thorough
def test_two_levels_in_many_buckets_give_the_mean(ranks: Ranks) -> None:
    found = ranks.run(on_two_nodes, world=3)
    assert all(torch.equal(parameters, found[0][0]) for parameters, _ in found)
    assert found[0][1][-1] == "two_level"
    plain = ranks.run(plainly, False, None, 1, world=3)[0]
    assert (found[0][0] - plain).abs().max() < 1e-5
