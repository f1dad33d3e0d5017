"""``elastic-ray verify``: checks what a run's files prove about its training."""

from __future__ import annotations

import posixpath
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import click

from elastic_ray.cli.output import json_option, show_json, show_table

if TYPE_CHECKING:
    from elastic_ray.checkpoints.automatic import StateFile
    from elastic_ray.checkpoints.run_directory import RunStorage

_STATES = {True: "proven", False: "UNPROVEN", None: "-"}


@click.command(short_help="Say what a run's files prove.")
@click.argument("path", metavar="RUN")
@click.option("--replay", "step", type=click.IntRange(min=1), metavar="STEP", help="Train the steps around it again.")
@json_option
def verify(path: str, step: int | None, as_json: bool) -> None:
    """Check from RUN's files that ranks started equal, epochs used each sample once, and checkpoints are complete.

    RUN is the run's directory: RunConfig's storage_path/name. Exit code 1 if anything is unproven.

    With --replay STEP, the steps from the automatic checkpoint before STEP to the next one are trained again on a
    different number of workers of the current cluster, and the two models are compared. This requires a job started by
    `elastic-ray submit`; for other jobs, call `elastic_ray.replay` in Python with the train function.
    """
    from elastic_ray.checkpoints.resumable import find_stored
    from elastic_ray.checkpoints.run_directory import EVENTS_FILE, RunStorage, resolve
    from elastic_ray.record.verification import Finding, verify_events

    try:
        filesystem, root = resolve(path, None)
        storage = RunStorage(root, filesystem)
        if not filesystem.get_file_info(posixpath.join(storage.path, EVENTS_FILE)).is_file:
            raise ValueError(f"it has no {EVENTS_FILE}; RUN is the directory of one run, storage_path/name")
        stored = find_stored(storage, start_from=None, is_trial=False, with_states=True, verify=True)
        epochs = max((each.resume_point.epoch for each in stored.result), default=0)
        findings = list(verify_events(storage.event_lines(), epochs=epochs))
        looked = [(False, why) for why in stored.passed_over]
        looked += [(True, f"{checkpoint.path} is whole") for checkpoint in stored.checkpoints]
        looked += _automatic(storage, (*stored.states, *stored.result))
    except (OSError, ValueError) as error:
        raise click.ClickException(f"the run {path!r} cannot be read: {error}") from error
    findings += [Finding(line=0, what="checkpoint", proven=proven, text=text) for proven, text in looked]
    if step is not None:
        from elastic_ray.cli.replaying import replay_submitted

        findings.append(replay_submitted(path, step))
    if as_json:
        show_json(findings)
    else:
        rows = [(str(each.line or ""), each.what.upper(), _STATES[each.proven], each.text) for each in findings]
        show_table(("LINE", "WHAT", "STATE", "FINDING"), rows, empty="nothing to verify")
    if any(each.proven is False for each in findings):
        raise click.exceptions.Exit(1)


def _automatic(storage: RunStorage, states: Sequence[StateFile]) -> Iterator[tuple[bool, str]]:
    """Yield for each automatic checkpoint whether its files are whole, and a sentence that says so."""
    if not states:
        return
    from elastic_ray.checkpoints.automatic import CorruptStateError, state_files
    from elastic_ray.checkpoints.sharded.reading import check_whole  # imports torch

    for state in states:
        try:
            check_whole(storage, state)
        except CorruptStateError as error:
            if state in state_files(storage):  # else the running job has deleted it
                yield False, str(error)
        else:
            yield True, f"{state.path} is whole"
