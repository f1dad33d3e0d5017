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
