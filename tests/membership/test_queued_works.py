"""Operations of NCCL: the CPU is through with them before a GPU has run them, and an abort ends them."""

from __future__ import annotations

import threading
import time
import weakref
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
        works = [communicator.send(mine, peer), communicator.receive(theirs, peer)]
        waiting = threading.Thread(target=communicator.wait_all, args=(works, [queued]))
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
        communicator.wait_all([], [work])
    assert communicator.broken


WAITS = [Communicator.wait, lambda communicator, work: communicator.wait_all([], [work])]


@pytest.mark.parametrize("wait", WAITS)
def test_what_an_abort_has_ended_is_not_done(wait: Any) -> None:
    communicator = alone(work := Queued())
    communicator.void()
    assert work.ran.wait(20)
    with pytest.raises(CommunicationFailedError, match="the generation was called off"):
        wait(communicator, work)


@pytest.mark.parametrize("wait", WAITS)
def test_work_is_not_looked_at_during_an_abort(wait: Any) -> None:
    """Torch would hold Python's lock until the abort is over, so that the whole process would stand still."""
    looks: list[bool] = []

    class Aborted(Queued):
        def is_completed(self) -> bool:
            looks.append(communicator.voided)
            return False

    communicator = alone(work := Aborted())
    waiting = threading.Thread(target=lambda: failed_to(communicator, wait, work))
    waiting.start()
    while len(looks) < 3:
        waiting.join(0.01)
    communicator.void()
    waiting.join(20)
    assert not waiting.is_alive() and looks[-5:].count(True) <= 1, "one may have begun before"
    failed_to(communicator, wait, work)
    assert looks.count(True) <= 1


def failed_to(communicator: Communicator, wait: Any, work: Queued) -> None:
    with pytest.raises(CommunicationFailedError, match="the generation was called off"):
        wait(communicator, work)


class Calling:
    """In the place of NCCL's group: notes the order of what is asked of it."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.within, self.goes_on = threading.Event(), threading.Event()

    def allreduce(self, tensors: list[torch.Tensor]) -> Queued:
        self.within.set()
        assert self.goes_on.wait(20)
        self.calls.append("called")
        return Queued()

    def _start_coalescing(self) -> None:
        self.calls.append("start")

    def _end_coalescing(self) -> Queued:
        self.calls.append("end")
        return Queued()

    def abort(self) -> None:
        self.calls.append("abort")


def test_an_abort_waits_for_the_end_of_a_call() -> None:
    """It frees what the call uses: torch does not keep the two from running at once."""
    communicator = alone(Queued())
    backend = communicator._nccl = communicator._gradient_backends["cpu"] = Calling()
    calling = threading.Thread(target=communicator.gradients.all_reduce, args=(torch.zeros(1),))
    calling.start()
    assert backend.within.wait(20)
    communicator.void()
    calling.join(0.3)
    assert backend.calls == []
    backend.goes_on.set()
    calling.join(20)
    wait_until(lambda: len(backend.calls) == 2)
    assert backend.calls == ["called", "abort"]


def test_a_cancelled_batch_ends_before_the_abort() -> None:
    """Else NCCL would take all later calls of this thread, in any group, for parts of the batch."""
    communicator = alone(Queued())
    backend = communicator._nccl = Calling()

    def send_in_vain() -> None:
        with communicator.batch():
            communicator.void()
            time.sleep(0.2)  # the abort would begin meanwhile
            communicator.send(torch.zeros(1), 1)

    with pytest.raises(CommunicationFailedError, match="called off"):
        send_in_vain()
    wait_until(lambda: len(backend.calls) == 3)
    assert backend.calls == ["start", "end", "abort"]


def test_an_aborted_group_frees_its_tensors_at_once() -> None:
    """Torch keeps those of unfinished operations as long as the group, which has to wait for gloo's timeout."""
    communicator = alone(Queued())
    backend = communicator._nccl = communicator._gradient_backends["cuda"] = Calling()
    kept = weakref.ref(backend)
    del backend
    communicator.void()
    communicator.void()
    wait_until(lambda: kept() is None)
    assert communicator.backend == "" and communicator._nccl is not None
    with pytest.raises(CommunicationFailedError, match="called off"), communicator.batch():
        pass


@pytest.mark.parametrize("error", ["", "ProcessGroup abort timed out"])
def test_closing_a_group_aborts_it_and_ignores_failures(error: str) -> None:
    class Failing(Calling):
        def abort(self) -> None:
            super().abort()
            if error:
                raise RuntimeError(error)

    communicator = alone(Queued())
    backend = communicator._nccl = Failing()
    communicator.close()
    communicator.close()
    wait_until(lambda: bool(backend.calls))
    assert backend.calls == ["abort"] and communicator._nccl is None


def test_an_abort_that_hangs_holds_no_closing_thread() -> None:
    goes_on = threading.Event()

    class Hanging(Calling):
        def abort(self) -> None:
            assert goes_on.wait(10)
            super().abort()

    communicator = alone(Queued())
    backend = communicator._nccl = Hanging()
    communicator.close()
    assert backend.calls == []
    goes_on.set()
    wait_until(lambda: backend.calls == ["abort"])


def test_a_cancelled_group_is_aborted_once() -> None:
    communicator = alone(Queued())
    backend = communicator._nccl = Calling()
    communicator.void()
    communicator.close()
    wait_until(lambda: bool(backend.calls))
    assert backend.calls == ["abort"]


def test_pairs_are_connected_by_an_exchange_of_all_ranks() -> None:
    def work(communicator: Communicator) -> list[int]:
        communicator.connect_pairs()  # nothing over gloo
        none = communicator.traffic["all_to_all"]
        communicator._nccl = Calling()
        communicator.connect_pairs()
        return [none, communicator.traffic["all_to_all"]]

    assert on_ranks(2, work) == [[0, 2]] * 2


def wait_until(done: Any) -> None:
    until_s = time.monotonic() + 20.0
    while not done() and time.monotonic() < until_s:
        time.sleep(0.01)
    assert done()


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
