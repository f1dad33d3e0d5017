"""Small sweeps, for every run of the tests; an actor that Tune keeps for the next trial holds nothing meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
from click.testing import CliRunner
from ray import tune
from ray.tune.experiment import Trial
from ray.tune.schedulers import ASHAScheduler, FIFOScheduler
from ray.tune.search import Searcher

import tuning
from elastic_ray.checkpoints.run_directory import RunStorage
from elastic_ray.cli import cluster
from elastic_ray.cli.app import cli
from elastic_ray.record.submitted import SubmittedJob
from placement.ray_cluster.named_actors import ALLOCATOR, NAMESPACE, find_actor
from tests.local_cluster import LocalCluster
from tests.tuning.sweeps import fit, trainable
from tuning import ray_tune
from tuning.ray_tune import SignsOfLife
from tuning.sweep import SweepRunsError

pytestmark = [pytest.mark.ray_cluster(num_cpus=4, resources={"slot": 4}), pytest.mark.timeout(1000)]


class Given(Searcher):
    """Gives two trials, and the third when it is due; answers None in between."""

    def __init__(self, *given: dict[str, Any]) -> None:
        super().__init__(metric="score", mode="max")
        self.given = list(given)
        self.due = 2

    def set_search_properties(self, *_: Any, **__: Any) -> bool:
        return True

    def suggest(self, trial_id: str) -> Any:
        if not self.given:
            return self.FINISHED
        if self.due == 0:
            return None
        self.due -= 1
        return self.given.pop(0)

    def on_trial_complete(self, *_: Any, **__: Any) -> None:
        pass

    def save(self, checkpoint_path: str) -> None:
        pass

    def restore(self, checkpoint_path: str) -> None:
        pass


class Watch(tune.Callback):
    """Lets the second trial continue once the first is ahead, and the first and the third once the second is gone."""

    def __init__(self, searcher: Given, ahead: Path, gone: Path) -> None:
        self.searcher, self.ahead, self.gone = searcher, ahead, gone
        self.stopped_s: float | None = None
        self.kept_s: float | None = None

    def on_trial_result(self, result: dict[str, Any], **_: Any) -> None:
        if result["config"]["quality"] == 3.0 and result["epoch"] == 3:
            self.ahead.touch()

    def on_trial_complete(self, trial: Any, **_: Any) -> None:
        if trial.config["quality"] == 0.1:
            self.stopped_s = time.monotonic()

    def on_step_end(self, **_: Any) -> None:
        if self.stopped_s is None or self.kept_s is not None:
            return
        since_s = time.monotonic() - self.stopped_s
        if len(jobs()) == 1 or since_s > 10:
            self.kept_s = since_s
            self.searcher.due += 1
            self.gone.touch()


def jobs() -> dict[str, Any]:
    """Jobs that the allocator knows."""
    allocator: Any = ray.get_actor(ALLOCATOR, namespace=NAMESPACE)
    found: dict[str, Any] = ray.get(allocator.snapshot.remote()).jobs
    return found


@pytest.mark.slow
def test_what_asha_stops_returns_workers_though_tune_keeps_actors(shared_cluster: LocalCluster, tmp_path: Path) -> None:
    """Two trials wait in their middles: one until the other is ahead, that one until the first is stopped and gone."""
    ahead, gone = tmp_path / "ahead", tmp_path / "gone"
    searcher = Given(
        {"quality": 3.0, "epochs": 8, "hold": str(gone), "pause_s": 0.0},
        {"quality": 0.1, "epochs": 4, "hold": str(ahead), "pause_s": 0.0},
        {"quality": 0.2, "epochs": 8, "pause_s": 0.0},
    )
    watch = Watch(searcher, ahead, gone)
    grid = fit(
        tmp_path,
        {},
        elastic=trainable(workers=1),
        search_alg=searcher,
        scheduler=ASHAScheduler(max_t=8, grace_period=3, reduction_factor=4),
        num_samples=10,
        reuse_actors=True,
        run={"callbacks": [watch]},
    )
    assert not grid.errors
    assert {each.config["quality"]: len(each.metrics_dataframe) for each in grid} == {3.0: 8, 0.1: 3, 0.2: 3}
    assert grid.get_best_result().metrics["score"] == 24.0
    actors = {each.config["quality"]: each.metrics["pid"] for each in grid}
    assert actors[0.1] == actors[0.2] != actors[3.0]  # it was kept
    assert watch.kept_s is not None and watch.kept_s < 3.0  # 0.2 s where nothing else runs
    assert not jobs()
    assert not [leak for leak in shared_cluster.leaks() if leak.startswith("placement group")]


@pytest.mark.thorough
def test_the_best_of_two_is_found_nothing_left(shared_cluster: LocalCluster, tmp_path: Path) -> None:
    grid = fit(tmp_path, {"quality": tune.grid_search([0.5, 2.0]), "epochs": 2, "pause_s": 0.0})
    assert not grid.errors
    best = grid.get_best_result("score", "max")
    assert best.config["quality"] == 2.0
    assert [len(each.metrics_dataframe) for each in grid] == [2, 2]
    assert not jobs()
    assert not [leak for leak in shared_cluster.leaks() if leak.startswith("placement group")]


def test_a_sweep_that_searches_num_workers_is_refused(shared_cluster: LocalCluster, tmp_path: Path) -> None:
    with pytest.raises(Exception, match="'num_workers' cannot be searched: the allocator changes"):
        fit(tmp_path, {"num_workers": tune.grid_search([1, 2]), "epochs": 1})


class Pause(FIFOScheduler):
    """Pauses the second trial after its third report, until the first one continues."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self.watch = watch

    def on_trial_result(self, tune_controller: Any, trial: Trial, result: dict[str, Any]) -> str:
        if trial.config["quality"] == 0.1 and result["epoch"] == 2:
            self.watch.stopped_s = time.monotonic()
            return str(self.PAUSE)
        return str(self.CONTINUE)

    def choose_trial_to_run(self, tune_controller: Any) -> Trial | None:
        may_go_on = {Trial.PENDING} if self.watch.kept_s is None else {Trial.PENDING, Trial.PAUSED}
        return next((each for each in tune_controller.get_trials() if each.status in may_go_on), None)


