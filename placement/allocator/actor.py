"""SHELL: the allocator as one named, detached, restartable actor per Ray cluster.

It reads the clock and Ray's nodes, passes events to ``AllocatorCore``, logs the decisions and sends the resulting
instructions to the jobs' controllers. It owns no resources: placement groups and workers belong to the controllers.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import logging
import re
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError

from placement.allocator import events
from placement.allocator.config import AllocatorConfig
from placement.allocator.controllers import Controllers
from placement.allocator.core import AllocatorCore
from placement.allocator.events import Event, HeartbeatReply
from placement.allocator.explaining import Explanation
from placement.allocator.metrics import AllocatorMetrics
from placement.allocator.packed_policy import PackedPolicy, pack_policy
from placement.allocator.recording import Recorder, SteadyClock
from placement.allocator.settings import OperatorSettings, check_quotas, in_force
from placement.allocator.snapshot import AllocatorLook, CoreSnapshot, StartTimes
from placement.autoscaling.autoscaler import ScalingDecision
from placement.cluster.cluster import Cluster
from placement.cluster.jobs import JobView
from placement.errors import InputError
from placement.knowledge.knowledge import Knowledge
from placement.knowledge.store import KnowledgeSync, StorageRoot
from placement.planning.plan import possible_nodes
from placement.ray_cluster import notes
from placement.ray_cluster.autoscaler_presence import may_autoscale
from placement.ray_cluster.cluster_scaler import ClusterScaler, WaitingDemand, demand
from placement.ray_cluster.dashboard_process import DashboardProcess, resume_jobs
from placement.ray_cluster.metric_writer import cluster_writer
from placement.ray_cluster.named_actors import ALLOCATOR, create_on_head
from placement.ray_cluster.notice_watcher import Watchers
from placement.ray_cluster.orphans import Orphans
from placement.ray_cluster.snapshot import RawNode, read_nodes, usable
from placement.storage.private_files import LineFile
from placement.text import log_plainly
from placement.versions import Spoken, check_spoken, spoken

_POLL_S = 0.5
_DEFAULT_POLICY = "goodput"
_READ_TIMEOUT_S = 5.0
_HISTORY = 3  # snapshots of the nodes that are compared
_ATTEMPTS = 5  # to replace an allocator that has no jobs
_HEARINGS = 10
_ANSWER_S = 60.0  # the first answer waits for the actor's process, on a busy machine for long
_NO_PRICES = "{} is not watched: AllocatorConfig(autoscaling=...), which knows prices, is not set"
_FAREWELL_S = 10.0  # how long an ended job's groups count as ours while its controller gives them back

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")

logger = logging.getLogger("placement.allocator")


class PolicyConflictError(ValueError):
    """Error raised if a policy is requested while jobs are running under a different one."""


def get_or_create_allocator(policy: object = None, *, config: AllocatorConfig | None = None) -> ActorHandle[Any]:
    """Return a handle to the cluster's allocator, creating the allocator (on the head node) if none exists.

    A cluster has one policy and one configuration at a time. The arguments take effect only if no allocator exists, or
    if the existing one has no jobs and is replaced. An argument that is None keeps its current value.

    Args:
        policy: Any policy that ``make_policy`` accepts: a registered name, ``module:name``, a function, class or
            object. None keeps the current policy, or selects ``"goodput"`` if no allocator exists.
        config: Timing, tenants and node types; None keeps the current configuration. While jobs are running, the
            configuration is not changed and a warning is logged.

    Raises:
        PolicyConflictError: Jobs are running under a different policy.
        ValueError: The policy name is unknown.
        TypeError: The object is not a policy.
        VersionError: The running allocator is from a different release.
    """
    packed = pack_policy(
        _DEFAULT_POLICY if policy is None else policy
    )  # a bad one is the caller's error, not the actor's
    for attempt in range(_ATTEMPTS):
        handle: ActorHandle[Any] = _named_actor(packed, config)
        if policy is None and config is None:
            return handle
        try:
            ask: Any = handle.rule_by
            speak: Any = handle.speak
            ray.get(speak.remote(spoken()), timeout=_ANSWER_S)
            wanted = (None if policy is None else packed.identity, config)
            rule: AllocatorSettings | None = ray.get(ask.remote(*wanted), timeout=_ANSWER_S)
            if rule is None:
                return handle
            if rule.running:
                _leave_running(rule, wanted=packed if policy is not None else None)
                return handle
            ray.kill(handle)
            packed, config = packed if policy is not None else rule.packed, config or rule.config
        except RayActorError:  # it is on its way out
            time.sleep(0.1 * (attempt + 1))
    raise RuntimeError(
        f"the allocator was not replaced by one with policy {packed.name!r} and its configuration; try again"
    )


def _leave_running(rule: AllocatorSettings, *, wanted: PackedPolicy | None) -> None:
    """Warn that running jobs keep their allocator's configuration, or raise an error if they use another policy."""
    running = ", ".join(rule.running)
    if wanted is not None and wanted.identity != rule.packed.identity:
        raise PolicyConflictError(
            f"policy {wanted.name!r} cannot rule this cluster now: its allocator runs policy {rule.packed.name!r} for "
            f"{running}, and all jobs of a cluster share one; leave policy out, give the same one with the same "
            "settings, or wait until these jobs have ended"
        )
    logger.warning(
        "the allocator keeps its AllocatorConfig instead of the one given here, for %s; give it before the first job, "
        "or when these have ended",
        running,
    )


