"""Real NNI experiments, with manager, REST API and web page, on a Ray cluster of this machine."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.train import ScalingConfig

from tests.local_cluster import LocalCluster
from tests.tuning.nni_trials import QUALITY, batch, for_elastic_ray, for_nni
from tuning import Promise
from tuning.nni import Experiment, ExperimentFailedError
from tuning.sweep import SweepRunsError

if importlib.util.find_spec("nni") is None:
    pytest.skip("NNI is not installed: pip install 'elastic-ray[nni]'", allow_module_level=True)

pytestmark = [
    pytest.mark.ray_cluster(num_cpus=4, resources={"slot": 4}),
    pytest.mark.usefixtures("sweep_cluster", "home"),
]

STOP_S = 30.0


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A home directory of the tests' own, for NNI keeps a list of experiments there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
        yield


def experiment(folder: Path, space: dict[str, Any], train: Any = for_nni, **options: Any) -> Experiment:
    workers = options.pop("num_workers", (1, 2))
    scaling = ScalingConfig(num_workers=workers, resources_per_worker={"slot": 1})
    options = {"name": "tests", "trial_concurrency": 1, "directory": str(folder), **options}
    return Experiment(train, space, scaling_config=scaling, **options)


def fetch(url: str) -> str:
    with urllib.request.urlopen(url, timeout=180) as answer:
        text: str = answer.read().decode()
    return text


def wait_for(what: Any, seconds: float) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < deadline, f"not within {seconds:g} s"
        time.sleep(0.1)
    return found


def test_experiment_from_its_web_page_to_early_stopped_trial(tmp_path: Path) -> None:
    import psutil

    space = batch(
        {"quality": 1.0, "more": True},
        {"quality": 0.1, "epochs": 500},
        {"quality": 3.0},
        {"quality": 2.0, "raises": True},  # last, for it ends the processes that the others hand on
    )
    # What NNI sees is what counts where reports lack the promise's metric; else the second one would be an error.
    promise = Promise(metric="accuracy", mode="max", max_t=2)
    found = experiment(tmp_path, space, tuner="Batch", assessor="Medianstop", max_trial_number=4, promise=promise)
    with pytest.raises(LookupError, match=r"no trial of experiment .* has finished"):
        _ = found.results().best
    found.start(0)
    try:
        manager = psutil.Process(found.nni._proc.pid)
        listening = [each.laddr.ip for each in manager.net_connections() if each.status == psutil.CONN_LISTEN]
        assert listening == ["127.0.0.1"]
        assert "<html" in fetch(found.url)
        assert json.loads(fetch(f"{found.url}/api/v1/nni/experiment"))["id"] == found.id
        found.wait()
        metrics = json.loads(fetch(f"{found.url}/api/v1/nni/metric-data"))
    finally:
        found.stop()
    results = found.results()
    good, cut, best, bad = results.trials
    assert [each.status for each in results.trials] == ["SUCCEEDED", "EARLY_STOPPED", "SUCCEEDED", "FAILED"]
    assert good.reports == (1.0, 2.0, 3.0, 4.0)
    assert good.value == 4.0
    assert len(cut.reports) < 500
    assert "the user's own mistake in trial 3" in bad.error
    assert results.best == best
    assert best.parameters == {"quality": 3.0}
    assert len(best.workers) == 4
    finals = [row for row in metrics if row["type"] == "FINAL"]
    assert [json.loads(json.loads(row["data"])) for row in finals] == [4.0, 12.0]
    assert not manager.is_running()
    left = [" ".join(each.cmdline()) for each in psutil.Process().children(recursive=True)]
    assert not [each for each in left if "nni_node" in each or "-m nni" in each or "tuning.nni.trial" in each]
    stderr = tmp_path / found.id / "environments" / "local-env" / "trials" / bad.trial / "trial.stderr"
    assert "the user's own mistake" in stderr.read_text()


@pytest.mark.slow
def test_stopped_experiment_ends_its_trials_and_blocks_its_name(sweep_cluster: LocalCluster, tmp_path: Path) -> None:
    import psutil

    space = batch(*({"quality": float(quality), "epochs": 10000} for quality in (1, 2, 3, 4)))
    found = experiment(tmp_path, space, tuner="Batch", trial_concurrency=2, name="halted")
    found.start(0)
    try:
        manager = psutil.Process(found.nni._proc.pid)
        wait_for(lambda: sum(bool(each.reports) for each in found.results().trials) == 2, 100)
        with pytest.raises(SweepRunsError, match=r"sweep 'halted' runs already \(driven by process"):
            experiment(tmp_path, space, tuner="Batch", name="halted").start(0)
        command = [sys.executable, "-m", "elastic_ray.cli", "stop", "halted"]
        environment = {**os.environ, "RAY_ADDRESS": sweep_cluster.address}
        said = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=170)
        assert (said.returncode, said.stdout) == (0, "the sweep ends; 2 trials stopped\n"), said.stderr
        found.wait()
    finally:
        found.stop()
    assert not manager.is_running()
    assert not _commands(tmp_path)
    trials = found.results().trials
    assert sum(bool(each.reports) for each in trials) == 2, "no other trial has started"
    assert not [each for each in trials if each.status in ("RUNNING", "WAITING")]
    wait_for(lambda: ray.available_resources().get("slot") == 4, STOP_S)
    ends = [path.read_text().splitlines()[-1] for path in tmp_path.rglob("events.jsonl")]
    assert len(ends) == 2 and all("the sweep was stopped: elastic-ray stop" in end for end in ends)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tuner", "options"),
    [
        ({"name": "Hyperband", "class_args": {"R": 4, "eta": 2}}, {"max_trial_number": 7}),
        ({"name": "BOHB", "class_args": {"min_budget": 1, "max_budget": 4, "eta": 2}}, {"max_trial_number": 7}),
        ("TPE", {"assessor": {"name": "Curvefitting", "class_args": {"epoch_num": 4}}, "max_trial_number": 3}),
        ("Anneal", {"max_trial_number": 2}),
        ({"name": "Evolution", "class_args": {"population_size": 2}}, {"max_trial_number": 4}),
    ],
    ids=lambda given: given if isinstance(given, str) else given.get("name", ""),
)
def test_tuners_and_advisors_run_through_the_manager(tmp_path: Path, tuner: Any, options: dict[str, Any]) -> None:
    results = experiment(tmp_path, QUALITY, tuner=tuner, trial_concurrency=2, **options).run(0)
    assert len(results.finished) == options["max_trial_number"]
    budgets = {each.parameters.get("TRIAL_BUDGET", 4) for each in results.trials}
    assert all(len(each.reports) == int(each.parameters.get("TRIAL_BUDGET", 4)) for each in results.trials)
    assert len(budgets) > 1 or not isinstance(tuner, dict) or tuner["name"] == "Evolution"


@pytest.mark.slow
def test_pbt_goes_on_from_the_better_ones_checkpoint(tmp_path: Path) -> None:
    arguments = {"population_size": 2, "fraction": 0.5, "all_checkpoint_dir": str(tmp_path / "pbt")}
    results = experiment(
        tmp_path,
        QUALITY,
        tuner={"name": "PBT", "class_args": arguments},
        trial_concurrency=2,
        max_trial_number=6,
    ).run(0)
    assert len(results.finished) == 6
    by_generation = [results.trials[k : k + 2] for k in (0, 2, 4)]
    for before, after in itertools.pairwise(by_generation):
        best: float = max(each.value or 0.0 for each in before)
        assert all((each.value or 0.0) > best for each in after)  # each continued from the best


@pytest.mark.slow
def test_loop_for_elastic_ray_and_space_that_is_exhausted(tmp_path: Path) -> None:
    space = {"quality": {"_type": "choice", "_value": [0.5, 1.0]}}
    results = experiment(tmp_path, space, for_elastic_ray, tuner="GridSearch", metric="score").run(0)
    assert sorted(each.value or 0.0 for each in results.trials) == [2.0, 4.0]
    assert results.best.parameters == {"quality": 1.0}


@pytest.mark.slow
def test_a_metric_that_is_never_reported_is_named(tmp_path: Path) -> None:
    space = batch({"quality": 1.0, "forgets": True})
    results = experiment(tmp_path, space, for_elastic_ray, tuner="Batch", metric="score").run(0)
    (trial,) = results.trials
    assert trial.status == "FAILED"
    assert "must report a finite number as 'score', but reported missing=0.0" in trial.error


@pytest.mark.slow
def test_tuner_that_fails_ends_the_experiment_with_its_words(tmp_path: Path) -> None:
    (tmp_path / "broken_tuner.py").write_text(
        "from nni.tuner import Tuner\n"
        "class Broken(Tuner):\n"
        "    def update_search_space(self, search_space): pass\n"
        "    def generate_parameters(self, *args, **kwargs): raise KeyError('no idea')\n"
    )
    own = {"class_name": "broken_tuner.Broken", "code_directory": str(tmp_path)}
    with pytest.raises(ExperimentFailedError, match=r"has failed: .*no idea.*logs are in .* 0 trial") as caught:
        experiment(tmp_path, QUALITY, tuner=own).run(0)
    assert caught.value.results.trials == ()


DRIVER = """
import sys
import ray
sys.path.insert(0, {root!r})
from tests.tuning.nni_trials import batch, for_nni
from tests.tuning.test_nni_experiment import experiment
from elastic_ray import ElasticConfig
from pathlib import Path

