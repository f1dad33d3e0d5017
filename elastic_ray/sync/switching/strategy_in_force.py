"""The strategy of one model: in force, asked for by hand, or found by ``Auto`` (torch).

A strategy takes effect between two steps, when buckets are laid out anew. What decides over it changes with it: until
then all ranks do what they have agreed on, whichever of them has asked for something else.
"""

from __future__ import annotations

import dataclasses
import hashlib
import statistics
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from elastic_ray.batch.reports import CHOSEN
from elastic_ray.state.layout import digest
from elastic_ray.sync.builders import Auto, StrategyBuilder
from elastic_ray.sync.checks import StrategyError
from elastic_ray.sync.choosing.candidates import with_rows
from elastic_ray.sync.choosing.choice import ChoiceSettings
from elastic_ray.sync.choosing.explanation import StrategyTable, explain
from elastic_ray.sync.naming import resolve_strategy
from elastic_ray.sync.plan import SyncPlan, lower
from elastic_ray.sync.profile import ModelProfile, Topology
from elastic_ray.sync.spec import Strategy
from elastic_ray.sync.switching.tuner import StrategyTuner, settings_of

if TYPE_CHECKING:
    from elastic_ray.run.run import Run
    from elastic_ray.sync.engine.gradient_engine import GradientEngine
    from elastic_ray.sync.tables.row_bucket import RowBucket

_KEPT_TIMES = 31


@dataclasses.dataclass(frozen=True, slots=True)
class _Asked:
    """A strategy that takes effect with the next step, and who decides over it from then on."""

    strategy: Strategy
    tuner: StrategyTuner | None


