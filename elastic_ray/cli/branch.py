"""``elastic-ray branch JOB``: measures how large a running job's batch can be without wasting samples."""

from __future__ import annotations

import time

import click

from elastic_ray.batch.branch_losses import BranchPlan, BranchResult
from elastic_ray.cli.output import job_argument, json_option, say, show_json

_POLL_S = 0.5


@click.command(short_help="Measure a job's critical batch by branches.")
@job_argument
@click.option("--factors", default="2,4", show_default=True, metavar="N,N", help="Batches to try, in present ones.")
@click.option("--steps", default=400, show_default=True, metavar="N", help="Steps at the present batch.")
@click.option("--metric", default="loss", show_default=True, metavar="NAME", help="Reported metric to compare.")
@click.option("--tolerance", default=0.01, show_default=True, metavar="PART", help="Part of it that may be lost.")
@json_option
def branch(job: str, factors: str, steps: int, metric: str, tolerance: float, as_json: bool) -> None:
    """Train branches of a running JOB at larger batches, and compare their losses after the same number of samples.

    A branch is a job with the lowest weight that starts from JOB's newest automatic checkpoint. JOB keeps training.
    Once the branches have been compared, JOB's batch does not exceed the largest batch found to be as good. If this
    command is interrupted, the comparison continues.
    """
    from elastic_ray.cli import cluster

    try:
        numbers = tuple(int(each) for each in factors.split(","))
    except ValueError:
        raise click.BadParameter(
            f"must be whole numbers such as 2,4, but got {factors!r}", param_hint="--factors"
        ) from None
    try:
        plan = BranchPlan(factors=numbers, steps=steps, metric=metric, tolerance=tolerance)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    cluster.connect()
    found = cluster.find_job(job)
    found.ask("branch", plan)
    while True:
        result: BranchResult | None = found.ask("branched")
        if result is not None:
            break
        time.sleep(_POLL_S)
    if as_json:
        show_json(result.plain)
    else:
        say(f"job {found.answers.job}: {result}")
