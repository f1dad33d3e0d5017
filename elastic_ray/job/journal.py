"""SHELL: a controller's journal in Ray's control store (GCS), for the controller that Ray starts as its replacement.

The journal is small and plain (JSON), because the workers hold the training state itself. It exists as long as the
control store does; with Redis it also survives a restart of the store. It is deleted when the controller ends. If the
controller is permanently killed from outside, the allocator deletes it (``placement.ray_cluster.notes``).
"""

from __future__ import annotations

import dataclasses
import json
import logging
import threading
import time

import ray
from ray.experimental import internal_kv

from elastic_ray.events import JobEvent
from elastic_ray.job_spec import JobSpec
from elastic_ray.record.controller_state import ControllerState
from placement.ray_cluster.notes import NAMESPACE, key_of

logger = logging.getLogger("elastic_ray.job")

_RETRY_S = 0.5
_FAREWELL_S = 2.0
_HOSTED = "hosted/"
_SPEC = "spec"


def hosted_before(actor: str) -> list[str]:
    """Return the names of the controllers that the actor hosted before its process died. Blocks for a moment."""
    prefix = key_of(actor, _HOSTED)
    keys = internal_kv._internal_kv_list(prefix, namespace=NAMESPACE) or ()
    parts = (key.removeprefix(prefix).decode().partition("/") for key in keys)
    return sorted(name for name, _, note in parts if note == _SPEC)


class Journal:
    """Journal of a controller's state in Ray's control store, which lets a replacement continue.

    Args:
        controller: Id of the controller's actor, which stays the same when Ray restarts it.
        hosted: Name of the controller if its actor hosts several controllers; otherwise empty.
    """

    def __init__(self, controller: str, hosted: str = "") -> None:
        self._controller = controller
        self._folder = f"{_HOSTED}{hosted}/" if hosted else ""
        self._lock = threading.Condition()
        self._last: str | None = None
        self._pending: dict[str, str] = {}
        self._closed = False
        self._events = 0
        self._thread: threading.Thread | None = None

    def read(self) -> tuple[ControllerState, tuple[JobEvent, ...]] | None:
        """Return the previous controller's state and events; None if there were none. Blocks for milliseconds."""
        text: bytes | None = internal_kv._internal_kv_get(self._key("job"), namespace=NAMESPACE)
        if text is None:
            return None
        keys = sorted(internal_kv._internal_kv_list(self._key("event/"), namespace=NAMESPACE) or ())
        lines = [internal_kv._internal_kv_get(key, namespace=NAMESPACE) for key in keys]
        events = tuple(JobEvent.from_json(line.decode()) for line in lines if line is not None)
        self._events = len(events)
        return ControllerState.from_json(text.decode()), events

    def record(self, state: ControllerState) -> None:
        """Record the job's state if it has changed; returns at once."""
        text = json.dumps(dataclasses.asdict(state))
        if text != self._last:
            self._last = text
            self.put("job", text)

    def add(self, event: JobEvent) -> None:
        """Record an event; returns at once."""
        self.put(f"event/{self._events:08d}", event.to_json())
        self._events += 1

    def flush(self, timeout_s: float) -> bool:
        """Block until everything is written or ``timeout_s`` has passed; True if everything is written."""
        with self._lock:
            return self._lock.wait_for(lambda: not self._pending, timeout_s)

    def start(self, spec: JobSpec) -> None:
        """Record the job that a warm or hosted controller now runs. Blocks.

        Raises Exception if the control store does not accept it.
        """
        # Who puts a reference to an object into a pickle keeps the object for ever; what it holds is stored as well.
        if spec.trial is not None:
            spec = dataclasses.replace(spec, trial=dataclasses.replace(spec.trial, checkpoint_ref=None))
        packed = ray.cloudpickle.dumps(spec)  # type: ignore[no-untyped-call]
        internal_kv._internal_kv_put(self._key(_SPEC), packed, overwrite=True, namespace=NAMESPACE)

    def begun(self) -> JobSpec | None:
        """Return the job recorded by :meth:`start`; None if nothing is recorded. Blocks for a moment."""
        packed: bytes | None = internal_kv._internal_kv_get(self._key(_SPEC), namespace=NAMESPACE)
        return None if packed is None else ray.cloudpickle.loads(packed)

    def close(self, *, delete: bool) -> None:
        """End the thread after its pending writes; delete the journal if no controller will need it (``delete``)."""
        with self._lock:
            self._closed = True
            self._lock.notify_all()
        if self._thread is not None:
            self._thread.join(_FAREWELL_S)
        if delete:
            try:
                internal_kv._internal_kv_del(self._key(""), del_by_prefix=True, namespace=NAMESPACE)
            except Exception as error:
                logger.warning("a controller's notes were not deleted: %s", error)

    def _key(self, name: str) -> bytes:
        return key_of(self._controller, self._folder + name)

    def put(self, name: str, text: str) -> None:
        """Queue a text to be written under a name in the journal; returns at once."""
        with self._lock:
            self._pending[name] = text
            if self._thread is None:
                self._thread = threading.Thread(target=self._write, name="journal", daemon=True)
                self._thread.start()
            self._lock.notify_all()

    def _write(self) -> None:
        """Write pending entries one after the other until the journal is closed."""
        while True:
            with self._lock:
                self._lock.wait_for(lambda: self._pending or self._closed)
                if not self._pending:
                    return
                name, text = next(iter(self._pending.items()))
            try:
                internal_kv._internal_kv_put(self._key(name), text.encode(), overwrite=True, namespace=NAMESPACE)
            except Exception as error:  # the control store is away: it is tried again
                if self._closed:
                    return
                logger.info("a controller's note was not written: %s", error)
                time.sleep(_RETRY_S)
                continue
            with self._lock:
                if self._pending.get(name) == text:
                    del self._pending[name]
                self._lock.notify_all()
