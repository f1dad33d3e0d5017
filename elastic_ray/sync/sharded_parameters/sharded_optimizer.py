"""Parameters and optimizer state of one sharded model, during updates and group changes (torch).

Two ranks hold each shard: its owner, whose model contains it, and a follower. Before an update, each rank sends its
rows' gradients, as left by user code, to its follower, and then all ranks vote. Right after a group change, followers
may be temporary ranks that already have the rows; the final followers receive them after the first update. If shards
have owners in several shard groups, they have no followers, and all owners already have the gradients. If any rank
knows that an update was decided, every surviving rank can make it: all holders of a shard have everything needed for
the update, and make the same update. Losing a single rank therefore loses no state, and only rows for the new layout
must be sent before training continues.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from elastic_ray.communication.communicator import CommunicationFailedError
from elastic_ray.consensus.intents import Announced, Intent
from elastic_ray.state.pieces import Pieces
from elastic_ray.state.unread import UnreadTensor
from elastic_ray.sync.engine.joint_optimizer import optimizers_of
from elastic_ray.sync.optimizer_tiles.pending import Update, as_then, options_of, swapped, update_digest
from elastic_ray.sync.optimizer_tiles.states import State
from elastic_ray.sync.row_changes import HandChanges, UpdatedRows
from elastic_ray.sync.sharded_parameters.fsdp_fields import ShardedParam
from elastic_ray.sync.sharded_parameters.held_shards import Shard
from elastic_ray.sync.sharded_parameters.shard_collectives import ShardCollectives
from elastic_ray.sync.sharded_parameters.shard_holder import ShardHolder, Whole

if TYPE_CHECKING:
    from elastic_ray.run.run import Run

Grads = Mapping[int, Tensor]
"""Gradients of a shard's rows, by the parameter's position; without those that have none."""
_STATE, _STEP = 2, 3  # what is announced; see Intent.SHARDS
_ONE_GROUP = (
    "model {number} is sharded with shard_size={size}, but {world} workers are not two or more groups of {size}: its "
    "rows are divided among all of them, each with two workers, until the group has such a size. "
    "SchedulingConfig(multiple_of={size}) has the allocator choose one"
)


class ShardedOptimizer:
    """Optimizers of one sharded model; methods that communicate raise CommunicationFailedError if the group breaks.

    Each update changes one optimizer's parameters. Updates by all optimizers are numbered in a single sequence, so that
    a rank that has voted for an update can find out whether other ranks have made it.
    """

    def __init__(
        self, run: Run, module: nn.Module, optimizer: torch.optim.Optimizer, number: int, collectives: ShardCollectives
    ) -> None:
        self._run, self._optimizer, self._number = run, optimizer, number
        self._collectives = collectives
        self._holder = ShardHolder(module, optimizer, number, collectives)
        self._by_hand = HandChanges(number)
        optimizers = optimizers_of(optimizer)
        for each in optimizers:
            self._by_hand.adapt(each)
        self.parts = [OptimizerPart(self, each) for each in optimizers]
        self._begun = False
        self._last = Update()
        self._followed: list[Grads] = []  # gradients of an update that is decided
        self._pending: PendingShards | None = None
        self._open = True  # whether rank 0 has all that there is to gather, as all ranks know
        self._gathered: Whole | None = None
        self._compared = False
        self._told = False

    @property
    def params(self) -> Sequence[ShardedParam]:
        """All sharded parameters, in model order."""
        return self._holder.params

    @property
    def groups(self) -> dict[int, int]:
        """Index of the optimizer's parameter group for each parameter, keyed by parameter position."""
        return self.groups_of(self._optimizer)

    def groups_of(self, optimizer: torch.optim.Optimizer) -> dict[int, int]:
        """Return the index of an optimizer's parameter group for each parameter, keyed by position in the model."""
        numbers = {id(p): i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}
        return {place: numbers[id(each.param)] for place, each in enumerate(self.params) if id(each.param) in numbers}

    @property
    def own(self) -> Shard:
        """Shard owned by this rank."""
        return self._holder.mine[0]

    # -- updates -------------------------------------------------------------------------------------------------------

    @property
    def divided(self) -> bool:
        """True if other ranks hold some of the shards, so that updates need a vote."""
        return self._begun and self._run.group.world_size > 1

    def decide(self, part: OptimizerPart) -> bool:
        """Vote with all ranks on optimizer ``part``'s next update; if the result is False, the step is lost."""
        self._close()
        if not self.divided:
            return True
        places = self.groups_of(part.optimizer)
        run, update = self._run, update_digest([self.params[place].param for place in places], part.optimizer)
        voted, votes = False, torch.tensor([1.0, self._by_hand.suspected], dtype=torch.float32)
        try:
            run.consensus.announce(Announced(Intent.SHARDS, self._number, update << 2 | _STEP))
            run.consensus.agreed()
            followed = self._grads_of_followed(places)
            voted = True
            vote = run.group.communicator.gradients.all_reduce(votes)
            run.moment("vote")
            run.consensus.announcer.wait(vote)
            run.consensus.announcer.done()
            if votes[1]:  # on some rank; an average that was put in for an evaluation may have been taken out again
                self._compare()
        except CommunicationFailedError as error:
            if run.ledger.step is None:
                raise
            if voted:  # others may have heard of its end
                self._pending = self._pend(part, followed)
            run.ledger.fail(str(error))
            return False
        self._followed = followed
        return True

    def _close(self) -> None:
        """Record that rank 0 no longer has the full state."""
        self._open, self._gathered, self._compared = False, None, False

    def _grads_of_followed(self, places: Collection[int]) -> list[Grads]:
        """Send this rank's gradients to its follower, and receive gradients from the ranks it follows.

        Returns the received gradients, one mapping for each followed shard.
        """
        layout, own = self._collectives.layout, self._own_grads(places)
        if layout.follower_of(0) is None:  # the other owners have the same
            return []
        trained = [place for place in places if self.params[place].param.grad is not None]
        received: list[Grads] = [
            {
                place: torch.empty_like(followed.views[place], dtype=self._grad_dtype(place))
                for place in trained
                if place in followed.views
            }
            for followed in self._holder.mine[1:]
        ]
        owners = [layout.owners(shard.index)[0] for shard in layout.held_by(self._run.group.rank)[1:]]
        into = {owner: list(grads.values()) for owner, grads in zip(owners, received, strict=True)}
        sent = [own[place] for place in trained if place in own]
        self._collectives.to_follower(sent, into, self.params[0].local.device)
        return received

    def _grad_dtype(self, place: int) -> torch.dtype:
        grad = self.params[place].local_grad
        assert grad is not None, "only parameters with gradients are asked for"
        return grad.dtype

    def _own_grads(self, places: Collection[int]) -> dict[int, Tensor]:
        """Return the gradients for this rank's rows of some parameters, keyed by parameter position."""
        own = self._holder.mine[0]
        found = {place: self.params[place].local_grad for place in places if place in own.views}
        return {place: grad for place, grad in found.items() if grad is not None}

    def _with_grads(self, places: Collection[int], followed: Sequence[Grads]) -> list[tuple[Shard, Grads]]:
        return list(zip(self._holder.mine, [self._own_grads(places), *followed], strict=False))

    def _pend(self, part: OptimizerPart, followed: Sequence[Grads]) -> PendingShards:
        key, update = (self._last.number + 1, self._run.group.generation), self._update(part)
        return PendingShards(part, update, self._with_grads(self.groups_of(part.optimizer), followed), key)

    def _update(self, part: OptimizerPart) -> ShardUpdate:
        hidden, groups = [id(each.param) for each in self.params], self.groups_of(part.optimizer)
        return ShardUpdate(part.optimizer, hidden, groups, self._by_hand)

    def update(self, part: OptimizerPart, apply: Callable[[], Any]) -> Any:
        """Make optimizer ``part``'s update that all ranks voted for; return the result of ``apply``, its step."""
        followed, self._followed = self._followed, []
        result = self._update(part).make(self._with_grads(self.groups_of(part.optimizer), followed), apply)
        self._last = self._last.next(self._run.group.generation, part.optimizer)
        if self._begun and self._holder.settles:
            self._send_copies()
        return result

    def _send_copies(self) -> None:
        """Send second copies of shards to their new followers, after the group's first update."""
        run = self._run
        try:
            run.moment("restore")
            self._holder.complete(run.group)
        except CommunicationFailedError as error:
            run.ledger.lose_by(error)

    def check_memory(self) -> None:
        """Raise RuntimeError if the model is still on the meta device, because the first loop has not started."""
        self._holder.check_memory()

    # -- the group -----------------------------------------------------------------------------------------------------

    def enter_group(self) -> None:
        """Receive shards for the current group; all ranks with shards must have made the same updates.

        Raises StateLostError on every rank if no rank holds some of the rows.
        """
        group = self._run.group
        self._by_hand.end()
        self._gathered, self._compared = None, False
        everyone, self._open = self._holder.gather_holdings(group, opened=self._open, begun=self._begun)
        self._run.moment("rows")
        self._holder.arrange(group, everyone)
        self._pending, self._followed, self._begun = None, [], True
        self._by_hand.watch(() if self._collectives.layout.follower_of(0) is None else self.own.views.values())
        self._report_layout()
        if self._open and self.divided:
            self._gathered = self._holder.collect(group)

    def _report_layout(self) -> None:
        """Warn once if several shard groups are requested, but the current group cannot be divided into them."""
        size, world = self._collectives.shard_size, self._run.group.world_size
        if size is None or world == 1 or self._collectives.layout.is_replicated or self._told:
            return
        self._told = True
        self._run.notify("warning", _ONE_GROUP.format(number=self._number, size=size, world=world))

    def hand_over(self, stays: Sequence[bool]) -> None:
        """Copy shards so that two staying ranks (``stays[r]`` for rank r) hold each of them; called on every rank."""
        if self.divided and not all(stays):
            self._holder.hand_over(self._run.group, stays)

    # -- the whole -----------------------------------------------------------------------------------------------------

    @property
    def settled(self) -> bool:
        """True if this rank is able to save the full model."""
        return not self.divided or self._gathered is not None

    def end_pass(self) -> None:
        """End a pass over the data: compare each shard's copies, and gather the full model on rank 0.

        Code after the loop can then save a checkpoint on rank 0 alone. A model built on the meta device might not fit
        into rank 0's memory, so it is gathered only if all ranks request this.

        Raises ReplicasDifferError on every rank if a shard differs between its holders.
        """
        if self._holder.built_on_meta:
            self._compare()
        else:
            self.gather()

    def gather(self) -> None:
        """Gather the full model into rank 0's CPU memory until the next update; called on every rank.

        Raises ReplicasDifferError on every rank if a shard differs between its holders.
        """
        self._compare()
        if self.divided and not self._open:
            self._gathered = self._holder.collect(self._run.group)
        self._open = True

    def _compare(self) -> None:
        """Compare each shard between its holders, once after each update; raises ReplicasDifferError."""
        if self.divided and not (self._open or self._compared):
            self._holder.compare(self._run.group.communicator)
            self._compared = True
            self._by_hand.record()

    def _whole(self) -> Whole | None:
        """Return the full state, None on ranks that lack it; if rank 0 lacks it, call this on every rank."""
        if not self.divided:
            return self._holder.whole()
        if not self._open and not self._run.ledger.replaying:  # others have done what a joiner only goes by
            self._run.consensus.agree_on(Announced(Intent.SHARDS, self._number, _STATE))
            self.gather()
        return self._gathered

    def whole_states(self) -> dict[Tensor, State]:
        """Return the optimizer's full states, keyed by parameter, on rank 0; other ranks get an empty dict.

        Between an update and the end of a pass, all ranks must call this; for a model built on the meta device, this
        applies at any time. Raises RanksDisagreeError if another rank does not make the call.
        """
        return {self.params[place].param: state for place, (_, state) in (self._whole() or {}).items() if state}

    def whole_params(self) -> dict[str, Tensor]:
        """Return the full parameters, keyed by name; empty if this rank does not have them."""
        return {self.params[place].name: value for place, (value, _) in (self._whole() or {}).items()}

    def loaded(self, optimizer: torch.optim.Optimizer) -> None:
        """Keep this rank's rows of the full states that all ranks have loaded into an optimizer."""
        self._holder.copy_states(optimizer)
        if self.divided:
            self._close()

    def load_param(self, name: str, value: Tensor) -> None:
        """Keep this rank's rows of ``value``, the full parameter called ``name``, which all ranks load."""
        self._holder.copy_param(next(place for place, each in enumerate(self.params) if each.name == name), value)
        self._by_hand.suspect()
        if self.divided:
            self._close()

    def hold_whole(self, values: Mapping[str, Tensor | UnreadTensor]) -> None:
        """Replace held shards with the full model with parameters ``values``; call :meth:`restore` for states.

        Raises RuntimeError if a parameter has a different shape.
        """
        self._holder.hold_whole(values)
        self._close()

    # -- what travels and what is kept ---------------------------------------------------------------------------------

    @property
    def tiled(self) -> list[Parameter]:
        """Parameters that are divided among the ranks."""
        return [each.param for each in self.params]

    def capture(self) -> dict[str, Any]:
        """Return the state that all ranks share, without rows."""
        return {
            "update": [*self._last.key, list(self._last.rates)],
            "begun": self._begun,
            "parameters": [[each.name, list(each.shape)] for each in self.params],
        }

    def gathered(self) -> dict[Parameter, State] | None:
        """Return the optimizer's full states, keyed by parameter; None if this rank does not have them."""
        whole = self.gathered_whole()
        return None if whole is None else {self.params[place].param: state for place, (_, state) in whole.items()}

    def gathered_whole(self) -> Whole | None:
        """Return the full parameters and states; None if this rank does not have them."""
        if self.divided:
            return self._gathered
        return self._holder.whole() if self._holder.holds else None

    def written(self, rank: int) -> dict[Parameter, State] | None:
        """Return the states that this rank writes to a joint checkpoint of all ranks; None if it holds all states."""
        if not self.divided:
            return None
        return {self.params[place].param: state for place, (_, state) in self._holder.written().items()}

    def written_params(self) -> dict[str, Pieces]:
        """Return this rank's parameter rows for a joint checkpoint, keyed by name; requires a divided model."""
        return {self.params[place].name: value for place, (value, _) in self._holder.written().items()}

    def kept(self) -> dict[str, Any]:
        """Return the shards held by this rank, for another run in this process."""
        return self._holder.to_keep()

    def restore(self, tree: Mapping[str, Any] | None, *, whole: bool) -> None:
        """Adopt the result of :meth:`capture` from another rank or a checkpoint, with the last update it records.

        Shards that lack this update are updated if this rank has kept everything needed for it, and dropped otherwise.

        Args:
            whole: Whether the optimizer and model hold the full state and all parameters after that update.

        Raises RuntimeError if the state belongs to a different model, or to a model that is not sharded.
        """
        if tree is None:
            raise RuntimeError(
                "a model that was not sharded cannot continue as a sharded one, nor from its automatic checkpoint: "
                "shard it on every worker (elastic_ray.fully_shard), or start anew under another RunConfig(name)"
            )
        if tree["parameters"] != self.capture()["parameters"]:
            raise RuntimeError("train_loop_per_worker must build and shard the same model on every worker")
        self._by_hand.end()
        pending, before = self._pending, self._last
        number, generation, rates = tree["update"]
        self._last = Update(number, generation, tuple(rates))
        self._pending = None
        self._close()
        if whole:
            self._open = True
            self._holder.copy_states(self._optimizer)
        elif tree.get("kept"):
            self._holder.hold_kept(tree["kept"])
        elif pending is not None and pending.key == self._last.key:
            pending.make(self._last.rates)
        elif before.key != self._last.key or not self._begun:
            self._holder.drop()
        self._begun = self._begun or bool(tree["begun"])


