"""A cluster that grows, shrinks and loses nodes under three elastic jobs, on this machine.

Starts a Ray head with Ray's own autoscaler, whose provider starts logical nodes of two types here: on-demand and spot.
The allocator decides which nodes it asks for. One spot node is drained as if its market had given notice, one is killed
without; every job ends whole, and says what it has cost. Takes about two minutes on two cores:

    python examples/autoscaling.py
    python examples/autoscaling.py --smoke      some seconds: one job, for which a node comes, and nothing goes wrong
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

# One thread per worker, for eight of them share two cores; read when torch is imported, here and in workers.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A cluster for this program alone, on loopback: no token, and no other address.
os.environ |= {"RAY_AUTH_MODE": "disabled", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}

import ray
import ray.train

import elastic_ray as er
from placement import AllocatorConfig, AutoscalerConfig, Autoscaling, NodeType, get_or_create_allocator

SMOKE = "--smoke" in sys.argv[1:]
HEAD_ID = "fffffffffffffffffffffffffffffffffffffffffffffffffff00000"  # as Ray's provider of logical nodes has it
MARKET = "ray.io/market-type"
SpotUse = Literal["avoid", "prefer", "mixed"]
TIME_LIMIT_S = 900.0  # a busy machine takes several times as long
COMMANDS = (
    *("initialization_commands", "setup_commands", "head_setup_commands", "worker_setup_commands"),
    *("head_start_ray_commands", "worker_start_ray_commands"),
)
NODE_TYPES = (
    NodeType(
        name="steady", resources={"CPU": 1, "slot": 2}, labels={MARKET: "on-demand"},
        usd_per_h=3.0, max_nodes=2, startup_s=10.0,
    ),
    NodeType(
        name="spot", resources={"CPU": 1, "slot": 2}, labels={MARKET: "spot"},
        usd_per_h=1.0, max_nodes=3, startup_s=10.0, lasts_h=2.0,
    ),
)  # fmt: skip


class LocalAutoscalingCluster:
    """A Ray head with an autoscaler whose nodes are processes of this machine; a context manager.

    Args:
        node_types: what the autoscaler may start.
        idle_s: time after which it ends an idle node.
    """

    def __init__(self, node_types: tuple[NodeType, ...], *, idle_s: float = 5.0) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="er-as-")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        self._config = Path(self._folder.name) / "cluster.json"
        self._config.write_text(json.dumps(self._settings(node_types, idle_s)))
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        """For ``ray.init``."""
        return f"127.0.0.1:{self._port}"

    def _settings(self, node_types: tuple[NodeType, ...], idle_s: float) -> dict[str, Any]:
        types: dict[str, Any] = {
            each.name: {
                "resources": dict(each.resources),
                "labels": dict(each.labels),
                "node_config": {},
                "min_workers": each.min_nodes,
                "max_workers": each.max_nodes,
            }
            for each in node_types
        }
        types["ray.head.default"] = {"resources": {"CPU": 4}, "node_config": {}, "max_workers": 0}
        return {
            "cluster_name": "local",
            "max_workers": sum(each.max_nodes for each in node_types),
            "idle_timeout_minutes": idle_s / 60.0,
            "provider": {
                "type": "external",
                "module": "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider",
                "gcs_address": self.address,
                "head_node_id": HEAD_ID,
                "launch_multiple": True,
                "use_node_id_as_ip": True,
                "disable_node_updaters": True,
                "disable_launch_config_check": True,
                "foreground_node_launch": True,
            },
            "available_node_types": types,
            "head_node_type": "ray.head.default",
            "auth": {},
            "file_mounts": {},
            **{name: [] for name in (*COMMANDS, "cluster_synced_files", "rsync_exclude", "rsync_filter")},
        }

    def __enter__(self) -> LocalAutoscalingCluster:
        settings = {
            "AUTOSCALER_UPDATE_INTERVAL_S": "1",
            "RAY_FAKE_CLUSTER": "1",
            "RAY_enable_autoscaler_v2": "1",
            "RAY_CLOUD_INSTANCE_ID": HEAD_ID,
            "RAY_OVERRIDE_NODE_ID_FOR_TESTING": HEAD_ID,
            "RAY_memory_monitor_refresh_ms": "0",
        }
        command = [
            *("ray", "start", "--head", "--block", f"--port={self._port}", "--node-ip-address=127.0.0.1"),
            *("--num-cpus=4", f"--autoscaling-config={self._config}", "--include-dashboard=false"),
            *("--dashboard-agent-listen-port=0", "--disable-usage-stats"),
        ]
        with (Path(self._folder.name) / "head.log").open("wb") as log:
            self._process = subprocess.Popen(
                command, env={**os.environ, **settings}, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        deadline = time.monotonic() + 60.0
        while True:
            try:
                socket.create_connection(("127.0.0.1", self._port), timeout=1.0).close()
                break
            except OSError:
                if time.monotonic() > deadline or self._process.poll() is not None:
                    said = (Path(self._folder.name) / "head.log").read_text(errors="replace")
                    raise RuntimeError(f"the Ray head did not start: {said[-2000:]}") from None
                time.sleep(0.1)
        ray.init(address=self.address, namespace="autoscaling", log_to_driver=False)
        return self

    def __exit__(self, *error: object) -> None:
        nodes = [node["NodeID"] for node in ray.nodes() if node["NodeID"] != HEAD_ID]
        ray.shutdown()
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(20.0)
            except subprocess.TimeoutExpired:
                self._process.kill()
        for node in nodes:
            kill_node(node)
        self._folder.cleanup()


def kill_node(node_id: str) -> None:
    """End a logical node without notice: its raylet is killed, and what it had started ends with it."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                command = (entry / "cmdline").read_bytes()
                if b"raylet/raylet" in command.split(b"\0")[0] and _node_of(entry) == node_id:
                    os.kill(int(entry.name), signal.SIGKILL)


