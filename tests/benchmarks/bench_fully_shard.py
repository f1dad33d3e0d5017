"""A sharded model that is resized live, against its own step and a restart from torch's distributed checkpoint.

25 M parameters with AdamW, gloo. Bars: the pauses of 2 -> 4 -> 3 workers (the last of them where joiners come one after
the other) at most half a step of the size that follows, and a fifteenth of a restart: processes that start, import
torch, connect, build and shard the model, load the checkpoint of two ranks and make their first step, without Ray and
without noticing that anything has changed. A worker of a model of 1 M parameters gets SIGKILL: the others continue
within 0.3 s.
"""

from __future__ import annotations

import functools
import itertools
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import common
from bench_sharded import pause_of, trains
from common import StepLog, bar, finish, median, side_parser
from elastic_side import ElasticJob

MOST = 4
_TIMEOUT_S = 400.0


def main() -> None:
    """The job, then the restart."""
    parser = side_parser(__doc__ or "", sides=False)
    parser.add_argument("--rank-of", choices=("save", "restart"), help="of processes that this benchmark starts itself")
    parser.add_argument("--checkpoint", default="")
    options = parser.parse_args()
    if options.rank_of:
        _rank(options.rank_of, options.checkpoint)
        return
    rows: list[dict[str, Any]] = []
    bars: list[dict[str, Any]] = []
    found = [_job() for _ in range(1 if options.quick else 3)]
    restart_s = _restart()
    rows.append({"what": "restart on 3 ranks from a checkpoint of 2 [s]", "value": restart_s})
    for event in ("2->4", "4->3", "kill"):
        pause_s = median(each[event][0] for each in found) or 0.0
        step_s = median(each[event][1] for each in found) or 0.0
        rows.append({"what": f"pause {event} [s]", "value": pause_s})
        rows.append({"what": f"step after {event} [s]", "value": step_s})
        if event != "kill":
            bars.append(
                bar(
                    f"pause of a sharded model {event} / its own step",
                    value=pause_s / step_s,
                    limit=0.5,
                    at_least=False,
                )
            )
            bars.append(
                bar(
                    f"pause of a sharded model {event} / restart",
                    value=pause_s / restart_s,
                    limit=1 / 15,
                    at_least=False,
                )
            )
    killed_s = median(_small_job(3 if options.quick else 5)) or 0.0
    rows.append({"what": "pause kill, 1 M parameters [s]", "value": killed_s})
    bars.append(
        bar(
            "pause of a sharded model after SIGKILL of one of three, 1 M parameters [s]",
            value=killed_s,
            limit=0.3,
            at_least=False,
        )
    )
    finish("fully_shard", rows=rows, bars=bars)


# -- the job ---------------------------------------------------------------------------------------------------------


def train_loop(config: dict[str, Any]) -> None:
    """The loop of `elastic_side`, sharded, with AdamW."""
    import torch

    import elastic_ray as er

    torch.set_num_threads(1)
    model = _small_model() if config["small"] else common.build_model()
    for layer in model:
        if isinstance(layer, torch.nn.Linear):
            er.fully_shard(layer)
    er.fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    parallel = er.AdaptiveDataParallel(model, optimizer, scaling_rule="none")
    loader = er.AdaptiveDataLoader(common.Rows(), batch_size=common.GLOBAL_BATCH, drop_last=True)
    log = StepLog(Path(config["log"]))
    for _ in er.remaining_epochs_until(1_000_000):
        for x, y in loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(parallel(x), y).backward()
            optimizer.step()
            context = er.get_context()
            if context.get_world_rank() == 0:
                log.append(world=context.get_world_size(), step=context.get_global_step())


def _small_model() -> Any:
    """1.1 million parameters."""
    import torch

    width = 440
    return torch.nn.Sequential(
        torch.nn.Linear(common.FEATURES, width),
        torch.nn.ReLU(),
        torch.nn.Linear(width, width),
        torch.nn.ReLU(),
        torch.nn.Linear(width, common.CLASSES),
    )