class StrategyInForce:
    """See the module's text.

    Args:
        context: the run.
        model: what it is planned for.
        builder: of the first strategy.
        number: of the model, in the order in which the loop wraps them.

    Raises:
        StrategyError: the strategy cannot be carried out for this model and optimizer.
    """

    def __init__(self, context: Run, model: GradientEngine, builder: StrategyBuilder, number: int) -> None:
        self._context = context
        self._model = model
        self._number = number
        self._asked: _Asked | None = None
        self._asked_before: _Asked | None = None  # when the step in progress began
        self._takes = 0
        self._entering = True
        self._wanted: Strategy | None = None  # by the tuner, or by the state of another rank
        self._rows: Mapping[str, RowBucket] = {}
        self._step_s: deque[float] = deque(maxlen=_KEPT_TIMES)
        self._bucket_s: deque[Sequence[float]] = deque(maxlen=_KEPT_TIMES)
        self._stepped: tuple[int, float] | None = None
        profile = model.profile
        self.plan = lower(builder.build(profile, Topology()), profile, Topology())
        self._digest = self.plan.digest
        self._given = self.plan.strategy.to_json()
        self.tuner = self._tuner_for(builder, self.plan.strategy)
        self._has_tuned = self.tuner is not None
        self._key = _key(self.plan.strategy)

    def _tuner_for(self, builder: StrategyBuilder, strategy: Strategy) -> StrategyTuner | None:
        if not isinstance(builder, Auto):
            return None
        return StrategyTuner(self._context, settings_of(builder), self, strategy, self._number)

    @property
    def profile(self) -> ModelProfile:
        """What a planner needs to know of the model."""
        return self._model.profile

    @property
    def device(self) -> torch.device:
        """Of the model's gradients."""
        return self._model.device

    @property
    def topology(self) -> Topology:
        """The present group."""
        return Topology(nodes=tuple(self._context.group.nodes))

    @property
    def touched(self) -> Mapping[str, int]:
        """Rows of this rank's latest gradient, by table; of tables whose rows travel."""
        return {name: bucket.touched for name, bucket in self._rows.items()}

    @property
    def pending(self) -> bool:
        """Whether another strategy, or another tuner, is to take effect."""
        return self._asked is not None or self._wanted is not None

    @property
    def label(self) -> str:
        """What a user calls the present strategy, and the one that is to take effect."""
        asked = self._asked.strategy if self._asked is not None else self._wanted
        present = self.plan.strategy.label
        return present if asked is None else f"{present}, then {asked.label}"

    @property
    def asked_digest(self) -> int:
        """A digest of the strategy that is to take effect, and of whether it is being chosen; 0 for none."""
        asked = self._asked
        strategy = asked.strategy if asked is not None else self._wanted
        if strategy is None:
            return 0
        return digest((strategy.to_json(), asked is not None, asked is not None and asked.tuner is not None))

    @property
    def agenda(self) -> str:
        """What follows a step's reductions, on all ranks alike; empty for nothing."""
        return self.tuner.agenda if self.tuner is not None else ""

    @property
    def key(self) -> str | None:
        """Tells strategies apart of which step times are not to be mixed; None while one is being chosen.

        ``auto/`` stands before what a choice has led to: another group may have another, and both count.
        """
        if self.tuner is None:
            return self._key
        in_force = self.tuner.choice.settled and self.tuner.strategy == self.plan.strategy
        return f"{CHOSEN}{self._key}" if in_force else None

    @property
    def digest(self) -> int:
        """Of the present plan."""
        return self._digest

    @property
    def takes(self) -> int:
        """How often buckets were laid out anew since the present group was entered; equal on all ranks."""
        return self._takes

    def works(self, plan: SyncPlan) -> bool:
        """Whether a plan can be carried out."""
        try:
            self._model.check(plan)
        except StrategyError:
            return False
        return True

    def ask(self, given: object) -> None:
        """Go on with another strategy from the next step on; ``Auto`` begins to choose. All ranks must ask alike.

        Args:
            given: as of ``AdaptiveDataParallel(strategy=...)``.

        Raises:
            StrategyError, TypeError: there is no such strategy, or it cannot be carried out for this model.
        """
        builder = resolve_strategy(given)
        strategy = builder.build(self.profile, self.topology)
        self._model.check(lower(strategy, self.profile, self.topology))
        tuner = self._tuner_for(builder, strategy)
        if tuner is None and self.tuner is None and not self.pending and strategy == self.plan.strategy:
            return  # it is in force
        if tuner is not None:
            tuner.enter_group()
        self._asked = _Asked(strategy, tuner)

    def before_forward(self) -> None:
        """Between two steps, or in one: want what the tuner does."""
        if self.tuner is not None:
            self.tuner.tell(lambda: str(self.explain()))
            wanted = self.tuner.strategy
            self._wanted = wanted if wanted is not self.plan.strategy and wanted != self.plan.strategy else None

    def take(self, *, switch: bool = True) -> SyncPlan:
        """Buckets are laid out: what was asked for is in force from here on.

        Args:
            switch: whether another strategy can take over now; else it is asked for still.
        """
        strategy = self.plan.strategy
        if switch:
            asked, self._asked = self._asked, None
            strategy, self._wanted = self._wanted or strategy, None
            if asked is not None:
                self.tuner, strategy = asked.tuner, asked.strategy
                self._has_tuned = self._has_tuned or asked.tuner is not None
        self.plan = lower(strategy, self.profile, self.topology)
        self._digest, self._key = self.plan.digest, _key(strategy)
        self._takes += 0 if self._entering else 1
        self._step_s.clear()
        self._bucket_s.clear()
        self._stepped = None
        return self.plan

    def follow_rows(self, tables: Mapping[int, RowBucket]) -> None:
        """These tables' rows travel, by the position of their buckets."""
        params = self.profile.params if tables else ()
        self._rows = {params[self.plan.buckets[at].params[0]].name: bucket for at, bucket in tables.items()}

    def reduced(self, bucket_s: Sequence[float]) -> None:
        """A pass's gradients are reduced, on all ranks.

        Args:
            bucket_s: from the beginning of each bucket's reduction to its end [s].
        """
        self._bucket_s.append(tuple(bucket_s))
        if self.tuner is not None:
            self.tuner.reduced()

    def stepped(self) -> None:
        """The optimizer was asked to step."""
        now_s, steps = time.perf_counter(), self._context.states.progress.steps
        if self._stepped is not None and steps == self._stepped[0] + 1:
            self._step_s.append(now_s - self._stepped[1])
        self._stepped = steps, now_s

    def enter_group(self) -> bool:
        """A group was entered, in which all ranks hold the same state; whether buckets are to be laid out anew."""
        self._stepped = None
        self._takes, self._entering = 0, True
        if self._asked is not None and self._asked.tuner is not None:
            self._asked.tuner.enter_group()
        if self.tuner is not None:
            self.tuner.enter_group()
            self.before_forward()
        return self.pending or lower(self.plan.strategy, self.profile, self.topology).digest != self._digest

    def remember(self) -> None:
        """A step begins."""
        self._asked_before, self._entering = self._asked, False
        if self.tuner is not None:
            self.tuner.remember()

    def roll_back(self) -> None:
        """It was lost, and with it what its body has asked for."""
        self._stepped, self._asked = None, self._asked_before
        if self.tuner is not None:
            self.tuner.roll_back()
            self._wanted = None

    def capture(self) -> dict[str, Any]:
        """The strategy where it is another than at the beginning, and the tuner's state."""
        asked = self._asked
        strategy = (asked.strategy if asked is not None else self._wanted or self.plan.strategy).to_json()
        tuner = asked.tuner if asked is not None else self.tuner
        if strategy == self._given and tuner is None and not self._has_tuned:
            return {}
        return {
            "given": self._given,
            "strategy": strategy,
            "tuner": tuner.capture() if tuner is not None else None,
        }

    def restore(self, tree: Mapping[str, Any]) -> bool:
        """Take over a captured state; whether buckets are to be laid out anew.

        The strategy of a run that began with another one stays behind with it.
        """
        if tree.get("given", self._given) != self._given:
            return False
        strategy = Strategy.from_json(tree["strategy"]) if "strategy" in tree else Strategy.from_json(self._given)
        if "tuner" in tree:
            self.tuner = self._restored(tree["tuner"], strategy)
            self._has_tuned = True
        self._asked = None
        self._wanted = strategy if strategy != self.plan.strategy else None
        return self._wanted is not None

    def _restored(self, tree: Mapping[str, Any] | None, strategy: Strategy) -> StrategyTuner | None:
        if tree is None:
            return None
        tuner = StrategyTuner(self._context, ChoiceSettings(**tree["settings"]), self, strategy, self._number)
        tuner.restore(tree)
        return tuner

    def explain(self) -> StrategyTable:
        """What is done, and why."""
        times: dict[int, float] = {}
        if self._bucket_s:
            times = {index: statistics.median(each) for index, each in enumerate(zip(*self._bucket_s, strict=True))}
        choice = self.tuner.choice if self.tuner is not None else None
        rows = dict(choice.rows) if choice is not None else {}
        return explain(
            self.plan,
            with_rows(self.profile, {**rows, **self.touched}),
            self.topology,
            choice=choice,
            step_s=statistics.median(self._step_s) if self._step_s else None,
            bucket_s=times,
        )


def _key(strategy: Strategy) -> str:
    digest = hashlib.blake2b(strategy.to_json().encode(), digest_size=3).hexdigest()
    return f"{strategy.label}-{digest}"
