"""Optimizer state of one model in tiles: updates, and changes of the group (torch).

A tile has several owners, which make the same update from the same gradient; the first one sends the new parameters to
all ranks. A rank votes before each update. What one rank has heard decided can be done on every rank that lives: one
that has voted and not heard the end keeps its tiles' gradients, and makes the update when it hears of it from another
one in the next group. There owners that are left send parameters again that did not come through.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from elastic_ray.communication.communicator import CommunicationFailedError, Communicator
from elastic_ray.consensus.intents import Announced, Intent
from elastic_ray.sync.optimizer_tiles.denominators import Denominators
from elastic_ray.sync.optimizer_tiles.moves import StateLostError, carry_out
from elastic_ray.sync.optimizer_tiles.publishing import Publisher
from elastic_ray.sync.optimizer_tiles.run_view import TileRun
from elastic_ray.sync.optimizer_tiles.states import HeldTiles, State, assemble, cut_tile
from elastic_ray.sync.optimizer_tiles.swapped import swapped
from elastic_ray.sync.optimizer_tiles.tiling import Tiling, cut
from elastic_ray.sync.plan import SyncPlan
from elastic_ray.sync.profile import ModelProfile
from elastic_ray.sync.sharded.placement import Move, hand_over, lost, moves, place
from elastic_ray.sync.sharded.tiles import from_words, to_words

_COPIED_IN_A_STEP = 24
"""Spans whose state gets memory of its own in one step after a change of the group."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Update:
    """An update that was made: its number, the group that made it, and the learning rates."""

    number: int = 0
    generation: int = 0
    rates: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class _Pending:
    """An update that this rank has voted for, and of which it does not know whether it is decided.

    Attributes:
        number: of the update.
        generation: of the group.
        parts: of each view that this rank holds, what it is, and its gradient.
        options: of the optimizer's groups.
    """

    number: int
    generation: int
    parts: list[tuple[Parameter, Tensor, Tensor | None]]
    options: list[dict[str, Any]]