class OptimizerPart:
    """One of a sharded model's optimizers (usually the only one), which votes on its updates and makes them."""

    idle = False  # its updates are never the user's optimizer's alone
    votes = True

    def __init__(self, shards: ShardedOptimizer, optimizer: torch.optim.Optimizer) -> None:
        self.shards, self.optimizer = shards, optimizer
        self.apply: Callable[..., Any] = optimizer.step

    @property
    def divided(self) -> bool:
        """True if other ranks hold some of the shards, so that updates need a vote."""
        return self.shards.divided

    def decide(self) -> bool:
        """Vote with all ranks on the next update; return False if the vote fails, which means the step is lost."""
        return self.shards.decide(self)

    def update(self, apply: Callable[..., Any], **kwargs: Any) -> Any:
        """Make an update that all ranks voted for; return the result of ``apply``, the optimizer's step."""
        return self.shards.update(self, lambda: apply(**kwargs))

    def whole_states(self) -> dict[Tensor, State]:
        """Return the optimizer's full states, keyed by parameter, on rank 0; see ``ShardedOptimizer.whole_states``."""
        own = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        return {param: state for param, state in self.shards.whole_states().items() if id(param) in own}

    def loaded(self) -> None:
        """Keep this rank's rows of the full states that all ranks have loaded into the optimizer."""
        self.shards.loaded(self.optimizer)


