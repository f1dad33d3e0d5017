"""A job whose workers are forked processes: at sizes 2, 3 and 2, between which its group changes. No Ray."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

from elastic_ray.authentication import new_secret
from elastic_ray.communication.bootstrap import BootstrapCall, call_mac
from elastic_ray.communication.bootstrap_store import BootstrapStore
from elastic_ray.communication.communicator import Communicator
from elastic_ray.events import Pause
from elastic_ray.membership.messages import GenerationSpec, Member
from elastic_ray.membership.worker_side import WorkerMembership
from elastic_ray.run.current import WorkerDismissed, set_session
from elastic_ray.session.session import Session
from elastic_ray.state.progress import Link
from tests.membership.groups import LocalController

_FORK = multiprocessing.get_context("fork")
_WAIT_S = 30.0
TIMEOUT_S = 10.0
"""A rank that comes to no collective for so long is lost."""


class JobLine:
    """A worker's line to the job: calls, and news of groups."""

    paced = False

    def __init__(self, worker: int, calls: Connection, news: Connection) -> None:
        self.worker, self._calls, self._news, self._lock = worker, calls, news, threading.Lock()

    def call(self, what: str, *values: Any) -> Any:
        """Return the job's answer."""
        with self._lock:
            self._calls.send((what, values))
            return self._calls.recv()

    def next_spec(self) -> GenerationSpec:
        """Return the next group, once there is one."""
        spec: GenerationSpec = self._news.recv()
        return spec

    def ready(self, loader: Any, *, has_state: bool, loaded: int = 0) -> None:
        self.call("ready")

    def failed(self, generation: int, cause: str) -> None:
        self.call("failed", generation, cause)

    def switched(self, generation: int, pause: Pause, proof: Link) -> None: ...

    def report_soon(self) -> None: ...

    def report(self, *values: Any) -> None: ...

    def notify(self, kind: str, text: str, detail: Mapping[str, Any]) -> None: ...

    def claim_fault(self, index: int) -> bool:
        return False


class _Caller:
    """A member's way to the job's bootstrap."""

    def __init__(self, line: JobLine, secret: str, generation: int) -> None:
        self._line, name = line, f"w{line.worker}"
        self._fields = {"generation": generation, "worker": name, "mac": call_mac(secret, generation, name)}

    def notify(self, values: Mapping[str, bytes]) -> None:
        self.ask((), 0.0, values)

    def ask(self, keys: tuple[str, ...], wait_s: float, tells: Mapping[str, bytes]) -> Mapping[str, bytes]:
        deadline = time.monotonic() + wait_s
        while True:  # in short calls: the line is shared
            call = BootstrapCall(tells=tells, wants=keys, wait_s=min(0.2, wait_s), **self._fields)
            found: dict[str, bytes] = self._line.call("meet", call)
            if all(key in found for key in keys) or time.monotonic() > deadline:
                return found


class _Moments:
    """In the place of scripted faults: a step after which the group changes waits for the next group."""

    def __init__(self, line: JobLine) -> None:
        self._line, self.membership = line, None

    def at(self, moment: str, *, worker: str, rank: int, step: int) -> None:
        membership: Any = self.membership
        if moment == "forward" and (generation := self._line.call("change_after", step)):
            while membership.generation < generation and membership.prepared_spec(generation) is None:
                time.sleep(0.002)  # formed by another thread


