"""The head dies, and every job that ran is submitted to the next one: once, under its name, from its newest state."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from elastic_ray.checkpoints.run_directory import RunStorage
from elastic_ray.cli.app import cli
from elastic_ray.events import EventKind, JobEvent
from elastic_ray.record.submitted import SubmittedJob
from placement import AllocatorConfig, get_or_create_allocator
from tests.local_cluster import LocalCluster, free_port

ROOT = Path(__file__).parents[2]
JOB = SubmittedJob(
    job="digits",
    storage="/runs/digits",
    session="session_1",
    address="10.0.0.1:6379",
    submitted_s=100.0,
    submission="digits",
    command=("/home/u/train.py", "--name", "digits", "--", "--epochs", "3"),
    user="u",
    script="/home/u/train.py",
)


def events(*kinds: EventKind, first_s: float = 101.0) -> list[JobEvent]:
    return [
        JobEvent(kind=kind, time_s=first_s + at, from_workers=0, to_workers=1, reason="")
        for at, kind in enumerate(kinds)
    ]


STARTED, PAUSED, RESUMED, FINISHED = EventKind.STARTED, EventKind.PAUSED, EventKind.RESUMED, EventKind.FINISHED


@pytest.mark.parametrize(
    ("happened", "first_s", "why"),
    [
        ((), 101.0, ""),
        ((STARTED,), 101.0, ""),
        ((STARTED, PAUSED, RESUMED), 101.0, ""),
        ((STARTED, FINISHED), 50.0, ""),  # an earlier run of the name
        ((STARTED, FINISHED), 101.0, None),
        ((STARTED, PAUSED), 101.0, "it was paused"),
    ],
)
def test_what_ran_is_told_from_what_did_not(happened: tuple[EventKind, ...], first_s: float, why: str | None) -> None:
    found = JOB.why_not(events(*happened, first_s=first_s))
    assert found == why if not why else found is not None and found.startswith(why)


@pytest.mark.parametrize(("before", "why"), [(0, None), (1, None), (2, ""), (None, "")])
def test_ends_are_told_without_comparing_clocks(before: int | None, why: str | None) -> None:
    job = dataclasses.replace(JOB, submitted_s=1000.0, events_before=before)
    assert job.why_not(events(STARTED, FINISHED)) == why, "the driver's clock is ahead of the controller's"
    assert SubmittedJob.from_json(job.to_json()) == job


def test_jobs_of_unknown_code_are_named_with_ways_out() -> None:
    by_hand = dataclasses.replace(JOB, command=(), submission="").why_not(())
    assert by_hand is not None and "run /home/u/train.py with RunConfig(name='digits')" in by_hand
    unnamed = dataclasses.replace(JOB, named=False).why_not(())
    assert unnamed is not None and "RunConfig(name)" in unnamed


def test_a_script_has_one_next_submission_whoever_asks() -> None:
    other = dataclasses.replace(JOB, job="second of the script", submitted_s=500.0)
    assert JOB.next_submission == other.next_submission and JOB.next_submission.startswith("digits.resumed-")
    later = dataclasses.replace(JOB, session="session_2", submission=JOB.next_submission)
    assert later.next_submission != JOB.next_submission and later.next_submission.count("resumed") == 1


def test_files_of_others_are_read_with_care() -> None:
    assert SubmittedJob.from_json(JOB.to_json()) == JOB
    for wrong in ('{"format": 9}', "[]", "{}", "", 10**5 * "[", JOB.to_json().replace('["/home', '[1, "/home')):
        with pytest.raises(ValueError, match=r"submission|format|Expecting|nested too deeply"):
            SubmittedJob.from_json(wrong)


# -- real heads ----------------------------------------------------------------------------------------------

SCRIPT = """
    import argparse, ray.train, elastic_ray as er
    from tests.job import traced

    parser = argparse.ArgumentParser()
    for name in ("trace", "runs"):
        parser.add_argument(f"--{name}")
    options = vars(parser.parse_args())
    runs = options.pop("runs")
    er.ElasticTrainer(
        traced.train,
        train_loop_config={**options, "epochs": 100_000},
        elastic_config=er.ElasticConfig(checkpoint_interval_s=1.0),
        run_config=ray.train.RunConfig(storage_path=runs),
    ).fit()
