"""Operations of NCCL: the CPU is through with them before a GPU has run them, and an abort ends them."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist

from elastic_ray.communication.communicator import CommunicationFailedError, Communicator
from tests.membership.groups import on_ranks


class Queued(dist._Work):  # type: ignore[name-defined]
    """One whose ``wait`` ends at once, as NCCL's; it has run once the peer has come, or once it was aborted."""

    def __init__(self, error: str = "") -> None:
        super().__init__()
        self._error = error
        self.ran, self.waited_for = threading.Event(), threading.Event()

    def wait(self, timeout: Any = None) -> bool:
        if self.waited_for.is_set() and self._error:
            raise RuntimeError(self._error)
        self.waited_for.set()
        return True

    def is_completed(self) -> bool:
        return self.ran.is_set()


class Aborting:
    """In the place of NCCL's group: its abort ends an operation."""

    def __init__(self, work: Queued) -> None:
        self._work = work

    def abort(self) -> None:
        self._work.ran.set()


def alone(work: Queued, timeout_s: float = 30.0) -> Communicator:
    communicator = Communicator(
        None, "alone", rank=0, world_size=1, timeout_s=timeout_s, form_timeout_s=5.0, host="127.0.0.1"
    )
    communicator._nccl = Aborting(work)
    return communicator


def test_a_transfer_is_waited_for_until_it_has_run() -> None:
    def work(communicator: Communicator) -> bool:
        queued = Queued()
        communicator._nccl = Aborting(queued)
        peer, mine, theirs = 1 - communicator.rank, torch.ones(3), torch.zeros(3)
        works = [communicator.send(mine, peer), communicator.receive(theirs, peer), queued]
        waiting = threading.Thread(target=communicator.wait_all, args=(works,))
        waiting.start()
        assert queued.waited_for.wait(20)
        waiting.join(0.3)
        too_early = not waiting.is_alive()
        queued.ran.set()
        waiting.join(20)
        return not too_early and not waiting.is_alive() and theirs.tolist() == [1.0] * 3

    assert on_ranks(2, work) == [True, True]


def test_one_whose_peer_never_comes_fails_in_time() -> None:
    communicator = alone(work := Queued(), timeout_s=0.1)
    with pytest.raises(CommunicationFailedError):
        communicator.wait_all([work])
    assert communicator.broken


@pytest.mark.parametrize("wait", [Communicator.wait, lambda communicator, work: communicator.wait_all([work])])
def test_what_an_abort_has_ended_is_not_done(wait: Any) -> None:
    communicator = alone(work := Queued())
    communicator.void()
    assert work.ran.wait(20)
    with pytest.raises(CommunicationFailedError, match="the generation was called off"):
        wait(communicator, work)


@pytest.mark.parametrize("error", ["", "remote process exited"])
def test_one_that_failed_has_run_and_fails(error: str) -> None:
    work = Queued(error)
    communicator = alone(work)
    work.ran.set()
    if not error:
        communicator.wait_all([None], [work])
        return
    with pytest.raises(CommunicationFailedError, match=error):
        communicator.wait_all([None], [work])
    assert communicator.broken
