"""NNI's tuners and assessors in Ray Tune: asked by hand, as Tune asks, and in a sweep of elastic trials."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ray import tune

from tests.local_cluster import LocalCluster
from tests.tuning.sweeps import fit
from tuning.nni import AssessorScheduler, NNISearch

if importlib.util.find_spec("nni") is None:
    pytest.skip("NNI is not installed: pip install 'elastic-ray[nni]'", allow_module_level=True)

pytestmark = pytest.mark.ray_cluster(num_cpus=4, resources={"slot": 4})

SPACE = {"x": {"_type": "uniform", "_value": [-2.0, 2.0]}, "kind": {"_type": "choice", "_value": ["a", "b"]}}


def score(config: dict[str, Any]) -> float:
    """Best at x = 1 of kind "b"."""
    return float(-((config["x"] - 1.0) ** 2) - (config["kind"] == "a"))


def search(searcher: NNISearch, trials: int) -> list[float]:
    """The scores of trials one after the other."""
    scores = []
    for k in range(trials):
        config = searcher.suggest(f"t{k}")
        assert isinstance(config, dict)
        scores.append(score(config))
        searcher.on_trial_complete(f"t{k}", {"score": scores[-1]})
    return scores


@pytest.mark.parametrize("tuner", ["TPE", "Random", "Anneal", "TPE_legacy", "Evolution"])
def test_a_tuner_suggests_and_is_told(tuner: str) -> None:
    searcher = NNISearch(tuner, SPACE, metric="score", mode="max")
    scores = search(searcher, 60)
    assert max(scores) > -0.3
    if tuner in ("TPE", "Anneal", "TPE_legacy"):  # those that learn by then
        assert sum(scores[-20:]) > sum(scores[:20])


def test_the_tuner_is_told_the_mode() -> None:
    searcher = NNISearch({"name": "TPE", "class_args": {"seed": 1}}, SPACE, metric="score", mode="min")
    scores = search(searcher, 60)
    assert sum(scores[-20:]) < sum(scores[:20])


def test_a_grid_comes_to_its_end() -> None:
    space = {"x": {"_type": "choice", "_value": [0.0, 1.0]}, "kind": SPACE["kind"]}
    searcher = NNISearch("GridSearch", space, metric="score", mode="max")
    found = [searcher.suggest(f"t{k}") for k in range(5)]
    assert {(each["x"], each["kind"]) for each in found[:4] if isinstance(each, dict)} == {
        (0.0, "a"),
        (0.0, "b"),
        (1.0, "a"),
        (1.0, "b"),
    }
    assert found[4] is None  # as long as something runs
    for k in range(4):
        searcher.on_trial_complete(f"t{k}", {"score": 0.0})
    assert searcher.suggest("t5") == NNISearch.FINISHED


@pytest.mark.parametrize("before_each_result", ["nothing", "saved", "saved and restored"])
def test_evolution_waits_for_results_and_gives_what_it_owes(before_each_result: str, tmp_path: Path) -> None:
    tuner = {"name": "Evolution", "class_args": {"population_size": 2}}
    searcher = NNISearch(tuner, SPACE, metric="score", mode="max")
    waiting = 0
    running: list[str] = []
    done = 0
    for k in range(200):
        config = searcher.suggest(f"t{k}")
        if isinstance(config, dict):
            running.append(f"t{k}")
        else:
            waiting += 1
            if "saved" in before_each_result:
                searcher.save(str(tmp_path / "state"))
            if "restored" in before_each_result:
                searcher = NNISearch(tuner)
                searcher.restore(str(tmp_path / "state"))
            searcher.on_trial_complete(running.pop(0), {"score": 0.1 * k}, error=k % 7 == 0)
            done += 1
    assert waiting > 10
    assert done > 10


def test_what_was_saved_continues_as_if_nothing_had_happened(tmp_path: Path) -> None:
    tuner = {"name": "TPE", "class_args": {"seed": 7}}
    searcher = NNISearch(tuner, SPACE, metric="score", mode="max")
    search(searcher, 25)
    searcher.suggest("running")
    searcher.save(str(tmp_path / "state"))
    again = NNISearch(tuner)
    again.restore(str(tmp_path / "state"))
    for each in (searcher, again):
        each.on_trial_complete("running", {"score": 0.0})
    assert [again.suggest(f"new{k}") for k in range(5)] == [searcher.suggest(f"new{k}") for k in range(5)]


def test_failed_trial_or_one_without_metric_is_no_result() -> None:
    searcher = NNISearch("TPE", SPACE, metric="score", mode="max")
    for k, result in enumerate(({"score": float("nan")}, {"other": 1.0}, None)):
        searcher.suggest(f"t{k}")
        searcher.on_trial_complete(f"t{k}", result)
    searcher.suggest("t9")
    searcher.on_trial_complete("t9", {"score": 1.0}, error=True)
    searcher.on_trial_complete("nobody", {"score": 1.0})
    assert isinstance(searcher.suggest("t10"), dict)


@pytest.mark.parametrize("number", [np.float32, np.int64, np.array])
def test_a_metric_may_be_numpys(number: Any) -> None:
    ours, other = (
        NNISearch({"name": "TPE", "class_args": {"seed": 3}}, SPACE, metric="score", mode="max") for _ in range(2)
    )
    for k in range(30):
        for searcher, kind in ((ours, number), (other, float)):
            searcher.suggest(f"t{k}")
            searcher.on_trial_complete(f"t{k}", {"score": kind(k % 7)})
    assert ours.suggest("next") == other.suggest("next")
    judge = AssessorScheduler("Medianstop", metric="score", mode="max")
    for name, value in (("good", 10.0), ("better", 11.0)):
        trial = SimpleNamespace(trial_id=name)
        assert [judge.on_trial_result(None, trial, {"score": number(value)}) for _ in range(4)] == ["CONTINUE"] * 4
        judge.on_trial_complete(None, trial, {})
    assert judge.on_trial_result(None, SimpleNamespace(trial_id="bad"), {"score": number(1.0)}) == "STOP"


def test_the_space_may_be_tunes() -> None:
    searcher = NNISearch("TPE")
    assert searcher.set_search_properties("score", "max", {"x": tune.uniform(-2, 2), "kind": tune.choice(["a", "b"])})
    config = searcher.suggest("t0")
    assert isinstance(config, dict) and set(config) == {"x", "kind"}
    own = NNISearch("TPE", SPACE)
    assert own.set_search_properties("score", "max", {"fixed": 3})
    assert not own.set_search_properties("score", "max", {"x": tune.uniform(0, 1)})


def test_what_is_missing_is_said() -> None:
    with pytest.raises(ValueError, match="there is nothing to search"):
        NNISearch("TPE").set_search_properties("score", "max", {"fixed": 3})
    with pytest.raises(ValueError, match="NNISearch needs a metric to optimise"):
        NNISearch("TPE", SPACE).set_search_properties(None, None, {})
    with pytest.raises(RuntimeError, match="no search space yet"):
        NNISearch("TPE").suggest("t0")
    with pytest.raises(ValueError, match=r"cannot be used in Ray Tune: .*HyperBandScheduler"):
        NNISearch("Hyperband")
    with pytest.raises(ValueError, match="assessor must be a name"):
        AssessorScheduler(None)


@pytest.mark.slow
def test_sweep_of_elastic_trials_with_tuner_and_an_assessor(sweep_cluster: LocalCluster, tmp_path: Path) -> None:
    space = {"quality": tune.choice([3.0, 0.1, 0.2, 0.3]), "epochs": 9}
    grid = fit(
        tmp_path,
        space,
        search_alg=NNISearch("GridSearch"),
        scheduler=AssessorScheduler("Medianstop"),
        num_samples=4,
        max_concurrent_trials=1,
    )
    assert not grid.errors
    lengths = {result.config["quality"]: len(result.metrics_dataframe) for result in grid}
    assert lengths[3.0] == 9
    assert min(lengths.values()) < 9


@pytest.mark.slow
def test_curvefitting_stops_nothing_that_is_good(sweep_cluster: LocalCluster, tmp_path: Path) -> None:
    judge = AssessorScheduler({"name": "Curvefitting", "class_args": {"epoch_num": 9, "start_step": 5}})
    space = {"quality": tune.uniform(1.0, 1.1), "epochs": 9}
    grid = fit(tmp_path, space, search_alg=NNISearch("TPE"), scheduler=judge, num_samples=2)
    assert [len(result.metrics_dataframe) for result in grid] == [9, 9]
