"""``elastic-ray doctor``: checks an installation and its cluster."""

from __future__ import annotations

import dataclasses

import click

from elastic_ray.cli.listings import SHORT_ID
from elastic_ray.cli.machine_checks import Check, check_storage, default_storage, machine_checks
from elastic_ray.cli.output import count, json_option, show_json, show_table

COLUMNS = ("CHECK", "STATE", "WHERE", "FINDING")


@click.command(short_help="Check this installation.")
@click.option("--storage", help="Path or URI of results and checkpoints; by default Ray's, ~/ray_results.")
@click.option("--every-node", is_flag=True, help="Look at each node of the cluster, too.")
@json_option
def doctor(storage: str | None, every_node: bool, as_json: bool) -> None:
    """Check this installation, and the cluster if one is running: versions, GPUs, NCCL, ports, storage.

    Exit code 1 if anything would prevent jobs from running.
    """
    of_cluster = _cluster_checks(storage or default_storage(), every_node)  # first: it joins the cluster
    findings = [*machine_checks(), *of_cluster]
    if as_json:
        show_json(findings)
    else:
        rows = [(each.name, each.state, each.where or "here", each.detail) for each in findings]
        show_table(COLUMNS, rows, empty="nothing to check")
    if any(each.state == "fail" for each in findings):
        raise click.exceptions.Exit(1)


def _cluster_checks(storage: str, every_node: bool) -> list[Check]:
    """Return the findings about the cluster, and about each of its nodes if ``every_node``."""
    from elastic_ray.cli import cluster

    try:
        cluster.connect()
    except click.ClickException as error:
        wrong = every_node or isinstance(error, cluster.RefusedError)
        return [check_storage(storage, 1), Check("cluster", "fail" if wrong else "warn", error.message)]
    nodes = [node for node in cluster.ray_nodes() if node["Alive"]]
    findings = [check_storage(storage, len(nodes)), check_cluster(len(nodes)), check_dashboard()]
    if every_node:
        for node_id, answer in cluster.on_every_node(machine_checks, [str(node["NodeID"]) for node in nodes]).items():
            where = node_id[:SHORT_ID]
            if isinstance(answer, str):
                detail = f"it cannot be looked at: {answer}; is elastic-ray installed there?"
                findings.append(Check("node", "fail", detail, where=where))
            else:
                findings += [dataclasses.replace(check, where=where) for check in answer]
    return findings


def check_cluster(nodes: int) -> Check:
    """Return a summary of the cluster, which has ``nodes`` nodes, and its allocator; this check never fails."""
    from elastic_ray.cli import cluster
    from placement.ray_cluster.autoscaler_presence import may_autoscale

    seen = cluster.snapshot()
    parts = [
        count(nodes, "node"),
        "an autoscaler may add some" if may_autoscale() else "no autoscaler",
        f"allocator with policy {seen.policy}" if seen is not None else "no allocator yet (the first job starts it)",
    ]
    return Check("cluster", "ok", "; ".join(parts))


def check_dashboard() -> Check:
    """Check that Ray's dashboard, which ``submit`` needs, answers."""
    from elastic_ray.cli import submission

    try:
        submission.client()
    except click.ClickException as error:
        return Check("dashboard", "warn", error.message)
    return Check("dashboard", "ok", "takes submissions")
