"""A process that ends while a thread of it waits in a group for a peer."""

from __future__ import annotations

import subprocess
import sys

import pytest

_PROGRAM = """
import concurrent.futures, threading, time, torch
from elastic_ray.communication.communicator import CommunicationFailedError
from tests.membership.groups import local_controller, member

def wait():
    try:
        first.wait_all([first.receive(torch.zeros(3), 1)])
    except CommunicationFailedError:
        first.mark_broken()

with local_controller() as controller:
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda rank: member(controller, rank, 2), range(2))
threading.Thread(target=wait, daemon=True).start()
time.sleep(0.3)  # until it waits in gloo
first.void()
time.sleep(0.3)  # its own thread waits on
"""


@pytest.mark.thorough
def test_process_ends_in_order_while_a_receiver_waits() -> None:
    """Python would end that thread within gloo's code, which aborts the process."""
    ended = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, timeout=180, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


_FORMS = """
import sys, time, types
from elastic_ray.communication.bootstrap_store import BootstrapStore
from elastic_ray.communication.communicator import Communicator
from elastic_ray.membership.messages import GenerationSpec, Member
from elastic_ray.membership.worker_side import WorkerMembership

class Unanswered:
    def notify(self, values):
        pass

    def ask(self, keys, wait_s, tells, sleep=time.sleep):
        sleep(wait_s)
        return {}

class LateEnd:
    def __del__(self, sleep=time.sleep):
        sleep(2.0)  # the interpreter exits for so long

late = types.ModuleType("late")
late.end = LateEnd()
sys.modules["late"] = late
del late
limits = {"timeout_s": 20.0, "form_timeout_s": 20.0, "host": "127.0.0.1"}

def form(spec, rank):
    store = BootstrapStore(Unanswered(), 20.0, rank=rank, world_size=2)
    return Communicator(store, "g", rank=rank, world_size=2, **limits)

members = tuple(Member(worker=name, node="here") for name in ("w1", "w2"))
membership = WorkerMembership("w1", form, lambda generation, cause: None)
membership.post(GenerationSpec(generation=1, members=members))
time.sleep(0.5)  # it waits for w2, which never comes
"""


@pytest.mark.thorough
def test_process_ends_in_order_while_a_group_forms() -> None:
    """Its thread would return from the wait for the other members while Python exits, and abort the process."""
    ended = subprocess.run([sys.executable, "-c", _FORMS], capture_output=True, text=True, timeout=100, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


_BROKEN = """
import time
from elastic_ray.communication.communicator import Communicator
from elastic_ray.communication.retired_communicators import RetiredCommunicators

lone = Communicator(None, "g", rank=0, world_size=1, timeout_s=30.0, form_timeout_s=1.0, host="127.0.0.1")
lone.mark_broken()
retired = RetiredCommunicators()
retired.retire(lone)
since_s = time.monotonic()
import atexit
atexit._run_exitfuncs()
print(time.monotonic() - since_s)
"""


def test_groups_to_be_dropped_delay_no_exit() -> None:
    ended = subprocess.run([sys.executable, "-c", _BROKEN], capture_output=True, text=True, timeout=60, check=True)
    assert float(ended.stdout) < 1.5


_FORKS = """
import os
from elastic_ray.communication.connections import leave_at_exit

class Group:
    def __init__(self, name):
        self.name = name
        leave_at_exit(self)

    def leave(self, timeout_s):
        print(self.name, flush=True)

of_parent = Group("parent")
if os.fork():
    os.wait()
else:
    of_child = Group("child")
"""


def test_forked_process_leaves_the_groups_of_its_own() -> None:
    ended = subprocess.run([sys.executable, "-c", _FORKS], capture_output=True, text=True, timeout=180, check=True)
    assert ended.stdout.split() == ["child", "parent"]
