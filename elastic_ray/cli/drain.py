"""``elastic-ray drain``: moves all jobs off nodes."""

from __future__ import annotations

import time

import click

from elastic_ray.cli.listings import SHORT_ID
from elastic_ray.cli.output import Seconds, say

_LOOK_S = 0.5


def _read_label(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[str, str] | None:
    key, equals, label = (value or "").partition("=")
    if value is not None and not (key and equals):
        raise click.BadParameter(f"must be KEY=VALUE, but got {value!r}", ctx, param)
    return (key, label) if value is not None else None


@click.command(short_help="Move all jobs off nodes.")
@click.argument("names", nargs=-1, metavar="[NODE]...")
@click.option("--label", callback=_read_label, metavar="KEY=VALUE", help="All nodes with this label.")
@click.option("--deadline", "deadline_s", type=Seconds(min=1, max=1e9), default=600.0, show_default=True, help="[s]")
@click.option("--reason", default="maintenance", show_default=True, help="What jobs and the page show.")
def drain(names: tuple[str, ...], label: tuple[str, str] | None, deadline_s: float, reason: str) -> None:
    """Move all elastic jobs off these nodes between two steps; Ray starts nothing new on them.

    NODE is an id, an id prefix or an address, as shown by `elastic-ray nodes`. Returns once no elastic job has workers
    on these nodes; exit code 1 if some still have workers there at the deadline. A drain cannot be undone: to use the
    node again, stop Ray on it and start it again.
    """
    from elastic_ray.cli import cluster
    from placement.ray_cluster.notice_watcher import ask_to_drain
    from placement.ray_cluster.snapshot import read_nodes

    if bool(names) == (label is not None):
        raise click.UsageError("give either node names or --label, and not both")
    cluster.connect()
    if label is not None:
        meant = [node.node_id for node in read_nodes() if node.labels.get(label[0]) == label[1]]
        if not meant:
            raise click.ClickException(
                f"no living node has the label {'='.join(label)}; `elastic-ray nodes` lists them"
            )
    else:
        meant = [cluster.living_node(name, "NODE") for name in names]
    until_s = time.monotonic() + deadline_s
    for node_id in meant:
        if refusal := ask_to_drain(node_id, reason, time.time() + deadline_s):
            raise click.ClickException(f"node {node_id[:SHORT_ID]} cannot be drained: {refusal}")
    while left := [node for node in read_nodes() if node.node_id in meant and node.reserved]:
        if time.monotonic() > until_s:
            told = "; ".join(f"node {node.node_id[:SHORT_ID]}: {', '.join(sorted(node.reserved))}" for node in left)
            raise click.ClickException(f"after {deadline_s:g} s some jobs still have workers there: {told}")
        time.sleep(_LOOK_S)
    say(f"no elastic job has workers on {', '.join(node_id[:SHORT_ID] for node_id in meant)}")
