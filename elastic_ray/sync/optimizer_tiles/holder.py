"""Part of a model's optimizer state held by one rank, and its moves when the group changes (torch)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Parameter

from elastic_ray.communication.communicator import Communicator
from elastic_ray.state.pieces import Pieces
from elastic_ray.sync.optimizer_tiles.moves import StateLostError, carry_out
from elastic_ray.sync.optimizer_tiles.states import HeldTiles, State, StoredStates, assemble, cut_tile
from elastic_ray.sync.optimizer_tiles.tiling import Span, Tiling
from elastic_ray.sync.sharded.placement import Move, from_words, hand_over, lost, moves, place, to_words
from elastic_ray.sync.sliced_gradients.routes import OwnedSpan

if TYPE_CHECKING:
    from elastic_ray.run.run import Group

Owners = tuple[tuple[int, ...], ...]
"""Ranks by tile; the first one sends parameters, and sums of gradients, to others."""


def needed_at_once(moves: Sequence[Move], target: Owners, held: Sequence[Set[int]]) -> tuple[Move, ...]:
    """Return the moves needed before the next step, i.e. moves to a tile's first owner that holds no tiles yet."""
    return tuple(move for move in moves if not held[move.destination] and target[move.tile][0] == move.destination)


def moved(moves: Sequence[Move], held: Sequence[Set[int]]) -> list[frozenset[int]]:
    """Return the tiles each rank holds after the moves, given the tiles ``held`` by each rank before them."""
    return [
        frozenset(tiles) | {move.tile for move in moves if move.destination == rank} for rank, tiles in enumerate(held)
    ]


def owners_meanwhile(target: Owners, held: Sequence[Set[int]]) -> Owners:
    """Return interim owners: each planned owner that lacks its tile is replaced by a rank that holds it.

    Args:
        held: Tiles held by each rank; at least one rank must hold each tile.
    """
    found = []
    for tile, wanted in enumerate(target):
        ready = [rank for rank in wanted if tile in held[rank]]
        others = [rank for rank, tiles in enumerate(held) if tile in tiles and rank not in wanted]
        found.append(tuple([*ready, *others][: len(wanted)]))
    return tuple(found)


def next_moves(target: Owners, present: Owners, sizes: Sequence[int], most: int) -> tuple[Move, ...]:
    """Return the next few moves, where each rank that lacks tiles receives one tile, or several small ones.

    Args:
        most: Limit on the total size a rank receives if it receives several tiles, in the same unit as ``sizes``.
    """
    ranks = range(1 + max(rank for mine in (*target, *present) for rank in mine))
    received, sent = dict.fromkeys(ranks, 0), dict.fromkeys(ranks, 0)
    found = []
    for tile in sorted(range(len(target)), key=lambda tile: (len(present[tile]), tile)):  # the only copies first
        for rank in target[tile]:
            if rank in present[tile] or (received[rank] and received[rank] + sizes[tile] > most):
                continue
            source = min(present[tile], key=lambda holder: (sent[holder], holder))
            received[rank] += sizes[tile]
            sent[source] += sizes[tile]
            found.append(Move(tile, source, rank))
    return tuple(found)


@dataclasses.dataclass(frozen=True, slots=True)
class Everyone:
    """Tiles held by each rank in a group, with flags that are the same on all ranks."""

    tiles: list[frozenset[int]]
    unpublished: bool  # whether one lacks parameters of the last update
    gathered: bool  # whether one knows that rank 0 had the whole state
    stored: bool  # whether rank 0 has the whole state that it continues from

    @property
    def senders(self) -> list[int]:
        """Rank that sends each tile to others, i.e. the lowest rank that holds the tile."""
        count = len(frozenset().union(*self.tiles))
        return [next(rank for rank, tiles in enumerate(self.tiles) if tile in tiles) for tile in range(count)]


