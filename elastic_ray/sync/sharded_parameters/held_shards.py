"""Shards held by a rank, made up of parameter rows and their optimizer state (torch)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from elastic_ray.communication.communicator import Communicator
from elastic_ray.state.pieces import Pieces
from elastic_ray.state.unread import UnreadTensor
from elastic_ray.sync.optimizer_tiles.moves import exchange, refused
from elastic_ray.sync.optimizer_tiles.states import State, owned, placed_state
from elastic_ray.sync.sharded_parameters.fsdp_fields import ShardedParam
from elastic_ray.sync.sharded_parameters.row_layout import Piece, RowMove, ShardId, by_pair, pieces_of, rows_of

VALUE = ""
"""Stands for the rows themselves among what an optimizer keeps."""

WHOLE = ShardId(1, 0)
"""The shard that has all rows."""

Rows = dict[str, Any]
"""Some rows of a parameter, and what the optimizer keeps of them, by name; tensors of the rows' shape are rows, too."""


Written = dict[int, tuple[Pieces, State]]
"""`Pieces` of parameters and of the optimizer's states, by the parameter's position."""


class Shard:
    """Shard of a model: views of parameter rows, with their optimizer state."""

    def __init__(self) -> None:
        # the rows of each parameter of which it has any, by the parameter's position
        self.views: dict[int, Parameter] = {}
        self.states: dict[Parameter, State] = {}  # what the optimizer keeps of each view

    def put(self, param: int, view: Parameter, state: State) -> None:
        """Add rows of a parameter, with their optimizer state, to the shard."""
        self.views[param], self.states[view] = view, state

    def rows(self, param: int) -> Rows:
        """Return the values and optimizer state for a parameter's rows in this shard."""
        view = self.views[param]
        return {VALUE: view.detach(), **self.states[view]}


class HeldShards:
    """Shards of a model held by this rank, with their optimizer state.

    Attributes:
        unread: All rows of each parameter in the checkpoint that this rank continues from, read when they are sent or
            used; empty without a checkpoint.
    """

    def __init__(self, shapes: Sequence[tuple[int, ...]]) -> None:
        self.shapes = shapes
        self.counts = [shape[0] for shape in shapes]
        self.shards: dict[ShardId, Shard] = {}
        self.unread: dict[int, Rows] = {}

    def keep(self, shards: Mapping[ShardId, Shard], unread: Mapping[int, Rows] | None = None) -> None:
        """Replace all held shards (and unread checkpoint rows) with the given ones."""
        self.shards, self.unread = dict(shards), dict(unread or {})

    @property
    def ids(self) -> set[ShardId]:
        """Ids of the shards this rank is able to send."""
        return {*self.shards, WHOLE} if self.unread else set(self.shards)

    def take(
        self,
        move: Sequence[tuple[Piece, Rows]],
        shard: ShardId,
        place: Callable[[Piece, Tensor], Tensor] = lambda _, value: value,
    ) -> Shard:
        """Return ``shard``, assembled from held and received rows; it may share their memory (see :func:`apart`).

        Args:
            move: Received rows, each with its piece (range of rows).
            place: Moves a parameter's rows to their final memory; by default, they are not moved.
        """
        made = Shard()
        for piece in pieces_of(self.counts, shard):
            rows = joined(self._parts(piece, [each for each in move if each[0].param == piece.param]))
            view = place(piece, rows.pop(VALUE))
            made.put(piece.param, Parameter(view, requires_grad=False), rows)
        return made

    def _parts(self, piece: Piece, received: Sequence[tuple[Piece, Rows]]) -> list[tuple[Piece, Rows]]:
        """Return consecutive parts of a piece, each cut from a source that includes it."""
        sources = [*self._all_rows(piece.param), *received]
        found: list[tuple[Piece, Rows]] = []
        at = piece.start
        while at < piece.stop:
            have = [each for each in sources if each[0].start <= at < each[0].stop]
            if not have and piece.param in self.unread:
                have = [(Piece(piece.param, 0, self.counts[piece.param]), self.unread[piece.param])]
            if not have:
                raise AssertionError(f"row {at} of parameter {piece.param} is neither held nor was it received")
            source, rows = max(have, key=lambda each: each[0].stop)
            part = Piece(piece.param, at, min(piece.stop, source.stop))
            found.append((part, cut(rows, source, part)))
            at = part.stop
        return found

    def _all_rows(self, param: int) -> Iterator[tuple[Piece, Rows]]:
        for shard, held in self.shards.items():
            for piece in pieces_of([0] * param + [self.counts[param]], shard):
                yield piece, held.rows(param)

    def give(self, piece: Piece) -> Rows:
        """Return the values and optimizer state for a piece's rows, joined from held shards."""
        return joined(self._parts(piece, ()))

    def whole(self, param: int, received: Sequence[tuple[Piece, Rows]] = ()) -> tuple[Tensor, State]:
        """Return a full parameter and its optimizer state, from held and received rows, in new memory on the CPU."""
        mine = [each for each in received if each[0].param == param]
        parts = self._parts(Piece(param, 0, self.counts[param]), mine)
        rows = joined([(piece, _on_cpu(each)) for piece, each in parts], copies=True)
        return rows.pop(VALUE), rows


