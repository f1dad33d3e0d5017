"""Controllers of jobs: which process, and its end."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import psutil
import ray

import elastic_ray as er
from elastic_ray.driver.handle import find_controller


def controller_pid(handle: er.JobHandle) -> int:
    """Process of the job's controller."""
    deadline = time.monotonic() + 60
    while True:
        try:
            ready: Any = find_controller(handle.job).__ray_call__.remote(lambda _: os.getpid())
            return int(ray.get(ready, timeout=180))
        except ray.exceptions.ActorUnavailableError:
            assert time.monotonic() < deadline
            time.sleep(0.1)


def kill_controller(handle: er.JobHandle) -> int:
    """SIGKILL; returns the process that was killed."""
    pid = controller_pid(handle)
    assert "Controller" in " ".join(psutil.Process(pid).cmdline())
    os.kill(pid, signal.SIGKILL)
    return pid
