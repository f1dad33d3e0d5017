"""Parameters and optimizer state of one sharded model: updates, and changes of the group (torch).

Each shard lies with its owner, in whose model it is, and with the rank that follows. Before an update each rank sends
the gradients of its rows, as user code has left them, to the one that follows it, and then all vote. What one rank has
heard decided can be done on every rank that lives: both holders of a shard have all that the update takes, and make it
alike. So a loss of any one rank loses nothing, and nothing has to be sent before training goes on but rows for the new
layout.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from elastic_ray.communication.communicator import CommunicationFailedError
from elastic_ray.consensus.intents import Announced, Intent
from elastic_ray.state.layout import ReplicasDifferError
from elastic_ray.state.replicas import sum_of_bits
from elastic_ray.sync.optimizer_tiles.moves import StateLostError
from elastic_ray.sync.optimizer_tiles.states import State
from elastic_ray.sync.sharded_parameters.collectives import ShardCollectives
from elastic_ray.sync.sharded_parameters.fsdp_fields import ShardedParam, adopt, padded, params_of
from elastic_ray.sync.sharded_parameters.held_shards import HeldShards, Shard, carry_out
from elastic_ray.sync.sharded_parameters.pending_update import PendingShards, ShardUpdate
from elastic_ray.sync.sharded_parameters.process_group import forget_mesh, make_mesh
from elastic_ray.sync.sharded_parameters.row_layout import (
    Piece,
    RowMove,
    ShardId,
    from_code,
    hand_over,
    lost,
    moves,
    pieces_of,
    rows_of,
    shards_of,
    to_code,
)
from elastic_ray.sync.sharded_parameters.run_view import ShardRun

_WHOLE = ShardId(1, 0)
_STATE, _STEP = 2, 3  # what is announced; see Intent.SHARDS


@dataclasses.dataclass(frozen=True, slots=True)
class _Update:
    """An update that was made: its number, the group that made it, and the learning rates."""

    number: int = 0
    generation: int = 0
    rates: tuple[float, ...] = ()

    @property
    def key(self) -> tuple[int, int]:
        """Tells updates apart."""
        return self.number, self.generation


class ShardedOptimizer:
    """See the module's text. Methods that communicate raise CommunicationFailedError where the group breaks.

    Args:
        run: that the model is trained in.
        module: the model, sharded on a mesh of one.
        optimizer: steps its parameters.
        number: of the model, in the order in which the loop wraps them.
        collectives: of the model.
    """

    def __init__(
        self,
        run: ShardRun,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        number: int,
        collectives: ShardCollectives,
    ) -> None:
        self._run, self._module, self._optimizer, self._number = run, module, optimizer, number
        self._collectives = collectives
        self._apply: Callable[..., Any] = optimizer.step
        self.params: list[ShardedParam] = params_of(module)
        self._places = {id(each.param): place for place, each in enumerate(self.params)}
        self._held = HeldShards([each.shape for each in self.params])
        self._layout = _WHOLE
        self._mesh: Any = None
        self._workers: tuple[str, ...] = ()
        self._begun = False
        self._last = _Update()
        self._pending: PendingShards | None = None
        self._open = True  # whether rank 0 has all that there is to gather, as all ranks know
        self._gathered: dict[int, tuple[Tensor, State]] | None = None
        self._hold_whole()

    def _hold_whole(self) -> None:
        """The whole model is here, and with it what the optimizer knows so far."""
        shard = Shard()
        for place, each in enumerate(self.params):
            state = _local(self._optimizer.state.pop(each.param, {}))
            shard.put(place, Parameter(each.local.detach(), requires_grad=False), state)
        self._layout, self._held.shards = _WHOLE, {_WHOLE: shard}

    # -- updates -------------------------------------------------------------------------------------------------------

    @property
    def divided(self) -> bool:
        """Whether other ranks hold some of the shards: updates are voted on."""
        return self._begun and self._run.group.world_size > 1

    def decide(self) -> bool:
        """Vote on the update that is about to be made; False where the step is lost."""
        self._close()
        if not self.divided:
            return True
        run, voted = self._run, False
        try:
            run.consensus.announce(Announced(Intent.SHARDS, self._number, self._trained_digest << 2 | _STEP))
            run.consensus.agreed()
            followed = self._grads_of_followed()
            voted = True
            vote = run.group.communicator.gradients.all_reduce(torch.ones(1))
            run.moment("vote")
            run.consensus.wait(vote)
            run.consensus.reductions_started()
        except CommunicationFailedError as error:
            if run.ledger.step is None:
                raise
            if voted:  # others may have heard of its end
                self._pending = self._pend(followed)
            run.ledger.fail(str(error))
            return False
        self._followed = followed
        return True

    def _close(self) -> None:
        """Rank 0 has the whole state no more."""
        self._open, self._gathered = False, None

    def _grads_of_followed(self) -> dict[int, Tensor]:
        """The gradients that the rank before has for its shard, in return for one's own to the rank that follows."""
        own = self._own_grads()
        if len(self._mine) < 2:
            return {}
        followed = self._held.shards[self._mine[1]]
        trained = [place for place, each in enumerate(self.params) if each.param.grad is not None]
        received = {
            place: torch.empty_like(followed.views[place], dtype=self._grad_dtype(place))
            for place in trained
            if place in followed.views
        }
        self._collectives.to_follower([own[place] for place in trained if place in own], list(received.values()))
        return received

    @property
    def _trained_digest(self) -> int:
        """32 bits that tell apart which parameters have a gradient: all ranks must have the same ones."""
        return zlib.crc32(bytes(each.param.grad is not None for each in self.params))

    def _grad_dtype(self, place: int) -> torch.dtype:
        grad = self.params[place].local_grad
        assert grad is not None, "only parameters with gradients are asked for"
        return grad.dtype

    def _own_grads(self) -> dict[int, Tensor]:
        """Those of the rows that this rank owns."""
        own = self._held.shards[self._layout]
        found = {place: each.local_grad for place, each in enumerate(self.params) if place in own.views}
        return {place: grad for place, grad in found.items() if grad is not None}

    @property
    def _mine(self) -> tuple[ShardId, ...]:
        """What this rank holds in the present layout: its own shard first."""
        return shards_of(self._layout.world, self._layout.index)

    def _with_grads(self, followed: Mapping[int, Tensor]) -> list[tuple[Shard, Mapping[int, Tensor]]]:
        shards = [self._held.shards[each] for each in self._mine]
        return list(zip(shards, [self._own_grads(), followed], strict=False))

    def _pend(self, followed: Mapping[int, Tensor]) -> PendingShards:
        key = self._last.number + 1, self._run.group.generation
        return PendingShards(self._optimizer, self._update, self._with_grads(followed), key)

    @property
    def _update(self) -> ShardUpdate:
        numbers = {id(p): i for i, group in enumerate(self._optimizer.param_groups) for p in group["params"]}
        groups = {place: numbers[id(each.param)] for place, each in enumerate(self.params) if id(each.param) in numbers}
        return ShardUpdate(self._optimizer, [id(each.param) for each in self.params], groups)

    def update(self, apply: Callable[..., Any], **kwargs: Any) -> Any:
        """Make an update that is decided.

        Args:
            apply: the optimizer's own step.
            kwargs: for it.
        """
        followed = self._followed if self.divided else {}
        self._followed: Mapping[int, Tensor] = {}
        result = self._update.make(self._with_grads(followed), lambda: apply(**kwargs))
        rates = tuple(float(group["lr"]) for group in self._optimizer.param_groups if "lr" in group)
        self._last = _Update(self._last.number + 1, self._run.group.generation, rates)
        return result

    # -- the group -----------------------------------------------------------------------------------------------------

    def enter_group(self) -> None:
        """Hold what this rank is to hold in the present group; all ranks that hold anything hold the same update.

        Raises:
            StateLostError: no rank holds some rows; raised on every rank.
        """
        group, held = self._run.group, self._held
        self._gathered = None
        everyone, self._open = self._look_around()
        sent = moves(held.counts, everyone, self._widths)
        received = carry_out(group.communicator, sent, held.give) if sent else []
        mine = shards_of(group.world_size, group.rank)
        memory: dict[int, tuple[Tensor, Tensor]] = {}
        made = {mine[0]: held.take(received, mine[0], lambda piece: self._own_place(piece, memory))}
        made |= {each: held.take(received, each, self._place) for each in mine[1:]}
        # From here on a rank that is through with this does not hold any more what it has sent, so all must have it.
        held.shards |= made
        if group.world_size > 1:
            group.communicator.gather_ints([1])
        held.shards = made
        self._layout, self._pending, self._followed = mine[0], None, {}
        self._workers = tuple(member.worker for member in group.members)
        self._adopt(memory)
        self._begun = True
        if self._open and self.divided:
            self._gathered = self._collect()

    @property
    def _widths(self) -> list[int]:
        return [max(1, each.param.numel() // each.shape[0]) for each in self.params]

    def _place(self, piece: Piece) -> Tensor:
        """Memory for rows that this rank follows."""
        param = self.params[piece.param]
        return param.local.new_empty((piece.stop - piece.start, *param.shape[1:]))

    def _own_place(self, piece: Piece, memory: dict[int, tuple[Tensor, Tensor]]) -> Tensor:
        """Memory for rows that this rank owns: the model's."""
        param, (_, chunk) = self.params[piece.param], rows_of(self._held.counts[piece.param], ShardId(self._world, 0))
        memory[piece.param] = padded(param, piece.stop - piece.start, chunk)
        return memory[piece.param][1]

    @property
    def _world(self) -> int:
        return self._run.group.world_size

    def _adopt(self, memory: dict[int, tuple[Tensor, Tensor]]) -> None:
        """Have torch's side of the model follow."""
        for place, param in enumerate(self.params):
            if place not in memory:  # it has no rows here
                _, chunk = rows_of(self._held.counts[place], ShardId(self._world, 0))
                memory[place] = padded(param, 0, chunk)
        before, group = self._mesh, self._run.group
        device = self.params[0].local.device.type
        self._mesh = make_mesh(device, group.rank, group.world_size, self._collectives)
        adopt(self._module, self._mesh, [(param, *memory[place]) for place, param in enumerate(self.params)])
        if before is not None:
            forget_mesh(before)

    def _look_around(self) -> tuple[list[set[ShardId]], bool]:
        """The shards of each rank, and whether one that the others follow has all that there is to gather."""
        communicator, counts = self._run.group.communicator, self._held.counts
        own = sorted(to_code(shard) for shard in self._held.shards)
        if communicator.world_size == 1:
            rows = [own]
            opened = self._open
        else:
            sizes = communicator.gather_ints([len(own), int(self._open)])
            most = max(size for size, _ in sizes)
            told = communicator.gather_ints([*own, *[0] * (most - len(own))])
            rows = [row[:size] for row, (size, _) in zip(told, sizes, strict=True)]
            opened = any(is_open for _, is_open in sizes)
        everyone = [{from_code(code) for code in row} for row in rows]
        if gone := lost(counts, everyone):
            raise StateLostError(self._lost_text(gone))
        return everyone, opened

    def _lost_text(self, gone: Sequence[Piece]) -> str:
        rows = sum(piece.stop - piece.start for piece in gone)
        whose = f" in the group of {', '.join(self._workers)}" if self._workers else ""
        return (
            f"{rows / sum(self._held.counts):.0%} of the rows of parameters of model {self._number} were lost{whose}: "
            "each row lies with two workers that follow each other, and none that lives has these"
        )

    def hand_over(self, stays: Sequence[bool]) -> None:
        """Some ranks are about to leave: each shard is to lie with two that stay; all ranks call it."""
        if not self.divided or all(stays):
            return
        group, counts = self._run.group, self._held.counts
        world = group.world_size
        given = hand_over([set(shards_of(world, rank)) for rank in range(world)], stays)
        sent = [
            RowMove(source, destination, piece)
            for shard, source, destination in given
            for piece in pieces_of(counts, shard)
        ]
        received = carry_out(group.communicator, sent, self._held.give) if sent else []
        for shard, _, destination in given:
            if destination == group.rank:
                self._held.shards[shard] = self._held.take(received, shard, self._place)

    # -- the whole -----------------------------------------------------------------------------------------------------

    @property
    def settled(self) -> bool:
        """Whether this rank can save the whole model."""
        return not self.divided or self._gathered is not None

    def gather(self) -> None:
        """Have rank 0 hold the whole model in CPU memory until the next update; all ranks call it.

        At the end of a pass as well, so that code which saves a checkpoint behind a loop may do so on rank 0 alone.
        The two holders of each shard are compared by the way.

        Raises:
            ReplicasDifferError: they differ; raised on every rank.
        """
        if self.divided and not self._open:
            self._compare()
            self._gathered = self._collect()
        self._open = True

    def _compare(self) -> None:
        """Whether each rank's shard is, bit by bit, what the rank that follows it has."""
        communicator = self._run.group.communicator
        sums = [sum(int(sum_of_bits(view)) for view in self._held.shards[each].views.values()) for each in self._mine]
        rows = communicator.gather_ints([each & ((1 << 62) - 1) for each in sums])
        bad = [rank for rank, (own, _) in enumerate(rows) if rows[(rank + 1) % len(rows)][1] != own]
        if bad:
            raise ReplicasDifferError(
                f"rows of parameters that rank {bad[0]} owns differ from those that rank {(bad[0] + 1) % len(rows)} "
                f"has of them, in model {self._number}: whatever changes parameters of a sharded model besides its "
                "optimizer's step (initialisation after the first step, clipping of weights, averages that are written "
                "back) reaches only the rows that a rank owns. Change them by load_state_dict(), on all ranks"
            )

    def _collect(self) -> dict[int, tuple[Tensor, State]] | None:
        """The whole of each parameter on rank 0; None elsewhere. All ranks call it."""
        group, counts = self._run.group, self._held.counts
        here = set(shards_of(group.world_size, 0))
        sent = [
            RowMove(rank, 0, piece)
            for rank in range(1, group.world_size)
            if ShardId(group.world_size, rank) not in here
            for piece in pieces_of(counts, ShardId(group.world_size, rank))
        ]
        received = carry_out(group.communicator, sent, self._held.give)
        if group.rank != 0:
            return None
        return {place: self._held.whole(place, received) for place in range(len(self.params))}

    def _whole(self) -> dict[int, tuple[Tensor, State]] | None:
        """The whole where this rank is to have it; all ranks call it between an update and the end of a pass."""
        if not self.divided:
            return {place: self._held.whole(place) for place in range(len(self.params))}
        if not self._open:
            self._run.consensus.agree_on(Announced(Intent.SHARDS, self._number, _STATE))
            self.gather()
        return self._gathered

    def whole_states(self) -> dict[Tensor, State]:
        """The optimizer's states by parameter, on rank 0, and none on the others.

        Raises:
            RanksDisagreeError: another rank does not call it, between an update and the end of a pass.
        """
        return {self.params[place].param: state for place, (_, state) in (self._whole() or {}).items() if state}

    def whole_params(self) -> dict[str, Tensor]:
        """The same of parameters, by name."""
        return {self.params[place].name: value for place, (value, _) in (self._whole() or {}).items()}

    def loaded(self) -> None:
        """The optimizer was given whole states, on all ranks alike: keep those of the rows that this rank holds."""
        for place, each in enumerate(self.params):
            state = _local(self._optimizer.state.pop(each.param, {}))
            self._cut(place, None, state)
        if self.divided:
            self._close()

    def load_param(self, name: str, value: Tensor) -> None:
        """A parameter is given anew, on all ranks alike: take over the rows that this rank holds.

        Raises:
            ValueError: it has another shape.
        """
        place = next(place for place, each in enumerate(self.params) if each.name == name)
        self._cut(place, value, None)
        if self.divided:
            self._close()

    @torch.no_grad()
    def _cut(self, place: int, value: Tensor | None, state: State | None) -> None:
        shape = self.params[place].shape
        for shard, held in self._held.shards.items():
            if place not in held.views:
                continue
            start, stop = rows_of(self._held.counts[place], shard)
            view = held.views[place]
            if value is not None:
                view.copy_(value[start:stop])
            if state is not None:
                cut = {
                    key: each[start:stop].clone() if isinstance(each, Tensor) and tuple(each.shape) == shape else each
                    for key, each in state.items()
                }
                held.put(place, view, {key: _clone(each) for key, each in cut.items()})

    # -- what travels and what is kept ---------------------------------------------------------------------------------

    @property
    def tiled(self) -> list[Parameter]:
        """Parameters of which each rank holds a part."""
        return [each.param for each in self.params]

    def capture(self) -> dict[str, Any]:
        """What all ranks share, without rows."""
        return {
            "update": [*self._last.key, list(self._last.rates)],
            "begun": self._begun,
            "parameters": [[each.name, list(each.shape)] for each in self.params],
        }

    def gathered(self) -> dict[Parameter, State] | None:
        """The optimizer's whole states where this rank has them."""
        whole = self.gathered_whole()
        return None if whole is None else {self.params[place].param: state for place, (_, state) in whole.items()}

    def gathered_whole(self) -> dict[int, tuple[Tensor, State]] | None:
        """All that there is, where this rank has it."""
        if not self.divided:
            return {place: self._held.whole(place) for place in range(len(self.params))} if self._held.shards else None
        return self._gathered

    def kept(self) -> dict[str, Any]:
        """The shards that this rank holds, for a rerun in this process."""
        return {
            str(to_code(shard)): {str(place): held.rows(place) for place in held.views}
            for shard, held in self._held.shards.items()
        }

    def restore(self, tree: Mapping[str, Any] | None, *, whole: bool) -> None:
        """Take over what :meth:`capture` gave: shards of its last update stay, those of the one before are updated.

        Args:
            tree: it.
            whole: whether the optimizer holds the whole state of that update, and the model all parameters.

        Raises:
            RuntimeError: it is of a model that is not sharded, or of another one.
        """
        if tree is None:
            raise RuntimeError(
                "a model that was not sharded cannot go on as a sharded one, nor from its automatic checkpoint: shard "
                "it on every worker (elastic_ray.fully_shard), or start anew under another RunConfig(name)"
            )
        if tree["parameters"] != self.capture()["parameters"]:
            raise RuntimeError("train_loop_per_worker must build and shard the same model on every worker")
        pending, before = self._pending, self._last
        number, generation, rates = tree["update"]
        self._last = _Update(number, generation, tuple(rates))
        self._pending = None
        self._close()
        if whole:
            self._open = True
            self._hold_again()
        elif tree.get("kept"):
            self._take_kept(tree["kept"])
        elif pending is not None and pending.key == self._last.key:
            pending.make(self._apply, self._last.rates)
        elif before.key != self._last.key or not self._begun:
            self._held.shards = {}
        self._begun = self._begun or bool(tree["begun"])

    def _hold_again(self) -> None:
        """The whole model is here, with whole states in the optimizer."""
        for place, each in enumerate(self.params):
            self._cut(place, None, _local(self._optimizer.state.pop(each.param, {})))

    def take_whole(self, values: Mapping[str, Tensor]) -> None:
        """Hold the whole model, with these parameters, in place of what was held; states follow by :meth:`restore`."""
        shard = Shard()
        for place, each in enumerate(self.params):
            if tuple(values[each.name].shape) != each.shape:
                raise RuntimeError(
                    f"parameter {each.name!r} is {each.shape} here and {tuple(values[each.name].shape)} there"
                )
            value = values[each.name].to(each.local.device, each.local.dtype, copy=True)
            shard.put(place, Parameter(value, requires_grad=False), {})
        self._held.shards = {_WHOLE: shard}
        self._close()

    def _take_kept(self, kept: Mapping[str, Any]) -> None:
        self._held.shards = {}
        for code, pieces in kept.items():
            shard = Shard()
            for place, rows in pieces.items():
                state = {key: value for key, value in rows.items() if key}
                shard.put(int(place), Parameter(rows[""], requires_grad=False), state)
            self._held.shards[from_code(int(code))] = shard


def _local(state: Mapping[str, Any]) -> State:
    """A state without torch's sharded tensors, of a mesh of one."""
    return {key: value.to_local() if hasattr(value, "to_local") else value for key, value in state.items()}


def _clone(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