@pytest.mark.slow
def test_what_is_paused_returns_workers_and_continues(shared_cluster: LocalCluster, tmp_path: Path) -> None:
    ahead, gone = tmp_path / "ahead", tmp_path / "gone"
    searcher = Given(
        {"quality": 3.0, "epochs": 8, "hold": str(gone), "pause_s": 0.0},
        {"quality": 0.1, "epochs": 5, "hold": str(ahead), "pause_s": 0.0, "checkpoint": True},
        {"quality": 0.2, "epochs": 2, "pause_s": 0.0},
    )
    watch = Watch(searcher, ahead, gone)
    run = {"callbacks": [watch]}
    paused = Pause(watch)
    elastic = trainable(workers=1)
    grid = fit(
        tmp_path, {}, elastic=elastic, search_alg=searcher, scheduler=paused, num_samples=10, reuse_actors=True, run=run
    )
    assert not grid.errors
    assert {each.config["quality"]: each.metrics["epoch"] for each in grid} == {3.0: 7, 0.1: 4, 0.2: 1}
    (resumed,) = [each.metrics for each in grid if each.config["quality"] == 0.1]
    assert resumed["training_iteration"] == 5
    assert resumed["inherited"] == pytest.approx(0.3)
    assert watch.kept_s is not None and watch.kept_s < 3.0


SHOWN = ("jobs", "status stopped", "pause stopped")


@pytest.mark.slow
@pytest.mark.parametrize("of", ["sweep", "submission"])
def test_a_stopped_sweep_ends_with_its_trials(
    shared_cluster: LocalCluster, tmp_path: Path, of: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", shared_cluster.address)

    class Stop(tune.Callback):
        """Stops the sweep as the command line does, once two trials have reported."""

        reported: set[str]
        said: list[str]

        def __init__(self) -> None:
            self.reported, self.said = set(), []

        def on_trial_result(self, trial: Trial, **_: Any) -> None:
            self.reported.add(trial.trial_id)
            if len(self.reported) == 2:
                trials = cluster.find_jobs(trial.trial_id)
                assert not trials, "a trial's job is called after its sweep as well"
                jobs = tuple(
                    cluster.JobClient(each, None)
                    for each in cluster.known_jobs()
                    if each.spec is not None and each.spec.trial is not None
                )
                self.said = self.said or [CliRunner().invoke(cli, words.split()).output for words in SHOWN]
                (sweep,) = cluster.find_sweeps("stopped" if of == "sweep" else "a submission", jobs)
                assert cluster.stop_sweep(sweep, "stopped", now=False, reason="enough of it") >= 2

    stop = Stop()
    grid = fit(
        tmp_path,
        {"epochs": 500, "pause_s": 0.01},
        elastic=trainable(workers=1, sweep="stopped"),
        num_samples=6,
        max_concurrent_trials=2,
        run={"callbacks": [stop]},
    )
    assert not grid.errors
    assert len(stop.reported) == 2, "no other trial has started"
    listed, shown, paused = stop.said
    (line,) = (line for line in listed.splitlines() if line.startswith("stopped "))
    assert " sweep " in line and "2 trials: 2 running, 0 done, 0 cut" in line
    assert len([each for each in shown.splitlines() if " running " in each]) == 2, "a line for each"
    assert "sweep 'stopped' cannot be paused: trials have no state of their own" in paused
    over = CliRunner().invoke(cli, ["status", "stopped"]).output
    assert over.startswith("sweep stopped: ") and " 0 running, 0 done, 2 cut" in over
    reasons = [line for path in tmp_path.rglob("events.jsonl") for line in path.read_text().splitlines()[-1:]]
    assert len(reasons) == 2 and all("the sweep was stopped: enough of it" in reason for reason in reasons)


class Meanwhile(tune.Callback):
    """Does something once, at the first report of a sweep, and keeps the error that it raises."""

    def __init__(self, does: Callable[[], Any]) -> None:
        self.does, self.error = does, ""

    def on_trial_result(self, **_: Any) -> None:
        if not self.error:
            self.error = "none"
            try:
                self.does()
            except SweepRunsError as error:
                self.error = str(error)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["begun", "resumed"])
