"""Jobs and a sweep while workers, controllers, the allocator, nodes and the storage fail in every way, at random."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import random
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import ray.train
from ray import tune

import elastic_ray as er
import tuning
from elastic_ray.events import JobPhase
from tests.job import traced
from tests.job.shaky_storage import shaky
from tests.job.soak_faults import Fault, FaultKind, schedule, shown
from tests.local_cluster import LocalCluster

# A dead node is found within 10 s: the tests' usual second takes a living one for dead while many processes start.
_NODE_DEATH = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 4000,
    "health_check_failure_threshold": 2,
}
pytestmark = [pytest.mark.ray_cluster(num_cpus=4, _system_config=_NODE_DEATH)]

SLOTS = 2  # of a node
LEAST_NODES, MOST_NODES = 1, 4
JOBS = 3  # at a time, beside the sweep
TRIALS = 4  # of a sweep, two at a time; when it is over the next one begins
KINDS = list(FaultKind)
# Classes of processes, as their titles say
_OF_RAY = ("IDLE", "SPILL", "RESTORE", "DELETE", "DashboardAgent", "RuntimeEnvAgent")
STAYS = (*_OF_RAY, "Allocator")  # as long as Ray does
CENTRAL = ("JobController", "Sweep")
PATIENCE_S = 180.0  # for what still runs when the faults are over
ELASTIC = {"checkpoint_interval_s": 1.0, "heartbeat_timeout_s": 5.0}
FAILURES = ray.train.FailureConfig(max_failures=-1)


def scaling() -> ray.train.ScalingConfig:
    return ray.train.ScalingConfig(num_workers=(1, SLOTS + 1), resources_per_worker={"slot": 1.0})


class World:
    """Does to a cluster what a schedule says, and undoes what is to last only for a while.

    Attributes:
        storage: the file system of the jobs.
    """

    def __init__(self, cluster: LocalCluster, folder: Path) -> None:
        self._cluster = cluster
        self._marker = folder / "trouble"
        self._later: list[tuple[float, Callable[[], None]]] = []
        self.storage = shaky(self._marker)

    def suffer(self, fault: Fault) -> None:
        """It happens now."""
        carried_out = getattr(self, f"_{fault.kind.name.lower()}")(fault)
        print(f"{fault}: {carried_out}", flush=True)

    def poll(self, *, over: bool = False) -> None:
        """Undo what has lasted long enough; all of it when it is ``over``."""
        due = [entry for entry in self._later if over or time.monotonic() >= entry[0]]
        self._later = [entry for entry in self._later if entry not in due]
        for _, undo in due:
            undo()

    @property
    def storage_fails(self) -> bool:
        """Whether nobody could submit a job now."""
        return self._marker.exists() and self._marker.read_text() == "fail"

    def add_nodes(self, number: int) -> None:
        """Until there are so many."""
        while len(self._cluster.added) < number:
            self._cluster.add_node(num_cpus=0, resources={"slot": SLOTS})

    def _after(self, fault: Fault, undo: Callable[[], None]) -> None:
        if fault.lasts_s != float("inf"):
            self._later.append((time.monotonic() + fault.lasts_s, undo))

    # -- processes ---------------------------------------------------------------------------------------------

    def _kill_worker(self, fault: Fault) -> str:
        return self._signal(fault, "Worker", signal.SIGKILL)

    def _stop_worker(self, fault: Fault) -> str:
        return self._signal(fault, "Worker", signal.SIGSTOP)

    def _kill_controller(self, fault: Fault) -> str:
        return self._signal(fault, "JobController", signal.SIGKILL)

    def _stop_controller(self, fault: Fault) -> str:
        return self._signal(fault, "JobController", signal.SIGSTOP)

    def _kill_allocator(self, fault: Fault) -> str:
        return self._signal(fault, "Allocator", signal.SIGKILL)

    def _stop_allocator(self, fault: Fault) -> str:
        return self._signal(fault, "Allocator", signal.SIGSTOP)

    def _signal(self, fault: Fault, kind: str, which: signal.Signals) -> str:
        found = sorted((p for p, name in processes() if name.startswith(kind)), key=lambda p: p.create_time())
        if not found:
            return "nobody is there"
        process = found[fault.of(len(found))]
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(which)
        if which is signal.SIGSTOP:
            self._after(fault, lambda: wake(process))
        return f"pid {process.pid}"

    # -- nodes -------------------------------------------------------------------------------------------------

    def _add_node(self, fault: Fault) -> str:
        self.add_nodes(min(len(self._cluster.added) + 1, MOST_NODES))
        return f"{len(self._cluster.added)} nodes"

    def _lose_node(self, fault: Fault) -> str:
        if len(self._cluster.added) <= LEAST_NODES:
            return "too few are left"
        self._cluster.remove_node(self._cluster.added[fault.of(len(self._cluster.added))])
        return f"{len(self._cluster.added)} nodes"

    def _drain_node(self, fault: Fault) -> str:
        if len(self._cluster.added) <= LEAST_NODES:
            return "too few are left"
        node = self._cluster.added[fault.of(len(self._cluster.added))]
        self._cluster.added.remove(node)
        self._cluster.drain_node(node, deadline_s=fault.lasts_s)
        self._after(fault, lambda: self._cluster.remove_node(node))
        return f"{len(self._cluster.added)} other nodes"

    # -- storage -----------------------------------------------------------------------------------------------

    def _slow_storage(self, fault: Fault) -> str:
        return self._trouble(fault, "slow")

    def _fail_storage(self, fault: Fault) -> str:
        return self._trouble(fault, "fail")

    def _trouble(self, fault: Fault, what: str) -> str:
        if self._marker.exists():
            return "it has trouble already"
        part = self._marker.with_suffix(".part")
        part.write_text(what)
        part.rename(self._marker)
        self._after(fault, self._marker.unlink)
        return "now"


def is_stopped(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(process.status() == psutil.STATUS_STOPPED)
    return False


def wake(process: psutil.Process) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(signal.SIGCONT)


def processes() -> Iterator[tuple[psutil.Process, str]]:
    """Ray's processes below this one, with the class of their actor."""
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            title = " ".join(process.cmdline())
            if title.startswith("ray::"):  # ray::Class.method or, of an actor that has a name, ray::name:Class.method
                yield process, title.rpartition(":")[2].partition(".")[0].strip()