ray.init(address={address!r})
config = ElasticConfig(warm_workers_per_node=0, lease_s=10.0)
space = batch({{"quality": 1.0, "epochs": 10000}})
found = experiment(Path({folder!r}), space, tuner="Batch", elastic_config=config)
found.start(0)
print("MANAGER", found.nni._proc.pid, flush=True)
found.wait()
"""


@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("victim", ["driver", "manager"])
def test_a_killed_experiment_leaves_nothing(sweep_cluster: LocalCluster, tmp_path: Path, victim: str) -> None:
    import psutil

    root = str(Path(__file__).parents[2])
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER.format(root=root, folder=str(tmp_path), address=sweep_cluster.address)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert driver.stdout is not None
        manager = next(int(line.split()[1]) for line in driver.stdout if line.startswith("MANAGER"))
        wait_for(lambda: ray.available_resources().get("slot", 0.0) < 4, 100)
        wait_for(lambda: _commands(tmp_path), 20)
        victims = {"driver": driver.pid, "manager": manager}
        os.kill(victims[victim], signal.SIGKILL)
        wait_for(lambda: not psutil.pid_exists(manager) or psutil.Process(manager).status() == "zombie", 20)
        wait_for(lambda: not _commands(tmp_path), STOP_S)
        wait_for(lambda: ray.available_resources().get("slot") == 4, STOP_S)
        if victim == "manager":
            rest = driver.communicate(timeout=180)[0]
            assert "NNI's manager has ended" in rest
            assert driver.returncode == 1
    finally:
        driver.kill()
        driver.wait()


def _commands(folder: Path) -> list[int]:
    """Trials' commands of experiments in this directory."""
    import psutil

    found = []
    for process in psutil.process_iter(["cmdline", "environ"]):
        cmdline, environ = process.info["cmdline"] or [], process.info["environ"] or {}
        if "tuning.nni.trial" in cmdline and str(folder) in environ.get("NNI_OUTPUT_DIR", ""):
            found.append(process.pid)
    return found


