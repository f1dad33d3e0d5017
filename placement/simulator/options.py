"""Command-line options of what a policy may know and of what goes wrong, and the values they stand for."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from typing import Any

from placement.autoscaling.objectives import OBJECTIVES, make_objective
from placement.autoscaling.objectives.cost_per_progress import CostPerProgress
from placement.cluster.jobs import SPOT_USES
from placement.errors import InputError
from placement.simulator.nodes.disturbances import Disturbances
from placement.simulator.nodes.provider import AutoscaledCluster
from placement.simulator.nodes.spot import SpotTrace, read_spot
from placement.simulator.workloads.lengths import Lengths

_TYPED = re.compile(r"(?P<gpu>[A-Za-z][\w-]*)=(?P<file>.+)")

_DISTURBANCES = {
    "node_mtbf_h": ("--mtbf", "HOURS", "mean time between failures of one node"),
    "repair_s": ("--repair", "SECONDS", "until a failed node is back"),
    "slow_every_h": ("--slow-every", "HOURS", "mean time between slow spells of one node"),
    "slow_for_s": ("--slow-for", "SECONDS", "length of a slow spell"),
    "slow_factor": ("--slow-factor", "X", "how many times longer a step takes there"),
    "interference": ("--interference", "PART", "of its speed lost by a job of several nodes that shares one, 0 to 1"),
    "noise": ("--noise", "SIGMA", "of the logarithm of measured step times; with all rules"),
    "spot_offset_h": ("--spot-offset", "HOURS", "where in the spot traces the simulation starts"),
}
"""Option, unit and meaning by field of ``Disturbances``; the defaults are the fields' own."""


APART = {"never": False, "measured": None, "always": True}
"""``AllocatorConfig.one_multi_node_job_per_node`` by what ``--apart`` says."""


def add_facts(group: argparse._ArgumentGroup) -> None:
    """What jobs tell; whatever the policy, it is its view that changes."""
    group.add_argument(
        "--declare", choices=("none", "epochs"), default="epochs", help="whether jobs declare how many epochs they run"
    )
    group.add_argument(
        "--length-error", type=float, default=0.0, metavar="SIGMA", help="log-normal, of declared epochs"
    )
    group.add_argument("--random-lengths", type=float, default=0.0, metavar="SIGMA", help="log-normal, of true epochs")
    group.add_argument(
        "--shared-knowledge", action="store_true", help="jobs of one application share what they measure"
    )


def add_disturbances(group: argparse._ArgumentGroup) -> None:
    """Failures, slow nodes, noise, and spot nodes."""
    defaults = Disturbances()
    for field, (option, unit, meaning) in _DISTURBANCES.items():
        value = getattr(defaults, field)
        group.add_argument(
            option, dest=field, type=float, default=value, metavar=unit, help=f"{meaning}; {value:g} by default"
        )
    group.add_argument(
        "--spot",
        action="append",
        default=[],
        metavar="[TYPE=]FILE",
        help="spot trace (.json counts or .csv events) of all nodes, or of those of one GPU type; may be repeated",
    )


def add_apart(group: argparse._ArgumentGroup) -> None:
    """Whether jobs that span nodes share them."""
    group.add_argument(
        "--apart",
        choices=sorted(APART),
        default="never",
        help="keep jobs of several nodes off each other's: always, or where links are measured to hold two jobs up",
    )


def add_autoscaling(group: argparse._ArgumentGroup) -> None:
    """A cluster whose size follows the jobs."""
    defaults, cost = AutoscaledCluster(), CostPerProgress()
    group.add_argument(
        "--autoscale",
        choices=sorted(OBJECTIVES),
        metavar="OBJECTIVE",
        help=f"{', '.join(sorted(OBJECTIVES))}; --cluster is then the most nodes, --spot offers spot nodes beside them",
    )
    group.add_argument(
        "--value",
        type=float,
        default=cost.value_usd_per_h,
        metavar="USD",
        help=f"with cost_per_progress: what an hour less is worth, for each job; {cost.value_usd_per_h:g} by default",
    )
    group.add_argument(
        "--budget", type=float, metavar="USD", help="with budget: what all nodes together may cost an hour, on average"
    )
    for field, meaning in (
        ("startup_s", "until a node that was asked for can be used"),
        ("notice_s", "between a spot node's notice and its end"),
    ):
        value = getattr(defaults, field)
        option = {"startup_s": "--node-startup", "notice_s": "--spot-notice"}[field]
        group.add_argument(
            option, dest=field, type=float, default=value, metavar="SECONDS", help=f"{meaning}; {value:g} by default"
        )
    group.add_argument("--spot-use", choices=SPOT_USES, default="prefer", help="how jobs use such spot nodes")


def autoscaling(options: argparse.Namespace) -> AutoscaledCluster | None:
    """What was asked for."""
    if options.autoscale is None:
        if options.value != CostPerProgress().value_usd_per_h:
            raise InputError("value goes with --autoscale cost_per_progress, but no --autoscale was given")
        if options.budget is not None:
            raise InputError("budget goes with --autoscale budget, but no --autoscale was given")
        return None
    try:
        objective = make_objective(options.autoscale, options.budget)
    except ValueError as error:
        raise InputError(str(error)) from error
    if options.autoscale == "cost_per_progress":
        objective = CostPerProgress(value_usd_per_h=options.value)
    return AutoscaledCluster(objective=objective, startup_s=options.startup_s, notice_s=options.notice_s)


def lengths(options: argparse.Namespace) -> Lengths:
    """What was asked for."""
    return Lengths(declared=options.declare == "epochs", error=options.length_error, spread=options.random_lengths)


def disturbances(options: argparse.Namespace) -> Disturbances:
    """What was asked for; reads the spot traces."""
    fields: dict[str, Any] = {field: getattr(options, field) for field in _DISTURBANCES}
    return Disturbances(**fields, spot=_spot(options.spot))


def _spot(values: Sequence[str]) -> dict[str, SpotTrace]:
    """Traces by GPU type, the empty one for all nodes; raises InputError where a type has two."""
    traces: dict[str, SpotTrace] = {}
    for value in values:
        match = _TYPED.fullmatch(value)
        gpu, file = (match["gpu"], match["file"]) if match else ("", value)
        if gpu in traces:
            raise InputError(f"spot must name every GPU type once, but got {gpu or 'all nodes'} twice")
        traces[gpu] = read_spot(file)
    return traces
