"""The main job: three elastic PyTorch jobs share one Ray cluster of 8 slots on this machine.

They arrive and end at different times, so the allocator grows and shrinks them while they train, and their batch sizes
follow the gradient noise. In mid-training one worker is killed, and then a job's controller: training continues. Takes
about a minute and a half on two cores:

    python examples/digits.py
    python examples/digits.py --smoke              two jobs of a few epochs and no kills: whether the installation works
    python examples/digits.py --plot sizes.png     draws the sizes over time as well; needs `pip install -e ".[plot]"`
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# One thread per worker, for eight of them share two cores; read when torch is imported, here and in workers.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import ray
import ray.train
from digits_loop import digits, train
from plot_sizes import draw

import elastic_ray as er

SLOTS = 8
TARGET_ACCURACY = 0.95
SMOKE_ACCURACY = 0.5  # of so few epochs
KILL_AFTER_S = 10.0  # a worker, after "cnn" has begun to train
KILL_CONTROLLER_AFTER_S = 6.0  # after that
TIME_LIMIT_S = 900.0  # a slow machine takes several times as long

# The cost of a step is that of a larger net on an accelerator, see digits_loop.stand_in_for_a_larger_net.
COST = {"step_s": 0.03, "sample_s": 0.004}
JOBS: dict[str, dict[str, Any]] = {
    "mlp": {"net": "mlp", "optimizer": "sgd", "lr": 0.2, "epochs": 14, **COST},
    "cnn": {"net": "cnn", "optimizer": "adam", "lr": 0.003, "epochs": 12, **COST},
    "late": {"net": "mlp", "optimizer": "adam", "lr": 0.003, "epochs": 10, **COST},
}
# When a job is submitted: so many seconds after another one (or nothing) has begun to train.
ARRIVALS: dict[str, tuple[str | None, float]] = {"mlp": (None, 0.0), "cnn": ("mlp", 2.0), "late": ("cnn", 4.0)}
# With --smoke: enough to submit, train together, grow and end.
SMOKE_JOBS: dict[str, dict[str, Any]] = {
    "mlp": {"net": "mlp", "optimizer": "sgd", "lr": 0.2, "epochs": 3},
    "cnn": {"net": "cnn", "optimizer": "adam", "lr": 0.003, "epochs": 2},
}


@dataclasses.dataclass
class Job:
    """A submitted job and what was seen of it."""

    handle: er.JobHandle
    submitted_s: float
    sizes: list[tuple[float, int]] = dataclasses.field(default_factory=list)
    events: list[er.events.JobEvent] = dataclasses.field(default_factory=list)
    running_s: float | None = None
    ended_s: float | None = None


class Demo:
    """Submits the jobs in time, kills a worker and a controller (no kills in a smoke test), and shows what happens."""

    def __init__(self, directory: str, *, smoke: bool = False) -> None:
        self.directory = directory
        self.smoke = smoke
        self.configs = SMOKE_JOBS if smoke else JOBS
        self.digits = digits()
        self.jobs: dict[str, Job] = {}
        self.killed_s: float | None = None
        self.killed_controller = False
        self._start_s = time.monotonic()

    @property
    def now_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._start_s

    def say(self, name: str, text: str) -> None:
        """One line of the log."""
        show(f"{self.now_s:6.1f} s  {name:<5} {text}")

    def run(self) -> None:
        """Wait until all jobs have ended."""
        while len(self.jobs) < len(self.configs) or any(job.ended_s is None for job in self.jobs.values()):
            for name in [name for name in self.configs if name not in self.jobs]:
                if self.arrives(name):
                    self.submit(name)
            for name, job in self.jobs.items():
                if job.ended_s is None:
                    self.poll(name, job)
            if self.smoke:
                pass
            elif self.killed_s is None:
                self.maybe_kill("cnn")
            elif not self.killed_controller and self.now_s > self.killed_s + KILL_CONTROLLER_AFTER_S:
                self.kill_controller()
            if self.now_s > TIME_LIMIT_S:
                raise TimeoutError(f"not all jobs have ended within {TIME_LIMIT_S:g} s")
            time.sleep(0.25)

    def arrives(self, name: str) -> bool:
        """Return True if it is time to submit a job."""
        other, delay_s = (None, 0.0) if self.smoke else ARRIVALS[name]
        begin_s = 0.0 if other is None else self.jobs[other].running_s if other in self.jobs else None
        return begin_s is not None and self.now_s >= begin_s + delay_s

    def submit(self, name: str) -> None:
        """Submit a job; from here on its size is the allocator's to choose."""
        trainer = er.ElasticTrainer(
            train,
            train_loop_config={**self.configs[name], **self.digits},
            scaling_config=ray.train.ScalingConfig(num_workers=(1, 4)),
            run_config=ray.train.RunConfig(name=name, storage_path=self.directory),
            # Eight workers and their start on two cores: some wait for their turn longer than the usual 2 s.
            elastic_config=er.ElasticConfig(heartbeat_timeout_s=10.0),
        )
        self.jobs[name] = Job(trainer.submit(), self.now_s)
        self.say(name, "submitted, may have 1 to 4 workers")

    def poll(self, name: str, job: Job) -> None:
        """Show what has happened since the last look."""
        ended = job.handle.done()
        for event in job.handle.events(since=len(job.events)):
            job.events.append(event)
            self.say(name, describe(event))
        status = job.handle.status()
        job.sizes.append((self.now_s, status.workers))
        if job.running_s is None and status.workers:
            job.running_s = self.now_s
        if ended:
            job.ended_s = self.now_s

    def maybe_kill(self, name: str) -> None:
        """SIGKILL the last worker of a job that has several: a machine takes one away."""
        job = self.jobs.get(name)
        if job is None or job.running_s is None or self.now_s < job.running_s + KILL_AFTER_S:
            return
        workers = job.handle.workers()
        if len(workers) > 1:
            self.killed_s = self.now_s
            self.say(name, f"--- kill -9 {workers[-1].pid} (rank {workers[-1].rank} of {len(workers)}) ---")
            with contextlib.suppress(ProcessLookupError):  # it has just left
                os.kill(workers[-1].pid, signal.SIGKILL)

    def kill_controller(self) -> None:
        """SIGKILL a process that steers a job. The job's workers train on, and tell the next one who they are."""
        self.killed_controller = True
        controllers = [pid for pid in descendants(os.getpid()) if "JobController" in title(pid)]
        if controllers:
            self.say("", f"--- kill -9 {controllers[0]} (the controller of a job) ---")
            os.kill(controllers[0], signal.SIGKILL)


