"""A worker that hangs (SIGSTOP), against Ray Train. Bar: training again, with a replacement, within 3 s."""

from __future__ import annotations

import functools

from common import arguments, bar, finish, median
from elastic_side import ElasticJob
from ray_train_baseline import RayTrainJob
from scenarios import hang, run_sides

CAP_S = 90.0
QUICK_CAP_S = 20.0


def main() -> None:
    """Both sides in turns; a side that has not recovered within the cap is cut off there."""
    options = arguments(__doc__ or "")
    measure = functools.partial(hang, cap_s=QUICK_CAP_S if options.quick else CAP_S)
    sides = [("ray-train", lambda: measure(RayTrainJob)), ("elastic-ray", lambda: measure(ElasticJob))]
    outcomes = run_sides(sides, wanted=options.side, repeats=options.repeats)
    ours = [o.pause for o in outcomes if o.system == ElasticJob.name]
    replaced = [pause.reached_s for pause in ours if pause.reached_s is not None]
    others = "pause of the others after SIGSTOP of a worker (Ray Train: nothing within 90 s) [s]"
    bars = [
        bar(others, value=median(pause.pause_s for pause in ours), limit=3, at_least=False),
        bar("hung worker replaced after [s]", value=median(replaced), limit=3, at_least=False),
    ]
    finish("hang", rows=[outcome.row() for outcome in outcomes], bars=bars)


if __name__ == "__main__":
    main()
