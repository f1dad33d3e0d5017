"""Pause after SIGKILL of one of three workers, against Ray Train.

Bars: 20 x shorter, no committed step lost.
"""

from __future__ import annotations

from common import arguments, bar, finish, median, ratio
from elastic_side import ElasticJob
from ray_train_baseline import RayTrainJob
from scenarios import kill, pauses, run_sides


def main() -> None:
    """Both sides in turns; medians are compared."""
    options = arguments(__doc__ or "")
    sides = [("ray-train", lambda: kill(RayTrainJob)), ("elastic-ray", lambda: kill(ElasticJob))]
    outcomes = run_sides(sides, wanted=options.side, repeats=options.repeats)
    theirs, ours = median(pauses(outcomes, RayTrainJob.name)), median(pauses(outcomes, ElasticJob.name))
    redone = [float(o.pause.redone) for o in outcomes if o.system == ElasticJob.name]
    shorter = "pause after SIGKILL of one of three workers, times shorter than Ray Train's"
    lost = "committed steps lost after SIGKILL of one of three workers"
    bars = [
        bar(shorter, value=ratio(theirs, ours), limit=20, at_least=True),
        bar(lost, value=max(redone, default=None), limit=0, at_least=False),
    ]
    finish("kill", rows=[outcome.row() for outcome in outcomes], bars=bars)


if __name__ == "__main__":
    main()
