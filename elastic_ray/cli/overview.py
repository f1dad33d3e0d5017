"""``elastic-ray nodes`` and ``allocator``: show nodes and decisions, and change the cluster's settings."""

from __future__ import annotations

import difflib
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click
import yaml

from elastic_ray.cli.listings import (
    DECISION_COLUMNS,
    NODE_COLUMNS,
    SHORT_ID,
    decision_cells,
    decisions,
    node_cells,
    node_rows,
)
from elastic_ray.cli.output import json_option, say, show_json, show_table
from placement.text import count

if TYPE_CHECKING:
    from placement.allocator.snapshot import CoreSnapshot
    from placement.autoscaling.autoscaler import ScalingDecision

NO_ALLOCATOR = "this cluster has no allocator yet: it starts with the first elastic job"


@click.command(short_help="List the nodes.")
@click.option("--forgive", metavar="NODE", help="Forget the workers that failed on a node: it was mended.")
@json_option
def nodes(forgive: str | None, as_json: bool) -> None:
    """List the cluster's nodes: the resources that elastic jobs may use, the jobs on each node, and failed workers."""
    from elastic_ray.cli import cluster

    cluster.connect()
    if forgive is not None:
        node = cluster.forgive(forgive)
        say(f"what failed on node {node[:SHORT_ID]} is forgotten")
        return
    seen, problem = cluster.snapshot_if_any()
    rows = node_rows(cluster.ray_nodes(), seen)
    if problem:
        say(f"warning: {problem}", err=True)
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
    """Let POLICY divide the cluster between all jobs from now on; fails while jobs run under a different policy.

    POLICY is a registered name, such as goodput or fair_share, or a custom policy as module:name or file.py:name.
    """
    from elastic_ray.cli import cluster

    cluster.set_policy(policy)
    say(f"policy {policy} shares the cluster out")


@click.command(short_help="Let the settings of a file rule.")
@click.argument("file", type=click.Path(exists=True, dir_okay=False))
def allocator_apply(file: str) -> None:
    """Apply the settings in FILE to the cluster: tenants, priorities, autoscaling, web page. Jobs may be running.

    They take precedence over AllocatorConfig and stay in effect until another file is applied. Settings missing from
    FILE keep their values from AllocatorConfig.
    """
    from elastic_ray.cli import cluster

    wanted = cluster.operator_settings(file)
    changes = _difference(cluster.settings_in_force(), cluster.settings_in_force(wanted, apply=True))
    say("\n".join(changes) if changes else "nothing changes")


@click.command(short_help="Show the settings in force, as a file.")
def allocator_show() -> None:
    """Print the settings in effect; the output is a valid file for `elastic-ray allocator apply`."""
    from elastic_ray.cli import cluster

    say(_as_yaml(cluster.settings_in_force()).rstrip())


@click.command(short_help="Show what a file would change.")
@click.argument("file", type=click.Path(exists=True, dir_okay=False))
def allocator_diff(file: str) -> None:
    """Print the changes that `elastic-ray allocator apply FILE` would make, without making them."""
    from elastic_ray.cli import cluster

    wanted = cluster.operator_settings(file)
    changes = _difference(cluster.settings_in_force(), cluster.settings_in_force(wanted))
    say("\n".join(changes) if changes else "nothing would change")


def _as_yaml(settings: Mapping[str, Any]) -> str:
    return str(yaml.safe_dump(dict(settings), sort_keys=False, allow_unicode=True))


def _difference(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Return the lines that differ between two settings, with ``-`` and ``+``, and some lines of context."""
    lines = difflib.unified_diff(_as_yaml(before).splitlines(), _as_yaml(after).splitlines(), lineterm="")
    return list(lines)[2:]


_SUBCOMMANDS = {"set": allocator_set, "apply": allocator_apply, "show": allocator_show, "diff": allocator_diff}


class _ShowOrSet(click.Command):
    """Command ``allocator [JOB]`` with the subcommands ``set``, ``apply``, ``show`` and ``diff``."""

    def make_context(self, info_name: str | None, args: list[str], *more: Any, **extra: Any) -> click.Context:
        if args and args[0] in _SUBCOMMANDS:
            return _SUBCOMMANDS[args[0]].make_context(f"{info_name} {args[0]}", args[1:], *more, **extra)
        return super().make_context(info_name, args, *more, **extra)


@click.command(cls=_ShowOrSet, short_help="Show decisions and their reasons, or set the policy.")
@click.argument("job", required=False)
@click.option("--last", default=20, show_default=True, type=click.IntRange(min=0), help="Decisions to show.")
@json_option
def allocator(job: str | None, last: int, as_json: bool) -> None:
    """Show the policy and the last decisions with their reasons; for a JOB, also the effect of more workers.

    `elastic-ray allocator set POLICY` chooses the policy. `allocator show`, `allocator diff FILE` and `allocator apply
    FILE` manage tenants, priorities, autoscaling and the web page (see their --help).
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
    """Return lines of text about the requested nodes, the changes with their reasons, and notes for the jobs' users."""
    nodes = ", ".join(f"{n} {name}" for name, n in decision.nodes.items() if n) or "none"
    lines = [f"nodes wanted: {nodes}; {decision.usd_per_h:.3g} USD/h"]
    lines += [
        f"  {name}{f' +{more}' if (more := decision.add.get(name)) is not None else ''}: {reason}"
        for name, reason in decision.reasons.items()
    ]
    return [*lines, *(f"  job {job}: {decision.note(job)}" for job in decision.notes)]


def headline(seen: CoreSnapshot) -> str:
    """Return a one-line summary: the policy, the jobs, and the workers and nodes."""
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
