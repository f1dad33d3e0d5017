"""SHELL: the strategy that ``Auto`` finds while training: takes measurements, has all ranks agree on them, asks.

What to do is decided in ``elastic_ray.sync.choosing``. Measurements are made where a step's gradients have just been
reduced: all ranks are there, in the same step, and nothing else uses the gradient group.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from elastic_ray.sync.builders import Auto
from elastic_ray.sync.choosing.candidates import consider, with_rows
from elastic_ray.sync.choosing.choice import (
    Choice,
    ChoiceSettings,
    Measured,
    Option,
    Phase,
    advance,
    begin,
    leave,
    resume,
    watch_rows,
)
from elastic_ray.sync.spec import Strategy

if TYPE_CHECKING:
    from elastic_ray.run.run import Run
    from elastic_ray.sync.switching.strategy_in_force import StrategyInForce

_WATCH_EVERY = 64
"""Steps between two looks at the rows that are touched."""


def settings_of(auto: Auto) -> ChoiceSettings:
    """How a choice is made that a user asks for."""
    return ChoiceSettings(exact=auto.exact, trials=auto.trials, trial_steps=auto.trial_steps, gain=auto.gain)


class StrategyTuner:
    """See the module's text. Its state is equal on all ranks, and travels to joiners.

    Args:
        context: the run.
        settings: how the choice is made.
        model: whose strategy is chosen.
        strategy: that training begins with.
        number: of the model, in the order in which the loop wraps them.
    """

    def __init__(
        self, context: Run, settings: ChoiceSettings, model: StrategyInForce, strategy: Strategy, number: int
    ) -> None:
        self._context = context
        self._settings = settings
        self._model = model
        self._number = number
        self._choice = self._before = _alone(strategy)
        self._topology = ""
        self._known: dict[str, Choice] = {}  # of other topologies
        self._told = ""
        self._looked_at: Choice | None = None
        self._step: object | None = None
        self._since_s: float | None = None

    @property
    def strategy(self) -> Strategy:
        """To be in force from the next step on."""
        return self._choice.strategy

    @property
    def choice(self) -> Choice:
        """Where the choice stands."""
        return self._choice

    @property
    def agenda(self) -> str:
        """What must be equal on all ranks, that their measurements meet."""
        return repr(self._settings)

    def tell(self, table: Callable[[], str]) -> None:
        """Tell the job's user of a choice, once it is in force; all ranks come by here."""
        choice = self._choice
        if choice is self._looked_at or not choice.settled or self._model.plan.strategy != choice.strategy:
            return
        self._looked_at = choice
        told = f"{self._topology} {choice.reason}"
        if not choice.reason or told == self._told:
            return
        self._told = told
        workers = len(self._model.topology.nodes)
        tried = {each.strategy.name: each.measured_s for each in (choice.present, *choice.options) if each is not None}
        detail = {
            "strategy": choice.strategy.name,
            "workers": workers,
            "considered": list(choice.considered),
            "measured_s": tried,
            "json": choice.strategy.to_json(),
            "table": table(),
        }
        self._context.tell("strategy", f"strategy for {workers} workers: {choice.reason}", detail)

    def reduced(self) -> None:
        """A backward pass has ended, and its gradients are reduced; the first one of a step is measured."""
        step, ledger = self._context.ledger.step, self._context.ledger
        if step is None or step is self._step:
            return
        self._step = step
        if self._choice.settled:
            if ledger.steps % _WATCH_EVERY == 0 and self._model.touched:
                self._choice = watch_rows(self._choice, self._agree(0).rows)
            return
        if not self._context.may_choose(self._number):
            self._since_s = None
            return
        took_s = time.perf_counter() - self._since_s if self._since_s is not None else 0.0
        in_force = self._model.plan.strategy == self._choice.strategy
        measured = self._agree(took_s if in_force else 0.0)
        self._choice = advance(self._choice, measured, self._settings, self._consider)
        self._since_s = time.perf_counter()

    def _agree(self, step_s: float) -> Measured:
        """The slowest rank's time and the most rows, the same on all ranks; 0 s for what was not measured."""
        touched = self._model.touched
        own = [round(step_s * 1e9), *touched.values()]
        rows = self._context.group.communicator.gather_ints(own, with_gradients=True)
        known = all(row[0] for row in rows)
        steps, *counts = (max(column) for column in zip(*rows, strict=True))
        return Measured(
            step_s=steps / 1e9 if known else None,
            rows=dict(zip(touched, counts, strict=True)),
        )

    def _consider(self, rows: Mapping[str, int], present: Strategy) -> tuple[Option, ...]:
        profile = with_rows(self._model.profile, rows)
        exact, works = self._settings.exact, self._model.works
        return consider(profile, self._model.topology, present, exact=exact, works=works)

    def enter_group(self) -> None:
        """A group was entered: go on with what is known of such a one, or begin to measure."""
        self._since_s, self._step = None, None
        topology = self._model.topology
        device = self._model.device.type
        key = f"{device}:{','.join(str(topology.nodes.index(node)) for node in topology.nodes)}"
        if topology.world_size == 1:
            key = ""
        if key == self._topology:
            self._choice = resume(self._choice)
        else:
            if self._topology:
                self._known[self._topology] = self._choice
            came = leave(self._choice)
            self._topology = key
            self._choice = resume(self._known.pop(key, begin(came))) if key else _alone(came)
        self._before = self._choice

    def remember(self) -> None:
        """A step begins."""
        self._before = self._choice

    def roll_back(self) -> None:
        """It was lost, and with it what was measured in it."""
        self._choice = self._before
        self._since_s, self._step = None, None

    def capture(self) -> dict[str, Any]:
        """State for joiners and checkpoints, as plain values."""
        return {
            "settings": dataclasses.asdict(self._settings),
            "topology": self._topology,
            "choice": self._choice.to_state(),
            "known": {key: choice.to_state() for key, choice in self._known.items()},
            "told": self._told,
        }

    def restore(self, tree: Mapping[str, Any]) -> None:
        """Take over a captured state."""
        self._settings = ChoiceSettings(**tree["settings"])
        self._topology = tree["topology"]
        self._choice = self._before = Choice.from_state(tree["choice"])
        self._known = {key: Choice.from_state(choice) for key, choice in tree["known"].items()}
        self._told = tree["told"]


def _alone(strategy: Strategy) -> Choice:
    """One worker has nothing to synchronise, and nothing to choose."""
    return Choice(strategy=strategy, phase=Phase.KEPT)