"""


def start_head() -> LocalCluster:
    return LocalCluster(num_cpus=4, include_dashboard=True, dashboard_agent_listen_port=free_port())


def kill(cluster: LocalCluster) -> None:
    """End a head with SIGKILL, and what it leaves behind."""
    head: Any = cluster.cluster.head_node
    head.kill_all_processes(check_alive=False, allow_graceful=False)
    cluster.shutdown()


@pytest.fixture
def environment() -> Iterator[None]:
    before = dict(os.environ)
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    os.environ["PYTHONPATH"] = str(ROOT)
    yield
    os.environ.clear()
    os.environ.update(before)


def run(cluster: LocalCluster, *arguments: str, code: int | None = 0) -> Result:
    result = CliRunner().invoke(cli, arguments, env={"RAY_ADDRESS": cluster.address, "NO_COLOR": "1"})
    assert code is None or result.exit_code == code, result.output
    return result


def wait_for_step(cluster: LocalCluster, job: str, step: int) -> dict[str, Any]:
    deadline = time.monotonic() + 120
    while True:
        rows = json.loads(run(cluster, "jobs", "--json").stdout)
        row = next((each for each in rows if each["job"] == job), None)
        if row is not None and row["phase"] == "running" and row["step"] >= step:
            return dict(row)
        assert time.monotonic() < deadline, rows
        time.sleep(0.5)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_jobs_next_head_continues_it_once(tmp_path: Path, environment: None) -> None:
    (tmp_path / "trace").mkdir()
    (tmp_path / "code").mkdir()
    runs = tmp_path / "runs"
    script = tmp_path / "code" / "train.py"
    script.write_text(textwrap.dedent(SCRIPT))
    told = tmp_path / "job.yaml"
    told.write_text(
        "script: code/train.py\nworkers: 1:2\nscheduling: {tenant: vision}\n"
        f"arguments: --trace {tmp_path / 'trace'} --runs {runs}\n"
    )
    first = start_head()
    try:
        run(first, "submit", str(told), "--name", "digits")
        wait_for_step(first, "digits", 20)
        storage = RunStorage(str(runs / "digits"))
        deadline = time.monotonic() + 60
        while not any((runs / "digits" / "automatic").glob("*")):
            assert time.monotonic() < deadline
            time.sleep(0.2)
        run(first, "resume", "--all", str(runs), code=0)  # it runs: nothing is done
        assert len(json.loads(run(first, "jobs", "--all", "--json").stdout)) == 1
    finally:
        kill(first)
    kept = SubmittedJob.from_json(storage.read_submission())
    storage.write_submission(dataclasses.replace(kept, user="ann").to_json())  # another one resumes than has submitted
    # Jobs of the same storage that cannot be submitted from here, each with what to do.
    for name, changed in {
        "closure": {"command": ()},
        "elsewhere": {"command": ("/nowhere/train.py", "--name", "elsewhere")},
        "copied": {"storage": "/runs/digits"},
    }.items():
        other = RunStorage(str(runs / name))
        other.create()
        told_of = {"job": name, "storage": other.path, "address": "127.0.0.1:1", "submission": name}
        other.write_submission(dataclasses.replace(JOB, **{**told_of, **changed}).to_json())
    second = start_head()
    try:
        said = run(second, "resume", "--all", str(runs), code=1)
        assert "digits: submitted as digits.resumed-" in said.stdout
        assert "closure: not resumed: its code is not known" in said.stderr
        assert "elsewhere: not resumed: " in said.stderr and "/nowhere/train.py" in said.stderr
        assert "copied: not resumed: its files were written to /runs/digits, where" in said.stderr
        again = run(second, "resume", "--all", str(runs), code=1)
        assert "submitted as" not in again.stdout, "once"
        row = wait_for_step(second, "digits", 20)
        assert (row["tenant"], row["user"]) == ("vision", "ann")
        (resumed,) = [each.reason for each in storage.read_events() if each.kind is EventKind.RESUMED]
        assert resumed.startswith("from the automatic checkpoint at step "), "from the newest state"
    finally:
        kill(second)
    third = start_head()
    try:
        get_or_create_allocator(config=AllocatorConfig(storage=str(runs)))
        row = wait_for_step(third, "digits", 20)
        assert (row["tenant"], row["user"]) == ("vision", "ann")
        assert sum(each.kind is EventKind.STARTED for each in storage.read_events()) == 3, "one start by each head"
        run(third, "stop", "digits")
        ended = run(third, "resume", "--all", str(runs), code=1)
        assert "digits:" not in ended.output, "it has ended"
    finally:
        third.shutdown()


SWEEP = """
    import sys, ray.train, elastic_ray as er, tuning
    from ray import tune
    from tests.tuning.sweeps import train

    trainable = tuning.elastic(train, scaling_config=ray.train.ScalingConfig(num_workers=(1, 2)))
    space = {"quality": tune.grid_search([1.0, 2.0]), "epochs": 60, "pause_s": 0.3, "checkpoint": True}
    run = tune.RunConfig(name="search", storage_path=sys.argv[1], verbose=0)
    told = tune.TuneConfig(metric="score", mode="max")
    tune.Tuner(trainable, param_space=space, tune_config=told, run_config=run).fit()
