"""SHELL: ownership of a worker process, first by the pool, and then by one job or sweep until the process ends.

A process from the cluster's pool was started on behalf of an earlier job. For its new owner, it adopts Ray's module
search path, the driver that receives its output, and the namespace for actor names.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import ray
from ray._private import worker as _ray_worker
from ray.actor import ActorClass
from ray.exceptions import ActorDiedError

from elastic_ray.worker.setup import ProcessOwner

logger = logging.getLogger(__name__)

_adopted: list[ProcessOwner] = []
_LOOK_S = 1.0
_ANSWER_S = 10.0
_FAREWELL_S = 1.5
_UNUSED_S = 120.0
_SAVED_WITHIN_S = 600.0  # the save itself has a limit of the job's
_UNWANTED_S = 180.0  # its pool asks every few seconds, and has given it up while it imports for so long


class Ownership:
    """Record of this process's owner, which also ends the process once it can no longer get an owner.

    Args:
        owner: Owner on whose behalf the process was started; None if any job may claim the process.
    """

    def __init__(self, owner: ProcessOwner | None) -> None:
        self._owner = owner
        if owner is not None:  # its starter may have been taken over from another Ray job
            adopt(owner)
        # the process stays after its owner's end while this is true: a run saves itself
        self.saves: Callable[[], bool] = lambda: False
        self._wanted_s = time.monotonic()
        self._begun_s: float | None = None
        self._prepared = False
        self._thread = threading.Thread(target=self._watch, name="ownership", daemon=True)
        self._thread.start()

    def wanted(self) -> bool:
        """Record that the pool still wants this process; return True if the process has no owner yet."""
        self._wanted_s = time.monotonic()
        return self._owner is None

    def prepared(self) -> None:
        """Record that the process has received its job's setup; a claimed process that never gets one ends itself."""
        self._prepared = True

    def claim(self, owner: ProcessOwner) -> bool:
        """Claim the process for this owner; return True if the process now belongs to it."""
        if self._owner is None:
            adopt(owner)
            self._owner = owner
        return self._owner.holder == owner.holder

    def leave(self, holder: str) -> None:
        """Exit the process, unless it belongs to a job or sweep other than ``holder``."""
        if self._owner is None or self._owner.holder == holder:
            os._exit(0)

    def _watch(self) -> None:
        """Exit the process once it is unwanted or its owner is gone."""
        while True:
            time.sleep(_LOOK_S)
            if self._owner is None:
                if time.monotonic() - self._wanted_s > _UNWANTED_S:
                    os._exit(0)
                continue
            self._begun_s = self._begun_s or time.monotonic()
            if not self._prepared and time.monotonic() - self._begun_s > _UNUSED_S:
                os._exit(0)  # its owner has forgotten it
            if self._owner.actor is not None and _is_gone(self._owner.actor):
                time.sleep(_FAREWELL_S)  # a run under way has a reservation to give back (``ControllerWatchdog``)
                until_s = time.monotonic() + _SAVED_WITHIN_S
                while self.saves() and time.monotonic() < until_s:
                    time.sleep(_FAREWELL_S)
                os._exit(0)


def _is_gone(owner: Any) -> bool:
    try:
        ray.get(owner.__ray_ready__.remote(), timeout=_ANSWER_S)
    except ActorDiedError:  # not ActorUnavailableError: that one may come back
        return True
    except Exception as error:  # it may be on its way back
        logger.debug("the owner of this process does not answer: %s", error)
    return False


def calling_owner(holder: str) -> ProcessOwner:
    """Return the caller as a process owner, identified by its Ray job and actor (None if the caller is a driver)."""
    context = ray.get_runtime_context()
    actor = context.current_actor if context.get_actor_id() is not None else None
    if _adopted:
        return dataclasses.replace(_adopted[-1], holder=holder, actor=actor)
    return ProcessOwner(
        holder=holder,
        actor=actor,
        ray_job=context.get_job_id(),
        namespace=context.namespace,
        search_path=_search_path(),
    )


def _search_path() -> tuple[str, ...]:
    """Return the entries that Ray adds to ``sys.path`` in workers of this Ray job.

    Uses a private API, because there is no public one.
    """
    worker: Any = _ray_worker.global_worker
    return tuple(worker.core_worker.get_job_config().py_driver_sys_path)


def adopt(owner: ProcessOwner) -> None:
    """Set up this process so that, to the train function, it looks like a process of the owner's Ray job."""
    if owner.ray_job == ray.get_runtime_context().get_job_id():
        return
    for path in _search_path():
        if path in sys.path:
            sys.path.remove(path)
    for path in owner.search_path:  # in Ray's own order
        sys.path.insert(0, path)
    importlib.invalidate_caches()
    for stream in (sys.stdout, sys.stderr):
        # Ray's log monitor reads this line, does not show it, and sends what follows to that job's driver.
        print(f":job_id:{owner.ray_job}", file=stream, flush=True)
    _look_up_in(owner.namespace)
    _adopted.append(owner)


def _look_up_in(namespace: str) -> None:
    """Make ``namespace`` the default namespace for actor names in this process."""
    get_actor: Any = ray.get_actor
    actor_class: Any = ActorClass
    create = actor_class._remote

    @functools.wraps(get_actor)
    def get_named(name: str, namespace: str | None = None) -> Any:
        return get_actor(name, namespace or tenants)

    @functools.wraps(create)
    def create_named(self: Any, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
        if options.get("name") and not options.get("namespace"):
            options["namespace"] = tenants
        return create(self, args, kwargs, **options)

    tenants = namespace
    ray.get_actor = get_named
    actor_class._remote = create_named
