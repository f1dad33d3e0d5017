"""State that a job's ranks share: registered states, their exchange, and rollback of a lost step."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from elastic_ray.batch.limits import BatchChoice
from elastic_ray.communication.communicator import CommunicationFailedError, Communicator
from elastic_ray.membership.messages import StateVersion, transfer_rounds
from elastic_ray.state.generators import Generators
from elastic_ray.state.layout import ReplicasDifferError, check_samples, difference, digest, packed
from elastic_ray.state.pieces import WrittenInParts, shared_out
from elastic_ray.state.progress import RunProgress
from elastic_ray.state.registered import Remembered
from elastic_ray.state.replicas import named_tensors
from elastic_ray.state.resume_point import UnreadableStateError
from elastic_ray.state.tree import (
    DictState,
    ModuleState,
    OptimizerState,
    SharedOut,
    Stateful,
    UnsafeStateError,
    check_plain,
    pack,
    receive_state,
    send_state,
    unpack,
)
from elastic_ray.state.unread import read_all

if TYPE_CHECKING:
    from elastic_ray.run.registry import Registry
    from elastic_ray.steps.ledger import StepLedger

_SAYS_ENOUGH = CommunicationFailedError, UnsafeStateError, UnreadableStateError
_OF_EVERY_RUN = {"run", "shape"}
_SAME_STATES = "train_loop_per_worker must register the same state on every worker before its first epoch"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Exchanged:
    """Result of an exchange of state between the ranks in a new group."""

    passes: int  # ended loader passes of the rank that is furthest (see ``RunProgress.ended_passes``)
    behind: bool  # a rank with an equal state has given up the outermost pass that this rank is in
    nested: bool  # ranks are in passes within a step, which some may have run further than others


@contextlib.contextmanager
def _named(name: str, what: str) -> Iterator[None]:
    """Name the state in errors from its own code, because user code may have registered many.

    Raises RuntimeError if the state's code raises an error.
    """
    try:
        yield
    except _SAYS_ENOUGH:
        raise
    except Exception as error:
        raise _named_error(name, what, error) from error


def _of_position(key: str, position: int) -> str:
    return f"{key}@{position}"


def _named_error(name: str, what: str, error: Exception) -> RuntimeError:
    return RuntimeError(f"state {name!r} cannot {what}: {type(error).__name__}: {error}")


@dataclasses.dataclass(frozen=True, slots=True)
class _Rollback:
    name: str
    capture: Callable[[], Any]
    restore: Callable[[Any], None]
    nested: bool  # False if only the outermost step has a snapshot

    def snapshot(self, depth: int) -> Any:
        """Return a copy of the current value, for a step nested in ``depth`` others."""
        if depth and not self.nested:
            return None
        try:
            found = self.capture()
            return copy.deepcopy(found) if found is not None else None
        except _SAYS_ENOUGH:
            raise
        except Exception as error:  # no context manager, for this is part of every step
            raise _named_error(self.name, "tell what it is at the beginning of a step", error) from error

    def take_back(self, snapshot: Any, depth: int) -> None:
        """Restore the value from the snapshot for a step nested in ``depth`` others."""
        if depth and not self.nested:
            return
        with _named(self.name, "go back to the beginning of a step that is lost"):
            self.restore(copy.deepcopy(snapshot))


class SharedState:
    """Registered states keyed by name, the run's progress, and small state that a lost step must roll back."""

    def __init__(self, progress: RunProgress, *, position: int | None = None) -> None:
        self._position_in_unit = position  # None where a rank is one worker
        self.progress = progress
        self.shape: BatchChoice | None = None
        self.complete = False
        self.joined = False  # the present group without a state of its own, and has that of others
        self.loaded = False  # that is from an automatic checkpoint, and no group has continued from it yet
        self.lacks_sums = False  # of the last step, which this rank has counted by itself
        self._states: dict[str, Stateful] = {}
        self._rollbacks: list[_Rollback] = []
        self._snapshots: list[list[Any]] = []  # of the outermost step, and of those nested in it
        self._before_round: tuple[RunProgress, Generators, list[list[Any]]] | None = None
        self._round_lost = False  # its steps are to be undone, unless another rank has committed them
        self._copies = Remembered()  # of all states, as the round in progress found them

    def register(self, key: str, state: Stateful) -> None:
        """Add ``state`` to the states that joining ranks receive. Raises ValueError if the key already exists."""
        if key in self._states:
            raise ValueError(f"state names must be unique in a train loop, but {key!r} is registered already")
        self._states[key] = state

    def holds(self, target: object) -> bool:
        """True if user code has registered ``target`` as a state."""
        return any(isinstance(state, DictState) and state.target is target for state in self._states.values())

    def register_rollback(
        self, capture: Callable[[], Any], restore: Callable[[Any], None], name: str = "", *, nested: bool = True
    ) -> None:
        """Register small state (schedulers, scalers), captured before each step and restored if that step is lost.

        With ``nested=False``, steps nested in another step neither capture nor restore it.
        """
        self._rollbacks.append(_Rollback(name or restore.__qualname__, capture, restore, nested))

    def check_plain(self) -> None:
        """Check that all states can be sent to another rank.

        Raises UnsafeStateError if a state contains more than tensors and plain values; the message names it.
        """
        check_plain(self.capture())

    def snapshot(self, depth: int = 0) -> None:
        """Copy the state registered with :meth:`register_rollback`, at the start of a step nested in ``depth`` others.

        Raises RuntimeError if a state cannot be captured; the message names it.
        """
        around = self._snapshots[:depth]
        if around:
            around[-1] = [each.moved() if isinstance(each, Remembered) else each for each in around[-1]]
        self._snapshots = [*around, [each.snapshot(depth) for each in self._rollbacks]]

    def discard_snapshot(self) -> None:
        """Drop the snapshots of a committed step, which no longer needs rollback."""
        self._snapshots, self.lacks_sums = [], False

    def start_round(self) -> None:
        """Copy all states at the start of a round (local steps committed together), so that the round can be undone.

        Raises RuntimeError in the same cases as :meth:`snapshot`.
        """
        self.snapshot()
        self._copies.take({key: state.capture() for key, state in self._states.items()})
        self._before_round = copy.deepcopy(self.progress), Generators(), self._snapshots

    def end_round(self) -> None:
        """Drop the copies of a committed round; their memory is reused for the next one."""
        self._before_round = None

    def lose_round(self) -> None:
        """Reset progress to the start of a lost round; :meth:`exchange` detects if another rank has committed it."""
        self._round_lost = self._before_round is not None
        if self._before_round is not None:
            self._before_round[0].limit_memory(self.progress.memory_bound)  # what a step has found out holds
            self._adopt_progress(copy.deepcopy(self._before_round[0]))
        else:  # a loss in a pass nested in the round has dropped them
            self._take_back()

    def _undo_round(self) -> None:
        """Restore all states, the progress and the random generators to the start of the round."""
        if self._before_round is not None:
            (progress, generators, self._snapshots), self._before_round = self._before_round, None
            self._take_back()
            for key, tree in self._copies.tree().items():
                with _named(key, "go back to the beginning of a round that is lost"):
                    self._states[key].restore(tree)
            self._adopt_progress(progress)
            generators.restore()

    def roll_back(self, depth: int = 0) -> None:
        """Restore the state from :meth:`snapshot` or, within a round, all state from :meth:`start_round`.

        Raises RuntimeError if a state cannot be restored; the message names it.
        """
        if self._before_round is not None and not depth:
            self._undo_round()
        else:
            self._take_back(depth)

    def _take_back(self, depth: int = 0) -> None:
        for snapshots in self._snapshots[depth : depth + 1]:
            for each, snapshot in zip(self._rollbacks, snapshots, strict=False):
                each.take_back(snapshot, depth)

    def capture(self) -> dict[str, Any]:
        """Return all states, keyed by name, and the run's progress; tensors are not copied."""
        return {**{key: state.capture() for key, state in self._states.items()}, **self._position()}

    def _position(self) -> dict[str, Any]:
        """Return the run's progress and its batch shape."""
        shape = None if self.shape is None else dataclasses.asdict(self.shape)
        return {"run": self.progress.to_state(), "shape": shape}

    def alike(self) -> dict[str, torch.Tensor]:
        """Return the tensors that must be identical on all ranks between two steps, keyed by name.

        These are unsharded parameters and optimizer states. Rows, tiles and slices that differ by rank are left out, as
        are buffers, which a pass may change on each rank.
        """
        found: dict[str, torch.Tensor] = {}
        for key, state in self._states.items():
            if isinstance(state, ModuleState):
                parameters = state.module.named_parameters()
                found |= {f"{key}/{name}": p for name, p in parameters if not hasattr(p, "to_local")}
            elif isinstance(state, OptimizerState):
                found |= dict(named_tensors(state.capture()["state"], key))
        return found

    def capture_to_save(self) -> dict[str, Any]:
        """Return all states, with divided states complete on the rank that gathered them (``prepare_to_save``)."""
        return self.capture() | {
            key: state.capture_to_save() for key, state in self._states.items() if isinstance(state, SharedOut)
        }

    def capture_part(self, rank: int, world_size: int) -> dict[str, Any]:
        """Return this rank's part of a joint checkpoint, with `Pieces` of tensors that several ranks write.

        The first rank writes everything that only one rank holds, and all identical state except models. It also writes
        its buffers, which differ by rank within a pass, as in a checkpoint that it writes alone.
        """
        if self._position_in_unit is not None:
            return self._capture_position(self._position_in_unit)
        trees: dict[str, Any] = {}
        for key, state in self._states.items():
            if isinstance(state, WrittenInParts):
                trees[key] = state.capture_part(rank, world_size)
            elif isinstance(state, ModuleState):
                shares = shared_out(dict(state.module.named_parameters()), rank, world_size)
                trees[key] = {**shares, **dict(state.module.named_buffers())} if rank == 0 else shares
            elif rank == 0:
                trees[key] = state.capture_to_save() if isinstance(state, SharedOut) else state.capture()
        return {**trees, **self._position()} if rank == 0 else trees

    def _capture_position(self, position: int) -> dict[str, Any]:
        """Return the states written by the worker at this position in a unit, with the position in their names."""
        trees = {_of_position(key, position): unpack(*pack(each.capture())) for key, each in self._states.items()}
        return {**trees, **self._position()} if position == 0 else trees

    def capture_to_keep(self) -> dict[str, Any]:
        """Return all states, including parts that only this rank holds, for a rerun in this process."""
        return self.capture() | {
            key: state.capture_to_keep() for key, state in self._states.items() if isinstance(state, SharedOut)
        }

    def install(self, trees: dict[str, Any], skip: set[str] | frozenset[str] = frozenset()) -> None:
        """Restore the captured states ``trees``, except those in ``skip``.

        Raises:
            RuntimeError: This rank registered a state that was not captured, or a state cannot be restored. The message
                names it.
            CorruptStateError: The checkpoint that holds the states can no longer be read.
        """
        missing = self._states.keys() - trees.keys()
        if missing:
            raise RuntimeError(f"{_SAME_STATES}, but the others have no {', '.join(sorted(missing))}")
        self._adopt_progress(RunProgress.from_state(trees["run"]))
        self.shape = None if trees["shape"] is None else BatchChoice(**trees["shape"])
        for key, state in self._states.items():
            if key not in skip:
                late = getattr(state, "takes_unread", False)
                tree = trees[key] if late else read_all(trees[key])
                with _named(key, "take over what another worker, or a checkpoint, has sent of it"):
                    state.restore(tree)

    def resume(self, trees: dict[str, Any], *, loaded: bool) -> None:
        """Continue from ``trees``, captured before a rerun or, if ``loaded``, read from an automatic checkpoint.

        Raises RuntimeError in the same cases as :meth:`install`.
        """
        if self._position_in_unit is not None:
            names = {_of_position(key, self._position_in_unit): key for key in self._states}
            trees = {names.get(key, key): tree for key, tree in trees.items() if key in names or key in _OF_EVERY_RUN}
        self.install(trees)
        self.complete, self.loaded = True, loaded

    def start_from(self, progress: RunProgress) -> None:
        """Set the progress to start from, before the first group."""
        self._adopt_progress(progress)

    @property
    def unique(self) -> bool:
        """True if losing this worker would lose state, because it has more than the checkpoint that it loaded."""
        return self.complete and not self.loaded

    def _adopt_progress(self, progress: RunProgress) -> None:
        # Loader passes in progress hold on to their PassProgress: refresh these instead of replacing them.
        mine = self.progress.passes
        for own, theirs in zip(mine, progress.passes, strict=False):
            own.adapt(theirs)
        passes = mine[: len(progress.passes)] + progress.passes[len(mine) :]
        self.progress = dataclasses.replace(progress, passes=passes)

    def exchange(
        self, communicator: Communicator, replicas: Registry, samples: int | None, ledger: StepLedger
    ) -> Exchanged:
        """Give every rank of a new group an exact copy of the furthest rank's state.

        Args:
            ledger: This rank's ledger, which leaves a step if other ranks will draw it again or have completed it.
            replicas: Merges replicas that differ among ranks at the same progress. Before anything is sent, the ranks
                that hold a state replace it with the mean over those that completed the last average.

        Raises:
            CommunicationFailedError: A peer was lost during the exchange. This rank's state is complete, or it has
                none.
            UnsafeStateError: A state cannot be sent. If this is known from the start, every rank raises the error.
            ReplicasDifferError: Ranks that all start here have built different objects, or any two ranks train on
                datasets of different lengths. Every rank raises the error.
            RuntimeError: This rank is joining and has registered different states from the others.
        """
        if not self.complete and communicator.world_size > 1:
            self.check_plain()
        layout = packed(self._layout())
        rows = self._gather_versions(communicator, replicas, ledger, digest(layout), samples)
        run = self.progress
        holds = [bool(row[4]) for row in rows]
        check_samples([row[-1] for row in rows], [any(holds) and not each for each in holds])
        everyone = [
            StateVersion(
                step=steps,
                optimizers_stepped=stepped,
                averaged=averaged,
                lineage=lineage,
                passes=passes,
                has_state=bool(complete),
                has_sums=not lacks_sums,
            )
            for steps, stepped, lineage, passes, complete, averaged, _, _, _, lacks_sums, *_ in rows
        ]
        self.joined = not self.complete and any(each.has_state for each in everyone)
        if not any(each.has_state for each in everyone):
            _compare(communicator, layout, [row[6] for row in rows])
        holders = [each for each in everyone if each.has_state]
        # In a pass nested in a step the step continues: only the nested one is lost.
        if self._round_lost and max(each.step for each in holders) <= run.loader_steps:
            self._undo_round()  # else this rank's steps count, in the mean of the models
        if len(holders) > 1:
            replicas.reconcile(communicator, max(each.averaged for each in holders), holds=self.complete)
        for served in transfer_rounds(everyone):
            for source, destination in served:
                if source == communicator.rank:
                    send_state(communicator, destination, self.capture())
                elif destination == communicator.rank:
                    self._receive(communicator, source)
        self.complete, self.loaded, self._before_round, self._round_lost = True, False, None, False
        bounds = [row[-2] for row in rows if row[-2]]  # one rank alone may know that it ran out of memory
        self.progress.limit_memory(min(bounds, default=None))
        # Who is behind has taken over what the furthest have, and may have ended a pass that continues there.
        furthest = max(each.order() for each in everyone)
        furthest_rows = [row for row, each in zip(rows, everyone, strict=True) if each.order() == furthest]
        if everyone[communicator.rank].order() != furthest:
            ledger.follow(furthest_rows[0][8])  # they may be in a later step of a pass nested in the same step
        self.lacks_sums = any(row[9] for row in furthest_rows)
        return Exchanged(
            passes=max(row[3] for row in furthest_rows),
            behind=max(row[7] for row in furthest_rows) > self.progress.place_in_epochs,
            nested=max(row[-3] for row in rows) > 0,
        )

    def _gather_versions(
        self, communicator: Communicator, replicas: Registry, ledger: StepLedger, layout: int, samples: int | None
    ) -> list[list[int]]:
        """Return each rank's progress, one row per rank, once all are in the same steps of passes around a lost one.

        A step that has reduced its gradients is committed without another vote: a rank that is in a pass nested in it
        may meet ranks that are in the next one.
        """
        while True:
            run = self.progress
            # Whoever joins begins with the step around.
            depth, outer = (ledger.depth_in_group, ledger.step_in_group) if self.complete else (0, -1)
            rows = communicator.gather_ints(
                [
                    run.loader_steps,
                    run.optimizers_stepped,
                    run.lineage,
                    run.ended_passes,
                    int(self.complete),
                    replicas.marker,
                    layout,
                    run.place_in_epochs,
                    ledger.updates_in_group,
                    int(self.lacks_sums),
                    outer,
                    depth,
                    run.memory_bound or 0,
                    -1 if samples is None else samples,
                ]
            )
            depths = [row[-3] for row in rows if row[-3] >= 0]
            same = len({row[-4] for row in rows if row[-4] >= 0}) <= 1
            common = min(depths, default=0) if same else 0
            if common == max(depths, default=0):
                return rows
            if depth > common:
                ledger.leave_steps(common)

    def _layout(self) -> dict[str, str]:
        found = {"the place to begin at": self.progress.place}
        for key, state in self._states.items():
            if isinstance(state, ModuleState):
                found |= {f"{key}: {name}": f"{tuple(t.shape)} {t.dtype}" for name, t in state.capture().items()}
            else:
                found[key] = state.kind if isinstance(state, (OptimizerState, DictState)) else "registered"
        return found

    def _receive(self, communicator: Communicator, source: int) -> None:
        """Adopt the state of rank ``source``; a newcomer's model receives it in place."""
        # A survivor of a torn step keeps its own state whole until all has arrived: its source may die meanwhile.
        in_place = not self.complete

        def own(key: str) -> Any | None:
            state = self._states.get(key)
            return state.capture() if in_place and isinstance(state, ModuleState) else None

        trees, done = receive_state(communicator, source, own)
        # A checkpoint may hold more: a program may drop a state and continue. One rank may be the next to hold all.
        unknown = trees.keys() - self._states.keys() - _OF_EVERY_RUN
        if unknown:
            raise RuntimeError(
                f"{_SAME_STATES}, but the others have {', '.join(sorted(unknown))}, which this joining worker lacks: "
                "run the same code up to the first epoch on every worker (register_state, AdaptiveDataParallel with "
                "the same schedulers and scaler, the same policies), whatever its rank"
            )
        self.install(trees, skip=done)


def _compare(communicator: Communicator, layout: bytes, digests: Sequence[int]) -> None:
    """Raise ReplicasDifferError on all ranks, naming the first difference, if any two layouts differ."""
    other = next((rank for rank, each in enumerate(digests) if each != digests[0]), None)
    if other is not None:
        raise ReplicasDifferError(difference({rank: communicator.broadcast_bytes(layout, rank) for rank in (0, other)}))
