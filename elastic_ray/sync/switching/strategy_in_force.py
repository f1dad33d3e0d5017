"""Current strategy of one model, and its replacement on request or by ``Auto``.

A new strategy takes effect between two steps, when buckets are laid out again. The tuner that chooses strategies is
replaced at the same time. Until then, all ranks keep the agreed strategy, even if one of them has requested another.

``elastic_ray.sync.choosing`` makes the decisions of ``Auto``. Steps are measured right after their gradients have been
reduced, when all ranks are in the same step and the gradient group is not used for anything else.
"""

from __future__ import annotations

import dataclasses
import hashlib
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from elastic_ray.batch.reports import CHOSEN
from elastic_ray.state.layout import digest
from elastic_ray.sync.builders import Auto, StrategyBuilder, resolve_strategy
from elastic_ray.sync.checks import StrategyError
from elastic_ray.sync.choosing.candidates import consider, with_rows
from elastic_ray.sync.choosing.choice import UNHEARD, Choice, Measured, advance, leave, most_candidates, watch_rows
from elastic_ray.sync.choosing.explanation import StrategyTable, explain
from elastic_ray.sync.plan import ModelProfile, SyncPlan, Topology, lower
from elastic_ray.sync.spec import Strategy
from placement.cluster.jobs import FoundStrategy

if TYPE_CHECKING:
    from elastic_ray.run.run import Run
    from elastic_ray.sync.engine.gradient_engine import GradientEngine
    from elastic_ray.sync.tables.row_bucket import RowBucket

_WATCH_EVERY = 64
"""Steps between two looks at the rows that are touched."""
_HEARING_S = 10.0  # a race waits for so long for what earlier jobs have found


