"""A sharded model at 1 -> 2 -> 4 -> 3 workers, against torch's `fully_shard` in Ray Train's elastic mode.

25 M parameters with AdamW, gloo. Ray Train restarts its workers, which load the distributed checkpoint that all ranks
have reported every ten steps. Bar: the pause 30 x shorter at 2 -> 4 and 4 -> 3. At 1 -> 2 the whole state is copied.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

from bench_fully_shard import ShardedJob, shard_by_torch
from common import arguments, bar, finish, median, ratio
from ray_train_baseline import RayTrainJob, join_group, train_on
from scenarios import pauses, resize, run_sides

EVENTS = ("1->2", "2->4", "4->3")


def main() -> None:
    """Both sides in turns; medians are compared, the worst event counts."""
    options = arguments(__doc__ or "")
    sides: list[tuple[str, Callable[[], Any]]] = [
        ("ray-train", functools.partial(resize, ShardedRayTrainJob)),
        ("elastic-ray", functools.partial(resize, CheckpointedJob)),
    ]
    outcomes = run_sides(sides, wanted=options.side, repeats=options.repeats)
    rows, ratios = [], []
    for event in EVENTS:
        theirs = median(pauses(outcomes, ShardedRayTrainJob.name, event))
        ours = median(pauses(outcomes, CheckpointedJob.name, event))
        times = ratio(theirs, ours)
        rows.append({"event": event, "Ray Train [s]": theirs, "fully_shard [s]": ours, "ratio": times})
        ratios.extend([] if times is None or event == "1->2" else [times])
    finish("fully_shard, Ray Train: every event", rows=[outcome.row() for outcome in outcomes], bars=[])
    claim = "pause of a sharded model, times shorter than Ray Train with `fully_shard`: the least of 2 -> 4 and 4 -> 3"
    limit = bar(claim, value=min(ratios, default=None), limit=30, at_least=True)
    finish("fully_shard, Ray Train", rows=rows, bars=[limit])


class CheckpointedJob(ShardedJob):
    """Our side, with its automatic checkpoints, as users have it."""

    options: Mapping[str, Any] = {"heartbeat_timeout_s": 20.0}


def train_loop(config: dict[str, Any]) -> None:
    """Shard, restore, train, and report a checkpoint of all ranks, each with its own part."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh

    rank, world = join_group(config)
    model = shard_by_torch(init_device_mesh("cpu", (world,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    _restore(model, optimizer)
    train_on(config, model, model, optimizer, rank=rank, world=world, report=lambda: _report(model, optimizer))


def _restore(model: Any, optimizer: Any) -> None:
    import ray.train
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None:
        return
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    with checkpoint.as_directory() as folder:
        dcp.load(states, checkpoint_id=folder)  # type: ignore[attr-defined]
    set_state_dict(model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])


def _report(model: Any, optimizer: Any) -> None:
    import ray.train
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    with tempfile.TemporaryDirectory() as folder:
        dcp.save(states, checkpoint_id=folder)  # type: ignore[attr-defined]
        ray.train.report({"steps": int(model.steps)}, checkpoint=ray.train.Checkpoint.from_directory(folder))


class ShardedRayTrainJob(RayTrainJob):
    """A Ray Train run whose model is sharded."""

    name = "Ray Train, FSDP2"
    loop = staticmethod(train_loop)


if __name__ == "__main__":
    main()
