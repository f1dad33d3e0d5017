"""``elastic-ray doctor``: checks an installation and its cluster."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import click

from elastic_ray.cli.listings import SHORT_ID
from elastic_ray.cli.machine_checks import Check, check_storage, default_storage, machine_checks
from elastic_ray.cli.output import json_option, show_json, show_table
from placement.text import count

COLUMNS = ("CHECK", "STATE", "WHERE", "FINDING")


@click.command(short_help="Check this installation.")
@click.option("--storage", help="Path or URI of results and checkpoints; by default Ray's, ~/ray_results.")
@click.option("--every-node", is_flag=True, help="Look at each node of the cluster, too.")
@json_option
def doctor(storage: str | None, every_node: bool, as_json: bool) -> None:
    """Check this installation, and the cluster if one is running: versions, GPUs, NCCL, ports, storage.

    Exit code 1 if anything would prevent jobs from running.
    """
    where = default_storage() if storage is None else storage
    of_cluster = _cluster_checks(where, every_node)  # first: it joins the cluster
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
        versions = dict[str, str]()
        for node_id, answer in cluster.on_every_node(machine_checks, [str(node["NodeID"]) for node in nodes]).items():
            where = node_id[:SHORT_ID]
            if isinstance(answer, str):
                detail = f"it cannot be looked at: {answer}; is elastic-ray installed there?"
                findings.append(Check("node", "fail", detail, where=where))
            else:
                findings += [dataclasses.replace(check, where=where) for check in answer]
                of_node = next(check for check in answer if check.name == "versions")
                versions |= {where: of_node.detail} if of_node.state == "ok" else {}
        findings += [check_alike(versions)] if versions else []
    return findings


def check_alike(versions: Mapping[str, str]) -> Check:
    """Check that all nodes have the same versions, given each node's as text: ``Python 3.11.2, torch 2.13.0``."""
    found: dict[str, dict[str, list[str]]] = {}
    for node, text in versions.items():
        for name, _, version in (each.rpartition(" ") for each in text.split(", ")):
            found.setdefault(name, {}).setdefault(version, []).append(node)
    unlike = [
        f"{name} is {' and '.join(f'{each} on {_named(there)}' for each, there in by_version.items())}"
        for name, by_version in found.items()
        if len(by_version) > 1
    ]
    if unlike:
        way = "install the same everywhere, since workers on these nodes may not form a group, or train differently"
        return Check("nodes", "warn", f"{'; '.join(unlike)}: {way}")
    return Check("nodes", "ok", f"{count(len(versions), 'node')} with the same versions")


def _named(nodes: Sequence[str]) -> str:
    """Return the first nodes' names, and the number of the others."""
    return ", ".join(nodes[:3]) + (f" and {len(nodes) - 3} more" if len(nodes) > 3 else "")


def check_cluster(nodes: int) -> Check:
    """Return a summary of the cluster, which has ``nodes`` nodes, and its allocator; this check never fails."""
    from elastic_ray.cli import cluster
    from placement.ray_cluster.autoscaler_presence import may_autoscale

    seen, problem = cluster.snapshot_if_any()
    no_allocator = problem or "no allocator yet (the first job starts it)"
    parts = [
        count(nodes, "node"),
        "an autoscaler may add some" if may_autoscale() else "no autoscaler",
        f"allocator with policy {seen.policy}" if seen is not None else no_allocator,
    ]
    return Check("cluster", "warn" if problem else "ok", "; ".join(parts))


def check_dashboard() -> Check:
    """Check that Ray's dashboard, which ``submit`` needs, answers."""
    from elastic_ray.cli import submission

    try:
        submission.client()
    except click.ClickException as error:
        return Check("dashboard", "warn", error.message)
    return Check("dashboard", "ok", "takes submissions")
