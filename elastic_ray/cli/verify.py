"""``elastic-ray verify``: checks what a run's files prove about its training."""

from __future__ import annotations

import click

from elastic_ray.cli.output import json_option, show_json, show_table

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
    from elastic_ray.checkpoints.run_directory import RunStorage, resolve
    from elastic_ray.record.verification import Finding, verify_events

    try:
        filesystem, root = resolve(path, None)
        storage = RunStorage(root, filesystem)
        findings = list(verify_events(storage.event_lines()))
        stored = find_stored(storage, start_from=None, is_trial=False, with_states=True, verify=True)
    except (OSError, ValueError) as error:
        raise click.ClickException(f"the run {path!r} cannot be read: {error}") from error
    looked = [(False, why) for why in stored.passed_over]
    looked += [(True, f"{checkpoint.path} is whole") for checkpoint in stored.checkpoints]
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
