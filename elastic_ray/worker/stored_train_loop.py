"""SHELL: storage in Ray's control store for train functions that are too large for a message."""

from __future__ import annotations

import dataclasses
import logging
import secrets

from ray.experimental import internal_kv

from elastic_ray.job_spec import JobSpec
from placement.ray_cluster.notes import NAMESPACE

logger = logging.getLogger("elastic_ray.job")

_MOST_INLINE_BYTES = 32 << 10  # Ray puts arguments of 100 KB into its object store, where a restart may not find them
_SIZE_BYTES = 8


def with_stored_train_loop(spec: JobSpec) -> JobSpec:
    """Return a copy of ``spec`` whose train function is in Ray's control store, if it is too large. Blocks briefly."""
    if len(spec.train_loop) + len(spec.callbacks) <= _MOST_INLINE_BYTES:
        return spec
    key = store_train_loop(spec.train_loop, spec.callbacks)
    return dataclasses.replace(spec, train_loop=b"", callbacks=b"", stored_train_loop=key)


def store_train_loop(train_loop: bytes, callbacks: bytes) -> str:
    """Store a train function and callbacks until :func:`delete_train_loop`; return their key. Blocks briefly.

    Ray keeps the functions that it sends to workers in the same place. Large actor arguments would be lost together
    with the driver, and Ray could then not restart the actor.
    """
    key = f"train_loop/{secrets.token_hex(8)}"
    packed = len(train_loop).to_bytes(_SIZE_BYTES) + train_loop + callbacks
    internal_kv._internal_kv_put(key.encode(), packed, overwrite=True, namespace=NAMESPACE)
    return key


def stored_train_loop(key: str) -> tuple[bytes, bytes]:
    """Return the train function and callbacks stored by :func:`store_train_loop` under a key.

    Raises LookupError if nothing is stored under the key any more.
    """
    packed: bytes | None = internal_kv._internal_kv_get(key.encode(), namespace=NAMESPACE)
    if packed is None:
        raise LookupError(f"the train function is no longer in Ray's control store ({key})")
    end = _SIZE_BYTES + int.from_bytes(packed[:_SIZE_BYTES])
    return packed[_SIZE_BYTES:end], packed[end:]


def delete_train_loop(key: str) -> None:
    """Delete the train function stored under ``key`` from Ray's control store."""
    try:
        internal_kv._internal_kv_del(key.encode(), namespace=NAMESPACE)
    except Exception as error:
        logger.warning("a train function was not deleted from Ray's control store: %s", error)
