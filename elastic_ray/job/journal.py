"""SHELL: what a job's controller notes down for the controller that Ray starts in its place, in Ray's control store.

It is small and plain (JSON): the truth about training is with the workers. It lives as long as the control store does,
with Redis behind that also through its restart. It is deleted when the controller ends; where that is ended for good
from outside, the allocator does it (``placement.ray_cluster.notes``).
"""

from __future__ import annotations

import dataclasses
import json
import logging
import secrets
import threading
import time

import ray
from ray.experimental import internal_kv

from elastic_ray.events import JobEvent
from elastic_ray.job_spec import JobSpec
from elastic_ray.record.controller_state import ControllerState
from placement.ray_cluster.notes import NAMESPACE, TRAIN_LOOP, key_of

logger = logging.getLogger("elastic_ray.job")

_RETRY_S = 0.5
_FAREWELL_S = 2.0
_RENEW_S = 2.0  # a sweep that has no answer within 5 s starts another controller
_SIZE_BYTES = 8


def store_train_loop(train_loop: bytes, callbacks: bytes) -> str:
    """Keep both, packed, until :func:`delete_train_loop`; returns their key. Blocks briefly.

    What an actor is created with is lost with the driver once it is too large for a message, and Ray could not start
    the actor again. Ray keeps functions that it sends to workers in the same place.
    """
    key = f"train_loop/{secrets.token_hex(8)}"
    packed = len(train_loop).to_bytes(_SIZE_BYTES) + train_loop + callbacks
    internal_kv._internal_kv_put(key.encode(), packed, overwrite=True, namespace=NAMESPACE)
    return key


def stored_train_loop(key: str) -> tuple[bytes, bytes]:
    """The train function and the callbacks that :func:`store_train_loop` has kept.

    Raises LookupError: it is not there (any more).
    """
    packed: bytes | None = internal_kv._internal_kv_get(key.encode(), namespace=NAMESPACE)
    if packed is None:
        raise LookupError(f"the train function is not in Ray's control store any more ({key})")
    end = _SIZE_BYTES + int.from_bytes(packed[:_SIZE_BYTES])
    return packed[_SIZE_BYTES:end], packed[end:]


def delete_train_loop(key: str) -> None:
    """Delete a train function from Ray's control store."""
    try:
        internal_kv._internal_kv_del(key.encode(), namespace=NAMESPACE)
    except Exception as error:
        logger.warning("a train function was not deleted from Ray's control store: %s", error)


class Journal:
    """Written by a thread of its own, so that a control store that is away holds nothing up.

    Args:
        controller: id of the controller's actor, which stays the same when Ray restarts it.
    """

    def __init__(self, controller: str) -> None:
        self._controller = controller
        self._lock = threading.Condition()
        self._last: str | None = None
        self._pending: dict[str, str] = {}
        self._closed = False
        self._events = 0
        self._thread: threading.Thread | None = None

    def read(self) -> tuple[ControllerState, tuple[JobEvent, ...]] | None:
        """Read the notes of the controller before; None for the first one. Blocks for some milliseconds."""
        text: bytes | None = internal_kv._internal_kv_get(self._key("job"), namespace=NAMESPACE)
        if text is None:
            return None
        keys = sorted(internal_kv._internal_kv_list(self._key("event/"), namespace=NAMESPACE) or ())
        lines = [internal_kv._internal_kv_get(key, namespace=NAMESPACE) for key in keys]
        events = tuple(JobEvent.from_json(line.decode()) for line in lines if line is not None)
        self._events = len(events)
        return ControllerState.from_json(text.decode()), events

    def note(self, state: ControllerState) -> None:
        """Note the job down, if anything has changed; returns at once."""
        text = json.dumps(dataclasses.asdict(state))
        if text != self._last:
            self._last = text
            self._put("job", text)

    def add(self, event: JobEvent) -> None:
        """Add an event; returns at once."""
        self._put(f"event/{self._events:08d}", event.to_json())
        self._events += 1

    def note_train_loop(self, key: str) -> None:
        """Note where the train function is kept, which goes with the notes; returns at once."""
        self._put(TRAIN_LOOP, key)

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything is written; whether it is. Blocks."""
        with self._lock:
            return self._lock.wait_for(lambda: not self._pending, timeout_s)

    def begin_again(self, spec: JobSpec) -> None:
        """Begin again with another job or trial; nothing noted before counts. Blocks.

        Raises Exception: the control store does not take it.
        """
        if not self.flush(_RENEW_S):  # else what is under way to the store would be written after this
            raise TimeoutError(f"Ray's control store has not taken a note within {_RENEW_S:g} s")
        # Who puts a reference to an object into a pickle keeps the object for ever; what it holds is stored as well.
        if spec.trial is not None:
            spec = dataclasses.replace(spec, trial=dataclasses.replace(spec.trial, checkpoint_ref=None))
        packed = ray.cloudpickle.dumps(spec)  # type: ignore[no-untyped-call]
        internal_kv._internal_kv_put(self._key("trial"), packed, overwrite=True, namespace=NAMESPACE)
        self._events = 0
        internal_kv._internal_kv_del(self._key("event/"), del_by_prefix=True, namespace=NAMESPACE)

    def trial(self) -> JobSpec | None:
        """The job, or trial, that it has begun last, if it was made for none, or another. Blocks for a moment."""
        packed: bytes | None = internal_kv._internal_kv_get(self._key("trial"), namespace=NAMESPACE)
        return None if packed is None else ray.cloudpickle.loads(packed)

    def close(self, *, delete: bool) -> None:
        """End the thread, once everything is written; ``delete``: there will be no other controller."""
        with self._lock:
            self._closed = True
            self._lock.notify_all()
        if self._thread is not None:
            self._thread.join(_FAREWELL_S)
        if delete:
            self._delete()

    def _delete(self) -> None:
        try:
            internal_kv._internal_kv_del(self._key(""), del_by_prefix=True, namespace=NAMESPACE)
        except Exception as error:
            logger.warning("a controller's notes were not deleted: %s", error)

    def _key(self, name: str) -> bytes:
        return key_of(self._controller, name)

    def _put(self, name: str, text: str) -> None:
        with self._lock:
            self._pending[name] = text
            if self._thread is None:
                self._thread = threading.Thread(target=self._write, name="journal", daemon=True)
                self._thread.start()
            self._lock.notify_all()

    def _write(self) -> None:
        """Write what is pending, one after the other, until the journal is closed."""
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
