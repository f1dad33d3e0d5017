"""Real jobs on a Ray cluster whose workers share one GPU: 1 -> 2 -> 4 -> 3 workers, and a SIGKILL. A program."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path
from typing import Any

CUSTOMIZE = """import os
os.environ.update(NCCL_HOSTID=f"h{os.getpid()}", NCCL_SOCKET_IFNAME="lo", NCCL_NET="Socket", NCCL_IB_DISABLE="1")
"""
SIZES = (1, 2, 4, 3)
BEGIN_S = time.monotonic()


def loop(config: dict[str, Any]) -> None:
    """Train until a file is there; rank 0 leaves what it has come to in another one."""
    import elastic_ray as er
    from elastic_ray.run.current import session_of_thread
    from tests.gpu import faults

    over = []

    def asked() -> bool:
        session = session_of_thread()
        group = session.group.communicator if session is not None and session.world_size > 1 else None
        if group is not None:
            over.append(group._nccl is not None)
        return Path(config["finish"]).exists()

    found = faults.train(config["strategy"], config["device"], 0, 0.1, asked)
    if er.get_context().get_world_rank() == 0:
        Path(config["result"]).write_text(json.dumps({**found, "nccl": sorted(set(over)), "steps": len(over)}))


def say(text: str) -> None:
    print(f"{time.monotonic() - BEGIN_S:6.1f} {text}", flush=True)


def run(folder: Path, strategy: str, device: str) -> None:
    """One job through all sizes."""
    import ray.train

    import elastic_ray as er
    from tests.gpu import faults, ray_job

    config = {"strategy": strategy, "device": device}
    config |= {"finish": str(folder / strategy), "result": f"{folder}/{strategy}.json"}
    gpu = {"GPU": 0.1} if device == "cuda" else {}
    handle = er.ElasticTrainer(
        ray_job.loop,  # by its module's name, wherever it is run
        train_loop_config=config,
        scaling_config=ray.train.ScalingConfig(
            num_workers=(1, 4), use_gpu=bool(gpu), resources_per_worker={"CPU": 1, **gpu}
        ),
        run_config=ray.train.RunConfig(
            name=strategy, storage_path=str(folder / "runs"), failure_config=ray.train.FailureConfig(max_failures=3)
        ),
        elastic_config=er.ElasticConfig(heartbeat_timeout_s=5.0),
    ).submit()

    def until(there: Any, what: str) -> None:
        deadline = time.monotonic() + 90.0
        while not there():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{strategy}: HANGS at {what}; {handle.status()}")
            time.sleep(0.1)

    try:
        for size in SIZES:
            handle.resize(size)
            until(lambda n=size: len(handle.workers()) == n, f"{size} workers")
            step = handle.status().step
            until(lambda s=step: handle.status().step > s + 2, f"a step of {size}")
            say(f"{strategy}: {size} workers at step {handle.status().step}")
        victim = handle.workers()[-1]
        os.kill(victim.pid, signal.SIGKILL)
        until(lambda: len(handle.workers()) == 3 and all(w.pid != victim.pid for w in handle.workers()), "replacement")
        step = handle.status().step
        until(lambda: handle.status().step > step + 2, "a step after the kill")
        Path(config["finish"]).touch()
        handle.result(timeout=40.0)
        found = json.loads(Path(config["result"]).read_text())
        for event in handle.events():
            if event.pause_s:
                parts = ", ".join(f"{k} {v:.3f}" for k, v in event.detail.items() if k.endswith("_s") and v)
                sizes = f"{event.from_workers}->{event.to_workers}"
                say(f"{strategy}: {event.kind.value} {sizes}: {event.pause_s:.3f} s ({parts})")
        wanted = faults.alone("all_reduce", device, found["epochs"])
        apart = faults.apart(found["weights"], wanted["weights"])
        say(f"{strategy}: epochs {found['epochs']} nccl {found['nccl']} apart {apart:.1e}")
    except Exception as error:
        say(f"{strategy}: {type(error).__name__} {str(error)[:500]}")
        traceback.print_exc()
        for event in handle.events()[-12:]:
            say(f"  {str(event)[:200]}")


def main() -> None:
    """Two jobs beside each other."""
    device = os.environ.get("ELASTIC_RAY_TEST_DEVICE", "cuda")
    folder = Path(tempfile.mkdtemp(prefix="er-", dir="/tmp"))
    (folder / "sitecustomize.py").write_text(CUSTOMIZE)
    os.environ["PYTHONPATH"] = f"{folder}:{os.environ.get('PYTHONPATH', '')}"
    os.environ.update(
        RAY_AUTH_MODE="disabled",
        RAY_memory_monitor_refresh_ms="0",
        RAY_USAGE_STATS_ENABLED="0",
        RAY_worker_niceness="0",
        RAY_TMPDIR=str(folder),
    )
    import ray

    gpus = 1 if device == "cuda" else 0
    ray.init(address="local", num_cpus=16, num_gpus=gpus, include_dashboard=False, log_to_driver=False)
    say("Ray is up")
    names = sys.argv[1:] or ["all_reduce", "zero2"]
    jobs = [threading.Thread(target=run, args=(folder, name, device), daemon=True) for name in names]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join(150.0)
    os._exit(0)


if __name__ == "__main__":
    main()
