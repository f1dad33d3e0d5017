"""``elastic-ray jobs``, ``logs``, ``stack``, ``stop``, ``pause``, ``resume``, ``resize``: commands for jobs."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from elastic_ray.cli.listings import JOB_COLUMNS, JobRow, Submission, job_cells, job_rows, no_metric, with_metric
from elastic_ray.cli.output import (
    job_argument,
    json_option,
    metric_option,
    read_size,
    say,
    show_json,
    show_table,
)
from elastic_ray.cli.sweeps import grouped
from elastic_ray.driver.display import event_line, status_line
from elastic_ray.events import JobEvent, JobPhase
from placement.text import count

if TYPE_CHECKING:
    from elastic_ray.cli.cluster import JobClient
    from placement.allocator.snapshot import CoreSnapshot

_STOP_S = 150.0
_POLL_S = 0.5


@click.command(short_help="List the jobs.")
@click.option("--all", "everything", is_flag=True, help="Also submitted scripts that have ended.")
@metric_option
@json_option
def jobs(everything: bool, metric: str, as_json: bool) -> None:
    """List the cluster's elastic jobs, including trials of sweeps, and submitted scripts without a job.

    Jobs that ended within the last hour are listed last, starting with failed jobs and the cause of each failure. Each
    sweep has one line; `elastic-ray status SWEEP` lists its trials.
    """
    seen, problem = read_snapshot()
    rows = read_rows(seen, ended=everything)
    if problem:
        say(f"warning: {problem}", err=True)
    if as_json:
        show_json(rows)
        return
    rows = grouped(rows)
    if problem := no_metric(rows, metric):
        raise click.ClickException(problem)
    now_s = time.time()
    show_table(with_metric(JOB_COLUMNS, metric), [job_cells(row, now_s, metric) for row in rows], empty="no jobs")


def read_snapshot() -> tuple[CoreSnapshot | None, str]:
    """Return what the allocator knows, None if there is none, and a message if it does not answer."""
    from elastic_ray.cli import cluster

    cluster.connect()
    return cluster.snapshot_if_any()


def read_rows(seen: CoreSnapshot | None, *, ended: bool = False) -> tuple[JobRow, ...]:
    """Return one row per job, given what the allocator knows; if ``ended``, also for scripts that have ended."""
    from elastic_ray.cli import cluster
    from elastic_ray.cli import submission as ray_jobs

    scripts = [each for each in ray_jobs.submissions() if ended or not each.ended]
    return job_rows(cluster.known_jobs(), seen, scripts, cluster.ended_jobs())


def show_events(job: str, events: Sequence[JobEvent]) -> None:
    """Print events, each with its local time."""
    for event in events:
        when = time.strftime("%H:%M:%S", time.localtime(event.time_s))
        say(f"{when} {event_line(job, event)}")


@click.command(short_help="Print what a job prints.")
@job_argument
@click.option("--follow", "-f", is_flag=True, help="Continue to the job's end; exit code 1 if it fails.")
@click.option("--events", "only_events", is_flag=True, help="What happened to the job, not what its script prints.")
@click.option("--rank", type=click.IntRange(min=0), help="The last lines that this worker's process has printed.")
def logs(job: str, follow: bool, only_events: bool, rank: int | None) -> None:
    """Print the output of a job's script and workers; for a job that was not submitted here, print its events."""
    from elastic_ray.cli import cluster
    from elastic_ray.cli import submission as ray_jobs

    if rank is not None:
        if follow or only_events:
            raise click.UsageError("--rank shows the last lines of one process: it goes with neither -f nor --events")
        _show_process(job, rank, "logs")
        return
    script = None if only_events else _script_of(job)
    if script is None:
        cluster.connect()
        found = cluster.find_job(job)
        if not only_events:
            say(f"job {job} was not started by elastic-ray submit: its events", err=True)
        _stream_events(found, follow=follow)
    elif follow:
        ray_jobs.stream_script(script.submission)
    elif text := ray_jobs.output(script.submission):
        click.echo(text, nl=False)
    else:
        say(f"submission {script.submission}: {script.phase}, no output. {script.message}".rstrip(), err=True)


@click.command(short_help="Show where a job's workers are in their code.")
@job_argument
@click.option("--rank", type=click.IntRange(min=0), help="Of this worker only.")
def stack(job: str, rank: int | None) -> None:
    """Print the stacks of a job's processes, read by py-spy on their nodes, to show where a worker hangs."""
    _show_process(job, rank, "stack")


def _show_process(job: str, rank: int | None, what: str) -> None:
    """Print the output (``logs``) or the stack (``stack``) of one worker, or of all workers if ``rank`` is None."""
    from elastic_ray.cli import cluster
    from elastic_ray.observe.process_look import LookRefusedError, inspect_process

    cluster.connect()
    workers = cluster.find_job(job).workers()
    chosen = [each for each in workers if rank in (None, each.rank)]
    if not workers:
        raise click.ClickException(f"job {job!r} has no workers now")
    if not chosen:
        raise click.ClickException(f"job {job!r} has no worker of rank {rank} now, but {count(len(workers), 'worker')}")
    for worker in chosen:
        if rank is None:
            say(f"rank {worker.rank}:")
        try:
            click.echo(inspect_process(worker, what))
        except LookRefusedError as error:
            raise click.ClickException(str(error)) from None