class ShardedJob(ElasticJob):
    """An elastic job whose model is sharded."""

    name = "fully_shard"
    config: Mapping[str, Any] = {"small": False}
    loop = staticmethod(train_loop)
    options: Mapping[str, Any] = {"automatic_checkpoints": False, "heartbeat_timeout_s": 20.0}


class SmallJob(ShardedJob):
    """The same of a small model, which is small beside what a loss costs by itself."""

    name = "fully_shard, 1 M"
    config: Mapping[str, Any] = {"small": True}


def _small_job(kills: int) -> list[float]:
    """Pauses after a SIGKILL of the last of three workers; its replacement has come before the next."""
    from scenarios import cluster

    found: list[float] = []
    with cluster(nodes=1, slots=MOST) as _, tempfile.TemporaryDirectory() as folder:
        job = SmallJob(Path(folder) / "run", workers=(1, MOST))
        try:
            job.resize(3)
            for _ in range(kills):
                trains(job, 3, time.time())
                found.append(pause_of(job, lambda: os.kill(job.pids()[2], signal.SIGKILL), 2))
        finally:
            job.stop()
    return found


def _job() -> dict[str, tuple[float, float]]:
    """Pause, and median step after it, of 2 -> 4 -> 3 and of a SIGKILL."""
    from scenarios import cluster

    found: dict[str, tuple[float, float]] = {}
    with cluster(nodes=1, slots=MOST) as _, tempfile.TemporaryDirectory() as folder:
        job = ShardedJob(Path(folder) / "run", workers=(1, MOST))
        try:
            job.resize(2)
            trains(job, 2, time.time())
            acts = {"2->4": functools.partial(job.resize, 4), "4->3": functools.partial(job.resize, 3)}
            acts["kill"] = lambda: os.kill(job.pids()[1], signal.SIGKILL)
            for (event, act), world in zip(acts.items(), (4, 3, 2), strict=True):
                pause_s = pause_of(job, act, world)
                if event != "kill":  # a replacement may have come by now
                    trains(job, world, time.time())
                records = [record for record in job.log.read() if record.world == world]
                steps = [after.time_s - before.time_s for before, after in itertools.pairwise(records)]
                found[event] = pause_s, median(steps[1:]) or 0.0
        finally:
            job.stop()
    return found


# -- the restart -----------------------------------------------------------------------------------------------------


def _restart() -> float:
    """Seconds from the start of three processes to the end of their first step, from a checkpoint of two."""
    with tempfile.TemporaryDirectory() as folder:
        _start("save", 2, folder)
        begin_s = time.monotonic()
        _start("restart", 3, folder)
        return time.monotonic() - begin_s


def _start(role: str, world: int, folder: str) -> None:
    """Run the ranks of one group to their end."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world)}
    shared |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--rank-of", role, "--checkpoint", folder]
    ranks = [subprocess.Popen(command, env={**shared, "RANK": str(rank)}) for rank in range(world)]
    try:
        for rank in ranks:
            if rank.wait(_TIMEOUT_S):
                raise RuntimeError(f"a rank that was to {role} has failed")
    finally:
        for rank in ranks:
            rank.kill()


def shard_by_torch(mesh: Any) -> Any:
    """The model, by torch's own ``fully_shard``; gradients are summed and divided, for gloo has no average."""
    import torch
    from torch.distributed.fsdp import fully_shard

    model = common.build_model()
    for layer in (*(each for each in model if isinstance(each, torch.nn.Linear)), model):
        fully_shard(layer, mesh=mesh)
        layer.set_gradient_divide_factor(float(mesh.size()))
        layer.set_force_sum_reduction_for_comms(True)
    return model


def _rank(role: str, folder: str) -> None:
    """One rank: torch's own fully_shard and distributed checkpoint, a step, and what the role asks for."""
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.device_mesh import init_device_mesh

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = shard_by_torch(init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    if role == "restart":
        states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        dcp.load(states, checkpoint_id=folder)  # type: ignore[attr-defined]
        set_state_dict(model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
    x = torch.randn(common.GLOBAL_BATCH // dist.get_world_size(), common.FEATURES)
    model(x).square().mean().backward()
    optimizer.step()
    if role == "save":
        states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        dcp.save(states, checkpoint_id=folder)  # type: ignore[attr-defined]
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
