"""``elastic-ray verify``: checks a run's files for proof that its training was correct."""

from __future__ import annotations

import contextlib
import posixpath
import secrets
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import click

from elastic_ray.cli.output import json_option, show_json, show_table
from elastic_ray.events import JobEvent
from elastic_ray.record.submitted import SubmittedJob
from placement.text import count

if TYPE_CHECKING:
    from elastic_ray.checkpoints.automatic import StateFile
    from elastic_ray.checkpoints.run_directory import RunStorage
    from elastic_ray.record.verification import Finding

_STATES = {True: "proven", False: "UNPROVEN", None: "-"}


@click.command(short_help="Say what a run's files prove.")
@click.argument("path", metavar="RUN")
@click.option("--replay", "step", type=click.IntRange(min=1), metavar="STEP", help="Train the steps around it again.")
@json_option
def verify(path: str, step: int | None, as_json: bool) -> None:
    """Check in RUN's files that ranks started equal, epochs used each sample once, and checkpoints are complete.

    RUN is the run's directory: RunConfig's storage_path/name. Exit code 1 if anything is unproven.

    With --replay STEP, the steps from the automatic checkpoint before STEP to the next one are trained again on a
    different number of workers in the current cluster, and the two models are compared. This requires a job started by
    `elastic-ray submit`; for other jobs, call `elastic_ray.replay` in Python with the train function.
    """
    from elastic_ray.checkpoints.automatic import find_stored
    from elastic_ray.checkpoints.run_directory import EVENTS_FILE, RunStorage, resolve
    from elastic_ray.record.verification import Finding, verify_events

    try:
        filesystem, root = resolve(path, None)
        storage = RunStorage(root, filesystem)
        if not filesystem.get_file_info(posixpath.join(storage.path, EVENTS_FILE)).is_file:
            raise ValueError(f"it has no {EVENTS_FILE}; RUN is the directory of one run, storage_path/name")
        stored = find_stored(storage, start_from=None, is_trial=False, with_states=True, verify=True)
        epochs = max((each.resume_point.epoch for each in stored.result), default=0)
        looked = [(False, why) for why in stored.passed_over]
        looked += [(True, f"{checkpoint.path} is whole") for checkpoint in stored.checkpoints]
        saved: dict[int, str] = {}
        looked += _automatic(storage, (*stored.states, *stored.result), saved)
        findings = list(verify_events(storage.events.read(), epochs=epochs, saved=saved))
    except (OSError, ValueError) as error:
        raise click.ClickException(f"the run {path!r} cannot be read: {error}") from error
    findings += [Finding(line=0, what="checkpoint", proven=proven, text=text) for proven, text in looked]
    if step is not None:
        findings.append(replay_submitted(path, step))
    if as_json:
        show_json(findings)
    else:
        rows = [(str(each.line or ""), each.what.upper(), _STATES[each.proven], each.text) for each in findings]
        show_table(("LINE", "WHAT", "STATE", "FINDING"), rows, empty="nothing to verify")
    if any(each.proven is False for each in findings):
        raise click.exceptions.Exit(1)


def _automatic(storage: RunStorage, states: Sequence[StateFile], saved: dict[int, str]) -> Iterator[tuple[bool, str]]:
    """Yield whether each automatic checkpoint's files are complete and unchanged, with a sentence that says so.

    Paths of checkpoints that are whole are added to ``saved``, keyed by the last proof before each.
    """
    if not states:
        return
    from elastic_ray.checkpoints.automatic import CorruptStateError, state_files
    from elastic_ray.checkpoints.sharded.reading import check_whole  # imports torch
    from elastic_ray.state.progress import RunProgress

    for state in states:
        try:
            tree = check_whole(storage, state).tree
        except CorruptStateError as error:
            if state in state_files(storage):  # else the running job has deleted it
                yield False, str(error)
            continue
        with contextlib.suppress(TypeError, KeyError, AttributeError):  # another version's
            progress = RunProgress.from_state(tree["run"])
            if progress.resume_point(state.resume_point.samples_left) != state.resume_point:
                yield False, f"{state.path} is in {progress.place}, but its note says otherwise"
                continue
            saved[progress.proof] = state.path
        yield True, f"{state.path} is whole"


_LONGEST_S = 3600.0
_END_S = 60.0


def replay_submitted(path: str, step: int) -> Finding:
    """Retrain the steps around ``step`` with the run's own script, and return the result of the comparison."""
    from elastic_ray.cli import cluster
    from elastic_ray.cli import submission as ray_jobs
    from elastic_ray.cli.submit import send_again
    from elastic_ray.driver.replay import Window
    from elastic_ray.record.verification import Finding

    try:
        window = Window.around(path, step)
        job = SubmittedJob.from_json(window.run.read_submission())
    except (OSError, ValueError) as error:
        raise click.ClickException(f"step {step} of {path!r} cannot be replayed: {error}") from error
    if not job.command or not job.named:
        raise click.ClickException(
            f"the code of {path!r} is unknown: either `elastic-ray submit` did not start the run, or its script "
            f"changes the run's name each time. In Python: elastic_ray.replay(train_function, {path!r}, step={step}, "
            "workers=2)"
        )
    cluster.connect()
    if cluster.find_jobs(window.name):
        raise click.UsageError(f"job {window.name!r} is another replay of these steps: wait for its end, or stop it")
    window.prepare()
    submission = f"{window.name}.{secrets.token_hex(4)}"
    workers = _other_size(window.run.read_events())
    send_again(job.command, submission=submission, user=job.user, workers=(workers, workers), replay=window.after.steps)

    def ended() -> bool:
        script = ray_jobs.find(submission)
        return script is not None and script.ended

    try:
        found = window.await_result(ended, _LONGEST_S)
    except (ValueError, TimeoutError) as error:
        raise click.ClickException(f"{error}: see `elastic-ray logs {submission}`") from error
    finally:
        with contextlib.suppress(click.ClickException):
            replayed = cluster.find_job(window.name)
            replayed.ask("stop", now=True, reason="the replay is over")
            replayed.wait_for(lambda status: status.phase.ended, _END_S)
    window.remove()
    return Finding(line=0, what="replay", proven=found.proven, text=f"{found} ({count(workers)})")


def _other_size(events: Iterable[JobEvent]) -> int:
    """Return a number of workers that differs from the run's last: one fewer if possible, otherwise two."""
    last = [each.to_workers for each in events if each.to_workers]
    return last[-1] - 1 if last and last[-1] > 1 else 2
