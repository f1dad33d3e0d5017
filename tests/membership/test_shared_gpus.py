"""What takes NCCL's place where ranks share a GPU. tests/gpu shows it on one."""

from __future__ import annotations

import concurrent.futures
import threading

import pytest
import torch
import torch.distributed as dist

from elastic_ray.communication.communicator import CommunicationFailedError, Communicator, _meet
from elastic_ray.communication.staged_transfers import receive_staged
from tests.membership.groups import on_ranks


@pytest.mark.parametrize(
    ("gpus", "apart"), [(("a", "b", "c"), True), (("a", "b", "a"), False), (("a", "a", "a"), False)]
)
def test_all_ranks_know_whether_two_share_a_gpu(gpus: tuple[str, ...], apart: bool) -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda rank: _meet(store, rank, 3, gpus[rank]), range(3)))
    assert [each for _, each in found] == [apart] * 3
    assert len(set(found[0][0])) == 3 and all(nonces == found[0][0] for nonces, _ in found)


class NoSends:
    """In the place of NCCL's group, which knows no tags and runs one send at a time."""


def test_sends_are_of_the_moment_receipts_there_after_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpu: list[int] = []
    monkeypatch.setattr(Communicator, "_is_staged", lambda self, tensor: id(tensor) in on_gpu)

    def work(communicator: Communicator) -> list[float]:
        communicator._nccl = NoSends()
        peer = 1 - communicator.rank
        mine, theirs = torch.full((3,), float(communicator.rank)), torch.full((3,), -1.0)
        on_gpu.extend((id(mine), id(theirs)))
        works = [communicator.send(mine, peer, 5), communicator.receive(theirs, peer, 5)]
        mine.fill_(9.0)
        assert theirs.tolist() == [-1.0] * 3
        communicator.wait_all(works)
        found: list[float] = theirs.tolist()
        return found

    assert on_ranks(2, work) == [[1.0] * 3, [0.0] * 3]


def test_a_gone_peer_is_a_failure_as_without_gpu() -> None:
    begun = threading.Event()  # else gloo refuses to begin

    def work(communicator: Communicator) -> None:
        if communicator.rank == 1:
            assert begun.wait(30.0)
            communicator.close()
            return
        works = [receive_staged(lambda host: communicator.receive(host, 1, 5), torch.zeros(3))]
        begun.set()
        communicator.wait_all(works)

    failed, left = on_ranks(2, work, timeout_s=5.0)
    assert isinstance(failed, CommunicationFailedError) and left is None