class Processes:
    """Three workers of which some are in the group: after a step of number ``changes`` has it another form."""

    def __init__(self, train: Callable[[JobLine], None], first: Sequence[int], changes: Mapping[int, Sequence[int]]):
        self._train, self._changes, self.members = train, {**changes}, tuple(first)
        self.told: list[tuple[int, Any]] = []  # by worker
        self._announced: dict[int, int] = {}
        self._generation, self._met = 0, dict[str, set[int]]()
        self._lock, self._ended = threading.RLock(), set[int]()
        self._ready: set[int] = set()
        lines, self._processes = {}, {}
        workers = sorted({*first, *(each for group in changes.values() for each in group)})
        secret = new_secret()
        for worker in workers:  # all are forked before this process has a thread
            (calls, theirs), (news, told) = _FORK.Pipe(), _FORK.Pipe()
            lines[worker] = calls, news
            process = _FORK.Process(target=self._work, args=(JobLine(worker, theirs, told), secret), daemon=True)
            self._processes[worker] = process
        for process in self._processes.values():
            process.start()
        self._news = {worker: news for worker, (_, news) in lines.items()}
        self._controller = LocalController(secret=secret)
        for worker, (calls, _) in lines.items():
            threading.Thread(target=self._serve, args=(worker, calls), daemon=True).start()

    # -- in a worker -------------------------------------------------------------------------------------------------

    def _work(self, line: JobLine, secret: str) -> None:
        import torch

        torch.set_num_threads(1)
        name, moments = f"w{line.worker}", _Moments(line)

        def form(spec: GenerationSpec, rank: int) -> Communicator:
            store = BootstrapStore(
                _Caller(line, secret, spec.generation), _WAIT_S, rank=rank, world_size=spec.world_size
            )
            return Communicator(
                store,
                f"generation/{spec.generation}",
                rank=rank,
                world_size=spec.world_size,
                timeout_s=TIMEOUT_S,
                form_timeout_s=_WAIT_S,
                host="127.0.0.1",
                secret=secret,
            )

        membership = WorkerMembership(name, form, lambda generation, cause: line.call("told", ("form", cause)))
        moments.membership = membership
        session = Session(name, membership, line, faults=moments, fixed_batch=True)

        def follow() -> None:
            while True:
                try:
                    membership.post(line.next_spec())
                except EOFError:
                    return

        threading.Thread(target=follow, daemon=True).start()
        set_session(session)
        try:
            self._train(line)
            session.finish()
        except WorkerDismissed:
            pass
        except BaseException as error:
            line.call("told", ("error", f"{type(error).__name__}: {error}"))
        line.call("ended")
        os._exit(0)

    # -- in the job --------------------------------------------------------------------------------------------------

    def _serve(self, worker: int, calls: Connection) -> None:
        try:
            while True:
                what, values = calls.recv()
                calls.send(getattr(self, f"_on_{what}")(worker, *values))
        except (EOFError, OSError):
            self._ended.add(worker)

    def _on_meet(self, worker: int, call: BootstrapCall) -> Any:
        return self._controller.call(call).result(call.wait_s + 5.0)

    def _on_ready(self, worker: int) -> None:
        self._ready.add(worker)

    def _on_failed(self, worker: int, generation: int, cause: str) -> None:
        self.told.append((worker, ("failed", cause)))

    def _on_told(self, worker: int, value: Any) -> None:
        self.told.append((worker, value))

    def _on_ended(self, worker: int) -> None:
        self._ended.add(worker)

    def _on_change_after(self, worker: int, step: int) -> int:
        with self._lock:
            if step in self._changes and step not in self._announced:
                self._announced[step] = self.announce(tuple(self._changes[step]))
            return self._announced.get(step, 0)

    def _on_all_at(self, worker: int, place: str, count: int) -> bool:
        """True once as many workers have come to a place, which need not be in order with collectives."""
        self._met.setdefault(place, set()).add(worker)
        return len(self._met[place]) >= count

    def announce(self, workers: tuple[int, ...]) -> int:
        """Tell old and new members of the next group."""
        with self._lock:
            self._generation += 1
            told, self.members = {*self.members, *workers}, workers
            members = tuple(Member(worker=f"w{each}", node="here") for each in workers)
            for each in told:
                self._news[each].send(GenerationSpec(generation=self._generation, members=members, void_below=0))
            return self._generation

    def over(self) -> bool:
        """True once the last group's members have ended, in whatever way."""
        return all(each in self._ended or not self._processes[each].is_alive() for each in self.members)

    def start(self) -> None:
        """Announce the first group, once all workers have built what they train."""
        deadline = time.monotonic() + _WAIT_S
        while self._ready != set(self._processes):
            assert time.monotonic() < deadline and not self._ended, f"not ready: {self.told}"
            time.sleep(0.01)  # other processes get ready
        self.announce(self.members)

    def close(self) -> None:
        """End all processes."""
        for process in self._processes.values():
            process.kill()
            process.join()
        self._controller.close()