"""


def reported(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """What each trial has reported."""
    return {
        path.parent.name.partition("_quality")[0]: [json.loads(line) for line in path.read_text().splitlines()]
        for path in folder.glob("*/result.json")
    }


def wait_for_reports(folder: Path, least: int, at_most_s: float = 180.0) -> dict[str, list[dict[str, Any]]]:
    deadline = time.monotonic() + at_most_s
    while True:
        found = reported(folder)
        if len(found) == 2 and all(rows and rows[-1]["training_iteration"] >= least for rows in found.values()):
            return found
        assert time.monotonic() < deadline, found
        time.sleep(0.5)


def wait_for_state(folder: Path, since_s: float, at_most_s: float = 60.0) -> None:
    """Wait until Tune has written its own state, as it does every ten seconds."""
    deadline = time.monotonic() + at_most_s
    while not any(path.stat().st_mtime > since_s for path in folder.glob("experiment_state*.json")):
        assert time.monotonic() < deadline, "Tune has written no state"
        time.sleep(0.2)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_sweeps_next_head_continues_its_trials(tmp_path: Path, environment: None) -> None:
    runs, script = tmp_path / "runs", tmp_path / "code" / "search.py"
    script.parent.mkdir()
    script.write_text(textwrap.dedent(SWEEP))
    first = start_head()
    try:
        run(first, "submit", str(script), "--name", "script", "--", str(runs))
        wait_for_reports(runs / "search", 3)
        wait_for_state(runs / "search", time.time())
        said = run(first, "resume", "--all", str(runs), code=0)
        assert "search" not in said.output, "it runs"
    finally:
        kill(first)
    before = reported(runs / "search")
    assert all(len(rows) < 60 for rows in before.values()), "the head was to die before the end"
    second = start_head()
    try:
        assert "search: submitted as script.resumed-" in run(second, "resume", "--all", str(runs)).stdout
        after = wait_for_reports(runs / "search", 60)
        assert after.keys() == before.keys(), "the same trials"
        for trial, rows in after.items():
            assert len(rows) < len(before[trial]) + 60, "no trial was begun anew"
            assert rows[-1]["inherited"] > 0, "from its checkpoint"
        deadline = time.monotonic() + 60
        while "no job to resume" not in run(second, "resume", "--all", str(runs), code=None).output:
            assert time.monotonic() < deadline, "it has ended"
            time.sleep(1.0)
    finally:
        second.shutdown()