class StrategyTuner:
    """Tuner that chooses a strategy for ``Auto`` during training through a race between candidates.

    The tuner's state is the same on all ranks, and is sent to joining ranks.
    """

    def __init__(self, context: Run, auto: Auto, model: StrategyInForce, strategy: Strategy, number: int) -> None:
        self._context, self._auto, self._model, self._number = context, auto, model, number
        self.choice = self._before = Choice(strategy=strategy, settled=True)  # alone there is nothing to synchronise
        self._form = ""
        self._known: dict[str, Choice] = {}  # of other forms of the group
        self._told = ""
        self._looked_at: Choice | None = None
        self._step: object | None = None
        self._since_s: float | None = None
        self._entered_s = time.monotonic()

    @property
    def strategy(self) -> Strategy:
        """Strategy used from the next step on: the race's current candidate or winner."""
        return self.choice.strategy

    @property
    def agenda(self) -> str:
        """Measurement settings as text, which must be the same on all ranks."""
        return repr(self._auto)

    @property
    def found(self) -> dict[str, FoundStrategy]:
        """Race winners, for other jobs with the same model; keyed by model number and placement of ranks on nodes."""
        choices = {**self._known, self._form: self.choice}
        return {
            f"{self._number} {form}": FoundStrategy(name=choice.strategy.name, step_s=measured[choice.strategy.name])
            for form, choice in choices.items()
            if choice.settled and choice.strategy.name in (measured := choice.measured)
        }

    def notify(self, table: Callable[[], str]) -> None:
        """Report a chosen strategy to the job's user once it is in use, with the text returned from ``table``."""
        choice = self.choice
        if choice is self._looked_at or not choice.settled or self._model.plan.strategy != choice.strategy:
            return
        self._looked_at = choice
        told = f"{self._form} {choice.reason}"
        if not choice.reason or told == self._told:
            return
        self._told = told
        workers = len(self._model.topology.nodes)
        detail = {
            "strategy": choice.strategy.name,
            "workers": workers,
            "considered": [each.name for each in choice.options],
            "measured_s": choice.measured,
            "json": choice.strategy.to_json(),
            "table": table(),
        }
        self._context.notify("strategy", f"strategy for {workers} workers: {choice.reason}", detail)

    def reduced(self) -> None:
        """Record that a backward pass has been reduced; only the first pass in a step is measured."""
        step, ledger = self._context.ledger.step, self._context.ledger
        if step is None or step is self._step:
            return
        self._step = step
        if not self.choice.measures:
            if ledger.state.progress.steps % _WATCH_EVERY == 0 and self._model.touched:
                self.choice = watch_rows(self.choice, self._agree(0.0).rows)
            return
        if not self._context.registry.have_chosen(self._number):
            self._since_s = None
            return
        if self._model.plan.strategy == self.choice.strategy:
            took_s = time.perf_counter() - self._since_s if self._since_s is not None else 0.0
            self.choice = advance(self.choice, self._agree(took_s), self._auto.steps, self._consider)
        self._since_s = time.perf_counter()

    def _agree(self, step_s: float) -> Measured:
        """Return the slowest rank's time, the most rows, and rank 0's known strategy; 0 s means it was not measured."""
        touched = self._model.touched
        own = [*self._known_strategy(), round(step_s * 1e9), *touched.values()]
        rows = self._context.group.communicator.gather_ints(own, with_gradients=True)
        measured = all(row[2] for row in rows)
        steps, *counts = (max(column) for column in zip(*(row[2:] for row in rows), strict=True))
        return Measured(
            step_s=steps / 1e9 if measured else None,
            rows=dict(zip(touched, counts, strict=True)),
            known=rows[0][0],
            known_s=rows[0][1] / 1e9,
        )

    def _known_strategy(self) -> tuple[int, int]:
        """Return a digest of the strategy found fastest in earlier jobs, and its step time [ns]; 0 if unknown."""
        heard = self._context.membership.known_strategies
        if heard is None and time.monotonic() - self._entered_s < _HEARING_S:
            return UNHEARD, 0
        known = None if heard is None else heard.get(f"{self._number} {self._form}")
        return (0, 0) if known is None else (digest(known.name), round(known.step_s * 1e9))

    def _consider(self, rows: Mapping[str, int], present: Strategy) -> tuple[Strategy, ...]:
        profile, auto = with_rows(self._model.profile, rows), self._auto
        most, works = most_candidates(auto.steps - 1), self._model.works
        return consider(profile, self._model.topology, present, exact=auto.exact, most=most, works=works)

    def enter_group(self) -> None:
        """Enter a group: reuse the strategy chosen earlier for this distribution over nodes, or start measuring."""
        self._since_s, self._step, self._entered_s = None, None, time.monotonic()
        form = self._form_of(self._model.topology)
        if form != self._form:
            if self._form:
                self._known[self._form] = self.choice
            came = leave(self.choice)
            self._form = form
            self.choice = self._known.pop(form, Choice(strategy=came, settled=not form))
        self._before = self.choice

    def _form_of(self, topology: Topology) -> str:
        """Return the backend and which ranks share nodes, regardless of node names; "" for a lone rank."""
        if topology.world_size == 1:
            return ""
        levels = [list(map(list(dict.fromkeys(each)).index, each)) for each in (topology.nodes, topology.domains)]
        size = f"{topology.world_size} on {len(set(topology.nodes))}"
        return f"{self._context.group.communicator.backend} {size} {digest(levels):x}"

    def remember(self) -> None:
        """Save the choice at the start of a step so that it can be rolled back."""
        self._before = self.choice

    def roll_back(self) -> None:
        """Restore the choice to its state before the lost step, and discard the step's measurements."""
        self.choice = self._before
        self._since_s, self._step = None, None

    def capture(self) -> dict[str, Any]:
        """Return the tuner's state as plain values, for joining ranks and checkpoints."""
        return {
            "auto": dataclasses.asdict(self._auto),
            "form": self._form,
            "choice": self.choice.to_state(),
            "known": {key: choice.to_state() for key, choice in self._known.items()},
            "told": self._told,
        }

    def restore(self, tree: Mapping[str, Any]) -> None:
        """Restore a state returned from :meth:`capture`."""
        self._auto, self._form = Auto(**tree["auto"]), tree["form"]
        self.choice = self._before = Choice.from_state(tree["choice"])
        self._known = {key: Choice.from_state(choice) for key, choice in tree["known"].items()}
        self._told = tree["told"]


_KEPT_TIMES = 31


@dataclasses.dataclass(frozen=True, slots=True)
class _Asked:
    """Requested strategy that takes effect at the next step, and its tuner."""

    strategy: Strategy
    tuner: StrategyTuner | None


