"""Tiled optimizer state of one model, during updates and group changes (torch).

A tile has several owners, which make the same update from the same gradient; its first owner sends the new parameters
to all ranks. Ranks vote before each update. If any rank knows that an update was decided, every surviving rank can make
it: a rank that voted without learning the outcome keeps its tiles' gradients, and makes the update once another rank
reports it in the next group. There, the remaining owners resend parameters that have not arrived.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Parameter

from elastic_ray.communication.communicator import CommunicationFailedError, Communicator
from elastic_ray.consensus.intents import Announced, Intent
from elastic_ray.sync.device_numbers import read, with_steps_read
from elastic_ray.sync.optimizer_tiles.holder import Owners, TileHolder
from elastic_ray.sync.optimizer_tiles.pending import PendingUpdate, Update, tiles_shown, update_digest
from elastic_ray.sync.optimizer_tiles.publishing import Publisher
from elastic_ray.sync.optimizer_tiles.states import HeldTiles, State, part_of
from elastic_ray.sync.optimizer_tiles.tiling import Tiling, cut
from elastic_ray.sync.plan import ModelProfile, SyncPlan
from elastic_ray.sync.preconditioners import DENOMINATOR, REFRESHED_EVERY, SETTLED_STEPS, denominators, is_adam_like
from elastic_ray.sync.sliced_gradients.routes import OwnedSpan
from elastic_ray.sync.step_hooks import StepHooks

if TYPE_CHECKING:
    from elastic_ray.run.run import Run

_COPIED_IN_A_STEP = 24
"""Spans whose state gets memory of its own in one step after a change of the group."""

RESTORED_IN_A_STEP = 8 << 20
"""Bytes of parameters whose state a rank receives after one step, while owners are not yet what they are to be."""


class TiledOptimizer:
    """Optimizer of one model, with state divided into tiles that are each owned by a few ranks.

    Methods that communicate raise CommunicationFailedError if the group breaks.

    Args:
        groups: Range of this optimizer's parameter groups within all of the model's parameter groups; None if it is the
            only optimizer.

    Attributes:
        denominators: View of the optimizer for gradient statistics.
        idle: Whether the model has no tiles, now or after a pending change, so that updates need only the optimizer. It
            is updated by :meth:`adapt`, :meth:`enter_group`, :meth:`gather` and :meth:`restore`.
    """

    def __init__(
        self,
        run: Run,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        number: int,
        groups: slice | None = None,
    ) -> None:
        self._run, self._optimizer, self._number, self._groups = run, optimizer, number, groups
        self._apply: Callable[..., Any] = optimizer.step
        self._holder = TileHolder(module, optimizer, number)
        self._wanted: Tiling | None = None
        self.idle, self._copies = False, 0
        self._begun = False
        self._last = Update()
        self._pending: PendingUpdate | None = None
        self._unpublished = False
        self._hooks = StepHooks(optimizer)
        self._publisher: Publisher | None = None
        self._open = True  # whether rank 0 has all that there is to gather, as all ranks know
        self._gathered: dict[str, State] | None = None
        self._stored = False  # whether that is what rank 0 continues from, as all ranks know: it is read once asked for
        self.denominators = Denominators(optimizer, lambda: self.divided)

    # -- the strategy --------------------------------------------------------------------------------------------------

    def adapt(self, plan: SyncPlan, profile: ModelProfile) -> None:
        """Adopt the tiles from a new bucket layout; the optimizer state is moved later."""
        self.idle, tiles, groups = False, plan.tiles, self._groups
        params: Sequence[int] = tiles.params if tiles is not None else ()
        if groups is not None:
            params = [i for i in params if groups.start <= profile.params[i].group < groups.stop]
        wanted = tiles.owner if tiles is not None and params else None
        self._wanted = cut(profile, params, wanted) if wanted is not None else None
        self._copies = wanted.copies if wanted is not None else 0
        if self._holder.held is None:
            self._adopt_wanted()

    def _adopt_wanted(self) -> None:
        if self._holder.tiling is None:
            self._last = Update()  # nobody has counted before
        self._holder.adopt(self._wanted)

    @property
    def owners(self) -> Owners:
        """Ranks that own each tile (part of the state); a new object whenever owners change, so compare with ``is``."""
        return self._holder.owners

    def owned_spans(self, params: Sequence[Parameter]) -> list[list[OwnedSpan]]:
        """Return each parameter's tiled ranges, with the ranks that own them; the state must be divided."""
        return self._holder.owned_spans(params)

    @property
    def divided(self) -> bool:
        """True if optimizer state is divided among ranks, so that updates need a vote."""
        return self._holder.held is not None and self._begun

    @property
    def unsettled(self) -> bool:
        """True if the state still has to be divided as the strategy requires for the current group."""
        several = self._run.group.world_size > self._copies
        held, tiling = self._holder.held, self._holder.tiling
        return tiling != self._wanted or (self._wanted is not None and several != (held is not None))

    def divide_between_steps(self) -> None:
        """Divide or gather the state after a strategy change; called on every rank."""
        run = self._run
        if not self._begun or run.ledger.failed or run.group.world_size == 1:
            return
        try:
            run.consensus.agree_on(Announced(Intent.UPDATE, self._number, 1))
            self._move_state()
            self._close()
        except CommunicationFailedError as error:
            run.ledger.lose_by(error)

    # -- updates -------------------------------------------------------------------------------------------------------

    @property
    def votes(self) -> bool:
        """True if all ranks vote on the next update; hooks before it are then called before the vote."""
        return self._holder.held is not None and self._begun

    def decide(self) -> bool:
        """Vote with all ranks on the next update; return False if the vote fails, which means the step is lost."""
        held = self._holder.held
        if held is not None or self._open or self._stored or self._gathered is not None:
            self._close()
        if held is None or not self._begun:
            self.idle = self._wanted is None and self._holder.tiling is None
            return True
        run, update = self._run, update_digest(self.tiled, self._optimizer)
        try:
            run.consensus.announce(Announced(Intent.UPDATE, self._number, update << 1))
            run.moment("vote")
            run.consensus.agreed()
            run.consensus.announcer.done()
        except CommunicationFailedError as error:
            if run.ledger.step is None:
                raise
            self._keep_pending()
            run.ledger.fail(str(error))
            return False
        return True

    def _close(self) -> None:
        """Discard the complete state gathered or stored on rank 0."""
        self._open, self._gathered, self._stored = False, None, False
        self._holder.discard_stored()

    def _keep_pending(self) -> None:
        """Keep everything needed for the update, because it may have been decided."""
        held, generation = self._holder.held, self._run.group.generation
        assert held is not None, "a vote is about tiles"
        self._pending = PendingUpdate(self._optimizer, held, self._holder.params, self._last.number + 1, generation)

    def update(self, apply: Callable[..., Any], **kwargs: Any) -> Any:
        """Make an update that all ranks voted for, using the optimizer's step ``apply``, and publish the parameters."""
        held = self._holder.held
        if held is None or not self._begun:
            result = apply(**kwargs)
            if self._holder.tiling is not None:
                self._count()
            return result
        held.own_memory(_COPIED_IN_A_STEP)
        held.update_views()
        held.put_gradients()
        shown = [(span.name, view) for span, view in held.spans()]
        with self._hooks.left_out(), tiles_shown(self._optimizer, self._holder.params, shown, held.states):
            result = apply(**kwargs)
        held.drop_gradients()
        self._count()
        self._publish(held)
        if not self._unpublished:  # else the step is lost, and the hooks are called when it is drawn again
            self._hooks.after(kwargs)
        return result

    def _count(self) -> None:
        self._last = self._last.next(self._run.group.generation, self._optimizer)

    def _publish(self, held: HeldTiles) -> None:
        """Publish new parameters from their owners to all ranks; after a failure, this repeats in the next group."""
        run, holder = self._run, self._holder
        run.moment("publish")
        senders = [mine[0] for mine in holder.owners]
        try:
            if self._publisher is None or self._publisher.is_outdated:
                self._publisher = self._publisher_of(senders)
            self._publisher.run(run.group.communicator)
            if self.denominators.due(run.states.progress.steps + 1):
                self.denominators.gather(run.group.communicator, held, holder.params, senders)
            if holder.restores:
                run.moment("restore")
                holder.restore_some(run.group, RESTORED_IN_A_STEP)
                self._publisher = None
        except CommunicationFailedError as error:
            self._unpublished, self._publisher = True, None
            run.ledger.lose_by(error)

    def _publisher_of(self, senders: Sequence[int]) -> Publisher:
        group, holder = self._run.group, self._holder
        assert holder.tiling is not None, "there are tiles"
        return Publisher(holder.tiling, senders, holder.params, group.rank, group.world_size)

    # -- the group -----------------------------------------------------------------------------------------------------

    def enter_group(self) -> None:
        """Enter a group where all ranks that have state have made the same last update.

        Raises StateLostError on every rank if no rank holds some of the tiles.
        """
        self.idle, self._gathered = False, None
        self._move_state()
        self._begun = True
        if self._open and self.divided and not self._stored:
            self._gathered = self._holder.collect(self._run.group)

    def _move_state(self) -> None:
        """Move state so that this rank holds the parts required by the current group and strategy."""
        held = self._holder.held
        if held is not None and held.everything:
            self._holder.become_whole()
        self._cut_anew()
        if self._holder.tiling is not None:
            self._arrange(self._copies)

    def _cut_anew(self) -> None:
        """Give every rank the complete state if any rank holds tiles from a tiling other than the required one."""
        group, held = self._run.group, self._holder.held
        wanted = self._wanted.digest if self._wanted is not None else 0
        own = held.tiling.digest if held is not None else 0
        rows = group.communicator.gather_ints([own]) if group.world_size > 1 else [[own]]
        other = next((rank for rank, (digest,) in enumerate(rows) if digest not in (0, wanted)), None)
        if other is not None:
            text = held.tiling.to_json() if held is not None else ""
            self._holder.adopt(Tiling.from_json(group.communicator.broadcast_bytes(text.encode(), other).decode()))
            self._arrange(group.world_size)
        if self._holder.held is None:
            self._adopt_wanted()

    def _arrange(self, copies: int) -> None:
        """Place tiles on ranks, and copy parameters from their owners."""
        group = self._run.group
        everyone = self._holder.gather_holdings(group.communicator, unpublished=self._unpublished, gathered=self._open)
        self._pending = None  # all ranks have come so far, and hold the same update
        self._publisher, self._open, self._stored = None, everyone.gathered, everyone.stored
        self.denominators.invalidate(fresh=self._last.number == 0)
        if everyone.unpublished:
            self._publisher_of(everyone.senders).run(group.communicator)
        self._holder.arrange(group, everyone, copies, gradually=self._last.number > 0)
        self._unpublished = False

    def hand_over(self, stays: Sequence[bool]) -> None:
        """Send tiles owned only by leaving ranks to ranks that stay (``stays[r]`` for rank r); called on every rank."""
        if self.divided:
            self._holder.hand_over(self._run.group.communicator, stays)

    # -- the whole state -----------------------------------------------------------------------------------------------

    @property
    def settled(self) -> bool:
        """True if this rank is able to save the complete state."""
        return not self.divided or self._gathered is not None or self._reads

    @property
    def _reads(self) -> bool:
        """True if this rank continues from the complete stored state, reading it on demand."""
        return self._stored and self._run.group.rank == 0

    def _at_hand(self) -> dict[str, State] | None:
        """Return the complete state by name if this rank has it even though the state is divided, otherwise None."""
        if self._gathered is None and self._reads:
            self._gathered = self._holder.stored.copies(self._holder.params)
        return self._gathered

    def gather(self) -> None:
        """Gather the complete state on rank 0, which keeps it until the next update; called on every rank.

        This also happens when a pass over the data ends, so that rank 0 alone can save a checkpoint after the loop.
        """
        if self.divided and not self._open:
            self._gathered = self._holder.collect(self._run.group)
        self.idle, self._open = False, True

    def whole_states(self) -> dict[Tensor, State] | None:
        """Return the complete states, keyed by parameter, on rank 0; other ranks get an empty dict.

        Returns None if the state is not divided. All ranks must call this method between an update and the end of the
        pass over the data.

        Raises RanksDisagreeError if another rank does not call this method.
        """
        if not self.divided:
            self._holder.stored.read()
            return None
        if not self._open:
            self._run.consensus.agree_on(Announced(Intent.STATE, self._number))
            self.gather()
        return {self._holder.params[name]: state for name, state in (self._at_hand() or {}).items()}

    def loaded(self) -> None:
        """Keep this rank's part of the complete state, which all ranks have loaded into the optimizer."""
        if self.divided:
            self._close()
        self._holder.reload()

    # -- what travels and what is kept ---------------------------------------------------------------------------------

    @property
    def tiled(self) -> list[Parameter]:
        """Parameters whose optimizer state is divided into tiles, or would be in a larger group."""
        return list(self._holder.params.values())

    def capture(self) -> dict[str, Any] | None:
        """Return the last update's number and rates, for joining ranks and checkpoints; None without tiles."""
        if self._holder.tiling is None:
            return None
        return {"update": [*self._last.key, list(self._last.rates)], "begun": self._begun}

    def gathered(self) -> dict[Parameter, State] | None:
        """Return the complete states keyed by parameter; None if this rank does not have them."""
        if self._holder.held is None:
            known = self._holder.stored.states()
            return {param: known[param] for param in self.tiled if param in known}
        whole = self._at_hand()
        return None if whole is None else {self._holder.params[name]: state for name, state in whole.items()}

    def written(self, rank: int) -> dict[Parameter, State] | None:
        """Return the states that this rank writes to a joint checkpoint of all ranks; None if they are not divided."""
        return self._holder.written(rank)

    def kept(self) -> dict[str, Any]:
        """Return the tiles (parts of the state) held by this rank, for a later run in this process; may be empty."""
        return self._holder.to_keep()

    def restore(self, tree: Mapping[str, Any] | None, *, whole: bool) -> None:
        """Adopt the result of :meth:`capture` from another rank or a checkpoint, with the last update it records.

        Tiles that lack this update are updated if this rank has kept everything needed for it, and dropped otherwise.

        Args:
            tree: Captured state; None if the capturing rank had no tiles.
            whole: Whether the optimizer holds the complete state after that update.
        """
        self.idle, pending, before = False, self._pending, self._last
        number, generation, rates = tree["update"] if tree is not None else (0, 0, ())
        self._last = Update(number, generation, tuple(rates))
        self._pending = None
        self._close()
        if whole or tree is None:
            self._open = True  # as at the beginning of a run: what is divided now is gathered at once
            self._holder.hold_whole()
        elif tree.get("kept"):
            self._holder.hold_kept(tree["kept"])
        elif pending is not None and pending.update == self._last.key:
            with self._hooks.left_out():
                pending.make(self._apply, self._last.rates)
        elif before.key != self._last.key or not self._begun:
            self._holder.drop()
        self._begun = self._begun or bool(tree and tree["begun"])


