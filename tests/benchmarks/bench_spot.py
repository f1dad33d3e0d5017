"""Cost of a day's trace on spot nodes with real preemptions, against the same on demand at one size, in the simulator.

Jobs arrive over eight hours (``workloads/pollux-0.5``, ``pollux`` with ``--full``) and are done within the day. Spot
places come and go as recorded (``spot/bamboo_g4dn.csv``: half a day of 64 T4 nodes under an autoscaling group, played
again until the end), with two minutes' notice; what cannot be had on spot falls back to on demand after a time-out.
Prices are the price table's: T4 at 0.98 USD/h on demand, 0.35 on spot. On demand all 16 nodes are paid for from the
first submission to the last completion.

Bar: at most 0.25 x the cost. The average completion time stands beside it: cheaper is not as fast.
"""

from __future__ import annotations

import time
from typing import Any

from bench_allocation import DATA
from common import bar, finish, side_parser

from placement.autoscaling.objectives.cost_per_progress import CostPerProgress
from placement.simulator import SimulationReport, simulate
from placement.simulator.nodes.disturbances import Disturbances, read_spot
from placement.simulator.nodes.provider import AutoscaledCluster

CLUSTER = "aws:16x4"
MARKET = DATA / "spot" / "bamboo_g4dn.csv"
VALUES = (0.5, 1.0, 2.0)


def main() -> None:
    """Static on demand, autoscaled on demand, and autoscaled on spot with several values of an hour."""
    parser = side_parser(__doc__ or "", sides=False)
    parser.add_argument("--full", action="store_true", help="160 jobs instead of 80")
    parser.add_argument("--traces", nargs="+", default=["6"], help="numbers of the workloads")
    options = parser.parse_args()
    folder = DATA / "workloads" / ("pollux" if options.full else "pollux-0.5")
    rows, bars = [], []
    for number in options.traces:
        trace = str(folder / f"workload-{number}.csv")
        own = [_row(number, "on demand, 16 nodes", simulate(trace, DATA / "profiles", CLUSTER, **_COMMON))]
        values = VALUES[:1] if options.quick else VALUES
        own += [_row(number, f"spot, {value:g} USD/h", _scaled(trace, value, spot=True)) for value in values]
        if not options.quick:
            own.append(_row(number, f"on demand, {VALUES[0]:g} USD/h", _scaled(trace, VALUES[0], spot=False)))
        for row in own:
            row["x cost"], row["x time"] = (row[k] / own[0][k] for k in ("rent [USD]", "average [h]"))
        rows += own
        best = min(row["x cost"] for row in own if row["system"].startswith("spot"))
        bars.append(bar(f"workload-{number}: cost on spot / static on demand", value=best, limit=0.25, at_least=False))
    finish("cost of a day on spot nodes", rows=rows, bars=bars)


_COMMON: dict[str, Any] = {"rules": "live", "policy": "goodput", "knowledge": True}


def _scaled(trace: str, value: float, *, spot: bool) -> SimulationReport:
    return simulate(
        trace,
        DATA / "profiles",
        CLUSTER,
        autoscale=AutoscaledCluster(objective=CostPerProgress(value_usd_per_h=value)),
        disturbances=Disturbances(spot={"": read_spot(MARKET)} if spot else {}),
        **_COMMON,
    )


def _row(number: str, system: str, report: SimulationReport) -> dict[str, Any]:
    return {
        "workload": number,
        "system": system,
        "rent [USD]": report.rented.usd,
        "held [USD]": report.cost,
        "average [h]": report.avg_jct_s / 3600,
        "makespan [h]": report.makespan_s / 3600,
        "node-hours": " ".join(f"{name} {hours:.0f}" for name, hours in report.rented.node_hours.items()),
        "changes": sum(job.resizes for job in report.jobs) / len(report.jobs),
        "CPU [s]": time.process_time(),
    }


if __name__ == "__main__":
    main()
