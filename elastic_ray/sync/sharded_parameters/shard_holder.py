"""Holder of one model's shards on a rank, which moves shards when the group changes (torch)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from elastic_ray.communication.communicator import Communicator
from elastic_ray.state.layout import ReplicasDifferError
from elastic_ray.state.replicas import sum_of_bits
from elastic_ray.state.unread import UnreadTensor
from elastic_ray.sync.optimizer_tiles.moves import StateLostError
from elastic_ray.sync.optimizer_tiles.states import State
from elastic_ray.sync.sharded.placement import hand_over
from elastic_ray.sync.sharded_parameters.deferred_initialisation import initialise
from elastic_ray.sync.sharded_parameters.fsdp_fields import (
    NO_MEMORY_YET,
    ShardedParam,
    adopt,
    memory_for,
    params_of,
    stands_in,
)
from elastic_ray.sync.sharded_parameters.held_shards import (
    VALUE,
    WHOLE,
    HeldShards,
    Rows,
    Shard,
    Written,
    apart,
    carry_out,
    placed,
    rows_of_state,
    written_rows,
)
from elastic_ray.sync.sharded_parameters.process_group import discard_mesh, make_mesh
from elastic_ray.sync.sharded_parameters.row_layout import (
    COPIES,
    Layout,
    Piece,
    RowMove,
    ShardId,
    check_shard_sizes,
    from_code,
    layout_of,
    lost,
    meanwhile,
    moves,
    pieces_of,
    rows_of,
    to_code,
)
from elastic_ray.sync.sharded_parameters.shard_collectives import ShardCollectives

if TYPE_CHECKING:
    from elastic_ray.run.run import Group

Whole = dict[int, tuple[Tensor, State]]
"""Whole parameters and the optimizer's state of each, by the parameter's position, in CPU memory."""

_LOW = (1 << 32) - 1


class ShardHolder:
    """Holder of this rank's shards, which moves shards between ranks when the group changes.

    Methods that communicate raise CommunicationFailedError if the group breaks.

    Args:
        module: Model already sharded by torch on a mesh with one rank.

    Attributes:
        built_on_meta: Whether this rank or, in a group, any of its ranks has built the model on the meta device.
    """

    def __init__(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, number: int, collectives: ShardCollectives
    ) -> None:
        self._module, self._optimizer, self._number, self._collectives = module, optimizer, number, collectives
        self.params: list[ShardedParam] = params_of(module)
        self._held = HeldShards([each.shape for each in self.params])
        self._layout, self._rank = layout_of(1), 0  # that shards were moved for
        self._target, self.settles = self._layout, False
        self._mesh: Any = None
        self._workers: tuple[str, ...] = ()
        # What the optimizer knows from its start, of a model that has no memory yet.
        self._first: list[State] | None = None
        self._meta_here = self.built_on_meta = any(stands_in(each.param) for each in self.params)
        if self.built_on_meta:
            self._first = [self._state_of(each) for each in self.params]
        else:
            self._hold_whole()

    def _hold_whole(self) -> None:
        """Hold the entire model as one shard, with the optimizer's current state."""
        shard = Shard()
        for place, each in enumerate(self.params):
            shard.put(place, Parameter(each.local.detach(), requires_grad=False), self._state_of(each))
        self._held.keep({WHOLE: shard})

    def _state_of(self, param: ShardedParam) -> State:
        """Return the optimizer's state for a full parameter, removing it from the optimizer."""
        state = self._optimizer.state.pop(param.param, {})
        return {key: value.to_local() if hasattr(value, "to_local") else value for key, value in state.items()}

    @property
    def mine(self) -> tuple[Shard, ...]:
        """Shards held by this rank in the current layout: its own first, then second copies of other shards."""
        return tuple(self._held.shards[each] for each in self._layout.held_by(self._rank))

    def written(self) -> Written:
        """Return this rank's part of a checkpoint written by all ranks; owners of the same rows each write a share."""
        own = self._layout.owned_by(self._rank)
        owners = self._layout.owners(own.index)
        share = ShardId(len(owners), owners.index(self._rank))
        return written_rows(self._held.shapes, own, self.mine[0], share)

    @property
    def holds(self) -> bool:
        """True if this rank holds any shard."""
        return bool(self._held.ids)

    def drop(self) -> None:
        """Release all shards, because they are outdated and other ranks hold valid ones."""
        self._held.keep({})

    # -- the group -----------------------------------------------------------------------------------------------------

    def check_memory(self) -> None:
        """Raise RuntimeError if the model is still on the meta device, because no group has been entered yet."""
        if self._first is not None:
            raise RuntimeError(NO_MEMORY_YET)

    def _start(self, seed: int, group: Group) -> None:
        """Initialise this rank's rows, one module at a time, in the first group, where no rank holds any rows yet."""
        assert self._first is not None, "only a model without memory is made here"
        own, shard, states = self._collectives.layout.owned_by(group.rank), Shard(), self._first

        def keep(place: int, value: Tensor) -> None:
            start, stop = rows_of(self._held.counts[place], own)
            if start < stop:
                rows = Parameter(value[start:stop].clone(), requires_grad=False)
                shard.put(place, rows, rows_of_state(states[place], self.params[place].shape, start, stop))

        initialise(self._module, self.params, seed, keep)
        self._held.keep({own: shard})

    def gather_holdings(self, group: Group, *, opened: bool, begun: bool) -> tuple[list[set[ShardId]], bool]:
        """Return the shards held by each rank, and whether ``opened`` is True on any rank; called on every rank.

        A model that is still on the meta device is initialised.

        Args:
            opened: Whether rank 0 has gathered the entire model, as far as this rank knows.
            begun: Whether this rank, or a rank that it received its state from, has entered a group before.

        Raises:
            StateLostError: No rank holds some rows; raised on every rank.
            ValueError: Ranks use different values of ``shard_size``; raised on every rank.
        """
        communicator, shard_size = group.communicator, self._collectives.shard_size or 0
        own = sorted(to_code(shard) for shard in self._held.ids)
        rows, seed, self.built_on_meta = [own], torch.initial_seed(), self._meta_here
        # Also where a first group broke while rows moved: the second copies may not be there yet.
        nothing = self._first is not None and not begun
        if communicator.world_size > 1:
            here = int(self._meta_here)
            sizes = communicator.gather_ints(
                [len(own), int(opened), int(nothing), seed >> 32, seed & _LOW, here, shard_size]
            )
            most = max(size for size, *_ in sizes)
            check_shard_sizes([size for *_, size in sizes])
            told = communicator.gather_ints([*own, *[0] * (most - len(own))])
            rows = [row[:size] for row, (size, *_) in zip(told, sizes, strict=True)]
            opened = any(is_open for _, is_open, *_ in sizes)
            nothing = all(each[2] for each in sizes)
            seed = sizes[0][3] << 32 | sizes[0][4]
            self.built_on_meta = any(each[5] for each in sizes)
        if nothing:
            self._start(seed, group)
            return [{self._collectives.layout.owned_by(rank)} for rank in range(group.world_size)], False
        everyone = [{from_code(code) for code in row} for row in rows]
        if gone := lost(self._held.counts, everyone):
            raise StateLostError(self._lost_text(gone))
        # A model that may be larger than any rank's memory is gathered only where all ranks ask for it.
        return everyone, opened and not self.built_on_meta

    def arrange(self, group: Group, everyone: Sequence[set[ShardId]]) -> None:
        """Receive the rows needed by this rank for the next step; :meth:`complete` completes the layout later."""
        held, target = self._held, self._collectives.layout
        layout = meanwhile(held.counts, everyone, target)
        received = self._received(group, everyone, layout)
        mine = layout.held_by(group.rank)
        memory = dict[int, tuple[Tensor, Tensor]]()

        def put(piece: Piece, value: Tensor) -> Tensor:
            memory[piece.param] = self._memory(piece.param, mine[0], value)
            return memory[piece.param][1]

        made = {mine[0]: held.take(received, mine[0], put)}
        made |= {each: held.take(received, each) for each in mine[1:]}
        # Ranks that are through with this do not hold any more what they have sent, so all must have received it.
        held.keep(held.shards | made, held.unread)
        if group.world_size > 1:
            group.communicator.gather_ints([1])
        held.keep(made)
        self._layout, self._rank = layout, group.rank
        self._collectives.layout = layout
        self._target, self.settles = target, True  # shards are to be moved or copied yet, on all ranks alike
        self._workers = tuple(member.worker for member in group.members)
        before = self._mesh
        self._mesh = make_mesh(self.params[0].local.device.type, mine[0].index, layout.parts, self._collectives)
        shards = [
            (param, *(memory.get(place) or self._memory(place, mine[0], None)))
            for place, param in enumerate(self.params)
        ]
        adopt(self._module, self._mesh, shards)
        if before is not None:
            discard_mesh(before)
        self._first = None

    def _received(self, group: Group, everyone: Sequence[set[ShardId]], layout: Layout) -> list[tuple[Piece, Rows]]:
        """Return the layout's pieces that this rank lacked, received from other ranks; called on every rank."""
        widths = [max(1, each.param.numel() // each.shape[0]) for each in self.params]
        sent = moves(self._held.counts, everyone, layout, widths)
        return carry_out(group.communicator, sent, self._held.give) if sent else []

    def _memory(self, place: int, own: ShardId, value: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the model's memory for this rank's own rows of a parameter, and the rows in it."""
        return memory_for(self.params[place], value, rows_of(self._held.counts[place], ShardId(own.world, 0))[1])

    def complete(self, group: Group) -> None:
        """Send the remaining copies of shards, and free memory that is no longer used; called on every rank."""
        held, target = self._held, self._target
        mine = target.held_by(group.rank)
        if self._layout != target:
            everyone = [set(self._layout.held_by(rank)) for rank in range(group.world_size)]
            received = self._received(group, everyone, target)
            made = {each: held.shards.get(each) or held.take(received, each) for each in mine}
            held.keep(held.shards | made)
            group.communicator.gather_ints([1], with_gradients=True)  # as above
            self._layout = target
            self._collectives.layout = target
        held.keep({each: apart(held.shards[each], values=each != mine[0]) for each in mine})
        self.settles = False

    def _lost_text(self, gone: Sequence[Piece]) -> str:
        """Return a message about the share of rows that were lost and the workers that held them."""
        rows = sum(piece.stop - piece.start for piece in gone)
        layout, how = self._layout, "two workers that follow each other"
        if layout.is_replicated:
            how = f"{len(layout.groups)} workers, one of each shard group"
        whose = f" in the group of {', '.join(self._workers)}" if self._workers else ""
        return (
            f"{rows / sum(self._held.counts):.0%} of the rows of parameters of model {self._number} were lost{whose}: "
            f"each row lies with {how}, and none that lives has these"
        )

    def hand_over(self, group: Group, stays: Sequence[bool]) -> None:
        """Copy shards so that two staying ranks (``stays[r]`` for rank r) hold each of them; called on every rank."""
        layout = self._layout
        given = hand_over([layout.holders(index) for index in range(layout.parts)], stays, COPIES)
        sent = [
            RowMove(each.source, each.destination, piece)
            for each in given
            for piece in pieces_of(self._held.counts, ShardId(layout.parts, each.tile))
        ]
        received = carry_out(group.communicator, sent, self._held.give) if sent else []
        for each in given:
            if each.destination == group.rank:
                shard = ShardId(layout.parts, each.tile)
                self._held.shards[shard] = self._held.take(received, shard)

    # -- the whole -----------------------------------------------------------------------------------------------------

    def compare(self, communicator: Communicator) -> None:
        """Check that each shard's copies are bit-identical on all holders; called on every rank.

        Raises ReplicasDifferError on every rank if copies differ.
        """
        layout = self._layout
        held = [layout.held_by(rank) for rank in range(layout.world)]
        sums = [sum(int(sum_of_bits(view)) for view in shard.views.values()) for shard in self.mine]
        none = [0] * (max(map(len, held)) - len(sums))  # before its first update not all hold equally many
        rows = communicator.gather_ints([*(each & ((1 << 62) - 1) for each in sums), *none])
        sums_of = [dict(zip(shards, row, strict=False)) for shards, row in zip(held, rows, strict=True)]
        pairs = [
            (first, other)
            for index in range(layout.parts)
            for first, *others in [layout.holders(index)]
            for other in others
        ]
        bad = [
            (one, other)
            for one, other in pairs
            if sums_of[other][layout.owned_by(one)] != sums_of[one][layout.owned_by(one)]
        ]
        if bad:
            raise ReplicasDifferError(
                f"rows of parameters that rank {bad[0][0]} owns differ from those that rank {bad[0][1]} "
                f"has of them, in model {self._number}: whatever changes parameters of a sharded model outside its "
                "optimizer's step (initialisation after the first step, clipping of weights, averages that are written "
                "back) reaches own rows only. Use load_state_dict() on all ranks, or elastic_ray.sync.change_parameters"
            )

    def collect(self, group: Group) -> Whole | None:
        """Return the full model and optimizer state on rank 0, None on other ranks; called on every rank."""
        layout, counts = self._layout, self._held.counts
        owned = [(rank, layout.owned_by(rank)) for rank in layout.group_of(0)]
        needed = [(rank, shard) for rank, shard in owned if shard not in layout.held_by(0)]
        sent = [RowMove(rank, 0, piece) for rank, shard in needed for piece in pieces_of(counts, shard)]
        received = carry_out(group.communicator, sent, self._held.give) if sent else []
        return self.whole(received) if group.rank == 0 else None

    def whole(self, received: Sequence[tuple[Piece, Rows]] = ()) -> Whole:
        """Return the full model and optimizer state, assembled from held rows and rows in ``received``."""
        self.check_memory()
        return {place: self._held.whole(place, received) for place in range(len(self.params))}

    @torch.no_grad()
    def copy_param(self, place: int, value: Tensor) -> None:
        """Copy this rank's rows from ``value``, a loaded full parameter at position ``place`` in the model."""
        self.check_memory()
        for shard, held in self._held.shards.items():
            if place in held.views:
                start, stop = rows_of(self._held.counts[place], shard)
                held.views[place].copy_(value[start:stop])

    def copy_states(self, optimizer: torch.optim.Optimizer) -> None:
        """Copy this rank's rows from the full states loaded into a (single or joint) optimizer."""
        self.check_memory()
        options = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        for place, each in enumerate(self.params):
            if id(each.param) not in options and optimizer is not self._optimizer:
                continue
            state = placed(self._state_of(each), each, options.get(id(each.param), {}))
            if place in self._held.unread:
                self._held.unread[place] = {VALUE: self._held.unread[place][VALUE], **state}
            for shard, held in self._held.shards.items():
                if place in held.views:
                    start, stop = rows_of(self._held.counts[place], shard)
                    held.put(place, held.views[place], rows_of_state(state, each.shape, start, stop))

    def hold_whole(self, values: Mapping[str, Tensor | UnreadTensor]) -> None:
        """Hold the entire model with the parameters ``values``; call :meth:`copy_states` for the optimizer state.

        Unread tensors stay unread until this rank knows which of their rows it needs; until then, it holds no rows.

        Raises RuntimeError if a parameter has a different shape.
        """
        shard, unread = Shard(), dict[int, Rows]()
        late = any(isinstance(values[each.name], UnreadTensor) for each in self.params)
        for place, each in enumerate(self.params):
            value = values[each.name]
            there = tuple(value.shape)
            if there != each.shape:
                raise RuntimeError(f"parameter {each.name!r} is {each.shape} here and {there} there")
            if late or isinstance(value, UnreadTensor):
                unread[place] = {VALUE: value.to(each.local.device, each.local.dtype)}
                continue
            value = value.to(each.local.device, each.local.dtype, copy=True)
            shard.put(place, Parameter(value, requires_grad=False), {})
        self._held.keep({} if late else {WHOLE: shard}, unread)
        self._first = None

    def to_keep(self) -> dict[str, Any]:
        """Return the shards held by this rank, for reuse by another run in this process."""
        return {
            str(to_code(shard)): {str(place): held.rows(place) for place in held.views}
            for shard, held in self._held.shards.items()
        }

    def hold_kept(self, kept: Mapping[str, Any]) -> None:
        """Hold shards returned from :meth:`to_keep` in an earlier run."""
        shards: dict[ShardId, Shard] = {}
        for code, pieces in kept.items():
            shard = Shard()
            for place, rows in pieces.items():
                state = {key: value for key, value in rows.items() if key}
                shard.put(int(place), Parameter(rows[""], requires_grad=False), state)
            shards[from_code(int(code))] = shard
        self._held.keep(shards)
        self._first = None
