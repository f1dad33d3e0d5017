"""Real gloo groups in one process: ranks are threads that find each other as workers do."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from elastic_ray.authentication import new_secret
from elastic_ray.communication.bootstrap import Bootstrap, BootstrapCall, call_mac
from elastic_ray.communication.bootstrap_store import BootstrapStore
from elastic_ray.communication.communicator import Communicator


class LocalController:
    """A controller's event loop in a thread, with its bootstrap alone."""

    def __init__(
        self, is_member: Callable[[int, str], bool] = lambda generation, worker: True, secret: str = ""
    ) -> None:
        self.secret = secret or new_secret()
        self.bootstrap = Bootstrap(self.secret, is_member)
        self.calls = 0
        self._loop, self._closing = asyncio.new_event_loop(), threading.Lock()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def call(self, meeting: BootstrapCall) -> concurrent.futures.Future[dict[str, bytes]]:
        """As an actor call: returns at once."""
        self.calls += 1
        answer = self.bootstrap.meet(meeting)
        with self._closing:
            if self._loop.is_closed():
                answer.close()  # else Python warns that nobody has awaited it
                raise RuntimeError("the controller is gone")
            return asyncio.run_coroutine_threadsafe(answer, self._loop)

    def close(self) -> None:
        """End the thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        if self._loop.is_running():
            return  # the process ends
        with self._closing:
            self._loop.run_until_complete(asyncio.sleep(0))  # calls that came after that
            for each in asyncio.all_tasks(self._loop):
                each.cancel()
            self._loop.run_until_complete(asyncio.sleep(0))
            self._loop.close()


@contextmanager
def local_controller(**options: Any) -> Iterator[LocalController]:
    """A controller for the length of a test."""
    controller = LocalController(**options)
    try:
        yield controller
    finally:
        controller.close()


class LocalCaller:
    """A member's way to a ``LocalController``."""

    def __init__(self, controller: LocalController, worker: str, generation: int, secret: str | None = None) -> None:
        mac = call_mac(secret or controller.secret, generation, worker)
        self._controller, self._fields = controller, {"generation": generation, "worker": worker, "mac": mac}

    def notify(self, values: Mapping[str, bytes]) -> None:
        self._controller.call(BootstrapCall(tells=values, **self._fields))

    def ask(self, keys: tuple[str, ...], wait_s: float, tells: Mapping[str, bytes]) -> Mapping[str, bytes]:
        call = BootstrapCall(tells=tells, wants=keys, wait_s=wait_s, **self._fields)
        try:
            return self._controller.call(call).result(wait_s + 5.0)
        except Exception as error:
            raise RuntimeError(str(error)) from error


def member(
    controller: LocalController,
    rank: int,
    world: int,
    *,
    generation: int = 1,
    form_s: float = 20.0,
    make: Callable[..., Communicator] = Communicator,
    **options: Any,
) -> Communicator:
    """One rank's communicator."""
    store = BootstrapStore(LocalCaller(controller, f"w{rank + 1}", generation), form_s, rank=rank, world_size=world)
    fields = {"timeout_s": 20.0, "form_timeout_s": form_s, "host": "127.0.0.1", "secret": controller.secret, **options}
    return make(store, f"generation/{generation}", rank=rank, world_size=world, **fields)


def on_ranks(world: int, work: Callable[[Communicator], Any], **options: Any) -> list[Any]:
    """What ``work`` returns on each rank of a fresh group; an exception of it in its place."""

    def run(rank: int) -> Any:
        try:
            return work(member(controller, rank, world, **options))
        except Exception as error:
            return error

    with local_controller() as controller, concurrent.futures.ThreadPoolExecutor(world) as pool:
        return list(pool.map(run, range(world)))