def listening() -> int:
    """Ports on which this process listens."""
    return sum(each.status == psutil.CONN_LISTEN for each in psutil.Process().net_connections())


class Load:
    """What runs meanwhile: always some jobs, and one sweep after the other."""

    def __init__(self, world: World, folder: Path, seed: int) -> None:
        self._world, self._folder = world, folder
        self._dice = random.Random(seed)
        self._running: dict[Path, er.JobHandle] = {}
        self.ended: dict[Path, er.JobHandle] = {}
        self.trials: list[Path] = []
        self._over = False
        self._sweeps: concurrent.futures.Future[None] = concurrent.futures.Future()
        threading.Thread(target=self._run_sweeps, daemon=True).start()  # after a failure nobody waits for it

    def poll(self) -> None:
        """Begin new jobs for those that have ended."""
        for folder in [folder for folder, job in self._running.items() if job.done()]:
            self.ended[folder] = self._running.pop(folder)
            self.ended[folder].result()  # it is to have succeeded
        while len(self._running) < JOBS and not self._over and not self._world.storage_fails:
            self._submit()
        if self._sweeps.done():
            self._sweeps.result()

    def finish(self, deadline: float) -> None:
        """Begin nothing any more, and wait for what runs."""
        self._over = True
        while self._running or not self._sweeps.done():
            left = f"{self._running}, sweep: {'over' if self._sweeps.done() else 'running'}"
            assert time.monotonic() < deadline, f"not ended: {left}"
            time.sleep(0.2)
            self.poll()
        self._sweeps.result()

    def _submit(self) -> None:
        folder = self._folder / f"job{len(self._running) + len(self.ended)}"
        (folder / "trace").mkdir(parents=True)
        config = {"trace": str(folder / "trace"), "epochs": self._dice.choice([6, 15, 30]), "pause_s": 0.05}
        self._running[folder] = er.ElasticTrainer(
            traced.train,
            train_loop_config=config,
            scaling_config=scaling(),
            run_config=ray.train.RunConfig(
                storage_path=str(folder / "runs"), storage_filesystem=self._world.storage, failure_config=FAILURES
            ),
            elastic_config=er.ElasticConfig(**ELASTIC),
        ).submit()

    def _run_sweeps(self) -> None:
        try:
            self._sweep()
        except BaseException as error:
            self._sweeps.set_exception(error)
        else:
            self._sweeps.set_result(None)

    def _sweep(self) -> None:
        trainer = er.ElasticTrainer(
            traced.train,
            scaling_config=scaling(),
            run_config=ray.train.RunConfig(failure_config=FAILURES),
            elastic_config=er.ElasticConfig(**ELASTIC),
        )
        for number in range(1000):
            if self._over:
                return
            traces = [self._folder / f"sweep{number}" / f"trace{trial}" for trial in range(TRIALS)]
            for trace in traces:
                trace.mkdir(parents=True)
            space = {"trace": tune.grid_search([str(trace) for trace in traces]), "epochs": 8, "pause_s": 0.05}
            grid = tune.Tuner(
                tuning.elastic(trainer),
                param_space=space,
                tune_config=tune.TuneConfig(metric="loss", mode="min", max_concurrent_trials=2),
                run_config=tune.RunConfig(storage_path=str(self._folder / f"sweep{number}"), verbose=0),
            ).fit()
            assert not grid.errors, grid.errors
            self.trials += traces