def _node_of(process: Path) -> str:
    for pair in (process / "environ").read_bytes().split(b"\0"):
        if pair.startswith(b"RAY_OVERRIDE_NODE_ID_FOR_TESTING="):
            return pair.split(b"=", 1)[1].decode()
    return ""


def train(config: dict[str, Any]) -> None:
    """A small net on made data; a step takes as long as one of a larger net on an accelerator would."""
    import torch

    torch.manual_seed(0)
    features = torch.randn(512, 16)
    data = torch.utils.data.TensorDataset(features, (features.sum(1) > 0).long())
    model: Any = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model = er.AdaptiveDataParallel(model, optimizer)
    loader = er.AdaptiveDataLoader(data, batch_size=64)
    for epoch in er.remaining_epochs_until(config["epochs"]):
        sums = er.Accumulator()
        for x, y in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            time.sleep(0.004 * len(y))
            sums["samples"] += len(y)
            sums["loss"] += loss.item() * len(y)
        er.report({"epoch": epoch, "samples": sums["samples"], "loss": sums["loss"] / sums["samples"]})


def submit(name: str, folder: str, *, workers: tuple[int, int], epochs: int, spot: SpotUse) -> er.JobHandle:
    """One job."""
    return er.ElasticTrainer(
        train,
        train_loop_config={"epochs": epochs},
        scaling_config=ray.train.ScalingConfig(num_workers=workers, resources_per_worker={"slot": 1}),
        run_config=ray.train.RunConfig(
            name=name, storage_path=folder, failure_config=ray.train.FailureConfig(max_failures=3)
        ),
        scheduling_config=er.SchedulingConfig(spot=spot),
    ).submit()


