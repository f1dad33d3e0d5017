"""The four events, carried out on Ray Train and on elastic_ray alike and measured by the same log."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from common import Pause, measure_pause
from elastic_side import ElasticJob
from ray_train_baseline import RayTrainJob

from tests.local_cluster import LocalCluster, clean_up

os.environ.pop("ELASTIC_RAY_POOL")  # which tests turn off; here it is as users have it

START_TIMEOUT_S = 120.0
EVENT_TIMEOUT_S = 150.0
STEPS_BEFORE = 12  # one checkpoint of the baseline included
# A replacement finds a warm process only where the job has trained for longer than it takes to start one.
STEPS_IN_FULL_TRAINING = 40
STEPS_AFTER = 5

Job = RayTrainJob | ElasticJob


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one event cost one system."""

    system: str
    event: str
    pause: Pause

    def row(self) -> dict[str, Any]:
        """A line of the printed table; times in seconds."""
        return {
            "system": self.system,
            "event": self.event,
            "pause_s": self.pause.pause_s,
            "gap_s": self.pause.gap_s,
            "step_s": self.pause.step_s,
            "reached_s": self.pause.reached_s,
            "steps_redone": self.pause.redone,
            "cut_off": self.pause.lost,
        }


@contextlib.contextmanager
def cluster(*, nodes: int, slots: int = 1, fast_health_check: bool = False) -> Iterator[tuple[LocalCluster, list[Any]]]:
    """A head without room for workers, and ``nodes`` nodes for ``slots`` each; Ray's own health checks."""
    head: dict[str, Any] = {"num_cpus": 4}
    if not fast_health_check:
        head["_system_config"] = None
    local = LocalCluster(**head)
    try:
        yield local, [_add(local, slots) for _ in range(nodes)]
    finally:
        local.shutdown()


@contextlib.contextmanager
def job(kind: type[Job], *, workers: tuple[int, int]) -> Iterator[Job]:
    """A job of one of the systems in a folder of its own, ended at the end."""
    folder = Path(tempfile.mkdtemp(prefix="bench-"))
    running = kind(folder / "run", workers=workers)
    try:
        yield running
    finally:
        running.stop()
        shutil.rmtree(folder, ignore_errors=True)


def settle(running: Job, *, world: int, steps: int = STEPS_BEFORE, timeout_s: float = START_TIMEOUT_S) -> None:
    """Wait until the job has trained some steps in a group of ``world``.

    Raises:
        TimeoutError: it does not get there.
    """
    since = time.time()
    hold = getattr(running, "resize", None)
    if hold is not None:  # with a fixed batch on two cores our allocator would see no use for so many
        hold(world)
    if not running.log.wait_for(world=world, steps=steps, since_s=since, timeout_s=timeout_s):  # type: ignore[attr-defined]
        running.check()  # type: ignore[attr-defined]
        last = running.log.read()[-1:]  # type: ignore[attr-defined]
        raise TimeoutError(f"{running.name}: no {steps} steps with {world} workers in {timeout_s:g} s; last: {last}")  # type: ignore[attr-defined]


def observe(
    running: Job, act: Callable[[], object], *, event: str, world: int, timeout_s: float = EVENT_TIMEOUT_S
) -> Outcome:
    """Carry out ``act``, wait until the job trains with ``world`` workers again, and measure."""
    begin = time.time()
    act()
    running.log.wait_for(world=world, steps=STEPS_AFTER, since_s=begin, timeout_s=timeout_s)  # type: ignore[attr-defined]
    pause = measure_pause(running.log.read(), event_s=begin, world=world, end_s=time.time())  # type: ignore[attr-defined]
    print(f"  {running.name}: {event}: pause {pause.pause_s:.2f} s", flush=True)  # type: ignore[attr-defined]
    return Outcome(system=running.name, event=event, pause=pause)  # type: ignore[attr-defined]


# -- events --------------------------------------------------------------------------------------------------


