"""Finish-time fairness: how a job fared against an equal share of the cluster of its own.

Source: Mahajan et al., "Themis: Fair and Efficient GPU Cluster Scheduling", NSDI 2020, section 3.1.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from placement.cluster import Cluster
from placement.simulator.job import SimulatedJob
from placement.simulator.profiles import Application


def rho(jobs: Sequence[SimulatedJob], cluster: Cluster) -> dict[str, float]:
    """rho = (completion - submission) / T of every finished job, T = its time alone on G / N GPUs.

    G are the GPUs of the cluster, N the time average of the number of unfinished jobs over the job's life, itself
    included. On k = floor(G / N) GPUs of one type (the mean rate over the types, weighted by their GPUs) the job
    runs at the best batch and the best count up to k, knowing all tables and without any restart; below one GPU
    per job it gets that part of one GPU's rate.
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
            count / gpus / isolated_s(job.app, gpu, per_node, min(alone, job.rules.most_workers))
            for (gpu, per_node), count in weights.items()
        )
        time_s = job.rules.divisor(job.app.name) / (speed * min(share, 1.0))
        result[job.name] = (finish_s - arrival_s) / time_s
    return result


@functools.lru_cache(maxsize=4096)
def isolated_s(app: Application, gpu: str, per_node: int, most: int) -> float:
    """Seconds to run the application alone on at most so many GPUs of a type, at the best batch of each epoch."""
    sizes = sorted({k for k in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64) if k <= most} | {min(most, 64)})
    return min(_alone_s(app, gpu, per_node, k) for k in sizes)


@functools.lru_cache(maxsize=4096)
def _alone_s(app: Application, gpu: str, per_node: int, replicas: int) -> float:
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