def descendants(pid: int) -> Iterator[int]:
    """Processes below this one, as Linux tells of them; none elsewhere."""
    for path in Path("/proc").glob(f"{pid}/task/*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, path.read_text().split()):
                yield child
                yield from descendants(child)


def title(pid: int) -> str:
    """Return the command line of a process; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""


def show(line: str) -> None:
    """Print a line. Standard output itself is redirected, for Ray fills it with a paragraph on the killed worker."""
    print(line, file=sys.__stdout__, flush=True)


def describe(event: er.events.JobEvent) -> str:
    """An event in one line."""
    if event.kind is er.events.EventKind.FINISHED:
        return event.reason
    if event.kind is er.events.EventKind.BATCH:
        what = f"batch {event.detail['from_batch_size']} -> {event.detail['to_batch_size']}"
    elif event.from_workers != event.to_workers:
        what = f"{event.from_workers} -> {event.to_workers} workers"
        if event.kind is er.events.EventKind.FAILURE:
            what = f"FAILURE, {what}"
    else:
        what = f"{event.kind.value}, {event.to_workers} workers"
    pause = f", paused {event.pause_s:.2f} s" if event.pause_s else ""
    return f"{what}{pause}  ({event.reason})"


def summary(demo: Demo, target: float) -> bool:
    """Print what happened; whether every job reached the target accuracy."""
    show("\nworkers over time, one column per second:")
    for name, job in demo.jobs.items():
        show(f"  {name:<5} {''.join(columns(job.sizes))}")
    show(
        f"\n  {'job':<5} {'time':>6} {'resizes':>8} {'failures':>9} {'longest pause':>14} {'accuracy':>9}  batch sizes"
    )
    good = True
    for name, job in demo.jobs.items():
        try:
            accuracy = job.handle.result().metrics["accuracy"]
        except ray.train.TrainingFailedError as error:
            show(f"  {name:<5} failed: {error}")
            good = False
            continue
        good = good and accuracy >= target
        count = [event.kind for event in job.events].count
        pause = max(event.pause_s for event in job.events)
        show(
            f"  {name:<5} {(job.ended_s or 0.0) - job.submitted_s:>4.0f} s {count(er.events.EventKind.RESIZE):>8} "
            f"{count(er.events.EventKind.FAILURE):>9} {pause:>12.2f} s {accuracy:>9.3f}  {batch_sizes(job)}"
        )
    return good


def columns(sizes: list[tuple[float, int]]) -> list[str]:
    """The size seen last before each full second; a dot while the job had no workers."""
    seen, line = 0, []
    for second in range(int(sizes[-1][0]) + 1):
        seen = next((size for at_s, size in reversed(sizes) if at_s <= second), 0)
        line.append(str(seen) if seen else ".")
    return line


def batch_sizes(job: Job) -> str:
    """The global batch sizes that the job went through."""
    changes = [event.detail for event in job.events if event.kind is er.events.EventKind.BATCH]
    sizes = [changes[0]["from_batch_size"]] if changes else [32]
    return " -> ".join(str(size) for size in [*sizes, *(change["to_batch_size"] for change in changes)])


def main(arguments: argparse.Namespace) -> int:
    """Run the demo; 0 when every job is accurate enough."""
    start_s = time.monotonic()
    target = SMOKE_ACCURACY if arguments.smoke else TARGET_ACCURACY
    ray.init(address="local", num_cpus=SLOTS, include_dashboard=False, log_to_driver=False, logging_level="error")
    show(f"one Ray cluster with {SLOTS} slots, started in {time.monotonic() - start_s:.1f} s")
    with contextlib.ExitStack() as stack:
        directory = arguments.storage or stack.enter_context(tempfile.TemporaryDirectory(prefix="elastic-ray-digits-"))
        demo = Demo(str(Path(directory).absolute()), smoke=arguments.smoke)
        try:
            demo.run()
            good = summary(demo, target)
            if arguments.plot:
                draw({name: job.handle.events() for name, job in demo.jobs.items()}, arguments.plot)
        finally:
            ray.shutdown()
    show(f"\nin {time.monotonic() - start_s:.0f} s; every job must reach {target}: {'yes' if good else 'NO'}")
    return 0 if good else 1


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="two jobs of a few epochs and no kills")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the jobs' sizes over time, .png or .svg")
    parser.add_argument("--storage", type=Path, metavar="DIR", help="keep the runs here; by default they are deleted")
    return parser.parse_args()


if __name__ == "__main__":
    arguments = parse()
    with contextlib.redirect_stdout(io.StringIO()):
        code = main(arguments)
    sys.exit(code)