class Story:
    """Report of what happens, line by line."""

    def __init__(self) -> None:
        self._start_s = time.monotonic()
        self._nodes: dict[str, str] = {}
        self._events: dict[str, int] = {}
        self.costs: dict[str, float] = {}

    def say(self, text: str) -> None:
        """A line."""
        print(f"{time.monotonic() - self._start_s:6.1f} s  {text}", flush=True)

    def poll(self, jobs: Mapping[str, er.JobHandle], allocator: Any) -> None:
        """Say what is new about nodes and jobs."""
        there = {n["NodeID"]: n["Labels"].get(MARKET, "head") for n in ray.nodes() if n["Alive"]}
        for node in there.keys() - self._nodes.keys():
            self.say(f"node {node[-5:]} ({there[node]}) is there")
        for node in self._nodes.keys() - there.keys():
            self.say(f"node {node[-5:]} ({self._nodes[node]}) is gone")
        self._nodes = there
        for name, job in jobs.items():
            with contextlib.suppress(TimeoutError):
                for event in job.events(self._events.get(name, 0)):
                    self._events[name] = self._events.get(name, 0) + 1
                    change = f"{event.from_workers} -> {event.to_workers}"
                    self.say(f"job {name}: {event.kind.value} {change}: {event.reason}")
        _, spent = ray.get(allocator.scaling.remote(), timeout=30)
        self.costs |= spent

    def spot_node_in_use(self, jobs: Mapping[str, er.JobHandle]) -> str | None:
        """A spot node that some job has a worker on."""
        for job in jobs.values():
            if not job.done():
                for worker in job.workers():
                    if self._nodes.get(worker.node) == "spot":
                        return worker.node
        return None


def main() -> int:
    """Run the story; returns the number of jobs that did not end whole."""
    with LocalAutoscalingCluster(NODE_TYPES) as cluster, tempfile.TemporaryDirectory() as folder:
        times = AutoscalerConfig(linger_s=5.0, launch_timeout_s=30.0, retry_s=60.0)
        config = AllocatorConfig(autoscaling=Autoscaling(node_types=NODE_TYPES, times=times, interval_s=1.0))
        allocator = get_or_create_allocator(config=config)
        story = Story()
        story.say(f"a head without slots at {cluster.address}; nodes: 2 slots each, on-demand 3 USD/h, spot 1 USD/h")
        jobs = {"large": submit("large", folder, workers=(1, 4), epochs=1 if SMOKE else 24, spot="prefer")}
        if not SMOKE:
            jobs["careful"] = submit("careful", folder, workers=(1, 2), epochs=10, spot="avoid")
        drained = killed = SMOKE
        deadline = time.monotonic() + TIME_LIMIT_S
        while not all(job.done() for job in jobs.values()) or not drained:
            if time.monotonic() > deadline:
                raise TimeoutError(f"not done within {TIME_LIMIT_S:g} s: {[job.status() for job in jobs.values()]}")
            time.sleep(0.5)
            story.poll(jobs, allocator)
            node = story.spot_node_in_use(jobs)
            step = jobs["large"].status().step
            if node is not None and not drained and step > 30:
                drained = True
                story.say(f"spot node {node[-5:]} gets notice: it goes in 20 s")
                drain(node, 20.0)
                jobs["mixed"] = submit("mixed", folder, workers=(1, 3), epochs=8, spot="mixed")
            elif node is not None and drained and not killed and step > 90:
                killed = True
                story.say(f"spot node {node[-5:]} is gone without notice")
                kill_node(node)
        story.poll(jobs, allocator)
        short = 0
        for name, job in jobs.items():
            metrics = job.result(timeout=30).metrics or {}
            short += metrics.get("samples") != 512
            print(
                f"{name:<8} last epoch {metrics.get('epoch')}, {metrics.get('samples'):g} samples in it, "
                f"loss {metrics.get('loss'):.3f}, cost {100 * story.costs.get(name, 0.0):.2f} cents"
            )
        return short


def drain(node_id: str, deadline_s: float) -> None:
    """Drain a node, as a spot notice does."""
    subprocess.run(
        [
            *("ray", "drain-node", "--address", ray.get_runtime_context().gcs_address, "--node-id", node_id),
            *("--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "the spot market takes it back"),
            *("--deadline-remaining-seconds", str(int(deadline_s))),
        ],
        check=True,
        stdout=subprocess.DEVNULL,
    )


if __name__ == "__main__":
    sys.exit(main())
