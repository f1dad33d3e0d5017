"""SHELL: creation, lookup and listing of named actors, and calls to them with retries."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayActorError
from ray.experimental import internal_kv

from placement.ray_cluster.snapshot import on_head

NAMESPACE = "elastic_ray"
"""Ray's namespace of all named actors of ours."""

_KV = NAMESPACE.encode()
_ALIAS = "alias/"
HOSTS = "controllers/"
"""How names of actors begin that each host several objects, which have aliases for names."""

ALLOCATOR = "allocator"
"""Name of the cluster's allocator."""

_PATIENCE_S = 60.0
_POLL_S = 0.1


@functools.cache
def actor_class(kind: type) -> Any:
    """Return the Ray actor class for a Python class, cached because Ray keeps some 20 kB for each ``ray.remote``."""
    return ray.remote(kind)


class HostedGoneError(ActorDiedError):
    """Error raised if an object hosted by an actor no longer exists."""

    def __init__(self, name: str) -> None:
        RayActorError.__init__(self, error_msg=f"{name} has ended")
        self._name = name

    def __reduce__(self) -> tuple[Any, ...]:
        return HostedGoneError, (self._name,)


@dataclasses.dataclass(frozen=True, slots=True)
class Hosted:
    """Handle of an object hosted by an actor; methods are called as on an actor's handle."""

    host: Any  # handle of the actor, which has a method ``call(name, method, *arguments, **options)``
    name: str

    def __getattr__(self, method: str) -> _HostedMethod:
        if method.startswith("__") and method != "__ray_ready__":  # copy and pickle ask for theirs
            raise AttributeError(method)
        return _HostedMethod(self, method)


@dataclasses.dataclass(frozen=True, slots=True)
class _HostedMethod:
    hosted: Hosted
    method: str

    def remote(self, *arguments: Any, **options: Any) -> Any:
        """Call the method; as with an actor, the result is an object reference."""
        return self.hosted.host.call.remote(self.hosted.name, self.method, *arguments, **options)


def create_on_head(kind: type, name: str, *arguments: Any, **options: Any) -> Any:
    """Create a detached actor of class ``kind`` on the head node, since nothing works if the head is lost anyway."""
    if options.get("get_if_exists") and (found := find_actor(name)) is not None:
        return found
    fixed = {
        "name": name,
        "namespace": NAMESPACE,
        "lifetime": "detached",
        "num_cpus": 0,
        "max_concurrency": 1000,
        "scheduling_strategy": "DEFAULT",  # never the placement group of the trial that calls
        **on_head(),
    }
    return actor_class(kind).options(**{**fixed, **options}).remote(*arguments)


def find_actor(name: str) -> Any | None:
    """Return the actor with this name or alias; None if none exists. Blocks briefly."""
    with contextlib.suppress(ValueError):
        return ray.get_actor(name, namespace=NAMESPACE)
    for own, _ in aliases(name, whole=True):
        with contextlib.suppress(ValueError):
            actor = ray.get_actor(own, namespace=NAMESPACE)
            return Hosted(actor, name) if own.startswith(HOSTS) else actor
    return None


def names_of_actors(prefix: str) -> list[str]:
    """Return the names and aliases of living actors that start with ``prefix``, sorted. Blocks briefly."""
    names = _names()
    found = {name for name in names if name.startswith(prefix)}
    return sorted(found | {alias for own, alias in aliases(prefix) if own in names})


def _names() -> set[str]:
    there = ray.util.list_named_actors(all_namespaces=True)
    return {str(each["name"]) for each in there if each["namespace"] == NAMESPACE}


def aliases(prefix: str, *, whole: bool = False) -> list[tuple[str, str]]:
    """Return (name, alias) for each actor whose alias starts with ``prefix`` or, if ``whole``, equals it."""
    keys = internal_kv._internal_kv_list(_alias_key(prefix, "" if whole else None), namespace=_KV) or ()
    return [(own, alias) for alias, _, own in (key.decode()[len(_ALIAS) :].partition("\n") for key in keys)]


def add_alias(alias: str, own: str) -> bool:
    """Give the actor named ``own`` a second name that it can be found by; return False if that name is in use.

    If two callers add the same alias at once, both may fail. Blocks briefly.
    """
    if find_actor(alias) is not None:
        return False
    internal_kv._internal_kv_put(_alias_key(alias, own), b"", overwrite=True, namespace=_KV)
    others = {alias, *(each for each, _ in aliases(alias, whole=True))} - {own}
    if others.isdisjoint(_names()):
        return True
    delete_alias(alias, own)
    return False


def delete_alias(alias: str, own: str) -> None:
    """Delete an alias of the actor named ``own``, which can then no longer be found by it. Blocks briefly."""
    internal_kv._internal_kv_del(_alias_key(alias, own), namespace=_KV)


def _alias_key(alias: str, own: str | None) -> bytes:
    return f"{_ALIAS}{alias}{'' if own is None else chr(10) + own}".encode()


def actors_named(prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield (name, actor) for living actors whose names start with ``prefix``, sorted. Blocks briefly."""
    for name in names_of_actors(prefix):
        if (actor := find_actor(name)) is not None:  # else it has just ended
            yield name, actor


def insist(call: Callable[[], Any], *, timeout_s: float | None, patience_s: float = _PATIENCE_S) -> Any:
    """Call an actor and return its result, repeating the call while Ray restarts the actor.

    Args:
        timeout_s: Longest wait for one answer [s]; None waits as long as the actor lives.
    """
    away_since_s: float | None = None
    while True:
        try:
            return ray.get(call(), timeout=timeout_s)
        except ActorUnavailableError:
            now_s = time.monotonic()
            away_since_s = now_s if away_since_s is None else away_since_s
            if now_s - away_since_s > patience_s:
                raise
            time.sleep(_POLL_S)


def call_within(timeout_s: float, call: Callable[[], Any], *, again: type[Exception] = ActorUnavailableError) -> Any:
    """Call an actor and return its answer within ``timeout_s`` [s]; a call that meets a restart is repeated.

    Args:
        again: Error by which a restart is known. The call must do no harm if it is made twice.
    """
    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            return ray.get(call(), timeout=max(0.1, deadline_s - time.monotonic()))
        except again:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(_POLL_S)
