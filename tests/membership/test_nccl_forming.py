"""Groups that form over NCCL: they can be called off, start no collective, and a hanging abort ends the process."""

from __future__ import annotations

import concurrent.futures
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_ray.communication import nccl
from elastic_ray.communication.bootstrap_store import BootstrapStore
from elastic_ray.communication.communicator import Communicator
from elastic_ray.communication.nccl import connect_nccl
from tests.membership.groups import LocalCaller, local_controller

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]


class Connecting:
    """In the place of NCCL's backend: connects when it is let; notes what is asked of it."""

    def __init__(self, *, connects: bool = True, fails: str = "") -> None:
        self.calls: list[str] = []
        self.within = self.aborted_within = False
        self.aborted, self._connects, self._fails = threading.Event(), connects, fails

    def rank(self) -> int:
        return 1

    def eager_connect_single_device(self, device: torch.device) -> None:
        self.calls.append("connect")
        self.within = True
        if not self._connects:
            time.sleep(0.5)  # as NCCL, after which it may be connected or have failed
        self.within = False
        if self._fails:
            raise RuntimeError(self._fails)

    def _start_coalescing(self) -> None:
        self.calls.append("start")

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> None:
        self.calls.append(f"send {rank}")

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> None:
        self.calls.append(f"receive {rank}")

    def _end_coalescing(self) -> Any:
        self.calls.append("end")
        return Ended()

    def abort(self) -> None:
        self.aborted_within = self.within
        self.aborted.set()


class Ended:
    """An operation that has run."""

    def is_completed(self) -> bool:
        return True

    def wait(self) -> bool:
        return True


def test_torch_neither_ends_the_process_nor_sleeps_after_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    class Backend:
        class Options:
            def __init__(self) -> None:
                self.config = type("Config", (), {})()

        def __init__(self, store: Any, rank: int, world_size: int, options: Any) -> None:
            self.options = options

    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", Backend, raising=False)
    environment: dict[str, str] = {}
    monkeypatch.setattr(os, "environ", environment)
    assert nccl.start_nccl(None, 0, 2, 5.0).options.config.blocking == 0
    for name in ("ASYNC_ERROR_HANDLING", "ENABLE_MONITORING", "WAIT_TIMEOUT_DUMP_MILSEC"):
        assert environment[f"TORCH_NCCL_{name}"] == "0"


def test_a_new_group_meets_no_peer_but_to_connect() -> None:
    backend = Connecting()
    connect_nccl(backend, None, CPU, time.monotonic() + 30.0, lambda: False)
    assert backend.calls == ["connect", "start", "send 1", "receive 1", "end"], "of its own rank alone"
    assert not backend.aborted.is_set()


@pytest.mark.parametrize("called_off", [True, False])
@pytest.mark.parametrize("fails", ["", "a peer is gone"])
def test_one_that_does_not_connect_in_time_is_aborted(called_off: bool, fails: str) -> None:
    backend = Connecting(connects=False, fails=fails)
    until_s = time.monotonic() + (30.0 if called_off else 0.2)
    begin_s = time.monotonic()
    with pytest.raises(RuntimeError, match="was not ready in time, or the group was called off"):
        connect_nccl(backend, None, CPU, until_s, lambda: called_off)
    assert time.monotonic() - begin_s < 15.0 and backend.aborted.wait(20.0)
    assert not backend.aborted_within, "what the call continues to use would be freed"
    assert backend.calls == ["connect"], "nothing more is started"


def test_a_call_that_never_returns_is_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl, "_ABORT_S", 0.3)

    class Stuck(Connecting):
        def eager_connect_single_device(self, device: torch.device) -> None:
            self.aborted.wait(30.0)
            raise RuntimeError("aborted")

    backend = Stuck()
    with pytest.raises(RuntimeError, match="or the group was called off"):
        connect_nccl(backend, None, CPU, time.monotonic() + 30.0, lambda: True)
    assert backend.aborted.wait(20.0)


class Slow(Connecting):
    """NCCL takes longer to be ready than torch lets an operation wait; what torch returns then counts as completed."""

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> None:
        super().send(tensors, rank, tag)
        if self.calls.count("send 1") < 3:
            raise RuntimeError("NCCL timeout in: NCCLUtils.cpp")


def test_a_group_that_connects_slowly_is_waited_for() -> None:
    backend = Slow()
    connect_nccl(backend, None, CPU, time.monotonic() + 30.0, lambda: False)
    assert backend.calls.count("start") == backend.calls.count("end") == 3 and not backend.aborted.is_set()


def test_why_it_could_not_connect_is_told() -> None:
    backend = Connecting(fails="a remote process exited\nat some line")
    with pytest.raises(RuntimeError, match=r"^a remote process exited$"):
        connect_nccl(backend, None, CPU, time.monotonic() + 30.0, lambda: False)
    assert backend.aborted.wait(20.0)


def test_who_waits_for_a_dead_peer_is_called_off() -> None:
    off = threading.Event()
    with local_controller() as controller, concurrent.futures.ThreadPoolExecutor(1) as pool:
        store = BootstrapStore(LocalCaller(controller, "w1", 1), 60.0, rank=0, world_size=2, called_off=off.is_set)
        waiting = pool.submit(store.get, "of a peer that has died")
        with pytest.raises(concurrent.futures.TimeoutError):
            waiting.result(0.3)
        off.set()
        with pytest.raises(RuntimeError, match="timed out waiting for"):
            waiting.result(20.0)


HANGS = """
import threading, time
from elastic_ray.communication import nccl
nccl._ABORT_S = 0.3
class Hanging:
    def abort(self): threading.Event().wait()
nccl.abort_nccl(Hanging())
time.sleep(600)
"""


def test_a_process_whose_abort_hangs_is_lost() -> None:
    ended = subprocess.run([sys.executable, "-c", HANGS], cwd=ROOT, timeout=300, capture_output=True, text=True)
    assert ended.returncode == -signal.SIGKILL and "has not returned within 0.3 s" in ended.stderr


def test_a_batch_is_one_operation() -> None:
    communicator = Communicator(
        None, "alone", rank=0, world_size=1, timeout_s=5.0, form_timeout_s=5.0, host="127.0.0.1"
    )
    with communicator.batch() as batched:
        pass
    assert batched == [], "gloo starts each at once"
    backend = communicator._nccl = Connecting()
    with communicator.batch() as batched:
        assert backend.calls == ["start"]
    assert backend.calls == ["start", "end"] and len(batched) == 1
    communicator.wait_all([None], batched)
    with pytest.raises(ValueError, match="mine"), communicator.batch():
        raise ValueError("mine")
    assert backend.calls[-1] == "end", "NCCL would wait for more for ever"
