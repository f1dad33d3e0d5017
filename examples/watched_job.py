"""Shared parts of the examples of other people's loops: a job that is grown, loses a worker, and is watched."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

# One thread per worker, for several of them share two cores; read when torch is imported, here and in workers.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import ray
import ray.train

import elastic_ray as er

TIME_LIMIT_S = 900.0  # a busy machine takes several times as long


def watch(handle: er.JobHandle, *, kill: bool) -> er.events.JobStatus:
    """Show what happens to a job; grow it to three workers in its first epochs, and kill one of them after that."""
    begin_s = time.monotonic()
    seen = reported = 0
    grown = killed = False
    ends = False
    while not ends:
        ends = handle.done()
        for event in handle.events(since=seen):
            seen += 1
            changed = event.from_workers != event.to_workers
            sizes = f"{event.from_workers} -> {event.to_workers} workers: " if changed else ""
            pause = f" (paused {event.pause_s:.2f} s)" if event.pause_s else ""
            show(f"{time.monotonic() - begin_s:6.1f} s  {event.kind.value:<9} {sizes}{event.reason}{pause}")
        while (report := handle.next_report(reported, timeout=0.0)) is not None:
            reported = report.index
            numbers = ", ".join(f"{name} {value:.3g}" for name, value in report.metrics.items())
            show(f"{time.monotonic() - begin_s:6.1f} s  report    on {report.workers} workers: {numbers}")
        status = handle.status()
        workers = handle.workers()
        if not grown and status.workers:
            grown = True
            handle.resize(3)
        if kill and grown and not killed and status.epoch and len(workers) == 3:
            killed = True
            show(f"          --- kill -9 {workers[-1].pid} (rank {workers[-1].rank} of 3) ---")
            with contextlib.suppress(ProcessLookupError):
                os.kill(workers[-1].pid, signal.SIGKILL)
            handle.resize(2)
        if time.monotonic() > begin_s + TIME_LIMIT_S:
            raise TimeoutError(f"the job has not ended within {TIME_LIMIT_S:g} s")
        time.sleep(0.1)
    return status


def show(line: str) -> None:
    """Print a line. Standard output itself is redirected, for Ray fills it with a paragraph on the killed worker."""
    print(line, file=sys.__stdout__, flush=True)


def main(
    description: str,
    name: str,
    train: Callable[[dict[str, Any]], Any],
    sizes: Callable[[bool], dict[str, Any]],
    check: Callable[[dict[str, Any], bool], bool],
    **options: Callable[[], Any],
) -> int:
    """The command line of an example: run ``train`` as a job; 0 when ``check`` is content with its last report.

    Args:
        description: of the example.
        name: of the job.
        train: the train function.
        sizes: its config, for a smoke run or not.
        check: whether the last report is good enough, for a smoke run or not.
        options: further arguments of ``ElasticTrainer``, made once Ray runs.
    """

    def make_trainer(folder: str, smoke: bool) -> er.ElasticTrainer:
        return er.ElasticTrainer(
            train,
            train_loop_config=sizes(smoke),
            scaling_config=ray.train.ScalingConfig(num_workers=(1, 3)),
            run_config=ray.train.RunConfig(name=name, storage_path=folder),
            elastic_config=er.ElasticConfig(heartbeat_timeout_s=10.0),  # on two cores, workers may be slow to answer
            **{option: make() for option, make in options.items()},
        )

    return run(description, name, make_trainer, check)


def run(
    description: str,
    name: str,
    make_trainer: Callable[[str, bool], er.ElasticTrainer],
    check: Callable[[dict[str, Any], bool], bool],
) -> int:
    """The command line of an example that makes its trainer by itself; 0 when ``check`` is content.

    Args:
        description: of the example.
        name: of the job.
        make_trainer: makes the trainer once Ray runs, from where results go, for a smoke run or not.
        check: whether the last report is good enough, for a smoke run or not.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="a few steps, and no kill")
    smoke = parser.parse_args().smoke
    with (
        contextlib.redirect_stdout(io.StringIO()),
        tempfile.TemporaryDirectory(prefix=f"elastic-ray-{name}-") as folder,
    ):
        ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="error")
        try:
            handle = make_trainer(folder, smoke).submit()
            handle.resize(1)
            watch(handle, kill=not smoke)
            metrics = handle.result().metrics or {}
        finally:
            ray.shutdown()
    good = check(metrics, smoke)
    show(f"good enough: {'yes' if good else 'NO'}")
    return 0 if good else 1
