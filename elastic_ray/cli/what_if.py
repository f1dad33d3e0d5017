"""``elastic-ray simulate``: simulates a trace, like ``python -m placement.simulator``, or the jobs running now."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from elastic_ray.cli.output import json_option, say, show_json, show_table
from placement.text import ago

if TYPE_CHECKING:
    from placement.simulator.results.outlook import Outlook

COLUMNS = ("JOB", "WORKERS", "SAMPLES/S", "ENDS IN", "REASON")


@click.command(
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []},
    add_help_option=False,
    short_help="Ask what other nodes or policies would do.",
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def simulate(arguments: tuple[str, ...]) -> None:
    """Simulate a trace (options as for `python -m placement.simulator`) or, with `--live`, the jobs running now.

    `simulate --help` and `simulate --live --help` list the options for each.
    """
    if "--live" in arguments:
        rest = [word for word in arguments if word != "--live"]
        live.main(rest, prog_name="elastic-ray simulate --live", standalone_mode=False)
        return
    from placement.simulator.threads import ask_for_one

    ask_for_one()  # before NumPy is imported
    from placement.simulator.cli import main

    raise click.exceptions.Exit(main(arguments, prog="elastic-ray simulate"))


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--nodes", "text", help="Others, such as T4:4x8 or cpu:2x16: type, nodes x devices each.")
@click.option("--policy", help="By default the cluster's own.")
@json_option
def live(text: str | None, policy: str | None, as_json: bool) -> None:
    """Show when the jobs running now will end, and how they would perform on other nodes or under another policy.

    The outlook uses the jobs' fitted models and declared lengths. A GPU type that a job has not run on yet is assumed
    to perform like the type it has run on. Other requested resources (CPUs, memory) are assumed to be plentiful.
    """
    from elastic_ray.cli import cluster
    from placement.errors import InputError
    from placement.simulator.results.outlook import outlook, read_nodes

    cluster.connect()
    seen = cluster.snapshot()
    views = cluster.views() if seen is not None and seen.jobs else ()
    if seen is None or not views:
        raise click.ClickException("no elastic job runs on this cluster, so there is nothing to ask about")
    chosen, now_s = policy or seen.policy, time.time()
    try:
        rules = seen.constraints
        now = outlook(views, seen.cluster, chosen, now_s, stay=True, constraints=rules)
        there = None if text is None else read_nodes(text, views)
        then = None if there is None else outlook(views, there, chosen, now_s, constraints=rules)
    except InputError as error:
        raise click.UsageError(str(error)) from error
    if as_json:
        show_json({"policy": chosen, "nodes": text, "now": now, "then": then})
        return
    if then is None:
        say(f"policy {chosen}; present nodes")
        show_table(COLUMNS, [row(each) for each in now], empty="no jobs")
        return
    say(f"policy {chosen}; present nodes -> {text}")
    show_table(COLUMNS, rows(now, then), empty="no jobs")


def row(here: Outlook) -> tuple[str, ...]:
    """Return the texts of a table row: a job's expected size, speed and end on the current nodes."""
    reason = " ".join(here.reason.split())
    return here.job, str(here.workers), _rate(here.goodput), _span(here.ends_s), reason


def rows(now: Sequence[Outlook], then: Sequence[Outlook]) -> list[tuple[str, ...]]:
    """Return one table row per job that compares its outlook ``now`` and ``then`` (other nodes), as in ``4 -> 8``."""
    return [
        (
            there.job,
            f"{here.workers} -> {there.workers}",
            f"{_rate(here.goodput)} -> {_rate(there.goodput)}",
            f"{_span(here.ends_s)} -> {_span(there.ends_s)}",
            " ".join(there.reason.split()),
        )
        for here, there in zip(now, then, strict=True)
    ]


def _rate(goodput: float | None) -> str:
    return "?" if goodput is None else f"{goodput:.3g}"


def _span(seconds: float | None) -> str:
    return "?" if seconds is None else ago(seconds)
