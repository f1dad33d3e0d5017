"""Work lost, and time until the node is empty, when a spot node with one of three workers goes, against Ray Train.

With notice (the cloud's, or an autoscaler's: Ray drains the node, and it is gone at the deadline) and without. 25 M
parameters. Ray Train writes a checkpoint every ten steps, far more often than its best interval would be (Young/Daly at
one loss an hour: some minutes), so that it loses less here than it would in use; work lost is what was committed and
had to be trained again. Bars: nothing lost with notice, nor without but for the step in flight, which nobody had
committed; the node empty within 5 s of the notice.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import threading
import time
from collections.abc import Sequence
from typing import Any

from common import arguments, bar, finish, median, wait_until
from elastic_side import ElasticJob
from ray_train_baseline import RayTrainJob
from scenarios import Job, Outcome, cluster, job, node_loss, observe, run_sides, settle

NOTICE_S = 30.0
WITH, WITHOUT = "with notice", "without notice"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Drained(Outcome):
    """``empty_s``: from the notice until no process works on the node any more [s]; None if nobody gave notice."""

    empty_s: float | None = None

    def row(self) -> dict[str, Any]:
        """A line of the printed table; times in seconds."""
        return {
            "system": self.system,
            "event": self.event,
            "steps_redone": self.pause.redone,
            "pause_s": self.pause.pause_s,
            "empty_s": self.empty_s,
            "cut_off": self.pause.lost,
        }


def with_notice(kind: type[Job]) -> list[Outcome]:
    """The node is drained, with a deadline at which it goes."""
    with cluster(nodes=3) as (local, nodes), job(kind, workers=(1, 3)) as running:
        settle(running, world=3)
        node = next(each for each in nodes if each.node_id == running.nodes()[2])
        emptied: list[float] = []

        def watch(since_s: float) -> None:
            if wait_until(lambda: not _occupied(node.node_id), NOTICE_S):
                emptied.append(time.monotonic() - since_s)

        def act() -> None:
            begin_s = time.monotonic()
            local.drain_node(node, deadline_s=NOTICE_S)
            watcher = threading.Thread(target=watch, args=(begin_s,))
            watcher.start()
            watcher.join()
            time.sleep(max(0.0, NOTICE_S - (time.monotonic() - begin_s)))
            local.remove_node(node)

        seen = observe(running, act, event=WITH, world=2)
        empty_s = emptied[0] if emptied else NOTICE_S
        return [Drained(system=seen.system, event=seen.event, pause=seen.pause, empty_s=empty_s)]


def without_notice(kind: type[Job]) -> list[Outcome]:
    """The node is gone."""
    (seen,) = node_loss(kind, fast_health_check=False)
    return [Drained(system=seen.system, event=WITHOUT, pause=seen.pause)]


def _occupied(node: str) -> bool:
    """Whether an actor lives on this node."""
    import ray

    actors = ray._private.state.actors().values()
    return any(each["Address"]["NodeID"] == node and each["State"] != "DEAD" for each in actors)


def bars(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """What must be reached."""
    ours = [each for each in outcomes if each.system == ElasticJob.name]
    redone = {event: max((o.pause.redone for o in ours if o.event == event), default=None) for event in (WITH, WITHOUT)}
    empty_s = median(each.empty_s for each in ours if isinstance(each, Drained) and each.empty_s is not None)
    return [
        *(bar(f"committed steps lost {event}", value=redone[event], limit=0, at_least=False) for event in redone),
        bar("from the notice to the empty node [s]", value=empty_s, limit=5.0, at_least=False),
    ]


def main() -> None:
    """Both events on both sides, in turns."""
    options: argparse.Namespace = arguments(__doc__ or "")
    kinds = (("ray-train", RayTrainJob), ("elastic-ray", ElasticJob))
    events = (with_notice, without_notice)
    sides = [(side, functools.partial(measure, kind)) for measure in events for side, kind in kinds]
    outcomes = run_sides(sides, wanted=options.side, repeats=options.repeats)
    finish("drain", rows=[outcome.row() for outcome in outcomes], bars=bars(outcomes))


if __name__ == "__main__":
    main()
