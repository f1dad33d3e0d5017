"""``elastic-ray resume --all STORAGE``: resubmits jobs that were running when their cluster ended."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import posixpath
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from elastic_ray.cli.output import say
from elastic_ray.record.submitted import SubmittedJob

if TYPE_CHECKING:
    from elastic_ray.checkpoints.run_directory import RunStorage
    from elastic_ray.cli.listings import JobAnswers

_SWEEP_FILE = "tuner.pkl"  # Ray Tune's; it is looked for, and never read
_ENDED_TRIAL = ("TERMINATED", "ERROR")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """Jobs to submit again, and the reasons for not submitting others, keyed by job name."""

    jobs: list[SubmittedJob] = dataclasses.field(default_factory=list)
    refused: dict[str, str] = dataclasses.field(default_factory=dict)


def resume_all(storage: str) -> None:
    """Resubmit every job in a storage path that was running when its cluster ended."""
    from elastic_ray.cli import cluster
    from elastic_ray.cli import submission as ray_jobs
    from elastic_ray.cli.submit import send_again

    cluster.connect()
    found = _poll(storage, {each.job: each for each in cluster.known_jobs()})
    scripts: dict[str, list[SubmittedJob]] = {}
    for job in found.jobs:
        scripts.setdefault(job.next_submission, []).append(job)
    for submission, jobs in scripts.items():
        names = ", ".join(job.job for job in jobs)
        try:
            send_again(jobs[0].command, submission=submission, user=jobs[0].user, resume=True)
        except ray_jobs.TakenError:
            script = ray_jobs.find(submission)
            if script is not None and script.ended:
                found.refused[names] = (
                    f"it was submitted again as {submission}, which ended before the job began: see `elastic-ray logs "
                    f"{submission}`, then {jobs[0].by_hand}"
                )
            else:
                say(f"{names}: submitted already, as {submission}")
        except click.ClickException as error:
            found.refused[names] = f"{error.format_message()}; {jobs[0].by_hand}"
        else:
            say(f"{names}: submitted as {submission}")
    if not found.jobs and not found.refused:
        say(f"no job to resume in {storage}")
    for name, why in found.refused.items():
        say(f"{name}: not resumed: {why}", err=True)
    if found.refused:
        raise click.exceptions.Exit(1)


def _poll(storage: str, known: Mapping[str, JobAnswers]) -> _Found:
    """Inspect all runs and sweeps in a storage path."""
    import pyarrow.fs

    from elastic_ray.checkpoints.run_directory import SUBMISSION_FILE, RunStorage, resolve

    found = _Found()
    try:
        filesystem, root = resolve(storage, None)
        entries = filesystem.get_file_info(pyarrow.fs.FileSelector(root))
    except (OSError, ValueError) as error:
        raise click.ClickException(f"storage path {storage!r} cannot be read: {error}") from error
    answers: dict[str, bool] = {}
    for entry in sorted((each for each in entries if each.type == pyarrow.fs.FileType.Directory), key=_path):
        name, run = posixpath.basename(entry.path), RunStorage(entry.path, filesystem)
        try:
            kept = filesystem.get_file_info(posixpath.join(run.path, SUBMISSION_FILE)).is_file
            if filesystem.get_file_info(posixpath.join(run.path, _SWEEP_FILE)).is_file:
                _judge_sweep(name, run, SubmittedJob.from_json(run.read_submission()) if kept else None, answers, found)
            elif kept:
                _judge(SubmittedJob.from_json(run.read_submission()), run, known, answers, found)
        except (OSError, ValueError) as error:
            found.refused[name] = f"{run.where} cannot be read: {error}"
    return found


def _path(entry: Any) -> str:
    return str(entry.path)


def _judge(
    job: SubmittedJob, run: RunStorage, known: Mapping[str, JobAnswers], answers: dict[str, bool], found: _Found
) -> None:
    """Add one job to ``found`` if it must be submitted again, even if it cannot be."""
    why = job.why_not(run.read_events())
    if why is None:
        return
    if run.local and os.path.realpath(job.storage.removeprefix("file://")) != os.path.realpath(run.path):
        why = why or (
            f"its files were written to {job.storage}, where its script would continue instead: move them back there, "
            f"or {job.by_hand} as here"
        )
    if (active := known.get(job.job)) is not None:
        there = active.spec.storage_path if active.spec is not None else ""
        if there != job.storage:
            found.refused[job.job] = (
                f"a job of this name runs on this cluster, with its files in {there or 'another place'}; wait for its "
                f"end or stop it, then {job.by_hand}"
            )
        return
    _judge_lost(job, why, run, answers, found)


def _judge_lost(job: SubmittedJob, why: str, run: RunStorage, answers: dict[str, bool], found: _Found) -> None:
    """Add a lost job or sweep to ``found`` unless it is running here; a non-empty ``why`` prevents resuming."""
    from elastic_ray.cli import cluster
    from elastic_ray.cli import submission as ray_jobs
    from placement.storage.private_files import check_own

    if job.session == cluster.session():
        script = ray_jobs.find(job.submission) if job.submission else None
        if script is None or script.ended:  # else it may not have started its job yet
            found.refused[job.job] = f"it was lost on this very cluster, whose head has not ended; {job.by_hand}"
        return
    if answers.setdefault(job.address, _answers(job.address)):
        found.refused[job.job] = f"its cluster, at {job.address}, still answers: stop the job there first"
        return
    if run.local:
        check_own(run.path)  # who may write there would choose what is run
    if why:
        found.refused[job.job] = why
    else:
        found.jobs.append(job)


def _answers(address: str) -> bool:
    """True if the control store at ``address`` answers and belongs to another cluster."""
    from elastic_ray.access import check_answers
    from elastic_ray.cli import cluster

    if address == cluster.joined_address():
        return False
    with contextlib.suppress(ConnectionError):
        check_answers(address, address)
        return True
    return False


def _judge_sweep(
    name: str, run: RunStorage, kept: SubmittedJob | None, answers: dict[str, bool], found: _Found
) -> None:
    """Add a sweep with unfinished trials to ``found``; it is resumed by submitting its script again."""
    from elastic_ray.cli import cluster

    if cluster.find_sweeps(name if kept is None else kept.job, ()):
        return
    import pyarrow.fs

    filesystem, path = run.filesystem, run.path
    entries = filesystem.get_file_info(pyarrow.fs.FileSelector(path))
    states = [each for each in entries if posixpath.basename(each.path).startswith("experiment_state")]
    if not states:
        return
    with filesystem.open_input_stream(max(states, key=_path).path) as stream:
        text = stream.read()
    try:
        trials = [json.loads(trial[0])["status"] for trial in json.loads(text)["trial_data"]]
    except (TypeError, LookupError) as error:
        raise ValueError(f"{max(states, key=_path).path} was written by another version of Ray: {error!r}") from error
    if all(status in _ENDED_TRIAL for status in trials):
        return
    if kept is not None and kept.command:
        _judge_lost(kept, kept.why_not(()) or "", run, answers, found)
    else:
        found.refused[name] = (
            "it is a sweep, whose searcher and train function only its script has, and `elastic-ray submit` did not "
            f"start it; continue it there: Tuner.restore({path!r}, trainable=...).fit()"
        )