CLUSTER_DIES = """
import sys, time
sys.path.insert(0, {root!r})
from tests.local_cluster import LocalCluster
from tests.tuning.nni_trials import batch
from tests.tuning.test_nni_experiment import experiment
from tuning import Promise
from tuning.nni import ExperimentFailedError
from pathlib import Path

cluster = LocalCluster(num_cpus=4, resources={{"slot": 4}})
space = batch({{"quality": 1.0}}, {{"quality": 2.0, "epochs": 10000}})
found = experiment(Path({folder!r}), space, tuner="Batch")
found.start(0)
while not any(each.reports for each in found.results().trials[1:]):
    time.sleep(0.2)
cluster.cluster.head_node.kill_all_processes(check_alive=False, allow_graceful=False)
since = time.monotonic()
try:
    found.wait()
except ExperimentFailedError as error:
    print("FAILED", round(time.monotonic() - since), error, flush=True)
    print("KEPT", [(each.parameters["quality"], each.value) for each in error.results.finished], flush=True)
since = time.monotonic()
found.stop()
print("STOPPED", round(time.monotonic() - since), found.results().best.value, flush=True)
"""


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_when_the_ray_cluster_dies_finished_trials_are_kept(tmp_path: Path) -> None:
    script = CLUSTER_DIES.format(root=str(Path(__file__).parents[2]), folder=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=170)
    lines = {line.split()[0]: line for line in done.stdout.splitlines() if line.split()}
    assert "FAILED" in lines, done.stdout + done.stderr
    assert "has not answered for 10 s" in lines["FAILED"]
    assert int(lines["FAILED"].split()[1]) < 40
    assert lines["KEPT"] == "KEPT [(1, 4.0)]"  # NNI's manager writes 1.0 so
    assert int(lines["STOPPED"].split()[1]) < 30
    assert lines["STOPPED"].endswith("4.0")


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"trial_concurrency": 0}, "trial_concurrency must be a whole number, 1 or more, but got 0"),
        ({"max_trial_number": 1.5}, "max_trial_number must be a whole number, 1 or more, but got 1.5"),
        ({"metric": ""}, "metric must be the name of a reported metric"),
        ({"mode": "best"}, "mode must be 'max' or 'min', but got 'best'"),
        ({"promise": Promise(metric="default", mode="min")}, "promise.mode must be 'max', the experiment's mode, but"),
        ({"name": "a b"}, "name must be letters, digits"),
        ({"host": "192.168.0.1"}, "host must be '127.0.0.1' .* but got '192.168.0.1'"),
        ({"tuner": "SMAC"}, "does not run on today's Python stack"),
        ({"tuner": "Hyperband", "assessor": "Medianstop"}, "assessor must be None with tuner='Hyperband'"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_starts(tmp_path: Path, wrong: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        experiment(tmp_path, QUALITY, **wrong)


def test_a_taken_port_is_named(tmp_path: Path) -> None:
    import socket

    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        found = experiment(tmp_path, QUALITY)
        with pytest.raises(RuntimeError, match=f"port {port} is taken .* port=0 picks a free one"):
            found.run(port)
    assert found.results().trials == ()
