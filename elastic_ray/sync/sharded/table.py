"""Sharded table during training: its rows, their gradients, and its state across group changes (torch)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from elastic_ray.communication.communicator import CommunicationFailedError
from elastic_ray.consensus.intents import Announced, Intent
from elastic_ray.sync.sharded.placement import RowTiling
from elastic_ray.sync.sharded.rules import RowRule
from elastic_ray.sync.sharded.shard import TableShard, summed, update_rows
from elastic_ray.sync.sharded.store import InitialRows, LoadedRows, SeededRows, TileStore

if TYPE_CHECKING:
    from elastic_ray.run.run import Run

_FETCH, _WHOLE, _LOAD = 1, 2, 3
_Piece = tuple[Tensor, Tensor]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TableShape:
    """Size and initialisation of a table."""

    rows: int
    width: int
    copies: int  # owners of each row
    std: float  # standard deviation of rows at the beginning
    padding: int | None  # row without gradients, zero at the beginning; None for none
    dtype: torch.dtype
    device: torch.device


@dataclasses.dataclass(frozen=True, slots=True)
class _Update:
    """Identity of a completed or pending update: its number, the group that computed it, and its learning rate."""

    number: int = 0
    generation: int = 0
    lr: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class _PendingRows:
    """Gradient rows received by their owners for the next update."""

    update: _Update
    ids: Tensor
    gradient: Tensor


class ShardedTable:
    """Sharded table during training, which fetches rows, exchanges their gradients, and updates owned rows.

    An update is decided once all ranks have received their gradients and a subsequent vote has ended. From then on,
    every surviving rank can make it. A rank that voted but did not update receives the other ranks' state, which
    includes the only value this rank lacks, the learning rate. After a loss, rows therefore only need to be sent if
    they need a new second owner.
    """

    def __init__(
        self, shape: TableShape, rule: RowRule, seed: int, name: str, number: tuple[int, int], run: Run
    ) -> None:
        self._shape, self.rule, self._seed, self._number, self._run = shape, rule, seed, number, run
        self._tiling = RowTiling.of(shape.rows)
        empty = torch.empty(0, shape.width, dtype=shape.dtype, device=shape.device)
        self._names = ("weight", *rule.initial)
        self._shard = TableShard(self._tiling, shape.copies, dict.fromkeys(self._names, empty), name)
        self._nothing = torch.empty(0, dtype=torch.int64, device=shape.device), empty
        self._local = LocalGradients(self._nothing)
        self._last = _Update()
        self._pending: _PendingRows | None = None
        self._begun = False
        self._gathered: dict[str, Tensor] | None = None
        self._unused = False  # gradients that no optimizer step was asked for
        self.start(SeededRows(self._tiling, seed, shape.std, shape.padding, rule.initial))

    def start(self, source: InitialRows) -> None:
        """Start with initial rows from `source`, unless other ranks already hold the rows."""
        self._shard.start(source)
        self._loaded, self._begun = source.trained, False

    def left_for(self, run: Run) -> dict[str, Tensor] | None:
        """Return the complete weight, to continue in ``run``, another run in this process; None before any group."""
        if run is self._run:
            raise ValueError("a ShardedEmbedding must belong to one model, but another wrapped model already has it")
        if self._shard.store is not None and not self._shard.everywhere:
            raise RuntimeError(
                "a ShardedEmbedding whose rows several workers hold cannot be wrapped again: keep "
                "row_state_dict() of the earlier run, build a new one and load that"
            )
        return self._shard.whole(None, ("weight",)) if self._shard.store is not None else None

    @property
    def updates(self) -> int:
        """Number of updates made to the table so far."""
        return self._last.number

    def load(self, whole: Mapping[str, Tensor], updates: int = 0) -> None:
        """Load a complete table and its number of updates; all ranks must load the same values.

        Raises:
            RuntimeError: a loader's step is in progress, and might be lost and drawn again.
            RanksDisagreeError: another rank does not load a table. CommunicationFailedError: the group broke.
        """
        group = self._run.group
        if self._run.ledger.step is not None:
            raise RuntimeError("load the state of a ShardedEmbedding before the first epoch, or between loops")
        if group.generation and group.world_size > 1:
            self._run.consensus.agree_on(self._announced(_LOAD))
        self._last = _Update(updates)
        self.start(LoadedRows(self._tiling, whole, self.rule.initial))
        if group.generation:
            self.enter_group()

    # -- rows in forward passes ----------------------------------------------------------------------------------------

    def rows(self, ids: Tensor) -> Tensor:
        """Return current rows, [len(ids), width]; called on every rank at the same point, with or without ids.

        The rows are zeros in a lost step, and while a joiner is replaying user code.

        Raises:
            RanksDisagreeError: other ranks do something different at this point.
            RuntimeError: rows cannot be fetched at this point; the message says why.
        """
        ledger, group = self._run.ledger, self._run.group
        self._check_place()
        if self._shard.store is None:
            self._shard.make_whole()
        if self._shard.everywhere:
            return self._shard.read(ids)
        if ledger.failed or ledger.replaying:
            return self._nothing[1].new_zeros(len(ids), self._shape.width)
        try:
            self._run.consensus.agree_on(self._announced(_FETCH))
            return self._shard.fetch(group.communicator, ids)
        except CommunicationFailedError as error:
            ledger.lose_by(error)
            return self._nothing[1].new_zeros(len(ids), self._shape.width)

    def _announced(self, what: int) -> Announced:
        return Announced(Intent.ROWS, self._number[0], self._number[1] * 4 + what)

    def join(self) -> None:
        """Participate in other ranks' row fetch without fetching any rows, because this rank has no samples."""
        self._shard.fetch(self._run.group.communicator, self._nothing[0])

    def _check_place(self) -> None:
        """Raise RuntimeError if not all ranks can fetch rows together at this point."""
        step, group = self._run.ledger.step, self._run.group
        if torch._C._current_graph_task_id() != -1:
            raise RuntimeError(
                "a ShardedEmbedding cannot be called within backward(), as activation checkpointing does: all ranks "
                "fetch its rows together; leave it out of the checkpointed part"
            )
        if step is not None and step.whole:  # also where no rank fetches any: the group may grow
            raise RuntimeError(
                "a ShardedEmbedding cannot be called in a pass over whole_batches=True: towards its end some ranks of "
                "a group have no batch, and all fetch rows together; evaluate without whole_batches"
            )
        if self._shard.store is None and group.rank_info.world_size > 1:
            raise RuntimeError(
                "a ShardedEmbedding has no rows before the first epoch: no worker is to hold the whole table; call the "
                "model inside `for epoch in elastic_ray.remaining_epochs_until(n):`"
            )

    # -- gradients and updates -----------------------------------------------------------------------------------------

    def add_gradient(self, ids: Tensor, gradient: Tensor) -> None:
        """Add the gradient that a backward pass has computed for fetched rows.

        Raises RuntimeError if gradients from an earlier step have not been applied.
        """
        ledger, group = self._run.ledger, self._run.group
        if ledger.failed or ledger.replaying:
            return
        step = ledger.step
        if step is not None and step.weighed:
            raise RuntimeError("loader.weigh(n) and a trained ShardedEmbedding exclude each other: see docs/limits.md")
        if self._local.start(step, step.micro if step is not None else 0):
            self._check_applied()
        weight = step.weight(group.rank) if step is not None else 1.0 / group.world_size
        padding = self._shape.padding
        if padding is not None and bool((ids == padding).any()):
            keep = ids != padding
            ids, gradient = ids[keep], gradient[keep]
        self._local.add(ids, gradient * weight)
        self._unused = True

    def _check_applied(self) -> None:
        """Raise RuntimeError if a step has left gradients for a later step."""
        unused, self._unused = self._unused, False
        if unused:
            raise RuntimeError(
                "gradients of a ShardedEmbedding cannot be added up over several steps of a loader: call "
                "optimizer.step() in each of them, or let the loader accumulate "
                "(autoscale_batch_size(..., gradient_accumulation=True))"
            )

    def push(self) -> None:
        """Send row gradients to the row owners, and receive gradients for this rank's rows; called on every rank."""
        ids, gradient = self._shard.push(self._run.group.communicator, *self._local.take())
        update = _Update(self._last.number + 1, self._run.group.generation)
        before = self._pending
        if before is not None and before.update == update:
            ids, gradient = summed([(before.ids, before.gradient), (ids, gradient)], self._shape.width)
        self._pending = _PendingRows(update, ids, gradient)

    def close(self) -> None:
        """Stop adding row gradients to the current update, because the optimizer is about to step."""
        self._local.close()
        self._unused = False

    def zero(self) -> None:
        """Clear the gradients of the table's rows, like ``zero_grad()``; do nothing if the step is lost."""
        if not self._run.ledger.failed:  # user code runs on in a lost step; what was received may be needed
            self._local.zero()
            self._pending, self._unused = None, False

    def update(self, lr: float) -> None:
        """Apply the gradients received for this rank's rows, or the local gradients if this rank is alone.

        Raises RuntimeError if row gradients were not sent, because no parameter of the model had a gradient.
        """
        if self._local.waits and self._run.group.world_size > 1:
            raise RuntimeError(
                "gradients of a ShardedEmbedding travel with those of parameters, but a backward pass had none of "
                "the latter: let one parameter of the wrapped model at least take part in each loss"
            )
        if self._run.group.world_size == 1:
            self.push()
        self._apply(_Update(self._last.number + 1, self._run.group.generation, lr * self.rule.lr_factor))

    def leave_out(self) -> None:
        """Skip the current update and discard its gradients; called on every rank."""
        self._pending = None

    def _apply(self, update: _Update) -> None:
        pending, store = self._pending, self._shard.store
        if pending is not None and store is not None and len(pending.ids):
            places = store.places(pending.ids)
            update_rows(self.rule, store.tensors, places, pending.gradient, lr=update.lr, step=update.number)
        self._pending, self._gathered, self._last = None, None, update

    # -- the group -----------------------------------------------------------------------------------------------------

    def enter_group(self) -> None:
        """Enter the current group, and receive the rows that this rank owns in it.

        Raises CommunicationFailedError if the group breaks again. Raises RowsLostError on every rank if rows were lost.
        """
        group = self._run.group
        self._shard.enter(group.communicator, group.nodes)
        self._begun, self._unused, self._pending, self._gathered = True, False, None, None

    def hand_over(self, stays: Sequence[bool]) -> None:
        """Send rows owned only by leaving ranks to ranks that stay (``stays[r]`` for rank r); called on every rank."""
        self._gathered = None
        self._shard.hand_over(self._run.group.communicator, stays)

    def gather(self) -> None:
        """Gather the complete table on rank 0, which keeps it until the next update; called on every rank."""
        self._gathered = self._shard.whole(self._run.group.communicator, self._names)

    @property
    def settled(self) -> bool:
        """True if this rank is able to save the complete table."""
        return self._gathered is not None or self._run.group.world_size == 1

    def whole(self, names: Sequence[str] = ("weight",)) -> dict[str, Tensor]:
        """Return the complete table's named tensors, without rows on ranks other than 0; called on every rank.

        In a lost step, rank 0 also gets tensors without rows, and this is reported to the job's user.

        Raises:
            RanksDisagreeError: another rank does not make this call.
            CommunicationFailedError: the group broke outside steps.
        """
        ledger, found = self._run.ledger, None
        self._check_place()
        if self._shard.store is None:
            self._shard.make_whole()
        try:
            if not ledger.failed:
                found = self._collected(names)
        except CommunicationFailedError as error:
            ledger.lose_by(error)
        if ledger.failed:
            self._run.notify("warning", "state of a ShardedEmbedding, asked for in a step that is lost, has no rows")
        return found if found is not None else dict.fromkeys(names, self._nothing[1])

    def _collected(self, names: Sequence[str]) -> dict[str, Tensor] | None:
        """Return the complete table on rank 0, None on other ranks."""
        group = self._run.group
        if group.generation and group.world_size > 1:
            self._run.consensus.agree_on(self._announced(_WHOLE))
        return self._shard.whole(group.communicator if group.generation else None, names)

    # -- state ---------------------------------------------------------------------------------------------------------

    def capture(self) -> Any:
        """Return the state that all ranks share, such as the table's shape and its last update, without rows."""
        return {
            "rows": [self._shape.rows, self._shape.width],
            "rule": repr(self.rule),
            "update": [self._last.number, self._last.generation, self._last.lr],
            "seed": self._seed,
            "begun": self._begun,
            "loaded": self._loaded,
        }

    def capture_to_save(self) -> Any:
        """Return the shared state, with the complete table if this rank is able to save it."""
        if not self._begun or not self.settled:
            return self.capture()
        whole = self._gathered or self._shard.whole(self._run.group.communicator, self._names)
        return {**self.capture(), "whole": whole}

    def capture_to_keep(self) -> Any:
        """Return the shared state with the rows held by this rank, for another run in this process."""
        store = self._shard.store
        kept = {"tiles": list(store.tiles), "tensors": dict(store.tensors)} if store is not None else {}
        return {**self.capture(), "kept": kept}

    def restore(self, tree: Any) -> None:
        """Restore a captured state; held rows that lack the state's last update are updated if possible, else dropped.

        Raises RuntimeError if the state belongs to a different table.
        """
        self._check_same(tree)
        number, generation, lr = tree["update"]
        update, pending, shape = _Update(number, generation, lr), self._pending, self._shape
        same = (self._last.number, self._last.generation) == (number, generation)
        self._seed = tree["seed"]
        if "whole" in tree:
            self.start(LoadedRows(self._tiling, tree["whole"], self.rule.initial))
        elif tree.get("kept"):
            self._shard.take(TileStore(self._tiling, tree["kept"]["tiles"], tree["kept"]["tensors"]))
            self._begun = True
        elif not tree["begun"] and not tree["loaded"]:
            self.start(SeededRows(self._tiling, self._seed, shape.std, shape.padding, self.rule.initial))
        elif pending is not None and (pending.update.number, pending.update.generation) == (number, generation):
            self._apply(update)
        elif not (same and (self._begun or (not tree["begun"] and self._loaded))):
            self._shard.drop()
            self._begun = True
        self._last, self._pending, self._gathered = update, None, None

    def _check_same(self, tree: Any) -> None:
        """Raise RuntimeError if a captured state belongs to a different table."""
        mine = self.capture()
        for what in ("rows", "rule", "loaded"):
            alike = mine[what] == tree[what] or (what == "loaded" and (tree["begun"] or tree["loaded"]))
            if not alike:
                raise RuntimeError(
                    "train_loop_per_worker must build the same model on every worker, and load the same into it, but "
                    f"{what} of a ShardedEmbedding is {mine[what]} here and {tree[what]} there"
                )


