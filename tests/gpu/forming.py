"""Two processes on one GPU form NCCL groups, and one of them fails: what NCCL and torch do then. A program."""

from __future__ import annotations

import multiprocessing
import os
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from elastic_ray.communication.communicator import CommunicationFailedError, Communicator
from elastic_ray.state.tree import receive_state, send_state
from tests.gpu.processes import nccl_environment

FORM_S = 20.0


def made(port: int, name: str, rank: int, world: int = 2, called_off: Callable[[], bool] = lambda: False) -> Any:
    store = dist.TCPStore("127.0.0.1", port, None, False)  # type: ignore[attr-defined]
    return Communicator(
        store,
        name,
        rank=rank,
        world_size=world,
        timeout_s=20.0,
        form_timeout_s=FORM_S,
        host="127.0.0.1",
        gpu=0,
        called_off=called_off,
    )


def used_mib() -> int:
    free, total = torch.cuda.mem_get_info()
    return (total - free) >> 20


def repeated(port: int, rank: int) -> str:
    """Groups one after the other: times, and memory of the GPU."""
    times, used = [], []
    for number in range(8):
        begin_s = time.monotonic()
        group = made(port, f"again/{number}", rank)
        times.append(time.monotonic() - begin_s)
        for _ in range(3):
            value = torch.ones(1000, device="cuda")
            group.wait(group.all_reduce(value))
            assert value[0] == 2.0, value[0]
        if number % 2:
            group.void()
            time.sleep(0.5)  # for the abort
        group.close()
        del group
        time.sleep(0.5)  # for the memory
        used.append(used_mib())
    return f"forms {statistics.median(times):.2f}/{max(times):.2f} s, MiB in use {used}"