class ShardUpdate:
    """Update of some shards with given gradients.

    Args:
        hidden: ``id`` of each user parameter replaced with shard rows during the optimizer step.
        groups: Index of the optimizer's parameter group, keyed by parameter position.
        by_hand: Detector of changes to parameters outside updates.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, hidden: Sequence[int], groups: Mapping[int, int], by_hand: HandChanges
    ) -> None:
        self._optimizer, self._hidden, self._groups, self._by_hand = optimizer, hidden, groups, by_hand

    def make(self, shards: Sequence[tuple[Shard, Mapping[int, Tensor]]], apply: Callable[[], Any]) -> Any:
        """Make the update, and return the result of ``apply``.

        Args:
            shards: Each shard with its rows' gradients, keyed by parameter position; parameters without a gradient are
                left out.
        """
        shown: list[tuple[Parameter, int]] = []
        states: dict[Parameter, State] = {}
        for shard, grads in shards:
            for param, grad in grads.items():
                view = shard.views[param]
                view.requires_grad_(True)
                view.grad = grad
                shown.append((view, self._groups[param]))
                states[view] = shard.states[view]
        places = {each: place for place, each in enumerate(self._hidden)}
        updated = UpdatedRows(places, [shard.views for shard, _ in shards], self._by_hand)
        with swapped(self._optimizer, self._hidden, shown, states), updated.shown():
            result = apply()
        for shard, grads in shards:
            for param in grads:
                view = shard.views[param]
                view.grad = None
                shard.put(param, view, states[view])
        return result


class PendingShards:
    """Copies of everything needed to make an update later, once it is known that all ranks voted for it.

    By that time, the optimizer may have a later step's options, and the gradients may no longer exist.

    Args:
        shards: Shards and gradients, as in ``ShardUpdate.make``; the gradients are copied.
    """

    def __init__(
        self,
        part: OptimizerPart,
        update: ShardUpdate,
        shards: Sequence[tuple[Shard, Mapping[int, Tensor]]],
        key: tuple[int, int],
    ) -> None:
        self.key = key
        self._part, self._update = part, update
        self._shards = [(shard, {param: grad.clone() for param, grad in grads.items()}) for shard, grads in shards]
        self._options = options_of(part.optimizer)

    def make(self, rates: Sequence[float]) -> None:
        """Make the update with the learning rates used on other ranks."""
        with as_then(self._part.optimizer, self._options, rates):
            self._update.make(self._shards, self._part.apply)
