"""``elastic-ray jobs``, ``logs``, ``stop``, ``pause``, ``resume``, ``resize``."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from elastic_ray.cli.listings import JOB_COLUMNS, JobRow, Submission, job_cells, job_rows
from elastic_ray.cli.output import count, job_argument, json_option, read_size, say, show_json, show_table
from elastic_ray.cli.sweeps import grouped
from elastic_ray.driver.display import event_line, status_line
from elastic_ray.events import JobEvent, JobPhase

if TYPE_CHECKING:
    from elastic_ray.cli.cluster import JobClient

_STOP_S = 150.0
_POLL_S = 0.5


@click.command(short_help="List the jobs.")
@click.option("--all", "everything", is_flag=True, help="Also submitted scripts that have ended.")
@json_option
def jobs(everything: bool, as_json: bool) -> None:
    """List the cluster's elastic jobs, trials of sweeps among them, and submitted scripts without one.

    Jobs that ended within the last hour come last, those that failed before the others, with what they failed of. A
    sweep has a line of its own; `elastic-ray status SWEEP` lists its trials.
    """
    rows = read_rows(ended=everything)
    if as_json:
        show_json(rows)
        return
    rows = grouped(rows)
    now_s = time.time()
    show_table(JOB_COLUMNS, [job_cells(row, now_s) for row in rows], empty="no jobs")


def read_rows(*, ended: bool = False) -> tuple[JobRow, ...]:
    """Read the rows of all jobs."""
    from elastic_ray.cli import cluster
    from elastic_ray.cli import submission as ray_jobs

    cluster.connect()
    scripts = [each for each in ray_jobs.submissions() if ended or not each.ended]
    return job_rows(cluster.known_jobs(), cluster.snapshot(), scripts, cluster.ended_jobs())


def show_events(job: str, events: Sequence[JobEvent]) -> None:
    """Print events, each with its time of day."""
    for event in events:
        when = time.strftime("%H:%M:%S", time.localtime(event.time_s))
        say(f"{when} {event_line(job, event)}")


@click.command(short_help="Print what a job prints.")
@job_argument
@click.option("--follow", "-f", is_flag=True, help="Continue to the job's end; exit code 1 if it fails.")
@click.option("--events", "only_events", is_flag=True, help="What happened to the job, not what its script prints.")
def logs(job: str, follow: bool, only_events: bool) -> None:
    """Print what a job's script and workers print; of one that was not submitted here, what happened to it."""
    from elastic_ray.cli import cluster
    from elastic_ray.cli import submission as ray_jobs

    script = None if only_events else _script_of(job)
    if script is None:
        cluster.connect()
        found = cluster.find_job(job)
        if not only_events:
            say(f"job {job} was not started by elastic-ray submit: its events", err=True)
        _follow_events(found, follow=follow)
    elif follow:
        follow_script(script.submission)
    else:
        click.echo(ray_jobs.output(script.submission), nl=False)


def _script_of(job: str) -> Submission | None:
    """The submission of this id or name, or the one that the job of this name came from."""
    from elastic_ray.cli import cluster
    from elastic_ray.cli import submission as ray_jobs

    script = ray_jobs.find(job)
    if script is not None:
        return script
    cluster.connect()
    for each in cluster.known_jobs():
        if each.job == job and each.spec is not None and each.spec.submission:
            return ray_jobs.find(each.spec.submission)
    return None


def follow_script(submission: str) -> None:
    """Show a script's output to its end. Raises Exit: with 1 if it fails."""
    from elastic_ray.cli import submission as ray_jobs

    ray_jobs.follow(submission, lambda chunk: click.echo(chunk, nl=False))
    ended = ray_jobs.wait(submission)
    if ended.status != "SUCCEEDED":
        say(f"submission {submission}: {ended.phase}. {ended.message}".rstrip(), err=True)
        raise click.exceptions.Exit(1)


def _follow_events(found: JobClient, *, follow: bool) -> None:
    """Show a job's events: those so far, or as they come until it ends; exit code 1 where it has failed."""
    from elastic_ray.cli.cluster import JobGoneError

    name, shown = found.answers.job, 0
    with contextlib.suppress(JobGoneError):
        while True:
            status = found.status()
            events = found.events(shown)
            show_events(name, events)
            shown += len(events)
            if status.phase.ended or not follow:
                break
            time.sleep(_POLL_S)
        if status.phase.value == "failed":
            say(status_line(status), err=True)
            raise click.exceptions.Exit(1)