def resize(kind: type[Job]) -> list[Outcome]:
    """Nodes come, and one is drained and goes; Ray Train follows by itself, our job is told to grow at once."""
    with cluster(nodes=1) as (local, _), job(kind, workers=(1, 4)) as running:

        def grow(by: int, to: int) -> None:
            for _ in range(by):
                _add(local, 1)
            if isinstance(running, ElasticJob):
                running.resize(to)

        settle(running, world=1)
        outcomes = [observe(running, lambda: grow(1, 2), event="1->2", world=2)]
        settle(running, world=2)
        outcomes.append(observe(running, lambda: grow(2, 4), event="2->4", world=4))
        settle(running, world=4)
        leaver = next(node for node in local.added if node.node_id == running.nodes()[3])
        outcomes.append(observe(running, lambda: _retire(local, leaver), event="4->3", world=3))
        return outcomes


def kill(kind: type[Job]) -> list[Outcome]:
    """SIGKILL of the last of three workers, on a cluster where it may be replaced."""
    with cluster(nodes=1, slots=3), job(kind, workers=(1, 3)) as running:
        settle(running, world=3)
        victim = running.pids()[2]
        return [observe(running, lambda: os.kill(victim, signal.SIGKILL), event="SIGKILL of 1 of 3", world=3)]


def node_loss(kind: type[Job], *, fast_health_check: bool) -> list[Outcome]:
    """One of three nodes, with one worker each, disappears."""
    checks = cluster(nodes=3, fast_health_check=fast_health_check)
    with checks as (local, nodes), job(kind, workers=(1, 3)) as running:
        settle(running, world=3)
        lost = running.nodes()[2]
        node = next(node for node in nodes if node.node_id == lost)
        return [observe(running, lambda: local.remove_node(node), event="node of 1 of 3 lost", world=2)]


def hang(kind: type[Job], *, cap_s: float) -> list[Outcome]:
    """SIGSTOP of the last of three workers; a system that does not notice is cut off after ``cap_s``."""
    with cluster(nodes=1, slots=3), job(kind, workers=(1, 3)) as running:
        settle(running, world=3, steps=STEPS_IN_FULL_TRAINING)
        victim = running.pids()[2]
        try:
            act = lambda: os.kill(victim, signal.SIGSTOP)  # noqa: E731
            return [observe(running, act, event="SIGSTOP of 1 of 3", world=3, timeout_s=cap_s)]
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, signal.SIGCONT)


def _add(local: LocalCluster, slots: int) -> Any:
    return local.add_node(num_cpus=slots, resources={"slot": slots})


def _retire(local: LocalCluster, node: Any, *, notice_s: float = 5.0) -> None:
    """Announce that a node goes away and take it away when it was said, as clouds do."""
    import ray
    from ray.core.generated import autoscaler_pb2

    gcs = ray._private.worker.global_worker.gcs_client  # type: ignore[attr-defined]
    reason = autoscaler_pb2.DrainNodeReason.DRAIN_NODE_REASON_PREEMPTION  # type: ignore[attr-defined]
    deadline_ms = int((time.time() + notice_s) * 1000)
    accepted, why = gcs.drain_node(node.node_id, reason, "benchmark", deadline_ms)
    if not accepted:
        raise RuntimeError(f"Ray refused to drain node {node.node_id}: {why}")
    time.sleep(notice_s)
    local.remove_node(node, abruptly=False)


# -- running them --------------------------------------------------------------------------------------------


def run_sides(sides: Sequence[tuple[str, Callable[[], list[Outcome]]]], *, wanted: str, repeats: int) -> list[Outcome]:
    """Every wanted side ``repeats`` times, in turns, so that a slow spell falls on all of them."""
    outcomes: list[Outcome] = []
    failed = True
    try:
        for number in range(repeats):
            for side, measure in sides:
                if wanted in ("both", side):
                    print(f"repetition {number + 1} of {repeats}: {side}", flush=True)
                    outcomes.extend(measure())
        failed = False
    finally:
        clean_up(failed=failed)
    return outcomes


def pauses(outcomes: Sequence[Outcome], system: str, event: str | None = None) -> list[float]:
    """Pauses of a system, of one event or of all."""
    return [o.pause.pause_s for o in outcomes if o.system == system and event in (None, o.event)]