def cut(rows: Rows, source: Piece, piece: Piece) -> Rows:
    """Return ``piece``'s part of the rows of piece ``source``, in shared memory or read from the checkpoint."""
    first, count = piece.start - source.start, piece.stop - piece.start
    like = rows[VALUE].shape
    return {
        key: _narrowed(value, first, count)
        if isinstance(value, Tensor | UnreadTensor) and value.shape == like
        else value
        for key, value in rows.items()
    }


def _narrowed(value: Tensor | UnreadTensor, first: int, count: int) -> Tensor:
    return value.rows(first, first + count) if isinstance(value, UnreadTensor) else value.narrow(0, first, count)


def joined(parts: Sequence[tuple[Piece, Rows]], *, copies: bool = False) -> Rows:
    """Return consecutive rows joined into one; a single part is returned without copying unless ``copies`` is True."""
    (_, first), *_ = parts
    like = first[VALUE].shape
    found: Rows = {}
    for key, value in first.items():
        if not isinstance(value, Tensor):
            found[key] = value
        elif value.shape == like:
            pieces = [rows[key] for _, rows in parts]
            found[key] = torch.cat(pieces) if len(pieces) > 1 or copies else pieces[0]
        else:
            found[key] = value.clone()
    return found


def apart(shard: Shard, *, values: bool) -> Shard:
    """Return a copy of the shard that does not share memory with larger tensors.

    Args:
        values: Whether to copy parameter rows as well as the optimizer state.
    """
    made = Shard()
    for place, view in shard.views.items():
        own = Parameter(owned(view.detach()), requires_grad=False) if values else view
        made.put(place, own, {key: owned(value) for key, value in shard.states[view].items()})
    return made


def _on_cpu(rows: Rows) -> Rows:
    return {key: value.cpu() if isinstance(value, Tensor) else value for key, value in rows.items()}


def carry_out(
    communicator: Communicator, moved: Sequence[RowMove], give: Callable[[Piece], Rows]
) -> list[tuple[Piece, Rows]]:
    """Send rows according to ``moved``, in one message per pair of ranks; called on every rank with the same moves.

    ``give`` returns the rows of a piece to send. Returns the rows received by this rank, each with its piece.

    Raises CommunicationFailedError if the group breaks or a peer sends unexpected data, leaving held rows unchanged.
    """
    found = list(exchange(communicator, by_pair(moved), give))
    for piece, rows in found:
        value = rows.get(VALUE) if isinstance(rows, dict) else None
        if not isinstance(value, Tensor) or value.shape[:1] != (piece.stop - piece.start,):
            raise refused(communicator, next(move.source for move in moved if move.piece == piece))
    return found


def written_rows(shapes: Sequence[tuple[int, ...]], shard: ShardId, own: Shard, share: ShardId) -> Written:
    """Return the shard rows that one of its owners writes to a checkpoint, as pieces of the full tensors.

    Other optimizer state of a parameter, such as a step count, is written with the parameter's first rows. A rank
    that writes later rows returns `Pieces` without elements for it, so that all ranks list the same names in order.

    Args:
        share: This rank's index among the shard's owners, and the number of owners.
    """
    found: Written = {}
    for place, view in own.views.items():
        shape = shapes[place]
        begin, stop = rows_of(len(view), share)
        if begin == stop:
            continue
        first, _ = rows_of(shape[0], shard)
        start = (first + begin) * math.prod(shape[1:])
        rows = cut(own.rows(place), Piece(place, 0, len(view)), Piece(place, begin, stop))
        value = rows.pop(VALUE)
        states = {key: _piece(each, value, shape, start) for key, each in rows.items()}
        found[place] = Pieces(shape, view.dtype, ((start, value),)), states
    return found


def _piece(value: Any, rows: Tensor, shape: tuple[int, ...], start: int) -> Any:
    if not isinstance(value, Tensor):
        return value
    if value.shape == rows.shape:
        return Pieces(shape, value.dtype, ((start, value.detach()),))
    return Pieces(tuple(value.shape), value.dtype, ((0, value.detach()),) if start == 0 else ())


def placed(state: State, param: ShardedParam, options: Mapping[str, Any]) -> State:
    """Return a parameter's full state, for example from a checkpoint, with step counts on the right device.

    Rows are read, or copied to the device, only when they are used.
    """
    return {
        key: value.whole() if isinstance(value, UnreadTensor) and tuple(value.shape) != param.shape else value
        for key, value in placed_state(state, param.local.device, options).items()
    }


def rows_of_state(state: State, shape: tuple[int, ...], start: int, stop: int) -> State:
    """Return the part of a parameter's state for rows ``start`` to ``stop``, in new memory."""
    found: State = {}
    for key, value in state.items():
        if isinstance(value, UnreadTensor):
            found[key] = value.rows(start, stop) if tuple(value.shape) == shape else value.whole()
        elif isinstance(value, Tensor):
            rows = value[start:stop] if tuple(value.shape) == shape else value
            found[key] = rows.clone(memory_format=torch.contiguous_format)  # stand-ins have no strides
        else:
            found[key] = value
    return found