@pytest.fixture(scope="module", autouse=True)
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where all processes of the cluster put their temporary files."""
    folder = tmp_path_factory.mktemp("tmp")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(folder))
        patch.setattr(tempfile, "tempdir", None)
        yield folder


@pytest.mark.parametrize(
    "duration_s, seed",
    [
        pytest.param(60.0, int(os.environ.get("SOAK_SEED", "1")), marks=[pytest.mark.slow, pytest.mark.timeout(1000)]),
        pytest.param(900.0, 2, marks=[pytest.mark.slow, pytest.mark.timeout(1500)]),
    ],
)
def test_every_job_ends_whole_and_nothing_is_left(
    scratch: Path, ray_cluster: LocalCluster, tmp_path: Path, duration_s: float, seed: int
) -> None:
    faults = schedule(seed, duration_s, KINDS)
    print(f"the schedule, of seed {seed}:\n{shown(faults)}\n")
    world = World(ray_cluster, tmp_path)
    world.add_nodes(3)
    ports, files = listening(), psutil.Process().num_fds()
    load = Load(world, tmp_path, seed)
    begin_s = time.monotonic()
    for fault in faults:
        while time.monotonic() < begin_s + fault.at_s:
            world.poll()
            load.poll()
            time.sleep(0.1)
        world.suffer(fault)
    world.poll(over=True)
    world.add_nodes(2)
    load.finish(time.monotonic() + PATIENCE_S)
    check(load)
    wait_until_gone(lambda process, kind: kind in CENTRAL or is_stopped(process))
    ray_cluster.remove_added_nodes()  # and warm processes with them
    wait_until_gone(lambda _, kind: not kind.startswith(STAYS))
    assert [each.name for each in scratch.iterdir() if not each.name.startswith("torch")] == []  # torch keeps a cache
    assert listening() <= ports, "ports are left open"
    assert psutil.Process().num_fds() <= files + 40, "files or sockets are left open"


def check(load: Load) -> None:
    """Every step of every job and trial is there, every sample once an epoch, and all ranks end with the same bits."""
    restarts = 0
    for folder, job in load.ended.items():
        assert job.status().phase is JobPhase.FINISHED
        restarts += sum(event.kind.value == "restart" for event in job.events())
        assert len(traced.account(folder / "trace").final) == 1, folder
    for trace in load.trials:
        assert len(traced.account(trace).final) == 1, trace
    print(f"{len(load.ended)} jobs ({restarts} restarts from checkpoints), {len(load.trials)} trials")
    assert len(load.ended) >= JOBS and load.trials


def wait_until_gone(ours: Callable[[psutil.Process, str], bool]) -> None:
    """Processes that nobody needs any more, once those of a sweep have waited for another trial."""
    deadline = time.monotonic() + 30.0
    while left := [f"{process.pid} {kind}" for process, kind in processes() if ours(process, kind)]:
        assert time.monotonic() < deadline, f"still there: {left}"
        time.sleep(0.2)


@pytest.mark.parametrize("seed", range(5))
def test_a_seed_makes_the_schedule(seed: int) -> None:
    faults = schedule(seed, 600.0)
    assert faults == schedule(seed, 600.0) != schedule(seed + 1, 600.0)
    assert {fault.kind for fault in faults[: len(FaultKind) + 3]} == set(FaultKind)
    assert [fault.at_s for fault in faults] == sorted(fault.at_s for fault in faults)
    assert all(fault.at_s <= 600.0 and 0 <= fault.of(3) < 3 for fault in faults)
    some = schedule(seed, 600.0, [FaultKind.ADD_NODE, FaultKind.SLOW_STORAGE])
    assert {fault.kind for fault in some} == {FaultKind.ADD_NODE, FaultKind.SLOW_STORAGE}