class LocalGradients:
    """Gradients of table rows on this rank, with the semantics of a parameter's ``.grad``.

    Each micro-step adds the gradients from its backward passes, except any cleared with ``zero_grad()``. Gradients
    computed after ``optimizer.step()`` belong to another loss and are ignored.

    Args:
        nothing: Empty ids and gradients, [0] and [0, width].
    """

    def __init__(self, nothing: _Piece) -> None:
        self._nothing = nothing
        self._at: tuple[Any, int] = (None, 0)
        self._carried: list[_Piece] = []  # of micro-steps before
        self._present: list[_Piece] = []
        self._carried_sent = self._closed = False
        self.waits = False  # some of the present step that were not taken

    def start(self, step: Any, micro: int) -> bool:
        """Prepare to add a gradient in micro-step ``micro`` of ``step``; return True if it is the step's first one."""
        before, self._at = self._at, (step, micro)
        first = before[0] is not step or (step is None and self._closed)
        if first:
            self._carried, self._present = [], []
            self._carried_sent = self._closed = self.waits = False
        elif before[1] != micro:
            self.close()
            self._closed = False
        return first

    def add(self, ids: Tensor, gradient: Tensor) -> None:
        """Add gradients (weighted by samples) for the rows with these ids, which must be unique."""
        if not self._closed:
            self._present.append((ids, gradient))
            self.waits = True

    def close(self) -> None:
        """Stop adding gradients in this micro-step, because the optimizer is about to step; ignore later gradients."""
        if not self._closed:
            self._carried += self._present
            self._present = []
        self._closed = True

    def zero(self) -> None:
        """Clear the gradients added in the current micro-step."""
        self._present = []
        self._carried_sent = self.waits = False

    def take(self) -> _Piece:
        """Return the gradients that have not been sent yet, with unique ids, and mark them as sent."""
        pieces = self._present if self._carried_sent else [*self._carried, *self._present]
        self._carried_sent, self.waits = True, False
        self._present = []
        return summed(pieces, self._nothing[1].shape[1]) if pieces else self._nothing