@click.command(short_help="Stop a job, or a sweep.")
@job_argument
@click.option("--now", is_flag=True, help="In the middle of a step, unsaved; else after the step in progress.")
def stop(job: str, now: bool) -> None:
    """Stop a job, a sweep, or all jobs and sweeps of a submission; a script without a job is ended itself.

    A stopped job's script continues after fit() with what the job has reached; its checkpoints stay. So does that of a
    sweep, which starts no other trial. The name of one trial stops that trial, and the sweep continues.
    """
    from elastic_ray.cli import cluster
    from elastic_ray.cli import submission as ray_jobs

    cluster.connect()
    found = cluster.find_jobs(job)
    sweeps = cluster.find_sweeps(job, found)
    for sweep in sweeps:
        trials = cluster.stop_sweep(sweep, now=now, reason="elastic-ray stop")
        say(f"the sweep ends; {trials} trials are stopped")
    if not found and sweeps:
        return
    if not found:
        script = ray_jobs.find(job)
        if script is None or script.ended:
            raise cluster.not_found(job, [each.job for each in cluster.known_jobs()])
        ray_jobs.stop(script.submission)
        say(f"submission {script.submission}: its script is being ended")
        return
    for each in found:
        with contextlib.suppress(cluster.JobGoneError):
            each.ask("stop", now=now, reason="elastic-ray stop")
    for each in found:
        name, ended = each.answers.job, each.wait_for(lambda status: status.phase.ended, _STOP_S)
        if ended is None:
            raise click.ClickException(f"job {name!r} has not stopped within {_STOP_S:g} s; try --now")
        say(status_line(ended) if ended.phase.ended else f"job {name}: ended")


@click.command(short_help="Pause a job: saved, without slots.")
@job_argument
def pause(job: str) -> None:
    """Save a job after the step in progress and give its slots to others, until `elastic-ray resume`.

    The job keeps its controller and its place in the order of arrival; its script keeps waiting in fit().
    """
    from elastic_ray.cli import cluster

    cluster.connect()
    _refuse_sweep(job, "paused")
    found = cluster.find_job(job)
    found.ask("pause", "paused by `elastic-ray pause`")
    reached = found.wait_for(lambda status: status.phase is JobPhase.PAUSED or status.phase.ended, _STOP_S)
    if reached is None:
        raise click.ClickException(f"job {found.answers.job!r} has not been saved within {_STOP_S:g} s; it still tries")
    say(status_line(reached))


def _refuse_sweep(name: str, what: str) -> None:
    """Refuse to pause or resume a sweep; raises a click error."""
    from elastic_ray.cli import cluster

    found = cluster.find_jobs(name)
    if cluster.find_sweeps(name, found):
        raise click.ClickException(
            f"sweep {name!r} cannot be {what}: trials have no state of their own between two reports, so that only the "
            f"searcher can let them continue. `elastic-ray stop {name}` ends it; Tuner.restore(...) then continues its "
            "trials from the last checkpoints that they reported"
        )


@click.command(short_help="Let a paused job continue.")
@job_argument
def resume(job: str) -> None:
    """Let a paused job continue from where it was saved, as soon as there are slots for it."""
    from elastic_ray.cli import cluster

    cluster.connect()
    _refuse_sweep(job, "resumed")
    found = cluster.find_job(job)
    found.ask("resume")
    say(f"job {found.answers.job}: continues as soon as there are slots for it")


@click.command(short_help="Hold a job at a size, or release it.")
@job_argument
@click.argument("workers", callback=read_size, metavar="N|auto")
def resize(job: str, workers: int | None) -> None:
    """Hold a job at N workers, or give its size back to the allocator with `auto`."""
    from elastic_ray.cli import cluster

    cluster.connect()
    found = cluster.find_job(job)
    if workers is None:
        found.ask("release")
        say(f"job {found.answers.job}: its size is the allocator's again")
    else:
        found.ask("resize", workers)
        say(f"job {found.answers.job}: held at {count(workers, 'worker')} until `elastic-ray resize {job} auto`")