class StrategyInForce:
    """Current strategy and plan of one model, with the switch to another strategy or tuner.

    Raises StrategyError if the strategy cannot be used with this model and optimizer.
    """

    def __init__(self, context: Run, model: GradientEngine, builder: StrategyBuilder, number: int) -> None:
        self._context, self._model, self._number = context, model, number
        self.asked: _Asked | None = None
        self.takes = 0  # how often buckets were laid out anew since the present group was entered; equal on all ranks
        self.wanted: Strategy | None = None  # by the tuner, or by the state of another rank
        self._rows: Mapping[str, RowBucket] = {}
        self.step_s: deque[float] = deque(maxlen=_KEPT_TIMES)  # times between optimizer steps, for :meth:`explain`
        self.bucket_s: deque[Sequence[float]] = deque(maxlen=_KEPT_TIMES)  # times of each bucket's reductions
        profile = model.profile
        self.plan = lower(builder.build(profile, Topology()), profile, Topology())
        self.digest = self.plan.digest
        self._given = self.plan.strategy
        self.tuner = self._tuner_for(builder, self.plan.strategy)
        self._has_tuned = self.tuner is not None
        self._told = ""  # why two levels are one
        self.own_key = _key(self.plan.strategy)  # see :attr:`key`

    def _tuner_for(self, builder: StrategyBuilder, strategy: Strategy) -> StrategyTuner | None:
        """Return the tuner that chooses a strategy for ``"auto"``, or None for any other builder."""
        if not isinstance(builder, Auto):
            return None
        if self._context.unit is not None:
            raise StrategyError(
                "strategy 'auto' is not supported in a job of units (SchedulingConfig(unit=)): the positions of a unit "
                "would choose apart from each other. Measure some by hand, and name the fastest"
            )
        return StrategyTuner(self._context, builder, self, strategy, self._number)

    @property
    def profile(self) -> ModelProfile:
        """Profile of the model, in the form expected by strategy builders."""
        return self._model.profile

    @property
    def topology(self) -> Topology:
        """Topology of the current group."""
        group = self._context.group
        return Topology(nodes=group.nodes, domains=group.domains if all(group.domains) else ())

    @property
    def touched(self) -> Mapping[str, int]:
        """Number of rows in this rank's latest gradient for each table with exchanged rows, keyed by name."""
        return {name: bucket.touched for name, bucket in self._rows.items()}

    @property
    def pending(self) -> bool:
        """True if another strategy or tuner is about to take effect."""
        return self.asked is not None or self.wanted is not None

    @property
    def asked_digest(self) -> int:
        """Digest of the pending strategy and whether a tuner chose it; 0 if no switch is pending."""
        asked = self.asked
        strategy = asked.strategy if asked is not None else self.wanted
        if strategy is None:
            return 0
        return digest((strategy.to_json(), asked is not None, asked is not None and asked.tuner is not None))

    @property
    def agenda(self) -> str:
        """Settings for the tuner's measurements as text, the same on all ranks; empty without a tuner."""
        return self.tuner.agenda if self.tuner is not None else ""

    @property
    def key(self) -> str | None:
        """Key for recording step times; times with equal keys are comparable. None during a race.

        A chosen strategy has the prefix ``auto/``, because the choice may be different in another group.
        """
        if self.tuner is None:
            return self.own_key
        in_force = self.tuner.choice.settled and self.tuner.strategy == self.plan.strategy
        return f"{CHOSEN}{self.own_key}" if in_force else None

    def works(self, plan: SyncPlan) -> bool:
        """True if the model can be trained with the plan."""
        try:
            self._model.check(plan)
        except StrategyError:
            return False
        return True

    def ask(self, given: object) -> None:
        """Request another strategy from the next step on; all ranks must request the same strategy.

        ``Auto`` starts a race between strategies.

        Args:
            given: Any value accepted by ``AdaptiveDataParallel(strategy=...)``.

        Raises StrategyError, TypeError if the strategy does not exist, or cannot be used with this model.
        """
        builder = resolve_strategy(given)
        strategy = builder.build(self.profile, self.topology)
        self._model.check(lower(strategy, self.profile, self.topology))
        tuner = self._tuner_for(builder, strategy)
        if tuner is None and self.tuner is None and not self.pending and strategy == self.plan.strategy:
            return  # it is in force
        if tuner is not None:
            tuner.enter_group()
        self.asked = _Asked(strategy, tuner)

    def ask_topology(self, topology: str) -> None:
        """Request another all-reduce topology for the last requested strategy, or for the current one if none."""
        self.ask((self.asked.strategy if self.asked is not None else self.plan.strategy).with_topology(topology))

    def before_forward(self) -> None:
        """Check for a new proposal from the tuner, which then becomes the pending strategy."""
        if self.tuner is not None:
            self.tuner.notify(lambda: str(self.explain()))
            wanted = self.tuner.strategy
            self.wanted = wanted if wanted is not self.plan.strategy and wanted != self.plan.strategy else None

    def take(self, *, switch: bool = True, entering: bool = False) -> SyncPlan:
        """Make the pending strategy's plan the current plan, and return the plan for laying out buckets.

        Args:
            entering: Whether the current group has not started its first step yet.
            switch: Whether another strategy may take effect now; otherwise, the request stays pending.
        """
        strategy = self.plan.strategy
        if switch:
            asked, self.asked = self.asked, None
            strategy, self.wanted = self.wanted or strategy, None
            if asked is not None:
                self.tuner, strategy = asked.tuner, asked.strategy
                self._has_tuned = self._has_tuned or asked.tuner is not None
        self.plan = lower(strategy, self.profile, self.topology)
        self.digest, self.own_key = self.plan.digest, _key(strategy)
        self.takes += 0 if entering else 1
        self.step_s.clear()
        self.bucket_s.clear()
        self._report_fallback()
        return self.plan

    def _report_fallback(self) -> None:
        """Notify the job's user, once per reason, that ``two_level`` falls back to ``all_reduce`` in this group."""
        topology, strategy = self.topology, self.plan.strategy
        why = topology.why_flat if strategy.asks_for("two_level") and topology.world_size > 1 else ""
        if why and why != self._told:
            text = f"strategy {strategy.label} for {topology.world_size} workers: {why}, so two_level is all_reduce"
            self._context.notify("strategy", text, {"strategy": strategy.label, "workers": topology.world_size})
        self._told = why or self._told

    def set_row_buckets(self, tables: Mapping[int, RowBucket]) -> None:
        """Set the row buckets of the current layout, keyed by their positions in the plan."""
        params = self.profile.params if tables else ()
        self._rows = {params[self.plan.buckets[at].params[0]].name: bucket for at, bucket in tables.items()}

    def enter_group(self) -> bool:
        """Enter a group where all ranks hold the same state; return True if buckets need a new layout."""
        self.takes = 0
        if self.asked is not None and self.asked.tuner is not None:
            self.asked.tuner.enter_group()
        if self.tuner is not None:
            self.tuner.enter_group()
            self.before_forward()
        return self.pending or lower(self.plan.strategy, self.profile, self.topology).digest != self.digest

    def roll_back(self, asked: _Asked | None) -> None:
        """Restore ``asked``, the request that was pending before the lost step; None if nothing was pending."""
        self.asked = asked
        if self.tuner is not None:
            self.tuner.roll_back()
            self.wanted = None

    def capture(self) -> dict[str, Any]:
        """Return the state for joining ranks and checkpoints: the tuner's state, and the strategy if it has changed."""
        asked = self.asked
        strategy = asked.strategy if asked is not None else self.wanted or self.plan.strategy
        tuner = asked.tuner if asked is not None else self.tuner
        if strategy == self._given and tuner is None and not self._has_tuned:
            return {}
        texts = {"given": self._given.to_json(), "strategy": strategy.to_json()}
        return {**texts, "tuner": tuner.capture() if tuner is not None else None}

    def restore(self, tree: Mapping[str, Any]) -> bool:
        """Restore a captured state; return True if buckets need a new layout.

        The state is ignored if it is from a run that started with a different strategy.
        """
        if "given" in tree and tree["given"] != self._given.to_json():
            return False
        strategy = Strategy.from_json(tree["strategy"]) if "strategy" in tree else self._given
        if "tuner" in tree:
            self.tuner = self._restored(tree["tuner"], strategy)
            self._has_tuned = True
        self.asked = None
        self.wanted = strategy if strategy != self.plan.strategy else None
        return self.wanted is not None

    def _restored(self, tree: Mapping[str, Any] | None, strategy: Strategy) -> StrategyTuner | None:
        if tree is None:
            return None
        tuner = StrategyTuner(self._context, Auto(**tree["auto"]), self, strategy, self._number)
        tuner.restore(tree)
        return tuner

    def explain(self) -> StrategyTable:
        """Return a table that shows how each parameter is synchronised, and why."""
        times: dict[int, float] = {}
        if self.bucket_s:
            times = {index: statistics.median(each) for index, each in enumerate(zip(*self.bucket_s, strict=True))}
        choice = self.tuner.choice if self.tuner is not None else None
        rows = dict(choice.rows) if choice is not None else {}
        return explain(
            self.plan,
            with_rows(self.profile, {**rows, **self.touched}),
            self.topology,
            choice=choice,
            step_s=statistics.median(self.step_s) if self.step_s else None,
            bucket_s=times,
        )


def _key(strategy: Strategy) -> str:
    digest = hashlib.blake2b(strategy.to_json().encode(), digest_size=3).hexdigest()
    return f"{strategy.label}-{digest}"
