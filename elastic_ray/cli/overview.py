"""``elastic-ray nodes``, ``allocator``."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import click

from elastic_ray.cli.listings import (
    DECISION_COLUMNS,
    NODE_COLUMNS,
    SHORT_ID,
    decision_cells,
    decisions,
    node_cells,
    node_rows,
)
from elastic_ray.cli.options import json_option
from elastic_ray.cli.output import count, say, show_json, show_table

if TYPE_CHECKING:
    from placement.allocator.snapshot import CoreSnapshot
    from placement.autoscaling.autoscaler import ScalingDecision

NO_ALLOCATOR = "this cluster has no allocator yet: it starts with the first elastic job"


@click.command(short_help="List the nodes.")
@click.option("--forgive", metavar="NODE", help="Forget the workers that failed on a node: it was mended.")
@json_option
def nodes(forgive: str | None, as_json: bool) -> None:
    """List the cluster's nodes, what elastic jobs may use of them, which jobs are there, and where workers failed."""
    from elastic_ray.cli import cluster

    cluster.connect()
    if forgive is not None:
        node = cluster.forgive(forgive)
        say(f"what failed on node {node[:SHORT_ID]} is forgotten")
        return
    rows = node_rows(cluster.ray_nodes(), cluster.snapshot())
    if as_json:
        show_json(rows)
        return
    show_table(NODE_COLUMNS, [node_cells(row) for row in rows], empty="no nodes")
    for row in rows:
        if row.failures is not None:
            say(str(row.failures))


@click.command(short_help="Choose the cluster's policy.")
@click.argument("policy")
def allocator_set(policy: str) -> None:
    """Let POLICY share the cluster out among all jobs from now on; while jobs run under another one it stays.

    POLICY is a registered name, such as goodput or fair_share, or one of your own as module:name or file.py:name.
    """
    from elastic_ray.cli import cluster

    cluster.set_policy(policy)
    say(f"policy {policy} shares the cluster out")


class _ShowOrSet(click.Command):
    """``allocator [JOB]``, and ``allocator set POLICY``."""

    def make_context(self, info_name: str | None, args: list[str], *more: Any, **extra: Any) -> click.Context:
        if args[:1] == ["set"]:
            return allocator_set.make_context(f"{info_name} set", args[1:], *more, **extra)
        return super().make_context(info_name, args, *more, **extra)


@click.command(cls=_ShowOrSet, short_help="Show decisions and their reasons, or set the policy.")
@click.argument("job", required=False)
@click.option("--last", default=20, show_default=True, type=click.IntRange(min=0), help="Decisions to show.")
@json_option
def allocator(job: str | None, last: int, as_json: bool) -> None:
    """Show who shares the cluster out, and the last decisions with their reasons; of a JOB also what more would do.

    `elastic-ray allocator set POLICY` chooses the policy (see its --help).
    """
    from elastic_ray.cli import cluster

    cluster.connect()
    seen = cluster.snapshot()
    if seen is None:
        raise click.ClickException(NO_ALLOCATOR)
    log = decisions(seen, job, last)
    if job is not None and job not in seen.jobs and not log:
        raise cluster.not_found(job, list(seen.jobs))
    why = cluster.explain(job) if job is not None else None
    scaling, page = cluster.scaling(), cluster.page_address()
    if as_json:
        show_json(
            {
                "policy": seen.policy,
                "settled": seen.settled,
                "jobs": list(seen.jobs),
                "decisions": log,
                "explanation": why,
                "scaling": scaling,
                "page": page,
            }
        )
        return
    say(headline(seen))
    if page:
        say(f"page: {page}")
    for line in scaling_lines(scaling) if scaling is not None else ():
        say(line)
    if why is not None:
        say(str(why))
    now_s = time.time()
    show_table(DECISION_COLUMNS, [decision_cells(record, now_s) for record in log], empty="no decisions")


def scaling_lines(decision: ScalingDecision) -> list[str]:
    """What the cluster is to be, what changes and why, and what users of jobs must know."""
    nodes = ", ".join(f"{n} {name}" for name, n in decision.nodes.items() if n) or "none"
    lines = [f"nodes wanted: {nodes}; {decision.usd_per_h:.3g} USD/h"]
    lines += [f"  {reason}" for reason in decision.reasons.values()]
    return [*lines, *(f"  job {job}: {note}" for job, note in decision.notes.items())]


def headline(seen: CoreSnapshot) -> str:
    """Policy, jobs and room on one line."""
    waiting = sum(not state.target and not state.view.paused for state in seen.jobs.values())
    workers = sum(sum(state.target.values()) for state in seen.jobs.values())
    parts = [
        f"policy {seen.policy}",
        count(len(seen.jobs), "job") + (f", {waiting} waiting" if waiting else ""),
        f"{count(workers, 'worker')} on {count(len(seen.cluster.nodes), 'node')}",
    ]
    if not seen.settled:
        parts.append("has just started, and still listens to jobs")
    return "; ".join(parts)
