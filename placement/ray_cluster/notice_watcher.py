"""SHELL: watch for the cloud's notice that a spot node will be reclaimed; Ray then drains the node.

All components handle draining nodes: the allocator moves jobs off them, and Ray schedules nothing new on them. Since an
actor keeps a node from being idle, only nodes that elastic jobs use are watched.
"""

from __future__ import annotations

import asyncio
import http.client
import logging
import math
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Collection
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from placement.cluster.cluster import MARKET_LABEL, SPOT
from placement.ray_cluster.named_actors import actor_class
from placement.ray_cluster.notices import AWS_TOKEN, Notice, NoticeConfig, Request, probe, question, read_notice
from placement.ray_cluster.snapshot import RawNode
from placement.text import log_plainly

logger = logging.getLogger("placement.ray_cluster.notices")

_ANSWER_S = 1.0  # without a byte
_TOKEN_S = 3600.0
_REFUSED = 401  # the token has run out, or the server has forgotten it
_QUIET_POLLS = 30  # unanswered looks after which it is asked again what cloud this is


class Watchers:
    """Allocator's watcher actors, one on each watched node; they end with the allocator."""

    def __init__(self, config: NoticeConfig) -> None:
        self._config = config
        self._actors: dict[str, Any] = {}

    def watch(self, nodes: Collection[RawNode]) -> None:
        """Watch the nodes that jobs use and that may be reclaimed; stop watching all other nodes."""
        wanted = {
            node.node_id
            for node in nodes
            if self._config.enabled and node.reserved and not node.draining and node.labels.get(MARKET_LABEL) == SPOT
        }
        for node_id in self._actors.keys() - wanted:
            ray.kill(self._actors.pop(node_id))
        for node_id in wanted - self._actors.keys():
            self._actors[node_id] = (
                actor_class(NoticeWatcher)
                .options(
                    num_cpus=0, max_restarts=-1, scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False)
                )
                .remote(self._config, node_id)
            )


class NoticeWatcher:
    """Actor class that watches, on one node, for the cloud's notice that it will reclaim that node."""

    def __init__(self, config: NoticeConfig, node_id: str) -> None:
        log_plainly(logging.INFO)
        self._config, self._node_id = config, node_id
        self._metadata = Metadata(config)
        self._main = asyncio.get_event_loop().create_task(self._run())

    async def _run(self) -> None:
        """Poll the cloud every ``poll_s`` until it gives notice, then drain the node; errors are only logged."""
        cloud: str | None = None
        failures = 0
        said = False
        while True:
            try:
                if cloud is None or failures >= _QUIET_POLLS:
                    cloud, failures = await asyncio.to_thread(self._metadata.find_cloud), 0
                    if cloud is None and not said:
                        said = True
                        logger.warning(
                            "node %s is a spot node, but no cloud answers at %s: it may go without notice",
                            self._node_id[:8], self._config.address,
                        )  # fmt: skip
                notice = await asyncio.to_thread(self._metadata.poll, cloud) if cloud is not None else None
                if notice is not None:
                    await asyncio.to_thread(drain, self._node_id, notice)
                    return
                failures = 0
            except Exception as error:  # a metadata server may be away for a moment; this one must not
                failures += 1
                if failures == 1:
                    logger.warning("node %s: no answer about its end: %s", self._node_id[:8], error)
            await asyncio.sleep(self._config.poll_s)


class Metadata:
    """Client of a machine's metadata server, which names the cloud and announces the machine's end; it blocks."""

    def __init__(self, config: NoticeConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._config, self._clock = config, clock
        self._token = ""
        self._token_s = -math.inf  # not 0: a clock that counts from boot says less than an hour for an hour
        self._machine = ""

    def find_cloud(self) -> str | None:
        """Return the first cloud whose probe the metadata server answers; None if it answers none."""
        candidates = ("gcp", "azure", "aws") if self._config.cloud == "auto" else (self._config.cloud,)
        for cloud in candidates:
            try:
                found = self._ask(probe(cloud))
            except (OSError, http.client.HTTPException):
                continue
            if found is not None:
                self._machine = found if cloud == "azure" else ""  # Azure is asked for the machine's name
                return cloud
        return None

    def poll(self, cloud: str) -> Notice | None:
        """Return the cloud's notice that it will reclaim this machine; None if there is none."""
        try:
            answer = self._ask(self._question(cloud))
        except urllib.error.HTTPError as error:
            if cloud != "aws" or error.code != _REFUSED:
                raise
            self._token_s = -math.inf
            answer = self._ask(self._question(cloud))
        return read_notice(cloud, answer, now_s=time.time(), machine=self._machine)

    def _question(self, cloud: str) -> Request:
        if cloud == "aws" and self._clock() - self._token_s > _TOKEN_S:
            self._token, self._token_s = self._ask(AWS_TOKEN) or "", self._clock()
        return question(cloud, self._token)

    def _ask(self, request: Request) -> str | None:
        """Return the body of the response; None for 404 (not found)."""
        asked = urllib.request.Request(
            self._config.address.rstrip("/") + request.path, headers=dict(request.headers), method=request.method
        )
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # never through a proxy
        try:
            with opener.open(asked, timeout=_ANSWER_S) as answer:
                return str(answer.read(65536).decode(errors="replace"))
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return None
            raise


def drain(node_id: str, notice: Notice) -> None:
    """Drain a node through Ray, because its cloud will reclaim it."""
    if refusal := ask_to_drain(node_id, notice.reason, notice.deadline_s):
        logger.warning("node %s cannot be drained: %s", node_id[:8], refusal)
    else:
        logger.info("node %s drains: %s, in %.0f s", node_id[:8], notice.reason, notice.deadline_s - time.time())


def ask_to_drain(node_id: str, reason: str, deadline_s: float) -> str:
    """Request Ray to drain a node, as ``ray drain-node`` does; return "", or Ray's reason if it refuses."""
    from ray._raylet import GcsClient  # type: ignore[attr-defined]
    from ray.core.generated import autoscaler_pb2

    client = GcsClient(address=ray.get_runtime_context().gcs_address)
    why = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")  # type: ignore[attr-defined]
    deadline_ms = int(max(deadline_s, time.time() + 1.0) * 1000)
    accepted, message = client.drain_node(node_id, why, reason, deadline_ms)
    return "" if accepted else message or "Ray gives no reason"
