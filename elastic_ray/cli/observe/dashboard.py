"""``elastic-ray dashboard``: serves a web page that shows which job has which slots, since when, and why."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
import sys
from typing import TYPE_CHECKING

import click

from elastic_ray.cli.output import say
from elastic_ray.observe.page.gate import Gate, is_loopback, new_token

if TYPE_CHECKING:
    from elastic_ray.observe.page.source import Source

DEFAULT_PORT = 8270


@click.command(short_help="Serve a page that shows jobs, nodes and decisions.")
@click.option("--port", default=DEFAULT_PORT, show_default=True, type=click.IntRange(0, 65535), help="0: any free one.")
@click.option(
    "--host", default="127.0.0.1", show_default=True, help="Where to listen; beyond this machine only with a token."
)
@click.option("--from", "path", metavar="STORAGE_PATH", help="Show runs from their files, the cluster gone or not.")
@click.option("--simulation", metavar="OUT.json", help="Show a report of `simulate --json OUT.json`.")
@click.option("--read-only", is_flag=True, help="No actions: nothing can be resized, released or stopped.")
@click.option("--attached", is_flag=True, hidden=True, help="End with standard input; take another port if need be.")
def dashboard(port: int, host: str, path: str | None, simulation: str | None, read_only: bool, attached: bool) -> None:
    """Serve a web page with the cluster's slots, the allocation over time, and jobs with reasons for their sizes.

    By default the page can only be opened on this machine; from elsewhere, forward the port (ssh -L). The printed token
    permits resizing, releasing and stopping jobs; with another --host, nothing is shown without the token.
    """
    if path is not None and simulation is not None:
        raise click.UsageError("--from and --simulation cannot be given together: a page has one source")
    live = path is None and simulation is None
    token = new_token() if (live and not read_only) or not is_loopback(host) else None
    from elastic_ray.observe.page.server import PageServer, listener, serve

    source = _source(path, simulation, actions=live and not read_only)
    gate = Gate(host=host, names=(socket.gethostname(), socket.getfqdn()), token=token)
    try:
        bound = listener(host, port, or_any=attached)
    except OSError as error:
        raise click.ClickException(str(error)) from None
    shown = f"[{host}]" if ":" in host else host
    shown_port = bound.getsockname()[1]
    say(f"dashboard: http://{shown}:{shown_port}/")
    if token is not None:
        say(f"token{'' if gate.open_to_others else ' for actions'}, shown once: {token}")
    with contextlib.suppress(KeyboardInterrupt):
        ends = functools.partial(asyncio.to_thread, sys.stdin.read) if attached else asyncio.Event().wait
        asyncio.run(serve(PageServer(source, gate), bound, ends))


def _source(path: str | None, simulation: str | None, *, actions: bool) -> Source:
    """Return the page's data source; raises a click error if it cannot be opened."""
    if path is not None or simulation is not None:
        from placement.errors import InputError

        try:
            if path is not None:
                from elastic_ray.observe.page.sources.files import RunFiles

                return RunFiles(path)
            from elastic_ray.observe.page.sources.simulation import SimulatedCluster

            return SimulatedCluster(str(simulation))
        except InputError as error:
            raise click.ClickException(str(error)) from None
    from elastic_ray.cli import cluster
    from elastic_ray.observe.page.sources.live import LiveCluster

    cluster.connect()
    return LiveCluster(cluster.joined_address(), actions=actions)