def find_allocator() -> Any:
    """Return a handle to the cluster's allocator, creating one with the default policy if none exists."""
    return _named_actor(pack_policy(_DEFAULT_POLICY), None)


def _named_actor(packed: PackedPolicy, config: AllocatorConfig | None) -> Any:
    return create_on_head(Allocator, ALLOCATOR, packed, config, get_if_exists=True, max_restarts=-1)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorSettings:
    """Policy, configuration and jobs of a running allocator, returned to a client that requested different settings."""

    packed: PackedPolicy
    config: AllocatorConfig | None
    running: tuple[str, ...]


def _equal(one: AllocatorConfig, other: AllocatorConfig | None) -> bool:
    """True if two configurations have the same repr; a user's objective may be a copy that does not compare equal."""
    said = [_ADDRESS.sub("", repr(each)) for each in (one, other or AllocatorConfig())]
    return said[0] == said[1]


def _kept_settings() -> OperatorSettings:
    """Return the stored operator settings; empty if unreadable, since that must not stop the cluster."""
    try:
        return OperatorSettings.from_plain(notes.settings(), where="the operator's settings")
    except InputError as error:
        logger.warning("%s; apply them again", error)
        return OperatorSettings()


class Allocator:
    """Actor class of the allocator; use ``get_or_create_allocator`` to get its handle."""

    def __init__(self, packed: PackedPolicy, config: AllocatorConfig | None = None) -> None:
        log_plainly(logging.INFO)
        self._packed = packed
        self._policy = packed.open()
        self._config = config
        self._knowledge = Knowledge()
        session = ray.get_runtime_context().get_session_name()
        self._knowledge_sync = KnowledgeSync(
            self._knowledge, session, lambda measurements: self._handle(events.Recalled(measurements=measurements))
        )
        self._ruling = _kept_settings().over(config or AllocatorConfig())
        self._watchers = Watchers(self._ruling.notices)
        self._dashboard: DashboardProcess | None = None
        self._writer = cluster_writer(self._ruling.metrics)
        self._open_nodes()
        self._open_page()
        if self._ruling.storage is not None:
            resume_jobs(self._ruling.storage, ray.get_runtime_context().gcs_address)
        self._orphans = Orphans(self._ruling.orphan_timeout_s)
        self._clock = SteadyClock()
        self._core: AllocatorCore | None = None
        file = LineFile(self._ruling.record) if self._ruling.record is not None else None
        self._recorder = Recorder(file.append if file is not None else None)
        self._started, self._applying = asyncio.Lock(), asyncio.Lock()
        self._controllers = Controllers(self._mourn)
        self._history: collections.deque[tuple[RawNode, ...]] = collections.deque(maxlen=_HISTORY)
        self._ended_s: dict[str, float] = {}
        self._logged = 0
        self._alarm: asyncio.TimerHandle | None = None
        self._life = secrets.token_hex(4)
        self._decision_cpu_s: float | None = None
        load_solver: Callable[[], None] = getattr(self._policy, "load_solver", lambda: None)
        self._solver_task = asyncio.get_event_loop().create_task(asyncio.to_thread(load_solver))
        self._loop_task = asyncio.get_event_loop().create_task(self._watch())

    def _open_nodes(self) -> None:
        scaling, constraints = self._ruling.scaling, self._ruling.constraints
        self._scaler = ClusterScaler(scaling, self._packed.open(), constraints) if scaling is not None else None
        self._demand = WaitingDemand() if self._ruling.autoscaling == "auto" else None
        self._metrics = AllocatorMetrics(self._writer, scaling.node_types if scaling is not None else ())

    def _open_page(self) -> None:
        """Start or stop the page, according to the current settings."""
        if self._ruling.dashboard and self._dashboard is None:
            self._dashboard = DashboardProcess(ray.get_runtime_context().gcs_address)
        elif not self._ruling.dashboard and self._dashboard is not None:
            self._dashboard.stop()
            self._dashboard = None

    async def settings(self, wanted: OperatorSettings | None = None) -> Mapping[str, Any]:
        """Return the operator's effective settings, or those that would be effective if ``wanted`` were applied."""
        core, ruling = await self._start(), self._ruling
        if wanted is not None:
            ruling = wanted.over(self._config or AllocatorConfig())
            known = {name for node in core.cluster.nodes for name in node.total}
            known |= {name for kind in (ruling.scaling.node_types if ruling.scaling else ()) for name in kind.resources}
            if ruling.autoscaling == "auto" and await asyncio.to_thread(may_autoscale):
                known |= {"CPU", "GPU"}  # of nodes that are not there yet
            check_quotas(ruling.tenants, known)
        return in_force(ruling).to_plain()

    async def apply(self, wanted: OperatorSettings) -> Mapping[str, Any]:
        """Apply and store an operator's settings, also for later allocators, and return the effective ones."""
        async with self._applying:  # of two operators one comes after the other
            await self.settings(wanted)
            await asyncio.to_thread(notes.keep_settings, wanted.to_plain())
            before, self._ruling = self._ruling, wanted.over(self._config or AllocatorConfig())
            ruling = self._ruling
            if repr((before.autoscaling, before.tenants)) != repr((ruling.autoscaling, ruling.tenants)):
                await self._withdraw_nodes()
                self._open_nodes()
            self._open_page()
            self._handle(events.SettingsChanged(tenants=ruling.tenants, priorities=ruling.priorities))
            return in_force(ruling).to_plain()

    async def _withdraw_nodes(self) -> None:
        for asks in (self._scaler, self._demand):
            if asks is not None:
                await asks.withdraw()

    async def speak(self, theirs: Spoken) -> None:
        """Check the protocol version of a controller or driver, which must call this first."""
        check_spoken(theirs, "a job", "the cluster's allocator")

    async def heartbeat(
        self, view: JobView, controller: ActorHandle[Any], root: StorageRoot | None = None
    ) -> HeartbeatReply:
        """Handle a heartbeat from a job's controller, sent every second and immediately after a change.

        Args:
            root: Storage location of the job's results. Controllers send it until a reply confirms receipt.
        """
        core = await self._start()
        if root is not None and not self._knowledge_sync.knows(view.job):
            await self._knowledge_sync.open(view.job, root)  # before anything is decided about it
        self._knowledge_sync.heard(view)
        self._controllers.heard(view.job, controller)
        self._ended_s.pop(view.job, None)
        # Up to now what a newcomer holds counted as others' use, and no decision may rest on that.
        new = not core.knows(view.job)  # of the many in a burst none has placement groups
        may_hold = new and (view.allocation or any(view.job in node.reserved for at in self._history for node in at))
        cluster = self._usable(view.job) if may_hold else None
        self._handle(events.JobHeartbeat(view=view, cluster=cluster))
        avoids = core.avoids.get(view.job)
        return HeartbeatReply(
            priors=self._knowledge.priors(view, time.time()),
            strategies=self._knowledge.strategies(view, time.time()),
            knows_root=self._knowledge_sync.knows(view.job),
            bill=self._scaler.autoscaler.bill(view.job) if self._scaler is not None else None,
            note="; ".join(filter(None, (self._remarks(view), avoids.figures if avoids is not None else ""))),
            start_s=None if view.workers else self._starts.of(view.job, time.time()),
            nodes=len(possible_nodes(view, core.cluster)),
        )

    def _remarks(self, view: JobView) -> str:
        if self._scaler is None:
            said = [] if view.budget_usd is None else [f"budget_usd={view.budget_usd:g}"]
            said += [] if view.utility is None else ["the cost beside utility"]
            return "; ".join(map(_NO_PRICES.format, said))
        return self._scaler.decision.note(view.job) if self._scaler.decision is not None else ""

    async def ended(self, job: str, view: JobView | None = None) -> None:
        """Handle a job's end; ``view`` is its final state, or None if unknown."""
        await self._start()
        self._discard(job, view)

    async def snapshot(self) -> CoreSnapshot:
        """Return the allocator's current state and decisions."""
        return (await self._start()).snapshot()

    async def views(self) -> tuple[JobView, ...]:
        """Return all jobs that could run, as the policy sees them: with planned workers and shared measurements."""
        return tuple((await self._start()).views(time.time()))

    async def poll(self, life: str, after: int) -> AllocatorLook:
        """Return the data that the web page polls.

        Args:
            life: Allocator id from the previous poll. If it differs from the current id, all records are returned.
            after: Number of the last decision record that the page already has.
        """
        core = await self._start()
        return AllocatorLook(
            core=core.snapshot(after if life == self._life else 0),
            recorded=core.recorded,
            life=self._life,
            tenants=self._ruling.tenants,
            scaling=self._scaler.decision if self._scaler is not None else None,
            spot_types=self._scaler.spot_types if self._scaler is not None else frozenset(),
            decision_cpu_s=self._decision_cpu_s,
            decided_s=core.decided_s,
        )

    async def dashboard(self) -> str:
        """Return the web page's address; empty if the page is not served."""
        return self._dashboard.address if self._dashboard is not None else ""

    async def explain(self, job: str) -> Explanation:
        """Explain why a job has its current workers, and the effect of one more worker."""
        found, decision = (
            (await self._start()).explain(job),
            self._scaler.decision if self._scaler is not None else None,
        )
        return found if decision is None else dataclasses.replace(found, nodes_wanted=decision.explained(job))

    async def scaling(self) -> tuple[ScalingDecision | None, dict[str, float]]:
        """Return the latest decision about the cluster's size, or None, and the cost so far [USD], keyed by job."""
        return (None, {}) if self._scaler is None else (self._scaler.decision, dict(self._scaler.autoscaler.spent_usd))

    async def forgive(self, node: str) -> bool:
        """Clear a node's record of failures; return True if there were any."""
        had = any(each.node == node for each in (await self._start()).snapshot().node_failures)
        self._handle(events.NodeForgiven(node=node))
        return had

    async def rule_by(self, identity: str | None, config: AllocatorConfig | None) -> AllocatorSettings | None:
        """Return None if the requested policy and configuration are already in effect, otherwise the current settings.

        ``identity`` identifies the requested policy; None for either argument accepts the current one. If the settings
        differ and no jobs exist, all state is saved first, so the caller may replace this actor.
        """
        core = await self._start()
        if identity in (None, self._packed.identity) and (config is None or _equal(config, self._config)):
            return None
        for _ in range(_HEARINGS):
            if core.settled:
                break
            await asyncio.sleep(_POLL_S)  # made anew beside running jobs, it has yet to hear of them
        if not core.jobs:
            await self._knowledge_sync.save(now=True)
            await self._withdraw_nodes()
        return AllocatorSettings(packed=self._packed, config=self._config, running=core.jobs)

    async def _start(self) -> AllocatorCore:
        """Return the core, creating it once the nodes are known. Existing groups mean that jobs have yet to report."""
        async with self._started:
            if self._core is None:
                while (nodes := await self._read()) is None:
                    await asyncio.sleep(_POLL_S)
                running = any(node.reserved for node in nodes)
                core = AllocatorCore(self._policy, self._ruling, settling=running, knowledge=self._knowledge)
                self._recorder.begun(self._policy, self._ruling, settling=running)
                self._core = core
                self._handle(self._nodes_changed(usable(self._history, ())))
                self._starts = StartTimes(lambda: core.snapshot(core.recorded))
            return self._core

    async def _watch(self) -> None:
        """Poll the nodes twice a second; an error is logged and does not end the loop."""
        core = await self._start()
        while True:
            await asyncio.sleep(_POLL_S)
            try:
                if await self._read() is not None:
                    self._update_nodes()
                jobs = len(core.jobs)
                self._handle(events.TimePassed())
                if len(core.jobs) < jobs:  # what the workers of one that is silent hold is not to be given away
                    self._update_nodes()
                self._scale()
                self._metrics.tick(time.monotonic(), core, self._scaler.decision if self._scaler is not None else None)
                self._controllers.ask_the_quiet()
                self._controllers.spawn(self._knowledge_sync.save())
                self._controllers.spawn(self._orphans.poll({*core.jobs, *self._ended_s}, time.monotonic()))
            except Exception:
                logger.exception("a round of the allocator failed; the next one follows in %g s", _POLL_S)

    async def _read(self) -> tuple[RawNode, ...] | None:
        """Read Ray's nodes and append them to the history; return None if they cannot be read or there are none."""
        try:
            nodes = await asyncio.wait_for(asyncio.to_thread(read_nodes), timeout=_READ_TIMEOUT_S)
        except Exception as error:  # the control store may be away for a moment; the last view stays
            logger.warning("Ray's nodes could not be read: %s", error)
            return None
        if not nodes:  # not even the head that this runs on; a cluster without nodes would have every job stopped
            logger.warning("Ray names no node at all; the last view stays")
            return None
        self._history.append(nodes)
        return nodes

    def _update_nodes(self) -> None:
        now_s = time.monotonic()
        self._ended_s = {job: at_s for job, at_s in self._ended_s.items() if now_s - at_s < _FAREWELL_S}
        self._handle(self._nodes_changed(self._usable()))
        self._watchers.watch(self._history[-1])

    def _nodes_changed(self, cluster: Cluster) -> events.NodesChanged:
        scaling = self._ruling.scaling
        return events.NodesChanged(cluster=cluster, obtainable=scaling.obtainable if scaling is not None else ())

    def _usable(self, *newcomers: str, but: str = "") -> Cluster:
        assert self._core is not None, "the loop starts after the core"
        cluster = self._present(newcomers, but)
        return cluster if self._scaler is None else self._scaler.marked(cluster)

    def _present(self, newcomers: Iterable[str] = (), but: str = "") -> Cluster:
        assert self._core is not None, "the loop starts after the core"
        return usable(self._history, {*self._core.jobs, *self._ended_s, *newcomers} - {but})

    def _scale(self) -> None:
        """Scale the cluster in the background, so that nothing else waits for nodes.

        Waits until jobs that were running before have reported, because their nodes would otherwise count as empty.
        """
        assert self._core is not None, "the loop starts after the core"
        if self._demand is not None and self._core.settled:
            jobs = [job for job in self._core.snapshot(self._core.recorded).jobs.values() if not job.view.paused]
            waiting = {job.view.job for job in jobs if not job.target}
            self._demand.poll(demand([job.view for job in jobs], waiting, self._ruling.tenants))
        if self._scaler is not None and self._core.settled:
            now_s, steady_s = self._clock.read()
            if self._scaler.is_due():
                self._scaler.poll(self._core.views_to_scale_for(now_s), self._present(), steady_s)

    def _discard(self, job: str, view: JobView | None = None, cluster: Cluster | None = None) -> None:
        """Discard an ended job; with ``cluster``, resources still held by its workers count as used by others."""
        self._controllers.discard(job)
        if cluster is None:
            self._ended_s[job] = time.monotonic()
        if self._scaler is not None:
            logger.info("job %s has cost %.4f USD", job, self._scaler.autoscaler.discard(job))
        self._handle(events.JobEnded(job=job, view=view, cluster=cluster))
        self._knowledge_sync.ended(job)
        self._controllers.spawn(self._knowledge_sync.save())

    def _handle(self, event: Event) -> None:
        """Pass an event to the core and carry out its instructions."""
        assert self._core is not None, "events come after the start"
        now_s, steady_s = self._clock.read()
        self._recorder.told(event, now_s, steady_s)
        before_s, begun_s = self._core.decided_s, time.thread_time()
        instructions = self._core.handle(event, now_s, steady_s)
        if self._core.decided_s != before_s:
            self._decision_cpu_s = time.thread_time() - begun_s
            self._metrics.decided(self._core.decided_for, self._decision_cpu_s)
        self._log_news()
        for instruction in instructions:
            self._controllers.post(instruction)
        if self._core.due_s is not None and self._alarm is None:
            wait_s = max(self._core.due_s - steady_s, 0.0)
            self._alarm = asyncio.get_running_loop().call_later(wait_s, self._ring)

    def _ring(self) -> None:
        self._alarm = None
        self._handle(events.TimePassed())

    def _log_news(self) -> None:
        """Log one line for each decision since the last call."""
        assert self._core is not None, "events come after the start"
        new = self._core.recorded - self._logged
        if not new:
            return
        self._logged, fresh = self._core.recorded, self._core.log[-new:]
        self._recorder.decided(fresh)
        for record in fresh:
            # Of a job's own size, its events tell, with the same reason; `elastic-ray allocator` lists all decisions.
            logger.log(logging.DEBUG if record.job else logging.INFO, "%s", record)

    def _mourn(self, job: str) -> None:
        """Discard a job whose controller is gone for good; its workers save it and release their resources."""
        self._discard(job, cluster=self._usable(but=job))
        self._controllers.spawn(self._orphans.release(job))