def _script_of(job: str) -> Submission | None:
    """Return the submission with this id or name, or the one that started the job with this name; may be None."""
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


def _stream_events(found: JobClient, *, follow: bool) -> None:
    """Print a job's events so far, or with ``follow`` until the job ends; exit code 1 if it has failed."""
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
    """Stop a job, a sweep, or all jobs and sweeps of a submission; a script without a job is itself stopped.

    After a job is stopped, its script continues after fit() with the result so far; its checkpoints are kept. The same
    applies to a sweep, which starts no further trials. Given the name of a trial, only that trial stops; its sweep
    continues.
    """
    from elastic_ray.cli import cluster
    from elastic_ray.cli import submission as ray_jobs

    cluster.connect()
    found = cluster.find_jobs(job)
    sweeps = cluster.find_sweeps(job, found)
    problems: list[str] = []  # what does not answer keeps nobody else from being asked
    for sweep in sweeps:
        try:
            trials = cluster.stop_sweep(sweep, job, now=now, reason="elastic-ray stop")
            say(f"the sweep ends; {count(trials, 'trial')} stopped")
        except click.ClickException as error:
            problems.append(error.message)
    if not found and not sweeps:
        script = ray_jobs.find(job)
        if script is None or script.ended:
            raise cluster.not_found(job, [each.job for each in cluster.known_jobs()])
        ray_jobs.stop(script.submission)
        say(f"submission {script.submission}: its script is being ended")
        return
    asked = [each for each in found if _ask_to_stop(each, problems, now=now)]
    for each in asked:
        try:
            ended = each.wait_for(lambda status: status.phase.ended, _STOP_S)
        except click.ClickException as error:
            problems.append(error.message)
            continue
        if ended is None:
            problems.append(f"job {each.answers.job!r} has not stopped within {_STOP_S:g} s; try --now")
        else:
            say(status_line(ended) if ended.phase.ended else f"job {each.answers.job}: ended")
    if problems:
        raise click.ClickException("; ".join(problems))


def _ask_to_stop(job: JobClient, problems: list[str], *, now: bool) -> bool:
    """Ask a job to stop; return False, and add to ``problems``, if its controller does not answer."""
    from elastic_ray.cli.cluster import JobGoneError

    try:
        job.ask("stop", now=now, reason="elastic-ray stop")
    except JobGoneError:
        pass
    except click.ClickException as error:
        problems.append(error.message)
        return False
    return True


@click.command(short_help="Pause a job: saved, without slots.")
@job_argument
def pause(job: str) -> None:
    """Save a job after the current step and give its slots to other jobs, until `elastic-ray resume`.

    The job keeps its controller and its place in the queue; its script keeps waiting in fit().
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
    """Raise a click error if ``name`` is a sweep, which cannot be paused or resumed."""
    from elastic_ray.cli import cluster

    found = cluster.find_jobs(name)
    if cluster.find_sweeps(name, found):
        raise click.ClickException(
            f"sweep {name!r} cannot be {what}: trials have no state of their own between two reports, so that only the "
            f"searcher can let them continue. `elastic-ray stop {name}` ends it; Tuner.restore(...) then continues its "
            "trials from the last checkpoints that they reported"
        )


@click.command(short_help="Let a paused job continue; all jobs of a head that died.")
@click.argument("job", required=False)
@click.option("--all", "storage", metavar="STORAGE", help="Submit again what ran when another head ended.")
def resume(job: str | None, storage: str | None) -> None:
    """Let a paused JOB continue from its saved state as soon as slots are available.

    With --all STORAGE (a RunConfig's storage_path), every job that was running when its cluster ended is submitted to
    this cluster under the same name, with its `elastic-ray submit` options, and continues from its newest state. Each
    job is resumed only once, no matter how often this is called. Exit code 1 if a job cannot be resumed; the message
    names the job and a remedy.
    """
    from elastic_ray.cli import cluster

    if (job is None) == (storage is None):
        raise click.UsageError("name one job, or the storage of all with --all STORAGE")
    if storage is not None:
        from elastic_ray.cli.resume_all import resume_all

        resume_all(storage)
        return
    assert job is not None, "checked above"
    cluster.connect()
    _refuse_sweep(job, "resumed")
    found = cluster.find_job(job)
    found.ask("resume")
    say(f"job {found.answers.job}: continues as soon as there are slots for it")


@click.command(short_help="Hold a job at a size, or release it.")
@job_argument
@click.argument("workers", callback=read_size, metavar="N|auto")
def resize(job: str, workers: int | None) -> None:
    """Hold a job at N workers, or hand control of its size back to the allocator with `auto`."""
    from elastic_ray.cli import cluster

    cluster.connect()
    found = cluster.find_job(job)
    if (phase := found.status().phase).ended:  # its driver has not collected the result yet
        raise click.ClickException(f"job {found.answers.job!r} cannot be resized: it has ended ({phase.value})")
    if workers is None:
        found.ask("release")
        say(f"job {found.answers.job}: its size is the allocator's again")
    else:
        found.ask("resize", workers)
        say(f"job {found.answers.job}: held at {count(workers, 'worker')} until `elastic-ray resize {job} auto`")