def test_second_sweep_of_name_is_refused_while_first_runs(
    shared_cluster: LocalCluster, tmp_path: Path, how: str
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    space = {"epochs": 6, "pause_s": 0.0}
    twin = trainable(workers=1, sweep="twins")

    def again() -> None:
        if how == "begun":
            fit(second, space, elastic=trainable(workers=1, sweep="twins"))
        else:
            tune.Tuner.restore(str(first / "named"), trainable=twin).fit()

    meanwhile = Meanwhile(again)
    grid = fit(first, space, elastic=twin, num_samples=2, run={"name": "named", "callbacks": [meanwhile]})
    assert "sweep 'twins' runs already (driven by process" in meanwhile.error
    assert f"results in {first / 'named'})" in meanwhile.error
    assert not grid.errors
    assert [len(each.metrics_dataframe) for each in grid] == [6, 6]
    assert not list(second.rglob("run_00")), "the second one has started no trial"


@pytest.mark.slow
def test_sweep_of_another_clusters_directory_is_refused(shared_cluster: LocalCluster, tmp_path: Path) -> None:
    directory = RunStorage(str(tmp_path / "twins"))
    directory.create()
    theirs = SubmittedJob(
        job="twins", storage=directory.path, session="another", address="10.0.0.1:6379", submitted_s=time.time()
    )
    directory.write_submission(theirs.to_json())
    signs = SignsOfLife(directory, every_s=0.2)
    try:
        with pytest.raises(Exception, match="is in use by job 'twins' of another cluster"):
            fit(tmp_path, {"epochs": 1, "pause_s": 0.0}, elastic=trainable(workers=1), run={"name": "twins"})
    finally:
        signs.stop()
        signs.join()
    begun_s = directory.read_alive()
    assert not fit(tmp_path, {"epochs": 1}, elastic=trainable(workers=1), run={"name": "own"}).errors
    assert RunStorage(str(tmp_path / "own")).read_alive() > begun_s, "others can see that it runs"


class Lost:
    """Tune's loop whose cluster is gone."""

    def _maybe_add_actors(self) -> None:
        pass

    def get_trials(self) -> list[Trial]:
        return []

    def step(self) -> None:
        raise KeyboardInterrupt

    def checkpoint(self) -> None:
        raise KeyboardInterrupt

    def cleanup(self) -> None:
        raise ConnectionError("the cluster is gone")


@pytest.mark.parametrize("last", ["step", "checkpoint", "cleanup"])
def test_signs_of_life_end_with_interrupted_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: str) -> None:
    kind: Any = type("Loop", (Lost,), {})
    monkeypatch.setattr(ray_tune, "TuneController", kind)
    ray_tune._claim_sweeps()
    directory = RunStorage(str(tmp_path / "lost"))
    directory.create()
    loop = kind()
    signs = ray_tune._watch_of(loop).signs = SignsOfLife(directory, every_s=600.0)
    with pytest.raises((ConnectionError, KeyboardInterrupt)):
        getattr(loop, last)()
    signs.join(10.0)
    assert not signs.is_alive()


@pytest.mark.slow
def test_a_sweep_after_its_namesake_is_not_compared(shared_cluster: LocalCluster, tmp_path: Path) -> None:
    for folder in ("first", "second"):
        promise = tuning.Promise(metric="score", mode="max", max_t=len(folder))
        grid = fit(tmp_path / folder, {"epochs": 2}, elastic=trainable(workers=1, sweep="twins", promise=promise))
        assert not grid.errors
    sweep: Any = find_actor("sweep:twins")
    records, kept = ray.get(sweep.__ray_call__.remote(lambda actor: (list(actor._records), actor._promise)))
    assert len(records) == 1
    assert kept == promise


class Sizes(tune.Callback):
    """Keeps the sizes at which trials are held, in their order."""

    def __init__(self) -> None:
        self.held: list[int] = []

    def on_trial_result(self, **_: Any) -> None:
        self.held += [state.view.held_at for state in jobs().values() if state.view.held_at is not None]


@pytest.mark.slow
@pytest.mark.parametrize("deadline_s", [1.0, 3600.0])
def test_a_deadline_holds_trials_at_sizes(
    shared_cluster: LocalCluster, tmp_path: Path, deadline_s: float, capfd: Any
) -> None:
    sizes, limits = Sizes(), tuning.Sweep(name=f"within{deadline_s:g}", deadline_s=deadline_s)
    grid = fit(
        tmp_path,
        {"epochs": 80, "pause_s": 0.05},
        elastic=trainable(workers=(1, 2), sweep=limits),
        num_samples=2,
        scheduler=ASHAScheduler(max_t=80, grace_period=40, reduction_factor=2),
        run={"callbacks": [sizes]},
    )
    assert not grid.errors
    if deadline_s > 60:
        assert sizes.held[-1] == 1
    else:
        assert sizes.held, "it continues with the sizes that come closest"
        assert "deadline_s=1 cannot be kept: by what its trials have told, the sweep takes" in capfd.readouterr().err