class TileHolder:
    """Holder of this rank's part of the optimizer state: some tiles (parts), the complete state, or nothing.

    Tiles are kept in :attr:`held`, and the complete state is kept in the optimizer.

    Methods that communicate raise CommunicationFailedError if the group breaks; the rank then keeps its state.
    """

    def __init__(self, module: torch.nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        self._module, self._optimizer, self._number = module, optimizer, number
        self.tiling: Tiling | None = None  # of the parameters; None where every rank holds the whole state
        self.params: dict[str, Parameter] = {}
        # the tiles that this rank holds; None where it holds the whole state, or nothing
        self.held: HeldTiles | None = None
        self._whole = True
        # the whole state that this rank continues from, read or not, until the next update; empty where the optimizer
        # has it
        self.stored = StoredStates(optimizer)
        # ranks of the present group that own each tile, as long as the state is divided in it. After a change of the
        # group they are others for some steps than they are to be.
        self.owners: Owners = ()
        self._target: Owners = ()
        self._workers: tuple[str, ...] = ()
        self._copies = 1

    def adopt(self, tiling: Tiling | None) -> None:
        """Adopt another tiling (None for no tiles) while this rank holds either the complete state or nothing."""
        known = dict(self._module.named_parameters(remove_duplicate=False))
        self.tiling = tiling
        self.params = {name: known[name] for name in tiling.names} if tiling is not None else {}
        self.stored.adapt(self.params.values())

    def owned_spans(self, params: Sequence[Parameter]) -> list[list[OwnedSpan]]:
        """Return each parameter's spans, in order, with the ranks that own them in the current group."""
        found: dict[int, list[OwnedSpan]] = {id(param): [] for param in params}
        for spans, owners in zip(self._tiling.tiles, self.owners, strict=True):
            for span in spans:
                mine = found.get(id(self.params[span.name]))
                if mine is not None:
                    mine.append(OwnedSpan(span.start, span.length, owners))
        return [sorted(found[id(param)], key=lambda span: span.start) for param in params]

    # -- the group -----------------------------------------------------------------------------------------------------

    def gather_holdings(self, communicator: Communicator, *, unpublished: bool, gathered: bool) -> Everyone:
        """Return the tiles that each rank holds; called on every rank.

        Raises StateLostError on every rank if no rank holds some of the tiles.
        """
        tiling = self._tiling
        own = self.held.tiles if self.held is not None else range(len(tiling)) if self._whole else ()
        words = [*to_words(own, len(tiling)), int(unpublished), int(gathered), int(bool(self.stored))]
        rows = communicator.gather_ints(words) if communicator.world_size > 1 else [words]
        tiles = [from_words(row[:-3], len(tiling)) for row in rows]
        if gone := lost(len(tiling), tiles):
            raise StateLostError(self._lost_text(gone))
        return Everyone(tiles, any(row[-3] for row in rows), any(row[-2] for row in rows), bool(rows[0][-1]))

    def arrange(self, group: Group, everyone: Everyone, copies: int, *, gradually: bool) -> None:
        """Move optimizer state between ranks so that ``copies`` ranks own each tile; called on every rank.

        Args:
            gradually: Whether to move only tiles needed for the next step; :meth:`restore_some` moves the rest.
        """
        communicator, world = group.communicator, group.world_size
        nodes = [member.node for member in group.members] or [""]
        target = place(len(self._tiling), everyone.tiles, nodes, copies)
        sent = moves(everyone.tiles, target)
        if copies < world and gradually:
            sent = needed_at_once(sent, target, everyone.tiles)
        if sent:
            self._receive(communicator, sent)
        if world > 1:
            communicator.gather_ints([1])  # ranks that are through with this do not hold any more what they have sent
        self._target, self._copies = target, copies
        self.owners = owners_meanwhile(target, moved(sent, everyone.tiles))
        self._workers = tuple(member.worker for member in group.members)
        if copies >= world:
            self.become_whole()
        else:
            self._keep([tile for tile, mine in enumerate(self.owners) if group.rank in mine])

    @property
    def restores(self) -> bool:
        """True if some tiles (parts of the state) still have temporary owners."""
        return self.owners != self._target

    def restore_some(self, group: Group, most: int) -> None:
        """Move some of the tiles to their planned owners; called on every rank between the same two updates.

        Args:
            most: Limit on the total size of the tiles' parameters if a rank receives several tiles [bytes].
        """
        communicator = group.communicator
        sizes = [self._nbytes(tile) for tile in range(len(self._tiling))]
        sent = next_moves(self._target, self.owners, sizes, most)
        self._receive(communicator, sent)
        communicator.gather_ints([1], with_gradients=True)  # as above
        present = [
            frozenset(tile for tile, mine in enumerate(self.owners) if rank in mine) for rank in range(group.world_size)
        ]
        self.owners = owners_meanwhile(self._target, moved(sent, present))
        self._keep([tile for tile, mine in enumerate(self.owners) if group.rank in mine])

    def _nbytes(self, tile: int) -> int:
        return self._tiling.elements(tile) * self.params[self._tiling.tiles[tile][0].name].element_size()

    def hand_over(self, communicator: Communicator, stays: Sequence[bool]) -> None:
        """Send tiles owned only by leaving ranks to ranks that stay (``stays[r]`` for rank r); called on every rank."""
        if given := hand_over(self.owners, stays):
            self._receive(communicator, given)

    def collect(self, group: Group) -> dict[str, State] | None:
        """Collect the states of all tiled parameters, keyed by name, on rank 0's CPU; other ranks get None."""
        tiling, held = self._tiling, self.held
        assert held is not None, "the state is divided"
        needed = [Move(tile, mine[0], 0) for tile, mine in enumerate(self.owners) if 0 not in mine]
        found = dict(carry_out(group.communicator, needed, self._states_of))
        if group.rank != 0:
            return None
        states = {**found, **{tile: held.states_of(tile) for tile in held.tiles}}
        return assemble(tiling, self.params, states, torch.device("cpu"))  # no GPU may have room for it

    def written(self, rank: int) -> dict[Parameter, State] | None:
        """Return the states that this rank writes to a checkpoint written by all ranks; None if it holds no tiles."""
        return written_states(self.held, self.params, self.owners, rank) if self.held is not None else None

    @property
    def _tiling(self) -> Tiling:
        assert self.tiling is not None, "there are tiles"
        return self.tiling

    def _lost_text(self, gone: Sequence[int]) -> str:
        """Return an error text that names the lost workers and says whether second copies were still missing."""
        whose = sorted({self._workers[rank] for tile in gone if self.owners for rank in self.owners[tile]})
        named = f" ({', '.join(whose)})" if whose else ""
        early = any(len(self.owners[tile]) < self._copies for tile in gone) if self.owners else False
        said = ". Since the change before, second copies had not been restored yet" if early else ""
        return (
            f"{len(gone) / len(self._tiling):.0%} of the optimizer state of model {self._number} was lost with all "
            f"workers that held it{named}: each part lies with {self._copies} of them, and none that lives has it{said}"
        )

    def _states_of(self, tile: int) -> list[State]:
        """Return the states for a tile that this rank holds."""
        if self.held is not None:
            return self.held.states_of(tile)
        return cut_tile(self._tiling, tile, self.params, self.stored.states())

    def _receive(self, communicator: Communicator, sent: Sequence[Move]) -> None:
        """Run the moves, and add any tiles received to the tiles that this rank holds."""
        if self.held is None and not self._whole:
            self.held = HeldTiles(self._tiling, self.params)
        for tile, states in carry_out(communicator, sent, self._states_of):
            assert self.held is not None, "who holds the whole state receives nothing"
            self.held.take(tile, states)

    # -- what is held --------------------------------------------------------------------------------------------------

    def _keep(self, tiles: Sequence[int]) -> None:
        """Keep only these tiles."""
        if self.held is None:
            held = HeldTiles(self._tiling, self.params)
            for tile in tiles:
                held.take(tile, self._states_of(tile), borrowed=True)
            self._clear()
            self.held, self._whole = held, False
        for tile in set(self.held.tiles) - set(tiles):
            self.held.drop(tile)

    def become_whole(self) -> None:
        """Join all tiles into the optimizer's complete state; this rank must hold all of them."""
        held = self.held
        if held is not None:
            states = {tile: held.states_of(tile) for tile in held.tiles}
            for name, state in assemble(held.tiling, self.params, states).items():
                self._optimizer.state[self.params[name]] = state
            self.stored.discard()
        self.stored.read()
        self.held, self._whole = None, True

    def hold_whole(self) -> None:
        """Hold the complete state loaded into the optimizer, which may contain unread tensors."""
        self.held, self._whole = None, True
        self.stored.take(self.params.values())

    def drop(self) -> None:
        """Release this rank's state, because it is outdated and other ranks hold the valid state."""
        self._clear()
        self.stored.discard()
        self.held, self._whole = None, False

    def _clear(self) -> None:
        """Clear the optimizer's state for tiled parameters."""
        for param in self.params.values():
            self._optimizer.state.pop(param, None)

    def discard_stored(self) -> None:
        """Discard the state stored from a checkpoint, because the next update will make it outdated."""
        if self.held is not None:
            self.stored.discard()

    def reload(self) -> None:
        """Replace this rank's tiles with their parts of a complete state loaded into the optimizer on every rank."""
        held = self.held
        self.stored.discard()
        if held is None:
            return
        for tile in held.tiles:
            held.drop(tile)
            held.take(tile, cut_tile(held.tiling, tile, self.params, self._optimizer.state), borrowed=True)
        self._clear()

    def to_keep(self) -> dict[str, Any]:
        """Return this rank's tiles (parts of the state) for a later run in this process; empty if it has none."""
        held = self.held
        if held is None:
            return {}
        return {"tiling": held.tiling.to_json(), "tiles": {str(tile): held.states_of(tile) for tile in held.tiles}}

    def hold_kept(self, kept: Mapping[str, Any]) -> None:
        """Hold the tiles (parts of the state) returned from :meth:`to_keep` in a previous run."""
        self.adopt(Tiling.from_json(kept["tiling"]))
        self.drop()
        self.held = HeldTiles(self._tiling, self.params)
        for tile, states in kept["tiles"].items():
            self.held.take(int(tile), states)


def writers(tiling: Tiling, owners: Sequence[Sequence[int]]) -> list[int]:
    """Return the owner that writes each tile, balanced by number of elements; the same on every rank."""
    load: dict[int, int] = {}
    found = [0] * len(tiling)
    for tile in sorted(range(len(tiling)), key=lambda tile: (-tiling.elements(tile), tile)):
        writer = min(owners[tile], key=lambda rank: (load.get(rank, 0), rank))
        load[writer] = load.get(writer, 0) + tiling.elements(tile)
        found[tile] = writer
    return found


def written_states(
    held: HeldTiles, params: Mapping[str, Parameter], owners: Sequence[Sequence[int]], rank: int
) -> dict[Parameter, State]:
    """Return the states that this rank writes, keyed by parameter.

    Tensors with the parameter's shape are given as `Pieces`. Other tensors of a parameter's state, such as a step
    count, are written by the rank that writes the parameter's first element. Other ranks return `Pieces` without
    elements for them, so that all ranks list the same state keys in the same order.
    """
    found: dict[Parameter, State] = {}
    for tile, writer in enumerate(writers(held.tiling, owners)):
        if writer != rank:
            continue
        for span, state in zip(held.tiling.tiles[tile], held.states_of(tile), strict=True):
            _add(found.setdefault(params[span.name], {}), params[span.name], span, state)
    return found


def _add(found: State, param: Tensor, span: Span, state: Mapping[str, Any]) -> None:
    """Add a span's state to the state of its parameter."""
    for key, value in state.items():
        if isinstance(value, Tensor) and (span.whole or value.shape == (span.length,)):
            shape = tuple(value.shape) if span.whole else tuple(param.shape)
            before = found[key].held if key in found else ()
            found[key] = Pieces(shape, value.dtype, (*before, (span.start, value.detach())))
        elif isinstance(value, Tensor):
            held = ((0, value.detach()),) if span.start == 0 else ()
            if held or key not in found:
                found[key] = Pieces(tuple(value.shape), value.dtype, held)
        else:
            found[key] = value
