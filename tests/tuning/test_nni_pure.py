"""What is decided about an NNI experiment without NNI: algorithms, search spaces, what is told to the manager."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest
from ray import tune

from tuning import Promise
from tuning.nni import ExperimentFailedError, Outcome, Results
from tuning.nni.algorithms import KNOWN, Algorithm, check_together, promise_of, read_assessor, read_tuner, works
from tuning.nni.spaces import check_space, from_tune
from tuning.nni.wire import FINAL, TrialId, metric_message, shown

UNIFORM = {"_type": "uniform", "_value": [0, 1]}


@pytest.mark.parametrize("name", [name for name in KNOWN if KNOWN[name].broken])
def test_broken_tuner_says_so_and_names_a_working_one(name: str) -> None:
    with pytest.raises(ValueError, match="does not run on today's Python stack") as caught:
        read_tuner(name, "max")
    assert f"Take {KNOWN[name].instead!r}" in str(caught.value)
    assert KNOWN[name].instead in works("tuner")


@pytest.mark.parametrize("name", [name for name in KNOWN if KNOWN[name].manager_only])
def test_what_only_the_manager_drives_is_refused_in_tune(name: str) -> None:
    assert read_tuner(name, "max").name == name
    with pytest.raises(ValueError, match=r"cannot be used in Ray Tune: .* use ray\.tune\.schedulers"):
        read_tuner(name, "max", in_tune=True)


def test_the_mode_is_told_to_tuners_that_take_it() -> None:
    assert read_tuner("tpe", "min") == Algorithm(name="TPE", class_args={"optimize_mode": "minimize"})
    given = {"name": "TPETuner", "class_args": {"seed": 3}}
    assert read_tuner(given, "max").class_args == {"seed": 3, "optimize_mode": "maximize"}
    assert read_tuner("Batch", "max").class_args == {}
    assessor = read_assessor("Medianstop", "min")
    assert assessor is not None and assessor.class_args == {"optimize_mode": "minimize"}
    own = read_tuner({"class_name": "mine.Tuner", "code_directory": "/code"}, "max")
    assert own == Algorithm(class_name="mine.Tuner", code_directory="/code")


@pytest.mark.parametrize(
    ("assessor", "says"),
    [
        (None, None),
        ({"class_name": "mine.Assessor"}, None),
        ("Medianstop", (None, 1)),
        ({"name": "Medianstop", "class_args": {"start_step": 3}}, (None, 3)),
        ({"name": "Curvefitting", "class_args": {"epoch_num": 20}}, (20, 6)),
        ({"name": "Curvefitting", "class_args": {"epoch_num": 4}}, (4, 4)),
        ({"name": "Curvefitting", "class_args": {"epoch_num": "many"}}, None),
    ],
)
def test_the_promise_is_read_off_the_assessor(assessor: Any, says: Any) -> None:
    found = promise_of(read_assessor(assessor, "max"), "accuracy", "max")
    promise = says and Promise(metric="accuracy", mode="max", max_t=says[0], grace_period=says[1], reduction_factor=2)
    assert found == promise


@pytest.mark.parametrize(
    ("given", "error", "says"),
    [
        ("Bayes", ValueError, "tuner must be one of TPE, .*Hyperband.* but got 'Bayes'"),
        ("Medianstop", ValueError, "tuner must be one of"),
        (3, TypeError, "tuner must be a name, such as 'TPE', or"),
        ({"name": "TPE", "args": {}}, TypeError, "tuner must be a name"),
        ({"name": "TPE", "class_args": 3}, TypeError, "class_args of the tuner must be a mapping, but got 3"),
        ({"name": "TPE", "class_args": {"optimize_mode": "minimize"}}, ValueError, "'maximize' as mode='max' says"),
    ],
)
def test_a_wrong_tuner_is_refused(given: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        read_tuner(given, "max")


def test_assessors_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match=r"Curvefitting.* cannot minimize"):
        read_assessor("Curvefitting", "min")
    with pytest.raises(ValueError, match="assessor must be None with tuner='Hyperband'"):
        check_together(read_tuner("Hyperband", "max"), read_assessor("Medianstop", "max"))
    check_together(read_tuner("Hyperband", "max"), read_assessor(None, "max"))


@pytest.mark.parametrize(
    ("space", "error", "says"),
    [
        ([1, 2], TypeError, r"search_space must be a mapping such as .*, but got \[1, 2\]"),
        ({}, ValueError, "at least one parameter"),
        ({"lr": 0.1}, ValueError, r"search_space\['lr'\] must be \{\"_type\": ..., \"_value\": \[...\]\}, but got 0.1"),
        ({"lr": tune.uniform(0, 1)}, ValueError, r"search_space\['lr'\] must be"),
        ({"lr": {"_type": "float", "_value": [0, 1]}}, ValueError, "_type of choice, .* but got 'float'"),
        (
            {"lr": {"_type": "uniform", "_value": 3}},
            ValueError,
            r"uniform, must have as _value \[low, high\], but got 3",
        ),
        ({"lr": {"_type": "uniform", "_value": [1, 0]}}, ValueError, "uniform, must have"),
        ({"lr": {"_type": "uniform", "_value": [1, 1]}}, ValueError, r"uniform, must have .* but got \[1, 1\]"),
        ({"lr": {"_type": "uniform", "_value": [0, 1, 2]}}, ValueError, r"\[low, high\], but got \[0, 1, 2\]"),
        ({"lr": {"_type": "quniform", "_value": [0, 1]}}, ValueError, r"\[low, high, q\], but got \[0, 1\]"),
        ({"lr": {"_type": "loguniform", "_value": [0, 1]}}, ValueError, "both above 0"),
        ({"n": {"_type": "randint", "_value": [0, 1.5]}}, ValueError, "whole numbers"),
        ({"n": {"_type": "choice", "_value": []}}, ValueError, "what to choose from"),
        ({"num_workers": UNIFORM}, ValueError, "cannot be searched: the allocator changes a trial's workers"),
    ],
)
def test_a_wrong_search_space_is_refused_with_the_right(space: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        check_space(space, read_tuner("TPE", "max"))


def test_what_tuner_cannot_search_on_this_stack_is_refused() -> None:
    space = {"q": {"_type": "quniform", "_value": [0, 1, 0.25]}}
    assert check_space(space, read_tuner("TPE", "max")) == space
    with pytest.raises(ValueError, match="cannot be 'quniform' with tuner='Anneal' here"):
        check_space(space, read_tuner("Anneal", "max"))


def test_tunes_spaces_become_nnis() -> None:
    searched, fixed = from_tune(
        {
            "a": tune.uniform(0, 1),
            "b": tune.loguniform(1e-4, 1e-1),
            "c": tune.quniform(0, 1, 0.25),
            "d": tune.randint(1, 9),
            "e": tune.choice(["x", "y"]),
            "f": tune.randn(0.0, 2.0),
            "fixed": 3,
            "nested": {"fixed": 3},
        }
    )
    assert fixed == {"fixed": 3, "nested": {"fixed": 3}}
    assert {name: (spec["_type"], spec["_value"]) for name, spec in searched.items()} == {
        "a": ("uniform", [0, 1]),
        "b": ("loguniform", [1e-4, 1e-1]),
        "c": ("quniform", [0, 1, 0.25]),
        "d": ("randint", [1, 9]),
        "e": ("choice", ["x", "y"]),
        "f": ("normal", [0.0, 2.0]),
    }
    check_space(searched, read_tuner("TPE", "max"))


@pytest.mark.parametrize(
    "wrong",
    [tune.grid_search([1, 2]), tune.sample_from(lambda spec: 1), {"deep": tune.uniform(0, 1)}, tune.lograndint(1, 9)],
)
def test_what_nni_has_no_equal_for_is_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"param_space\['x'\] has no equal in NNI"):
        from_tune({"x": wrong})


def test_what_is_shown_is_the_metric_and_drawables() -> None:
    assert shown({"acc": 0.5, "loss": 2, "note": "x", "tensor": object()}, "acc") == {
        "default": 0.5,
        "loss": 2.0,
        "note": "x",
    }
    assert shown({"default": 0.5, FINAL: True}, "acc") == {"default": 0.5}
    for wrong in ({}, {"loss": 1.0}, {"acc": "high"}, {"acc": float("nan")}):
        with pytest.raises(ValueError, match="must report a finite number as 'acc', but reported"):
            shown(wrong, "acc")


def test_a_message_is_nnis() -> None:
    trial = TrialId(experiment="e", trial="t", sequence=3, parameter={"parameter_id": 7, "parameters": {}})
    message = metric_message(trial, final=False, index=2, value={"default": 0.5})
    assert message["type"] == "metric"
    assert json.loads(message["metric"]) == {
        "parameter_id": 7,
        "trial_job_id": "t",
        "type": "PERIODICAL",
        "sequence": 2,
        "value": "0.5",
    }
    final = json.loads(metric_message(trial, final=True, index=2, value={"default": 0.5, "loss": 1.0})["metric"])
    assert (final["type"], final["sequence"]) == ("FINAL", 0)
    assert json.loads(final["value"]) == {"default": 0.5, "loss": 1.0}


def outcome(sequence: int, status: str, value: float | None) -> Outcome:
    return Outcome(trial=f"t{sequence}", sequence=sequence, status=status, value=value)


def test_the_best_is_the_best_of_those_that_finished() -> None:
    trials = (outcome(0, "SUCCEEDED", 1.0), outcome(1, "EARLY_STOPPED", 9.0), outcome(2, "SUCCEEDED", 3.0))
    assert Results(experiment="e", trials=trials).best.sequence == 2
    assert Results(experiment="e", trials=trials, mode="min").best.sequence == 0
    with pytest.raises(LookupError, match=r"no trial of experiment e has finished \(t1: EARLY_STOPPED\)"):
        _ = Results(experiment="e", trials=trials[1:2]).best


def test_the_error_keeps_the_results_also_pickled() -> None:
    error = ExperimentFailedError(
        "the cluster is gone", Results(experiment="e", trials=(outcome(0, "SUCCEEDED", 1.0),))
    )
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.results) == ("the cluster is gone", error.results)
