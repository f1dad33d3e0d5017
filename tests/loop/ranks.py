"""Processes that run a function together, in the environment that torchrun gives its ranks."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch.distributed
from torch.distributed import TCPStore  # type: ignore[attr-defined]

_STORES: list[Any] = []  # as the agent's, a store outlives its ranks
_GROUPS: list[Any] = []


class RankFailedError(AssertionError):
    """A rank raised, died, or was not done in time."""


class Ranks:
    """Keeps a few processes that have imported torch; each `run` is a fresh group of them, or one process alone."""

    def __init__(self) -> None:
        # Forked from a process that has imported torch and nothing else: an error ends them all, and the next ones
        # are there at once.
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["torch", "elastic_ray.session.session"])
        self._processes: list[tuple[Any, Connection]] = []

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        world: int | None = None,
        timeout_s: float = 100.0,
        others_s: float = 0.0,
    ) -> Any:
        """The results of `function(*args)` in rank order; without `world` the one result of a process on its own.

        Once a rank has died, the others have ``others_s`` to end by themselves before they are killed.

        Raises:
            RankFailedError: a rank raised (then with its traceback), died, or was not done in time.
            Exception: a process on its own raised this.
        """
        answers = self._ask(function, args, world or 1, alone=world is None, timeout_s=timeout_s, others_s=others_s)
        failed = {rank: value for rank, (good, value) in enumerate(answers) if not good}
        if failed:
            error, shown = next(iter(failed.values()))
            if world is None and error is not None:
                raise error
            raise RankFailedError(f"rank {next(iter(failed))} of {world}:\n{shown}")
        results = [value for _, value in answers]
        return results[0] if world is None else results

    def _ask(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        world: int,
        *,
        alone: bool,
        timeout_s: float,
        others_s: float,
    ) -> list[Any]:
        while len(self._processes) < world:
            self._start()
        ours = self._processes[:world]
        shared = {} if alone else _shared_environment(world)
        for rank, (_, pipe) in enumerate(ours):
            mine = {} if alone else {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            pipe.send_bytes(pickle.dumps((mine, function, args)))
        deadline = time.monotonic() + timeout_s
        answers: list[Any] = []
        for rank, (process, pipe) in enumerate(ours):
            try:
                if not pipe.poll(max(0.0, deadline - time.monotonic())):
                    raise EOFError("was not done in time")
                answers.append(pickle.loads(pipe.recv_bytes()))
            except (EOFError, ConnectionError) as error:
                for other, _ in ours if others_s else ():
                    other.join(others_s)
                heard = [shown for good, (_, shown) in ((a[0], a[1]) for a in answers if not a[0])]
                heard += self._stacks()
                self.close()
                raise RankFailedError(
                    f"rank {rank} of {world} {error or f'died with exit code {process.exitcode}'}\n" + "\n".join(heard)
                ) from None
        if any(not good for good, _ in answers):
            self.close()  # operations may be pending in the group
        return answers

    def _start(self) -> None:
        ours, theirs = multiprocessing.Pipe()
        os.environ["OMP_NUM_THREADS"] = "1"
        process = self._context.Process(target=_serve, args=(theirs,))  # no daemon: ranks have children
        process.start()
        theirs.close()
        self._processes.append((process, ours))

    def _stacks(self) -> list[str]:
        """Where each process is: whoever finds that one hangs wants to know where."""
        for process, _ in self._processes:
            if process.is_alive():
                with contextlib.suppress(ProcessLookupError):  # it has just ended
                    os.kill(process.pid, signal.SIGUSR1)
        time.sleep(0.5)  # signal handlers write
        found = [(process.pid, _stack_file(process.pid)) for process, _ in self._processes]
        return [f"process {pid}:\n{path.read_text()}" for pid, path in found if path.exists()]

    def close(self) -> None:
        """End the processes."""
        for process, pipe in self._processes:
            pipe.close()
            process.kill()
            process.join()
            _stack_file(process.pid).unlink(missing_ok=True)
        self._processes = []


def _shared_environment(world: int) -> dict[str, str]:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    _STORES.append(store)
    return {
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_RUN_ID": f"test-{store.port}",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "GLOO_SOCKET_IFNAME": "lo",  # for torch's own groups, which else take the interface of the host's name
    }


def leave_torch_group() -> None:
    """Leave torch's default group, but keep its threads.

    A group that ends joins them holding the GIL, which they may still need to let go of DDP's last work: a deadlock.
    """
    _GROUPS.append(torch.distributed.group.WORLD)
    torch.distributed.destroy_process_group()


def _stack_file(pid: int) -> Path:
    return Path(tempfile.gettempdir()) / f"elastic-ray-rank-{pid}.stacks"


_OWN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def _serve(pipe: Connection) -> None:
    from elastic_ray.run.current import set_session

    multiprocessing.set_start_method("fork", force=True)  # as in a process of torchrun, not in one that was spawned
    stacks = _stack_file(os.getpid()).open("w")
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    torch.set_num_threads(1)
    gc.freeze()  # torch's own objects, which each collection below would walk
    while True:
        try:
            environment, function, args = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        for name in _OWN:
            os.environ.pop(name, None)
        os.environ.update(environment)
        set_session(None)
        gc.collect()  # nothing of the function before is to watch this one
        torch.manual_seed(0)
        try:
            answer = pickle.dumps((True, function(*args)))
        except BaseException as error:
            try:
                answer = pickle.dumps((False, (error, traceback.format_exc())))
            except Exception:
                answer = pickle.dumps((False, (None, traceback.format_exc())))
        sys.stdout.flush()
        pipe.send_bytes(answer)
