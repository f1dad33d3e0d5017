"""SHELL: actors of ours that others find by name: how they are made, found, listed and asked again."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError

from placement.ray_cluster.snapshot import on_head

NAMESPACE = "elastic_ray"
"""Ray's namespace of all named actors of ours."""

ALLOCATOR = "allocator"
"""Name of the cluster's allocator."""

_PATIENCE_S = 60.0
_POLL_S = 0.1


@functools.cache
def actor_class(kind: type) -> Any:
    """``ray.remote`` of a class, once: each call makes classes that Ray keeps, some 20 kB."""
    return ray.remote(kind)


def create_on_head(kind: type, name: str, *arguments: Any, **options: Any) -> Any:
    """Make an actor that outlives the process that makes it, on the head node: without that nothing runs.

    Args:
        kind: its class.
        name: unique in our namespace.
        *arguments: of the class.
        **options: further options of Ray's, such as ``get_if_exists``.

    Raises:
        ValueError: an actor of this name is alive, and ``get_if_exists`` is not set.
    """
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
    """The actor of this name; None if there is none. Blocks for a moment."""
    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return None


def names_of_actors(prefix: str) -> list[str]:
    """Names of living actors that begin so, sorted. Blocks for a moment."""
    there = ray.util.list_named_actors(all_namespaces=True)
    names = (str(each["name"]) for each in there if each["namespace"] == NAMESPACE)
    return sorted(name for name in names if name.startswith(prefix))


def actors_named(prefix: str) -> Iterator[tuple[str, Any]]:
    """Living actors whose names begin so, by name. Blocks for a moment."""
    for name in names_of_actors(prefix):
        if (actor := find_actor(name)) is not None:  # else it has just ended
            yield name, actor


def insist(call: Callable[[], Any], *, timeout_s: float | None, patience_s: float = _PATIENCE_S) -> Any:
    """The answer to a call of an actor, which is called again while Ray restarts it.

    Args:
        call: makes the call; answering it twice must do no harm.
        timeout_s: longest wait for one answer [s]; None waits for as long as the actor lives.
        patience_s: longest wait for an actor that is away [s].

    Raises:
        RayError: it is gone for good, or was away for too long; GetTimeoutError: it has not answered in time.
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