def moved(port: int, rank: int) -> str:
    """States of two sizes, as a joiner gets them."""
    found = []
    for megabytes in (0, 64, 512):
        group = made(port, f"moved/{megabytes}", rank)
        tree = {f"p{i}": torch.full((1 << 20,), float(i), device="cuda") for i in range(megabytes // 4)}
        tree |= {f"s{i}": torch.full((100,), float(i), device="cuda") for i in range(50)}
        group.wait(group.all_reduce(torch.ones(1)))
        torch.cuda.synchronize()
        begin_s = time.monotonic()
        if rank == 0:
            send_state(group, 1, {"x": tree})
            took_s = time.monotonic() - begin_s
        else:
            trees, _ = receive_state(group, 0, lambda key: None)
            took_s = time.monotonic() - begin_s
            assert all(torch.equal(trees["x"][key], value) for key, value in tree.items())
        found.append(f"{megabytes} MB {took_s:.3f} s")
        again_s = time.monotonic()
        if rank == 0:
            send_state(group, 1, {"x": tree})
        else:
            receive_state(group, 0, lambda key: None)
        found.append(f"again {time.monotonic() - again_s:.3f} s")
        group.void()
    return ", ".join(found)


def stopped_while_forming(port: int, rank: int) -> str:
    """The peer is stopped between gloo and NCCL."""
    from elastic_ray.communication import communicator as module

    begin_s = time.monotonic()
    if rank == 1:
        module.connect_nccl = lambda *args: os.kill(os.getpid(), signal.SIGSTOP)  # type: ignore[attr-defined]
    try:
        made(port, "stopped", rank, called_off=lambda: time.monotonic() - begin_s > 2.0)
    except CommunicationFailedError as error:
        called_off_s = time.monotonic() - begin_s
        while any(t.name in ("nccl-connect", "nccl-abort") for t in threading.enumerate()):
            time.sleep(0.02)
            if time.monotonic() - begin_s > 30:
                break
        left = [t.name for t in threading.enumerate() if t.name.startswith("nccl")]
        gone_s = time.monotonic() - begin_s
        return f"called off after {called_off_s:.2f} s ({error}); threads gone after {gone_s:.1f} s, left {left}"
    return "it formed?"


def collectives(port: int, rank: int) -> str:
    """All of the gradient group's, of each kind of number."""
    group = made(port, "collectives", rank)
    gradients, world = group.gradients, 2
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.uint8, torch.int64):
        mine = torch.full((6,), rank + 1, device="cuda").to(dtype)
        for name, start, wanted in (
            ("all_reduce", gradients.all_reduce, 3),
            ("broadcast", lambda t: gradients.broadcast(t, 1), 2),
            ("reduce", lambda t: gradients.reduce(t, rank), 3),
        ):
            if name == "reduce" and rank == 1:
                start, wanted = (lambda t: gradients.reduce(t, 0)), None
            elif name == "reduce":
                start = lambda t: gradients.reduce(t, 0)  # noqa: E731
            tensor = mine.clone()
            group.wait(start(tensor))
            assert wanted is None or tensor.tolist() == [wanted] * 6, (dtype, name, tensor)
        out = torch.zeros(12, device="cuda").to(dtype)
        group.wait(gradients.all_gather(out, mine))
        assert out.tolist() == [1] * 6 + [2] * 6, (dtype, "all_gather", out)
        for splits in ((), ([3, 3], [3, 3])):
            out = torch.zeros(6, device="cuda").to(dtype)
            group.wait(gradients.all_to_all(out, mine, *splits))
            assert out.tolist() == [1] * 3 + [2] * 3, (dtype, "all_to_all", out)
        out = torch.zeros(5 if rank == 0 else 7, device="cuda").to(dtype)
        into, parts = ([1, 4], [1, 5]) if rank == 0 else ([5, 2], [4, 2])
        group.wait(gradients.all_to_all(out, mine, into, parts))
        assert out.tolist() == [1] * into[0] + [2] * into[1], (dtype, "unequal", out)
    assert world == group.world_size
    return "right"


def torn_while_state_moves(port: int, rank: int) -> str:
    """The source is killed with bytes on the way: the receiver must not take what has come for a state."""
    group = made(port, "torn", rank)
    tree = {f"p{i}": torch.full((1 << 22,), float(i + 1), device="cuda") for i in range(64)}
    if rank == 0:
        wait = group.wait_all

        def wait_or_die(works: Any, batched: Any = ()) -> None:
            if batched:  # after a moment, so that some bytes are on their way
                time.sleep(0.05)  # some, and not all
                os.kill(os.getpid(), signal.SIGKILL)
            wait(works)

        group.wait_all = wait_or_die
        send_state(group, 1, {"x": tree})
    begin_s = time.monotonic()
    try:
        trees, _ = receive_state(group, 0, lambda key: None)
        whole = all(torch.equal(trees["x"][key], value) for key, value in tree.items())
        return f"received after {time.monotonic() - begin_s:.2f} s, whole {whole}"
    except CommunicationFailedError as error:
        return f"refused after {time.monotonic() - begin_s:.2f} s: {str(error)[:80]}"


def killed_in_collective(port: int, rank: int) -> str:
    """What a work says whose peer was killed, before anybody aborts it."""
    group = made(port, "killed", rank)
    value = torch.ones(1 << 20, device="cuda")
    group.wait(group.all_reduce(value))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    work = group.all_reduce(value)
    begin_s = time.monotonic()
    while not work.is_completed() and time.monotonic() - begin_s < 6.0:
        time.sleep(0.01)
    ended_s = time.monotonic() - begin_s
    try:
        told: Any = work.exception()
        told = f"{type(told).__name__} {str(told)[:60]!r}"
    except Exception as error:
        told = f"raises {type(error).__name__} {str(error)[:60]!r}"
    completed = work.is_completed()
    wait_s = time.monotonic()
    try:
        work.wait()
        told += "; wait() returns"
    except RuntimeError as error:
        told += f"; wait() raises after {time.monotonic() - wait_s:.2f} s {str(error)[:60]!r}"
    begin_s = time.monotonic()
    group.void()
    while any(t.name == "nccl-abort" for t in threading.enumerate()) and time.monotonic() - begin_s < 20:
        time.sleep(0.01)
    abort_s = time.monotonic() - begin_s
    torch.cuda.synchronize()
    alive = float(torch.ones(2, device="cuda").sum())
    return f"completed {completed} after {ended_s:.2f} s, exception {told}; abort {abort_s:.2f} s, CUDA {alive}"


CASES = (repeated, collectives, moved, torn_while_state_moves, killed_in_collective, stopped_while_forming)


def _work(case: Callable[[int, int], str], port: int, rank: int, pipe: Any) -> None:
    nccl_environment(rank)
    torch.zeros(1, device="cuda")
    try:
        pipe.send(f"{case.__name__} rank {rank}: {case(port, rank)}")
    except BaseException as error:
        pipe.send(f"{case.__name__} rank {rank}: {type(error).__name__} {str(error)[:300]}")
    os._exit(0)


def main() -> None:
    """Run all cases, each with two fresh processes; print what rank 0 says."""
    from tests.gpu import forming as here

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.gpu.forming", "elastic_ray.state.tree"])
    for name in sys.argv[1:] or [case.__name__ for case in CASES]:
        store = dist.TCPStore("127.0.0.1", 0, None, True)  # type: ignore[attr-defined]
        mine, theirs = context.Pipe()
        ranks = [
            context.Process(target=here._work, args=(getattr(here, name), store.port, rank, theirs), daemon=True)
            for rank in range(2)
        ]
        for each in ranks:
            each.start()
        print(mine.recv() if mine.poll(25.0) else f"{name}: HANGS", flush=True)
        for each in ranks:
            each.kill()
            each.join()


if __name__ == "__main__":
    main()
