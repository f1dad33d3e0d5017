"""Finish-time fairness: how a job fared compared with running alone on an equal share of the cluster.

Source: Mahajan et al., "Themis: Fair and Efficient GPU Cluster Scheduling", NSDI 2020, section 3.1.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np

from placement.cluster.cluster import Cluster
from placement.simulator.workloads.profiles import Application
from placement.simulator.workloads.traces import TraceJob
from placement.simulator.world.job import SimulatedJob
from placement.simulator.world.rules import Location, Rules

_EXPLORES_S = 60.0  # a job alone takes the next larger size after so long, as in the published rounds

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Numbers of GPUs at which a job alone is looked at."""


def rho(jobs: Sequence[SimulatedJob], cluster: Cluster) -> dict[str, float]:
    """Return rho = (completion - submission) / T for each finished job, where T is its time alone on G / N GPUs.

    G is the number of GPUs in the cluster. N is the number of unfinished jobs, including this one, averaged over the
    job's lifetime. Alone, the job obeys the same rules: it waits for the next round, starts, grows as fast as
    exploration allows to the best count up to floor(G / N) GPUs of one type, and pays for every change. Its rate is the
    mean over the GPU types, weighted by their number of GPUs. If there is less than one GPU per job, the rate is the
    corresponding fraction of one GPU's rate.
    """
    ends = [(job.trace.time_s, job.finished_s or job.trace.time_s) for job in jobs]
    starts, stops = np.array(ends).T
    weights: dict[tuple[str, int], int] = {}
    for node in cluster.nodes:
        key = node.gpu_type, int(node.total["GPU"])
        weights[key] = weights.get(key, 0) + key[1]
    gpus = sum(weights.values())
    result: dict[str, float] = {}
    for job, (arrival_s, finish_s) in zip(jobs, ends, strict=True):
        overlap = np.clip(np.minimum(stops, finish_s) - np.maximum(starts, arrival_s), 0.0, None)
        share = gpus / max(float(overlap.sum()) / max(finish_s - arrival_s, 1e-9), 1.0)
        alone = max(int(share), 1)
        speed = sum(
            count / gpus / isolated_s(job.app, job.rules, gpu, per_node, min(alone, job.rules.most_workers))
            for (gpu, per_node), count in weights.items()
        )
        waits_s = -arrival_s % job.rules.round_s if job.rules.round_s else 0.0
        result[job.name] = (finish_s - arrival_s) / (waits_s + 1.0 / (speed * min(share, 1.0)))
    return result


@functools.lru_cache(maxsize=4096)
def isolated_s(app: Application, rules: Rules, gpu: str, per_node: int, most: int) -> float:
    """Return the time from a job's first start to its end if it runs alone on up to ``most`` GPUs of one type [s]."""
    sizes = sorted({k for k in SIZES if k <= most} | {min(most, 64)})
    best = min(sizes, key=lambda k: alone_s(app, gpu, per_node, k))
    spec = TraceJob(name="alone", time_s=0.0, application=app.name, num_replicas=1, batch_size=app.init_batch_size)
    job = SimulatedJob(spec, app, rules, requested=False, gpus_per_node={gpu: per_node})
    while job.finished_s is None:
        count = min(best, job.view().growth_limit or best)
        if job.location is None or job.location.workers < count:
            nodes = {f"{gpu}-{i}": min(per_node, count - i * per_node) for i in range(-(-count // per_node))}
            job.place(Location(nodes=nodes, gpu=gpu))
        job.advance(_EXPLORES_S if count < best else math.inf)
    return job.finished_s


@functools.lru_cache(maxsize=4096)
def alone_s(app: Application, gpu: str, per_node: int, replicas: int) -> float:
    """Return a job's pure training time on these GPUs with each epoch's best batch [s]; infinity if none fits."""
    counts = (per_node,) * (replicas // per_node) + ((replicas % per_node,) if replicas % per_node else ())
    least, most = app.local_bsz_range(gpu)
    table = app.step_times[gpu]
    options: list[tuple[int, float]] = []  # (batch, seconds of a step)
    for accum in range(8):
        top = min(most, app.max_batch_size // (replicas * (accum + 1)))
        if top < least:
            break
        for atomic in np.unique(np.geomspace(least, top, 12).astype(int)).tolist():
            step_s, sync_s = table.times(counts, atomic)
            options.append((replicas * atomic * (accum + 1), step_s + accum * (step_s - sync_s)))
    valid = [option for option in options if option[0] >= app.init_batch_size] or options
    if not valid:
        return float("inf")
    batches, seconds = np.array(valid).T
    epochs = range(app.epochs)
    noise = [[app.noise(batch, epoch) for epoch in epochs] for batch in batches.tolist()]
    sqr, var = (np.array([[getattr(each, name) for each in row] for row in noise]) for name in ("sqr", "var"))
    gain = (var + sqr) / (var / (batches / app.init_batch_size)[:, np.newaxis] + sqr)
    best = (gain / seconds[:, np.newaxis]).max(axis=0)
    work = np.diff([app.progress_at(epoch) for epoch in range(app.epochs + 1)])
    return float((work / best).sum())
