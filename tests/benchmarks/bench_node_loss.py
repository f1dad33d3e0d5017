"""Pause after a node disappears with one of three workers, against Ray Train. Bar: 20 x shorter."""

from __future__ import annotations

import functools

from common import arguments, bar, finish, median, ratio
from elastic_side import ElasticJob
from ray_train_baseline import RayTrainJob
from scenarios import node_loss, pauses, run_sides


def main() -> None:
    """Both sides in turns, with Ray's default health checks (`--quick`: with fast ones)."""
    options = arguments(__doc__ or "")
    measure = functools.partial(node_loss, fast_health_check=options.quick)
    sides = [("ray-train", lambda: measure(RayTrainJob)), ("elastic-ray", lambda: measure(ElasticJob))]
    outcomes = run_sides(sides, wanted=options.side, repeats=options.repeats)
    theirs, ours = median(pauses(outcomes, RayTrainJob.name)), median(pauses(outcomes, ElasticJob.name))
    shorter = "pause after a node disappears, times shorter than Ray Train's"
    bars = [bar(shorter, value=ratio(theirs, ours), limit=20, at_least=True)]
    finish("node_loss", rows=[outcome.row() for outcome in outcomes], bars=bars)


if __name__ == "__main__":
    main()