_NONE = -1.0
"""Stands for a denominator that an optimizer does not have yet."""


class Denominators:
    """Values that an Adam-like optimizer divides gradients by, from its state or from its tiles' owners."""

    def __init__(self, optimizer: torch.optim.Optimizer, divided: Callable[[], bool]) -> None:
        self._optimizer, self._divided = optimizer, divided
        self._gathered: dict[Parameter, dict[str, Tensor]] = {}
        self.idle, self._outdated = True, False  # nothing is divided before all ranks call :meth:`invalidate`

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Parameter groups of the optimizer."""
        return self._optimizer.param_groups

    @property
    def state(self) -> MutableMapping[Any, Any]:
        """Optimizer states keyed by parameter; gathered denominators take precedence."""
        if not self._divided():
            return self._optimizer.state
        return collections.ChainMap(dict(self._gathered), self._optimizer.state)

    @property
    def adam_like(self) -> bool:
        """True if the optimizer divides gradients by a running estimate of their size."""
        return is_adam_like(self._optimizer) or any(self._gathered)

    @property
    def outdated(self) -> bool:
        """True if nothing can be measured until the denominators have been gathered; the same on all ranks."""
        return self._outdated and is_adam_like(self._optimizer) and self._divided()

    def invalidate(self, *, fresh: bool) -> None:
        """Invalidate the denominators after the group or the division of state has changed.

        Args:
            fresh: Whether no update has been made yet, which leaves no denominators to gather.
        """
        self.idle, self._outdated = False, not fresh
        self._gathered = {}

    def due(self, step: int) -> bool:
        """True if the denominators must be gathered before the given step."""
        early = step <= SETTLED_STEPS or step % REFRESHED_EVERY == 0
        return is_adam_like(self._optimizer) and (self._outdated or early)

    @torch.no_grad()
    def gather(
        self, communicator: Communicator, held: HeldTiles, params: Mapping[str, Parameter], senders: Sequence[int]
    ) -> None:
        """Send the denominators from their first owners to all ranks; called on every rank."""
        groups = {id(p): group for group in self._optimizer.param_groups for p in group["params"]}
        # Parameters keep their memory format where they are whole, and so do these.
        found = {name: torch.empty_like(params[name], dtype=torch.bfloat16) for name in held.tiling.names}
        spans = list(held.spans())
        states = with_steps_read([held.states[view] for _, view in spans])
        for (span, _), state in zip(spans, states, strict=True):
            param = params[span.name]
            size = denominators(state, groups[id(param)], param.dtype)
            place = part_of(found[span.name], span)
            if size is None:
                place.fill_(_NONE)
            else:
                place.copy_(size)
        rank, world = communicator.rank, communicator.world_size
        Publisher(held.tiling, senders, found, rank, world).run(communicator)
        firsts = read([size.view(-1)[0] for size in found.values()])
        self._gathered = {
            params[name]: {DENOMINATOR: size}
            for (name, size), first in zip(found.items(), firsts, strict=True)
            if first != _NONE
        }
        self._outdated = False