class TiledOptimizer:
    """See the module's text. Methods that communicate raise CommunicationFailedError where the group breaks.

    Args:
        run: that the model is trained in.
        module: the model.
        optimizer: steps its parameters.
        number: of the model, in the order in which the loop wraps them.

    Attributes:
        denominators: the optimizer as statistics see it.
    """

    def __init__(self, run: TileRun, module: torch.nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        self._run, self._module, self._optimizer, self._number = run, module, optimizer, number
        self._apply: Callable[..., Any] = optimizer.step
        self._wanted: Tiling | None = None
        self._copies = 0
        self._tiling: Tiling | None = None
        self._params: dict[str, Parameter] = {}
        self._held: HeldTiles | None = None  # None where the optimizer holds the whole state, or this rank none of it
        self._whole = True
        self._begun = False
        self._owners: tuple[tuple[int, ...], ...] = ()
        self._workers: tuple[str, ...] = ()
        self._last = _Update()
        self._pending: _Pending | None = None
        self._unpublished = False
        self._publisher: Publisher | None = None
        self._open = True  # whether rank 0 has all that there is to gather, as all ranks know
        self._gathered: dict[str, State] | None = None
        self.denominators = Denominators(optimizer, lambda: self.divided)

    # -- the strategy --------------------------------------------------------------------------------------------------

    def follow(self, plan: SyncPlan, profile: ModelProfile) -> None:
        """Buckets were laid out for another strategy, other parameters or another group; :meth:`settle` follows."""
        tiles = plan.tiles
        self._wanted = cut(profile, tiles.params, tiles.owner) if tiles is not None else None
        self._copies = tiles.owner.copies if tiles is not None else 0
        if not self._divided:
            self._adopt_wanted()

    def _adopt_wanted(self) -> None:
        """The whole state is here, or none of it: it can be cut in any way."""
        known = dict(self._module.named_parameters(remove_duplicate=False))
        if self._tiling is None:
            self._last = _Update()  # nobody has counted before
        self._tiling = self._wanted
        self._params = {name: known[name] for name in self._wanted.names} if self._wanted is not None else {}

    @property
    def _divided(self) -> bool:
        """Whether this rank holds a part of the state."""
        return self._held is not None

    @property
    def divided(self) -> bool:
        """Whether optimizer state lies with several ranks, so that updates are voted on."""
        return self._held is not None and self._begun

    @property
    def unsettled(self) -> bool:
        """Whether the state is not divided as the strategy wants it in the present group."""
        several = self._run.group.world_size > self._copies
        return self._tiling != self._wanted or (self._wanted is not None and several != self._divided)

    def settle_between_steps(self) -> None:
        """The strategy has changed, on all ranks alike: divide the state, or have all ranks hold the whole of it."""
        run = self._run
        if not self._begun or run.ledger.failed or run.group.world_size == 1:
            return
        try:
            run.consensus.agree_on(self._announced(Intent.UPDATE, 1))
            self._settle()
            self._close()
        except CommunicationFailedError as error:
            if run.ledger.step is None:
                raise
            run.ledger.fail(str(error))

    # -- updates -------------------------------------------------------------------------------------------------------

    def _announced(self, intent: Intent, detail: int) -> Announced:
        return Announced(intent, self._number, detail)

    def decide(self) -> bool:
        """Vote on the update that is about to be made; False where the step is lost."""
        self._close()
        if not self.divided:
            return True
        run = self._run
        try:
            run.consensus.announce(self._announced(Intent.UPDATE, 0))
            run.moment("vote")
            if run.group.communicator.voided:
                raise CommunicationFailedError("the generation was called off")
            run.consensus.agreed()
            run.consensus.reductions_started()
        except CommunicationFailedError as error:
            if run.ledger.step is None:
                raise
            self._keep_pending()
            run.ledger.fail(str(error))
            return False
        return True

    def _close(self) -> None:
        """Rank 0 has the whole state no more."""
        self._open, self._gathered = False, None

    def _keep_pending(self) -> None:
        """The update may have been decided: keep what it takes to make it."""
        held = self._held
        assert held is not None, "a vote is about tiles"
        held.follow_params()
        held.put_gradients()
        parts = [
            (view, view.detach().clone(), None if view.grad is None else view.grad.detach().clone())
            for _, view in held.spans()
        ]
        held.drop_gradients()
        options = [{k: v for k, v in group.items() if k != "params"} for group in self._optimizer.param_groups]
        self._pending = _Pending(self._last.number + 1, self._run.group.generation, parts, options)

    def update(self, apply: Callable[..., Any], **kwargs: Any) -> Any:
        """Make an update that is decided.

        Args:
            apply: the optimizer's own step.
            kwargs: for it.
        """
        held = self._held
        if held is None or not self._begun:
            result = apply(**kwargs)
            self._count()
            return result
        held.own_memory(_COPIED_IN_A_STEP)
        held.follow_params()
        held.put_gradients()
        with self._shown([(span.name, view, view) for span, view in held.spans()], held.states):
            result = apply(**kwargs)
        held.drop_gradients()
        self._count()
        self._publish()
        return result

    def _count(self) -> None:
        if self._tiling is None:
            return
        rates = tuple(float(group["lr"]) for group in self._optimizer.param_groups if "lr" in group)
        self._last = _Update(self._last.number + 1, self._run.group.generation, rates)

    def _shown(self, parts: Sequence[tuple[str, Parameter, Parameter]], states: dict[Parameter, State]) -> Any:
        """The optimizer with these in place of parameters.

        Args:
            parts: name of a parameter, the key of its part's state, and what is shown to the optimizer.
            states: by key.
        """
        groups = {id(p): i for i, group in enumerate(self._optimizer.param_groups) for p in group["params"]}
        hidden = {id(param) for param in self._params.values()}
        shown = [(part, groups[id(self._params[name])]) for name, _, part in parts]
        return swapped(self._optimizer, hidden, shown, states)

    def _publish(self) -> None:
        """New parameters from their owners to all; what does not come through is repeated in the next group."""
        run = self._run
        run.moment("publish")
        senders = [mine[0] for mine in self._owners]
        try:
            self._send_parameters(senders, again=True)
            if self._held is not None and self.denominators.due(run.ledger.steps + 1):
                self.denominators.gather(run.group.communicator, self._held, self._params, senders)
        except CommunicationFailedError as error:
            self._unpublished, self._publisher = True, None
            if run.ledger.step is None:
                raise
            run.ledger.fail(str(error))

    def _send_parameters(self, senders: Sequence[int], *, again: bool) -> None:
        assert self._tiling is not None, "there are tiles"
        group, publisher = self._run.group, self._publisher
        if publisher is None or not again or publisher.is_outdated:
            publisher = Publisher(self._tiling, senders, self._params, group.rank, group.world_size)
        self._publisher = publisher if again else None
        publisher.run(group.communicator)

    # -- the group -----------------------------------------------------------------------------------------------------

    def enter_group(self) -> None:
        """A group was entered, and all ranks hold parameters and tiles of the same update, or none.

        Raises:
            StateLostError: no rank holds some tiles; raised on every rank.
        """
        self._gathered = None
        self._settle()
        self._begun = True
        if self._open and self.divided:
            self._gathered = self._collected()

    def _settle(self) -> None:
        """Hold what this rank is to hold in the present group under the present strategy."""
        held = self._held
        if held is not None and held.everything:
            self._become_whole()
        self._cut_anew()
        if self._tiling is not None:
            self._arrange(self._copies)

    def _cut_anew(self) -> None:
        """Where ranks hold tiles of another tiling than is wanted: have all of them hold the whole state first."""
        group, held = self._run.group, self._held
        wanted = self._wanted.digest if self._wanted is not None else 0
        own = held.tiling.digest if held is not None else 0
        rows = group.communicator.gather_ints([own]) if group.world_size > 1 else [[own]]
        other = next((rank for rank, (digest,) in enumerate(rows) if digest not in (0, wanted)), None)
        if other is None:
            if self._held is None:
                self._adopt_wanted()
            return
        text = held.tiling.to_json() if held is not None else ""
        tiling = Tiling.from_json(group.communicator.broadcast_bytes(text.encode(), other).decode())
        known = dict(self._module.named_parameters(remove_duplicate=False))
        self._tiling, self._params = tiling, {name: known[name] for name in tiling.names}
        self._arrange(group.world_size)
        self._adopt_wanted()

    def _arrange(self, copies: int) -> None:
        """Have tiles lie with so many ranks each, and parameters be those that their owners have."""
        tiling, group = self._tiling, self._run.group
        assert tiling is not None, "there are tiles"
        communicator, world = group.communicator, group.world_size
        everyone = self._everyone_holds(communicator)
        sets = [held for held, _, _ in everyone]
        if gone := lost(len(tiling), sets):
            raise StateLostError(self._lost_text(gone))
        self._open = any(is_open for _, _, is_open in everyone)
        self._pending = None  # all ranks have come so far, and hold the same update
        self._publisher = None
        self.denominators.invalidate(fresh=self._last.number == 0)
        owners = place(len(tiling), sets, [member.node for member in group.members] or ["here"], copies)
        if any(unpublished for _, unpublished, _ in everyone):
            holders = [min(rank for rank in range(world) if tile in sets[rank]) for tile in range(len(tiling))]
            self._send_parameters(holders, again=False)
        sent = moves(sets, owners)
        if sent:
            self._receive(communicator, sent)
        if world > 1:
            communicator.gather_ints([1])  # ranks that are through with this do not hold any more what they have sent
        self._unpublished = False
        self._owners, self._workers = owners, tuple(member.worker for member in group.members)
        if copies >= world:
            self._become_whole()
        else:
            self._keep([tile for tile, mine in enumerate(owners) if group.rank in mine])

    def _everyone_holds(self, communicator: Communicator) -> list[tuple[frozenset[int], bool, bool]]:
        """By rank: tiles, whether it lacks parameters of the last update, and whether rank 0 had the whole state."""
        tiling, held = self._tiling, self._held
        assert tiling is not None, "there are tiles"
        own = held.tiles if held is not None else range(len(tiling)) if self._whole else ()
        words = [*to_words(own, len(tiling)), int(self._unpublished), int(self._open)]
        rows = communicator.gather_ints(words) if communicator.world_size > 1 else [words]
        return [(from_words(row[:-2], len(tiling)), bool(row[-2]), bool(row[-1])) for row in rows]

    def _lost_text(self, gone: Sequence[int]) -> str:
        tiles = len(self._tiling) if self._tiling is not None else 1
        whose = sorted({self._workers[rank] for tile in gone if self._owners for rank in self._owners[tile]})
        named = f" ({', '.join(whose)})" if whose else ""
        return (
            f"{len(gone) / tiles:.0%} of the optimizer state of model {self._number} was lost with all workers that "
            f"held it{named}: each part lies with {max(1, self._copies)} of them, and no living worker has it"
        )

    def _states_of(self, tile: int) -> list[State]:
        """Of a tile that this rank holds."""
        if self._held is not None:
            return self._held.states_of(tile)
        assert self._tiling is not None, "there are tiles"
        return cut_tile(self._tiling, tile, self._params, self._optimizer.state)

    def _receive(self, communicator: Communicator, sent: Sequence[Move]) -> None:
        """Hold what others send, besides what is held."""
        tiling = self._tiling
        assert tiling is not None, "there are tiles"
        if self._held is None and not self._whole:
            self._held = HeldTiles(tiling, self._params)
        for tile, states in carry_out(communicator, sent, self._states_of):
            assert self._held is not None, "who holds the whole state receives nothing"
            self._held.take(tile, states)

    def _keep(self, tiles: Sequence[int]) -> None:
        """Hold these tiles, and no others."""
        assert self._tiling is not None, "there are tiles"
        if self._held is None:
            held = HeldTiles(self._tiling, self._params)
            for tile in tiles:
                held.take(tile, self._states_of(tile), borrowed=True)
            for param in self._params.values():
                self._optimizer.state.pop(param, None)
            self._held, self._whole = held, False
        for tile in set(self._held.tiles) - set(tiles):
            self._held.drop(tile)

    def _become_whole(self) -> None:
        """The optimizer holds the state of whole parameters, as without tiles."""
        held = self._held
        if held is not None:
            states = {tile: held.states_of(tile) for tile in held.tiles}
            for name, state in assemble(held.tiling, self._params, states).items():
                self._optimizer.state[self._params[name]] = state
        self._held, self._whole = None, True

    def hand_over(self, stays: Sequence[bool]) -> None:
        """Some ranks are about to leave: what only they own goes to others; all ranks call it."""
        given = hand_over(self._owners, stays) if self.divided else ()
        if given:
            self._receive(self._run.group.communicator, given)

    # -- the whole state -----------------------------------------------------------------------------------------------

    @property
    def settled(self) -> bool:
        """Whether this rank can save the whole state."""
        return not self.divided or self._gathered is not None

    def gather(self) -> None:
        """Have rank 0 hold the whole state until the next update; all ranks call it.

        At the end of a pass as well, so that code which saves a checkpoint behind a loop may do so on rank 0 alone.
        """
        if self.divided and not self._open:
            self._gathered = self._collected()
        self._open = True

    def _collected(self) -> dict[str, State] | None:
        """The state of whole parameters, by name, on rank 0; None elsewhere."""
        tiling, held, group = self._tiling, self._held, self._run.group
        assert tiling is not None and held is not None, "there are tiles"
        needed = [Move(tile, mine[0], 0) for tile, mine in enumerate(self._owners) if 0 not in mine]
        found = dict(carry_out(group.communicator, needed, self._states_of))
        if group.rank != 0:
            return None
        states = {**found, **{tile: held.states_of(tile) for tile in held.tiles}}
        return assemble(tiling, self._params, states, torch.device("cpu"))  # no GPU may have room for it

    def whole_states(self) -> dict[Tensor, State] | None:
        """Those of parameters in tiles, by parameter, on rank 0 and none on the others; None where nothing is divided.

        Between an update and the end of a pass all ranks call it.

        Raises:
            RanksDisagreeError: another rank does not.
        """
        if not self.divided:
            return None
        if not self._open:
            self._run.consensus.agree_on(self._announced(Intent.STATE, 0))
            self.gather()
        found = self._gathered or {}
        return {self._params[name]: state for name, state in found.items()}

    def loaded(self) -> None:
        """The optimizer was given the whole state, on all ranks alike: keep what this rank holds of it."""
        held, tiling = self._held, self._tiling
        self._gathered, self._open = None, held is None
        if held is None or tiling is None:
            return
        for tile in held.tiles:
            held.drop(tile)
            held.take(tile, cut_tile(tiling, tile, self._params, self._optimizer.state), borrowed=True)
        for param in self._params.values():
            self._optimizer.state.pop(param, None)

    # -- what travels and what is kept ---------------------------------------------------------------------------------

    @property
    def tiled(self) -> list[Parameter]:
        """Parameters whose state is in tiles, or would be in a larger group."""
        return list(self._params.values())

    def capture(self) -> dict[str, Any] | None:
        """What all ranks share, without states; None where no state is in tiles."""
        if self._tiling is None:
            return None
        return {"update": [self._last.number, self._last.generation, list(self._last.rates)], "begun": self._begun}

    def gathered(self) -> dict[Parameter, State] | None:
        """The whole state where this rank has it."""
        if not self._divided:
            return {param: self._optimizer.state[param] for param in self.tiled if param in self._optimizer.state}
        if self._gathered is None:
            return None
        return {self._params[name]: state for name, state in self._gathered.items()}

    def kept(self) -> dict[str, Any]:
        """The tiles that this rank holds, for a rerun in this process."""
        held = self._held
        if held is None:
            return {}
        return {"tiling": held.tiling.to_json(), "tiles": {str(tile): held.states_of(tile) for tile in held.tiles}}

    def restore(self, tree: Mapping[str, Any] | None, *, whole: bool) -> None:
        """Take over what :meth:`capture` gave: tiles of its last update stay, those of the one before are updated.

        Args:
            tree: it; None where that rank had no tiles.
            whole: whether the optimizer holds the whole state of that update.
        """
        pending, before = self._pending, self._last
        number, generation, rates = tree["update"] if tree is not None else (0, 0, ())
        self._last = _Update(number, generation, tuple(rates))
        self._pending = None
        self._close()
        if whole or tree is None:
            self._held, self._whole = None, True
        elif tree.get("kept"):
            self._take_kept(tree["kept"])
        elif pending is not None and (pending.number, pending.generation) == (number, generation):
            self._catch_up(pending)
        elif not ((before.number, before.generation) == (number, generation) and self._begun):
            self._drop()
        self._begun = self._begun or bool(tree and tree["begun"])

    def _take_kept(self, kept: Mapping[str, Any]) -> None:
        """Tiles of a run before in this process."""
        tiling = Tiling.from_json(kept["tiling"])
        known = dict(self._module.named_parameters(remove_duplicate=False))
        self._tiling, self._params = tiling, {name: known[name] for name in tiling.names}
        self._held, self._whole = HeldTiles(tiling, self._params), False
        for tile, states in kept["tiles"].items():
            self._held.take(int(tile), states)

    def _drop(self) -> None:
        """Nothing is held, and others hold what counts."""
        for param in self._params.values():
            self._optimizer.state.pop(param, None)
        self._held, self._whole = None, False

    def _catch_up(self, pending: _Pending) -> None:
        """Make an update that was decided, at the rates that others have made it with."""
        held = self._held
        assert held is not None, "a vote was about tiles"
        names = {view: span.name for span, view in held.spans()}
        parts: list[tuple[str, Parameter, Parameter]] = []
        states: dict[Parameter, State] = {}
        for view, value, grad in pending.parts:
            part = Parameter(value, requires_grad=view.requires_grad)
            part.grad = grad
            states[part] = held.states[view]
            parts.append((names[view], view, part))
        groups = self._optimizer.param_groups
        before = [{k: v for k, v in group.items() if k != "params"} for group in groups]
        others = self._hide_others()
        try:
            for group, options in zip(groups, pending.options, strict=True):
                group.update(options)
            for group, rate in zip((g for g in groups if "lr" in g), self._last.rates, strict=True):
                group["lr"] = torch.full_like(group["lr"], rate) if isinstance(group["lr"], Tensor) else rate
            with self._shown(parts, states):
                self._apply()
        finally:
            for group, options in zip(groups, before, strict=True):
                group.update(options)
            for param, grad in others:
                param.grad = grad
        with torch.no_grad():
            for _, view, part in parts:
                held.states[view] = states[part]
                view.copy_(part)

    def _hide_others(self) -> list[tuple[Parameter, Tensor | None]]:
        """Gradients of parameters without tiles, whose update has been taken over already; taken away from them."""
        mine = {id(param) for param in self._params.values()}
        others = [p for group in self._optimizer.param_groups for p in group["params"] if id(p) not in mine]
        found = [(param, param.grad) for param in others]
        for param in others:
            param.grad = None
        return found
