"""Core of the allocator: a pure state machine that handles events and returns instructions."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence

from placement.allocator import events
from placement.allocator.config import AllocatorConfig
from placement.allocator.events import Allocate, Event, Instruction, Unsatisfiable
from placement.allocator.explaining import Explanation, explain
from placement.allocator.significance import KnownJob, trigger_of
from placement.allocator.snapshot import CoreSnapshot, DecisionRecord, JobState, Trigger
from placement.cluster.cluster import Allocation, AllocationError, Change, Cluster, Node, check, diff, parts
from placement.cluster.jobs import JobView, worker_kind
from placement.cluster.node_record import NodeRecord
from placement.goodput.speeds import spread
from placement.knowledge.knowledge import Knowledge
from placement.planning.failing_nodes import avoid_failing
from placement.planning.plan import make_plan, possible_nodes, unsatisfiable
from placement.planning.problem import Plan
from placement.policies.shared.base import Policy
from placement.reasons import Cause, Reason, nodes_of

# Longest time between two ``TimePassed`` that counts as a job's silence [s]: beyond it the allocator was busy.
_BETWEEN_TICKS_S = 2.0
# After a start beside jobs that run already, time from the first heartbeat to hear from all.
_ALL_HEARD_S = 1.5
IMPOSSIBLE_S = 3.0
"""Time for which a job must be impossible on the nodes at hand before it is told so [s]."""

_UNFORCED = frozenset({Trigger.MODEL, Trigger.REFRESH})
"""Triggers that measured speeds alone bring about."""

_SETTLES_S = 60.0  # twice as long after each further time without another cause, up to ``_MOST_DOUBLED`` doublings
_MOST_DOUBLED = 2
_SURE = 0.05  # a speed that varies by this much or more is not followed more often than once in ``_SETTLES_S``


class AllocatorCore:
    """State machine that allocates the cluster; pure: each event carries the time, and instructions are data.

    A decision is made when a job arrives or ends, when its limits or its model change, when nodes change, and
    occasionally otherwise. One decision covers all events within ``gather_s``. At time ``due_s``, the caller must send
    ``TimePassed`` to trigger a pending decision. A heartbeat that reports no change triggers no decision. The plan may
    use slots that shrinking jobs still hold: a growing job's reservation stays pending until they are released.

    Args:
        settling: True if running jobs may not have reported yet, which is the case after the allocator restarts.
        knowledge: Measurements shared by jobs with the same fingerprint; None limits each job to its own.
    """

    def __init__(
        self,
        policy: Policy,
        config: AllocatorConfig | None = None,
        *,
        settling: bool = False,
        knowledge: Knowledge | None = None,
    ) -> None:
        self._policy, self._knowledge = policy, knowledge
        self._config = config or AllocatorConfig()
        self._constraints = self._config.constraints
        self._guaranteed: frozenset[str] = frozenset()
        self._granted: Allocation = {}
        self.cluster = Cluster()  # as last reported
        self._obtainable: tuple[Node, ...] = ()
        self._node_ids: frozenset[str] = frozenset()
        self._goes: dict[str, tuple[float, float]] = {}  # by draining node: when, by its clock and ours
        self._jobs: dict[str, KnownJob] = {}
        self._nodes = NodeRecord()
        self.avoids: Mapping[str, Reason] = {}  # why each job was kept off some nodes in the latest decision
        self._log: collections.deque[DecisionRecord] = collections.deque(maxlen=self._config.log_length)
        self.recorded = 0  # decisions so far, also those that the log no longer holds
        self._settling = settling
        # Intervals by a clock that nobody sets, and the time of day of what is shown.
        self._settled_s: float | None = None
        self._steady_s: float | None = None
        self._event_s: float | None = None
        self._decided_at_s = float("-inf")
        self._decided_s = float("-inf")
        self.decided_for: Trigger | None = None  # trigger of the latest decision
        self._changed_s = float("-inf")
        self._unjudged = False
        self._urgent: Trigger | None = None
        self._urgent_s = 0.0
        self._ticked_s: float | None = None
        self._pending: Trigger | None = None

    @property
    def log(self) -> tuple[DecisionRecord, ...]:
        """Latest decision records, oldest first. The same events in the same order give the same log."""
        return tuple(self._log)

    @property
    def decided_s(self) -> float | None:
        """Time of the latest decision [s since the epoch]; None before the first."""
        return self._decided_s if math.isfinite(self._decided_s) else None

    @property
    def prices(self) -> Mapping[str, float]:
        """Latest price per slot that balances demand (dual price), keyed by GPU type; empty if the policy has none."""
        prices: Mapping[str, float] = getattr(self._policy, "prices", {})
        return prices

    @property
    def settled(self) -> bool:
        """True if every job that was already running when this core started has had time to report."""
        return not self._settling

    @property
    def due_s(self) -> float | None:
        """Time of the pending decision [s, clock of ``steady_s`` in :meth:`handle`]; None if no event requested one."""
        if self._urgent is None or self._settling or self._config.rounds:
            return None
        return self._urgent_s + self._config.gather_s

    @property
    def jobs(self) -> tuple[str, ...]:
        """Names of the jobs that have reported to the core and have not since ended or been dropped as silent."""
        return tuple(self._jobs)

    def knows(self, job: str) -> bool:
        """True if this job has reported to the core and has not since ended or been dropped as silent."""
        return job in self._jobs

    def snapshot(self, after: int = 0) -> CoreSnapshot:
        """Return the current state as immutable values, with the decision records numbered (from 1) above ``after``."""
        new = max(self.recorded - max(after, 0), 0)
        return CoreSnapshot(
            policy=self._policy.name,
            settled=self.settled,
            cluster=self.cluster,
            constraints=self._config.constraints,
            jobs={
                name: JobState(
                    view=job.view,
                    target=dict(job.target),
                    reason=job.reason,
                    heard_s=(self._event_s or 0.0) - ((self._steady_s or 0.0) - job.heard_s),
                )
                for name, job in self._jobs.items()
            },
            log=tuple(itertools.islice(self._log, max(len(self._log) - new, 0), None)),
            node_failures=tuple(
                each for each in self._nodes.rows(self._steady_s or 0.0) if each.node in self._node_ids
            ),
        )

    def explain(self, job: str) -> Explanation:
        """Explain why a job has its current workers, and the effect of one more worker, without making a decision.

        Raises KeyError if no job has this name; the message lists the known names.
        """
        if job not in self._jobs:
            raise KeyError(f"job must be one of {sorted(self._jobs)}, but got {job!r}")
        now_s = self._event_s or 0.0
        views = {view.job: view for view in self.views(now_s)}
        known = self._jobs[job]
        view = views.get(job, known.view)  # a job that no node could hold takes no part in decisions
        plan = functools.partial(self._plan, now_s=now_s)
        return explain(view, known.reason, list(views.values()), plan, self.cluster)

    def handle(self, event: Event, now_s: float, steady_s: float | None = None) -> list[Instruction]:
        """Handle one event and return the resulting instructions, with those that shrink jobs first.

        Args:
            now_s: Wall-clock time [s since the epoch], which is displayed, stored and passed to the policy.
            steady_s: Monotonic time [s] for measuring intervals; None if ``now_s`` is itself monotonic.
        """
        steady_s = now_s if steady_s is None else steady_s
        self._event_s = now_s
        self._watch_the_clock(steady_s)
        if isinstance(event, events.JobHeartbeat):
            self._receive(event.view, now_s, steady_s)
            if event.cluster is not None:
                self._update_nodes(event.cluster)
        elif isinstance(event, events.JobEnded):
            if event.view is not None:
                self._nodes.ended(event.view)
            if self._jobs.pop(event.job, None) is not None:
                self._hurry(Trigger.END)
                if self._knowledge is not None:
                    if event.view is not None:
                        self._knowledge.learn(event.view, now_s)
                    self._knowledge.ended(event.job, now_s)
            if event.cluster is not None:
                self._update_nodes(event.cluster)
        elif isinstance(event, events.NodesChanged):
            self._obtainable = event.obtainable
            self._update_nodes(event.cluster)
        elif isinstance(event, events.NodeForgiven):
            if self._nodes.forgive(event.node, steady_s):
                self._pending = self._pending or Trigger.NODES
        elif isinstance(event, events.SettingsChanged):
            self._config = dataclasses.replace(self._config, tenants=event.tenants, priorities=event.priorities)
            self._constraints = self._config.constraints
            self._hurry(Trigger.LIMITS)
        elif isinstance(event, events.Recalled):
            if self._knowledge is not None:
                self._knowledge.recall(event.measurements, now_s)
                self._pending = self._pending or Trigger.MODEL
        elif isinstance(event, events.TimePassed):
            self._nodes.discard(steady_s, self._node_ids)
            self._drop_silent(now_s, steady_s)
        if self._settling:
            self._unjudged = True
            return []
        self._judge(event, steady_s)
        told = self._report_impossible(steady_s)
        trigger = self._due(steady_s) if isinstance(event, events.TimePassed) or not self._config.rounds else None
        changed: list[Instruction] = list(self._decide(trigger, now_s, steady_s)) if trigger else []
        if isinstance(event, events.JobHeartbeat):
            changed += self._remind(event.view.job, changed)
        return [*told, *changed]

    def _watch_the_clock(self, now_s: float) -> None:
        """Wait for heartbeats again if more than ``silence_s`` passed between events, and then decide."""
        gap = now_s - self._steady_s if self._steady_s is not None else 0.0
        self._steady_s = now_s
        if gap > self._config.silence_s and self._jobs:
            # Not the jobs were silent: this process slept. Listen again before judging any of them.
            for job in self._jobs.values():
                job.excuse(now_s)
            self._settling, self._settled_s = True, None
        if self._settling and self._settled_s is not None and now_s >= self._settled_s:
            self._settling, self._settled_s = False, None
            self._pending = self._pending or Trigger.REFRESH

    def _receive(self, view: JobView, now_s: float, steady_s: float) -> None:
        """Process a heartbeat. A new job requests a decision at once, as do new limits, except in rounds."""
        if (priority := self._config.priority_of(view.job)) is not None:
            view = dataclasses.replace(view, priority=priority)
        if self._settling and self._settled_s is None:
            # Counted from the first heartbeat: after a restart it takes the jobs a while to find the allocator.
            self._settled_s = steady_s + _ALL_HEARD_S
        if self._knowledge is not None:
            self._knowledge.learn(view, now_s)
        self._nodes.receive(view, steady_s)
        job = self._jobs.get(view.job)
        if job is None:
            self._jobs[view.job] = KnownJob.arrived(view, steady_s)
            self._hurry(Trigger.ARRIVAL)
            return
        job.receive(view, steady_s)
        if self._settling:  # nothing was decided yet: what it has is what it is to have
            job.give(dict(view.allocation))
        if self._config.rounds:
            return  # the next round looks at everything anyway
        news = trigger_of(job.decided_on, view)
        if news == Trigger.LIMITS:
            self._hurry(news)
        elif news:
            self._pending = self._pending or news

    def _update_nodes(self, cluster: Cluster) -> None:
        """Store a changed cluster; a decision is urgent if a job waits or some workers no longer fit."""
        if cluster == self.cluster:
            return
        self.cluster = cluster
        self._node_ids = frozenset(node.node_id for node in cluster.nodes)
        self._update_drains()
        if self._knowledge is not None:
            self._knowledge.machines(cluster)
        try:
            check(self._targets(), {name: job.view.bundle for name, job in self._jobs.items()}, cluster)
            urgent = any(job.waits for job in self._jobs.values())  # a waiting job may fit now
        except AllocationError:
            urgent = True
        if urgent:
            self._hurry(Trigger.NODES)
        else:
            self._pending = self._pending or Trigger.NODES

    def _update_drains(self) -> None:
        """Convert new times at which nodes go to the steady clock, once, because somebody may set the other one."""
        told = {node.node_id: node.goes_s for node in self.cluster.nodes if node.draining and node.goes_s is not None}
        ahead_s = (self._steady_s or 0.0) - (self._event_s or 0.0)
        for node, goes_s in told.items():
            if node not in self._goes or self._goes[node][0] != goes_s:
                self._goes[node] = goes_s, goes_s + ahead_s
        self._goes = {node: times for node, times in self._goes.items() if node in told}

    def _hurry(self, trigger: Trigger) -> None:
        """Request an urgent decision, due within ``gather_s``."""
        if self._urgent is None:
            self._urgent, self._urgent_s = trigger, self._steady_s or 0.0

    def _drop_silent(self, now_s: float, steady_s: float) -> None:
        """Drop silent jobs; time when the allocator was too busy to receive heartbeats does not count."""
        busy_s = 0.0 if self._ticked_s is None else steady_s - self._ticked_s - _BETWEEN_TICKS_S
        self._ticked_s = steady_s
        if busy_s > 0:
            for job in self._jobs.values():
                job.excuse(min(steady_s, job.heard_s + busy_s))
        for name in [n for n, job in self._jobs.items() if steady_s - job.heard_s > self._config.silence_s]:
            job = self._jobs.pop(name)
            silent_s = steady_s - job.heard_s
            reason = Reason(Cause.SILENT, (silent_s,), f"silence_s is {self._config.silence_s:g} s")
            self._record(now_s, Trigger.SILENCE, name, sum(job.target.values()), {}, reason)
            self._hurry(Trigger.END)

    def _due(self, now_s: float) -> Trigger | None:
        """Return the trigger of a decision that is due now; None if none is due."""
        if not self._jobs or not self.cluster.nodes:
            self._urgent = self._pending = None
            return None
        if self._urgent:
            gathered = self._config.rounds or now_s >= self._urgent_s + self._config.gather_s
            return self._urgent if gathered else None
        rested_s = now_s - max(self._changed_s, self._decided_at_s)
        if self._pending and not self._config.rounds and rested_s >= self._config.min_interval_s:
            return self._pending
        rested = self._config.rounds or now_s - self._decided_at_s >= self._config.refresh_s
        return Trigger.REFRESH if rested else None

    def _decide(self, trigger: Trigger, now_s: float, steady_s: float) -> list[Allocate]:
        """Query the policy, place the workers, and return instructions for jobs that changed."""
        self._urgent = self._pending = None
        self._decided_s, self._decided_at_s, self.decided_for = now_s, steady_s, trigger
        views = self.views(now_s)
        kept = self._kept(views, steady_s) if trigger in _UNFORCED else {}
        views = [dataclasses.replace(v, held_at=v.workers) if v.job in kept else v for v in views]
        for job in self._jobs.values():
            job.decided(forced=trigger not in _UNFORCED)
        try:
            plan = self._plan(views, self.cluster, now_s)
            units, had = {view.job: view.unit for view in views}, {view.job: view.workers for view in views}
            kept = {job: why for job, why in kept.items() if sum(plan.allocation.get(job, {}).values()) == had[job]}
            reasons = {job: reason.of_unit(units[job]) for job, reason in {**plan.reasons, **kept}.items()}
            plan = dataclasses.replace(plan, reasons=reasons)
        except Exception as error:  # a policy may be the user's own code: whatever it does, jobs keep what they have
            rule = error.rule if isinstance(error, AllocationError) else type(error).__name__
            reason = Reason(Cause.REFUSED, (self._policy.name, rule), str(error))
            if not self._log or self._log[-1].reason != reason:
                self._record(now_s, Trigger.REFUSED, "", 0, {}, reason)
            for job in self._jobs.values():
                job.give(self._surviving(job.target))
            return []
        self._guaranteed, self._granted = plan.guaranteed, plan.granted
        return self._carry_out(plan, trigger, now_s, steady_s)

    def _kept(self, views: Sequence[JobView], steady_s: float) -> dict[str, Reason]:
        """Return jobs that keep their size for now because noisy measurements have just changed it, with reasons."""
        kept = {}
        for view in views:
            job, varies = self._jobs[view.job], spread(view)
            waits_s = _SETTLES_S * 2 ** min(max(job.sways - 1, 0), _MOST_DOUBLED)
            settled_s = job.swayed_s + waits_s * min(varies / _SURE, 1.0)
            if steady_s < settled_s and view.held_at is None and view.min_workers <= view.workers <= view.max_workers:
                kept[view.job] = Reason(Cause.NOISE, (varies,))
        return kept

    def _plan(self, views: Sequence[JobView], cluster: Cluster, now_s: float) -> Plan:
        avoided = self._nodes.avoided(self._steady_s or 0.0)
        views, cluster, self.avoids = avoid_failing(views, cluster, avoided)
        plan = make_plan(self._policy, views, cluster, now_s, self._constraints, self._guaranteed, self._granted)
        return plan.noted(self.avoids) if self.avoids else plan

    def views(self, now_s: float) -> list[JobView]:
        """Return all jobs that could run and are not paused, with their planned workers and shared measurements."""
        views = [
            job.view.placed(self._surviving(job.target))
            for job in sorted(self._jobs.values(), key=lambda job: job.view.arrival)
            if job.impossible_since_s is None and not job.view.paused
        ]
        return views if self._knowledge is None else [self._knowledge.complete(view, now_s) for view in views]

    def views_to_scale_for(self, now_s: float) -> Sequence[JobView]:
        """Return the jobs to consider when sizing the cluster, each excluded from the nodes that it avoids."""
        return avoid_failing(self.views(now_s), self.cluster, self._nodes.avoided(self._steady_s or 0.0))[0]

    def _carry_out(self, plan: Plan, trigger: Trigger, now_s: float, steady_s: float) -> list[Allocate]:
        """Return an ``Allocate`` for each job with changed nodes or a new reason to wait; log the changes."""
        instructions: list[Allocate] = []
        changes = diff(self._targets(), plan.allocation)
        plan = plan.noted({change.job: why for change in changes if (why := self._loss(change))})
        for name, job in self._jobs.items():
            reason = plan.reasons.get(name, job.reason)
            if job.view.paused:
                reason = Reason(Cause.PAUSED, (job.view.paused,))
            if reason != job.reason and not job.target and name not in plan.allocation:
                told = self._allocate(job, job.view.allocation)  # let it say what it waits for
                instructions.append(dataclasses.replace(told, reason=reason))
            job.explain(reason)
        for change in changes:
            job = self._jobs[change.job]
            self._record(now_s, trigger, change.job, sum(change.before.values()), change.after, job.reason)
            job.give(change.after)
            workers = sum(change.after.values())
            explores = job.view.growth_limit is not None and workers > job.view.most_workers
            if trigger in _UNFORCED and workers != sum(change.before.values()) and not explores:
                job.swayed(steady_s)
            self._changed_s = steady_s
            # Its workers may be on other nodes than it was told last: they leave those when others are ready.
            instructions.append(self._allocate(job, {*change.before, *job.view.allocation}))
        return instructions

    def _remind(self, name: str, instructions: list[Instruction]) -> list[Instruction]:
        """Repeat the instruction for a job that differs from its target, as a message or worker may have been lost."""
        job = self._jobs.get(name)
        target = {} if job is None else self._surviving(job.target)  # with no node left nothing is decided
        if job is None or dict(job.view.allocation) == target:
            return []
        if any(instruction.job == name for instruction in instructions):
            return []
        return [dataclasses.replace(self._allocate(job, job.view.allocation), nodes=target)]

    def _allocate(self, job: KnownJob, before: Iterable[str]) -> Allocate:
        """Return the instruction for a job's target, with what is known of the nodes that it had ``before``."""
        goes = self._draining_of(before)
        return Allocate(
            job=job.view.job,
            nodes=dict(job.target),
            reason=job.reason,
            draining=goes,
            nodes_may_come=bool(goes and possible_nodes(job.view, Cluster(nodes=self._obtainable))),
        )

    def _loss(self, change: Change) -> Reason | None:
        """Return why a job leaves nodes that are draining or gone; None if it leaves no such node."""
        left = {node for node, workers in change.before.items() if change.after.get(node, 0) < workers}
        if gone := {node for place in left for node in parts(place)} - self._node_ids:
            return Reason(Cause.GONE, nodes_of(gone))
        drain = {node for place in left for node in self._draining_of(parts(place))}
        return Reason(Cause.DRAIN, nodes_of(drain)) if drain else None

    def _draining_of(self, nodes: Iterable[str]) -> dict[str, float]:
        """Return those of ``nodes`` (node ids, or places of units) that drain, with the time left [s], 0 if unknown."""
        now_s = self._steady_s or 0.0
        goes_s = {node: steady_s for node, (_, steady_s) in self._goes.items()}
        left_s = {n.node_id: max(0.0, goes_s.get(n.node_id, now_s) - now_s) for n in self.cluster.nodes if n.draining}
        draining = {place: left_s.keys() & parts(place).keys() for place in sorted(set(nodes))}
        return {place: min(left_s[node] for node in goes) for place, goes in draining.items() if goes}

    def _judge(self, event: Event, now_s: float) -> None:
        """Find the jobs that this cluster could never run, if the event may have changed that."""
        if isinstance(event, events.JobHeartbeat):
            suspects = [self._jobs[event.view.job]]
        else:
            suspects = list(self._jobs.values()) if isinstance(event, events.NodesChanged) or self._unjudged else []
            self._unjudged = False
        possible = Cluster(nodes=(*self.cluster.nodes, *self._obtainable)) if self._obtainable else self.cluster
        reasons: dict[object, Reason | None] = {}  # thousands of jobs share a few kinds of workers
        for job in suspects:
            view = job.view
            spans = any(len(parts(place)) > 1 for place in view.allocation)  # it may stay beside a larger node
            kind = worker_kind(view), view.min_workers, view.unit, spans
            if kind not in reasons:
                reasons[kind] = unsatisfiable(view, possible)
            why = reasons[kind]
            if job.judge(None if view.paused or why is None else why.of_unit(view.unit), now_s):
                self._hurry(Trigger.NODES)

    def _report_impossible(self, now_s: float) -> list[Instruction]:
        """Return one notification for each impossible job, after a short delay for nodes that are still joining."""
        return [
            Unsatisfiable(job=name, reason=job.reason, final=bool(self._obtainable))
            for name, job in self._jobs.items()
            if job.must_report_impossible(now_s, IMPOSSIBLE_S)
        ]

    def _surviving(self, target: Mapping[str, int]) -> dict[str, int]:
        return {place: workers for place, workers in target.items() if parts(place).keys() <= self._node_ids}

    def _targets(self) -> Allocation:
        return {name: dict(job.target) for name, job in self._jobs.items() if job.target}

    def _record(
        self, now_s: float, trigger: Trigger, job: str, before: int, nodes: Mapping[str, int], reason: Reason
    ) -> None:
        """Append to the decision log; ``before`` is the former number of workers, ``nodes`` the new workers by node."""
        self.recorded += 1
        self._log.append(
            DecisionRecord(
                time_s=now_s,
                trigger=trigger,
                job=job,
                from_workers=before,
                to_workers=sum(nodes.values()),
                nodes=dict(nodes),
                reason=reason,
            )
        )
