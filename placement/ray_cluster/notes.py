"""SHELL: notes from controllers and the allocator in Ray's control store, and the removal of orphaned notes.

A controller deletes its own notes when it ends. A controller that is killed for good from outside (``ray.kill``, its
namespace cleared) cannot, and with Redis as the control store's backend, its notes would survive cluster restarts.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Mapping
from typing import Any

from ray.experimental import internal_kv

from placement.cluster.jobs import Account
from placement.ray_cluster import named_actors
from placement.ray_cluster.snapshot import is_dead
from placement.versions import check_format

logger = logging.getLogger("placement.nodes")

NAMESPACE = named_actors.NAMESPACE.encode()
_CONTROLLERS = "controller/"
TRAIN_LOOP = "train_loop"
"""Name of the note that says under which key the train function is kept, where it is kept apart."""

_ACCOUNT = b"allocator/account"
_ENDED = "ended/"
ENDED_FOR_S = 3600.0
"""How long it is remembered how a job ended [s]."""

_ASKS = b"allocator/asks_for_nodes"
_SETTINGS = b"allocator/settings"
_FORMAT = 1


def _put(key: bytes, value: bytes) -> None:
    internal_kv._internal_kv_put(key, value, overwrite=True, namespace=NAMESPACE)


def _get(key: bytes) -> bytes | None:
    found: bytes | None = internal_kv._internal_kv_get(key, namespace=NAMESPACE)
    return found


def _stored(key: bytes, otherwise: str) -> Mapping[str, Any]:
    """Return a note stored as JSON; empty if there is none, or if a newer release has stored it, which is logged."""
    told: Mapping[str, Any] = json.loads(_get(key) or b"{}")
    try:
        check_format(told, _FORMAT)
    except ValueError as error:
        logger.warning("%s: %s", otherwise, error)
        return {}
    return told


def keep_account(account: Account) -> None:
    """Store the cluster's running costs (``Account``) for the next allocator. Blocks briefly."""
    text = json.dumps({"format": _FORMAT, **dataclasses.asdict(account)})
    _put(_ACCOUNT, text.encode())


def account() -> Account:
    """Return the cluster's running costs as last stored; an empty ``Account`` if no allocator has stored any."""
    told = _stored(_ACCOUNT, "what the cluster has cost is counted from now on")
    return Account(**{field.name: told[field.name] for field in dataclasses.fields(Account) if told})


def keep_settings(settings: Mapping[str, Any]) -> None:
    """Store the operator's settings for the next allocator. Blocks briefly."""
    text = json.dumps({"format": _FORMAT, "settings": settings})
    _put(_SETTINGS, text.encode())


def settings() -> Mapping[str, Any]:
    """Return the operator's settings; empty if none are stored, or if a newer release has stored them."""
    told = _stored(_SETTINGS, "the operator's settings are not used, apply them again")
    found: Mapping[str, Any] = told.get("settings", {})
    return found


def keep_asks_for_nodes(asks: bool) -> None:
    """Store whether this allocator requests nodes from Ray, so that the next allocator can withdraw the requests."""
    _put(_ASKS, b"1" if asks else b"")


def asks_for_nodes() -> bool:
    """True if an allocator has requested nodes from Ray's autoscaler and not withdrawn the requests."""
    return bool(_get(_ASKS))


def keep_ended(job: str, ended_s: float, text: str) -> None:
    """Store a note about a job's end, and delete notes about jobs that ended more than an hour before it."""
    _put(f"{_ENDED}{ended_s:.3f}/{job}".encode(), text.encode())
    for key in _ended_keys():
        if ended_s - _ended_s(key) > ENDED_FOR_S:
            internal_kv._internal_kv_del(key, namespace=NAMESPACE)


def ended(now_s: float) -> tuple[bytes, ...]:
    """Return the notes about jobs that ended within the last hour, as ``keep_ended`` stored them. Blocks briefly."""
    keys = [key for key in _ended_keys() if now_s - _ended_s(key) <= ENDED_FOR_S]
    texts = (_get(key) for key in keys)
    return tuple(text for text in texts if text)


def _ended_keys() -> list[bytes]:
    return list(internal_kv._internal_kv_list(_ENDED.encode(), namespace=NAMESPACE) or ())


def _ended_s(key: bytes) -> float:
    return float(key.decode().removeprefix(_ENDED).partition("/")[0])


def key_of(controller: str, name: str) -> bytes:
    """Return the key of a controller's note in Ray's control store.

    Args:
        controller: Id of the controller's actor, which stays the same when Ray restarts it.
        name: Name of the note; an empty name, or a name that ends with a slash, is a prefix for other notes.
    """
    return f"{_CONTROLLERS}{controller}/{name}".encode()


def delete_orphaned() -> tuple[str, ...]:
    """Delete the notes of controllers that will never run again; return these controllers' ids. Blocks briefly.

    Nothing is deleted for a controller whose state Ray does not currently know, since it may be about to restart.
    """
    keys = internal_kv._internal_kv_list(_CONTROLLERS.encode(), namespace=NAMESPACE) or ()
    controllers = {key.decode().removeprefix(_CONTROLLERS).partition("/")[0] for key in keys}
    dead = tuple(sorted(controller for controller in controllers if is_dead(controller)))
    for controller in dead:
        kept = [
            key for key in keys if key.startswith(key_of(controller, "")) and key.endswith(f"/{TRAIN_LOOP}".encode())
        ]
        for train_loop in (_get(key) for key in kept):
            if train_loop is not None:
                internal_kv._internal_kv_del(train_loop, namespace=NAMESPACE)
        internal_kv._internal_kv_del(key_of(controller, ""), del_by_prefix=True, namespace=NAMESPACE)
    return dead
