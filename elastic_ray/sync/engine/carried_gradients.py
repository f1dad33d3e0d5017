"""Gradients kept between steps: accumulated by user code, or left over by compression (torch)."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from elastic_ray.sync.device_numbers import real_count, real_shape
from elastic_ray.sync.engine.reduction import BucketLayout
from elastic_ray.sync.engine.trainable import local_groups
from elastic_ray.sync.operations.bucket_operation import GradientBucket
from elastic_ray.sync.operations.gradient_checks import refuse_own
from elastic_ray.sync.operations.owing import CompressedOperation, Compression, Residual
from elastic_ray.sync.plan import ParamInfo
from elastic_ray.sync.sliced_gradients.sliced_gradient import SlicedGradient, plain_or_sliced
from placement.text import count

if TYPE_CHECKING:
    from elastic_ray.run.run import Run
    from elastic_ray.steps.step import LoaderStep

_TWICE = (
    "the loop adds up gradients over several steps, and the job accumulates micro-batches within each: they count "
    "more than once. Either step the optimizer in every step, or leave gradient_accumulation=True out"
)


class CarriedGradients:
    """Tracker of gradients accumulated in one model's ``.grad`` for a future optimizer step.

    A loop that applies each step's gradients immediately leaves nothing to track, and has no overhead. Some loops leave
    gradients behind after the optimizer's step and discard them later, as a GAN does with its other loss's gradients.
    Once this has been observed, such gradients no longer count as carried.
    """

    def __init__(self, context: Run, optimizer: torch.optim.Optimizer) -> None:
        self._context, self._optimizer = context, optimizer
        self._steps = 0  # whose gradients the optimizer was not asked to apply yet
        self._lost = 0  # of those, what the rank that this one's state is from could not pass on
        self._step: LoaderStep | None = None
        self._asked = self._behind = self._throws_away = False
        self.local = False  # accumulated gradients differ between ranks, as ``no_sync`` has left them unreduced
        self._left: tuple[weakref.ref[torch.Tensor], int] | None = None
        self._left_behind = self._warned = False
        self.watched: torch.Tensor | None = None
        self._last: weakref.ref[torch.Tensor] | None = None  # the first gradient of the last update
        self._last_version = 0
        self.applied = False  # the optimizer has stepped in the step in progress
        self._updated: tuple[weakref.ref[torch.Tensor], int] | None = None  # a gradient that the last update has left
        self._beneath = False  # the present gradients were added to it
        self._alike = False  # all ranks have come by an update in the present group

    @property
    def is_open(self) -> bool:
        """True if any accumulated gradients have not been applied yet."""
        return self._steps > 0

    def add(self, step: LoaderStep | None, *, local: bool = False) -> None:
        """Record a backward pass that adds to ``.grad``; ``local`` if the pass's gradients will not be reduced."""
        if step is None or (self._asked and self._throws_away):
            return
        if step is not self._step or not self._steps:
            self._step, self._steps = step, self._steps + 1
            if local:
                self._context.ledger.mark_training()
        self.local = self.local or (local and self._context.group.world_size > 1)
        self._behind = self._asked

    @property
    def note(self) -> int:
        """Flag: 1 if gradients were added to ``.grad`` after the last update without zeroing it, otherwise 0.

        The flag is the same on all ranks that reduce gradients. It is 0 until the first update in a group, because a
        joiner lacks the gradients that other ranks have added since their last update. Passes within ``no_sync`` do not
        affect it, because ranks may run different numbers of them, as under DDP.
        """
        if not self._alike:
            return 0
        return int(self._beneath)

    def check(self, param: torch.Tensor) -> None:
        """Check, using one parameter as a sample, whether the pass added to a gradient that was already applied."""
        if self._updated is None:
            self.watched = None
        grad, (updated, at) = param.grad, self._updated or (lambda: None, 0)
        added = grad is not None and (self._beneath or grad._version == at + 1)
        self._beneath = added and grad is updated()
        if self._left is not None and param.grad is not None:
            (left, version), self._left = self._left, None
            thrown_away = param.grad is not left() or param.grad._version > version + 1
            if self._left_behind:
                self._throws_away = thrown_away
            if not (thrown_away or self._warned) and self._step is not None and self._step.micro_steps > 1:
                self._warned = True
                self._context.notify("warning", _TWICE)

    def refuse_own(self) -> None:
        """Refuse an optimizer step if its gradients were not averaged over the ranks.

        Raises RuntimeError if any gradients exist only on this rank, i.e. are non-zero, not reduced, not
        ``SlicedGradient`` objects, and not left over from the last update.
        """
        ledger = self._context.ledger
        step = ledger.step
        if step is None or not step.is_last_micro or self._context.group.world_size == 1:
            return
        if ledger.failed or ledger.replaying or (self.is_open and not self.local):
            return
        grads = [p.grad for p in self._params() if p.grad is not None]
        left = self._last() if self._last is not None else None
        if grads and grads[0] is left and grads[0]._version == self._last_version:
            return
        refuse_own(grad for grad in map(plain_or_sliced, grads) if not isinstance(grad, SlicedGradient))

    def taken(self) -> None:
        """Mark accumulated gradients as applied, because the optimizer is about to step."""
        self._steps, self._asked, self.local = 0, True, False
        self._alike, self._beneath = True, False
        self._last, self._last_version, self._updated, self.watched = None, 0, None, None
        for group in self._optimizer.param_groups:
            for p in group["params"]:
                if p.grad is not None:  # the next pass adds to it, or it is thrown away
                    self._last, self._last_version = weakref.ref(p.grad), p.grad._version
                    self._updated, self.watched = (self._last, self._last_version), p
                    return

    def remember(self) -> Any:
        """Return the data that :meth:`roll_back` needs if the next step is lost; None if nothing is accumulated."""
        self._asked = self.applied = False
        if not self._steps:
            return None
        self._left_behind = self._behind
        self._watch()
        # Local ones do not outlast a group that has lost a step.
        return self._steps, self.local, {} if self.local else self._gradients()

    def roll_back(self, remembered: Any) -> None:
        """Undo a lost step, restoring accumulated gradients unless the optimizer has already applied them."""
        if remembered is None or self.applied:
            self._continue_from(0, {})
            return
        steps, local, gradients = remembered
        self._continue_from(steps, gradients)
        self.local = local

    def _watch(self) -> None:
        for p in self._params():
            if p.grad is not None:
                self.watched, self._left = p, (weakref.ref(p.grad), p.grad._version)
                return

    def capture(self) -> Any:
        """Return the state for joiners and checkpoints; just the step count if gradients differ between ranks."""
        if self.local:
            return {"lost": self._steps}
        gradients = self._gradients() if self._steps else {}
        if any(isinstance(grad, SlicedGradient) for grad in gradients.values()):
            return {}  # no backward pass can add to them, so that they are of one step, which has not applied them
        return {"steps": self._steps, "gradients": gradients} if self._steps else {}

    def restore(self, tree: Any) -> None:
        """Restore a captured state."""
        self._continue_from(tree.get("steps", 0), tree.get("gradients", {}))
        self._lost = tree.get("lost", 0)

    def enter_group(self) -> None:
        """Enter a new group, dropping accumulated gradients that differ between ranks with a warning."""
        self._updated, self.watched, self._beneath, self._alike = None, None, False, False
        lost, self._lost = self._steps if self.local else self._lost, 0
        if self.local:
            self._continue_from(0, {})
        if lost:
            self._context.notify(
                "warning",
                f"gradients of {lost} step{'s' if lost > 1 else ''} are lost: each worker has added up its own, within "
                "no_sync() or between averages of models, when the group changed before they were applied",
                {"steps": lost},
            )

    def _params(self) -> list[torch.Tensor]:
        return [p for group in self._optimizer.param_groups for p in group["params"]]

    def _gradients(self) -> dict[int, torch.Tensor]:
        params = local_groups([self._params()])[0]
        found = {i: plain_or_sliced(p.grad) for i, p in enumerate(params) if p.grad is not None}
        return {i: grad.detach() for i, grad in found.items()}

    def _continue_from(self, steps: int, gradients: dict[int, torch.Tensor]) -> None:
        self._steps, self._step, self.local = steps, None, False
        self._beneath = False
        for i, p in enumerate(local_groups([self._params()])[0]):
            p.grad = gradients[i].to(p.device) if i in gradients else None


_Tensors = Mapping[str, torch.Tensor]


@dataclasses.dataclass(frozen=True, slots=True)
class _Debtor:
    """Bucket that has a residual, with parameter names that stay valid when the layout changes."""

    bucket: GradientBucket
    names: Sequence[str]
    residual: Residual
    compression: Compression | None  # what has left that out; None where a strategy before has

    @property
    def owes(self) -> bool:
        """True if the residual has any non-zero values."""
        owed = self.residual.owed
        return owed is not None and owed.flat is not None and bool(owed.flat.any())

    @property
    def knows(self) -> bool:
        """True if the residuals' sum over all ranks is known, or if the bucket has no residual."""
        return self.residual.folded is not None or (self.compression is None and not self.owes)

    def owed(self) -> torch.Tensor:
        """Return a copy of the residual without the loss scale; zeros if the bucket has no residual."""
        owed = self.residual.owed
        return self.flat({}) if owed is None or owed.flat is None else owed.flat / owed.scale

    def by_name(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """Split a flat tensor into tensors of the bucket's parameter shapes, keyed by parameter name."""
        pieces = torch.split(flat, [real_count(p) for p in self.bucket.params])
        return {
            name: piece.view(real_shape(p))
            for name, piece, p in zip(self.names, pieces, self.bucket.params, strict=True)
        }

    def flat(self, by_name: _Tensors) -> torch.Tensor:
        """Join tensors keyed by name into a flat tensor, with zeros for missing names."""
        dtype = torch.promote_types(self.bucket.dtype, torch.float32)
        device = self.bucket.params[0].device
        pieces = []
        for name, param in zip(self.names, self.bucket.params, strict=True):
            piece = by_name.get(name)
            if piece is None or piece.shape != real_shape(param):
                piece = torch.zeros(real_count(param), dtype=dtype)
            pieces.append(piece.reshape(-1).to(device, dtype))
        return torch.cat(pieces)

    def factors(self) -> dict[str, torch.Tensor]:
        """Return the bucket's compression factors, keyed by parameter name."""
        known = self.compression.factors() if self.compression is not None else {}
        return {self.names[place]: each for place, each in known.items()}

    def is_among(self, tensors: _Tensors) -> bool:
        """True if `tensors` has an entry for any of the bucket's parameters."""
        return not tensors.keys().isdisjoint(self.names)

    def take(self, owed: _Tensors, folded: _Tensors, factors: _Tensors) -> None:
        """Continue with the given residuals, sums of residuals and factors, each keyed by parameter name."""
        self.residual.become(self.flat(owed) if self.is_among(owed) else None)
        if self.is_among(folded):
            self.residual.fold(self.flat(folded))
        if self.compression is not None:
            self.compression.set_factors(
                {place: factors[name] for place, name in enumerate(self.names) if name in factors}
            )


class OwedGradients:
    """One model's compression residuals on this rank, i.e. gradients that have not been sent yet.

    Gradients are weighted by samples and summed, so the *sum* of residuals over ranks is preserved. Before a planned
    change, all ranks sum their residuals, and each rank of the next group starts with an equal part. A rank's residual
    is lost if the rank dies, or if it lags behind and receives another rank's state; both losses are reported. If the
    next strategy does not compress, each rank adds its residual to the first committed step.
    """

    def __init__(self, context: Run) -> None:
        self._context = context
        self._debtors: list[_Debtor] = []
        self._settling: list[_Debtor] = []  # which owe until a step has sent it, perhaps on some ranks only
        self._plain: dict[int, _Debtor] = {}  # of buckets that nothing compresses, the ones that could be such
        self._layout: BucketLayout | None = None
        self._members = 0  # ranks of the group that owes, or would under another strategy
        self._holds = True  # not taken over from another rank

    def adapt(self, layout: BucketLayout, places: Sequence[Sequence[int]], params: Sequence[ParamInfo]) -> None:
        """Move residuals and low-rank factors to the new layout's buckets, parameter by parameter.

        Args:
            places: For each new bucket, the indices of its parameters in ``params``, the model's parameters.
        """
        owed: dict[str, torch.Tensor] = {}
        folded: dict[str, torch.Tensor] = {}
        factors: dict[str, torch.Tensor] = {}
        for each in self._all:
            factors |= each.factors()
            if each.owes:
                owed |= each.by_name(each.owed())
            if each.residual.folded is not None:
                folded |= each.by_name(each.residual.folded)
        self._debtors, self._settling, self._plain, self._layout = [], [], {}, layout
        for index, (bucket, mine) in enumerate(zip(layout.buckets, places, strict=True)):
            operation, names = layout.operations[index], [params[place].name for place in mine]
            if isinstance(operation, CompressedOperation):
                self._debtors.append(_Debtor(bucket, names, operation.residual, operation.compression))
            else:
                self._plain[index] = _Debtor(bucket, names, Residual(), None)
        self._continue_from(owed, folded, factors)

    @property
    def _all(self) -> Sequence[_Debtor]:
        return (*self._debtors, *self._settling)

    def _continue_from(self, owed: _Tensors, folded: _Tensors, factors: _Tensors) -> None:
        """Continue with the given residuals, sums of residuals and factors, each keyed by parameter name."""
        for index, each in list(self._plain.items()):
            if each.is_among(owed) or each.is_among(folded):
                self._send_residual(index)
        for each in self._all:
            each.take(owed, folded, factors)

    def _send_residual(self, index: int) -> None:
        """Have an uncompressed bucket send the residual left by an earlier strategy."""
        assert self._layout is not None, "buckets are laid out"
        residual = self._layout.send_residual_first(index).residual
        self._settling.append(dataclasses.replace(self._plain.pop(index), residual=residual))

    def before_change(self) -> None:
        """Sum all ranks' residuals (unsent gradients) before a planned group change, so that none are lost.

        Raises CommunicationFailedError if the group breaks; each rank then keeps its own residual.
        """
        communicator, several = self._context.group.communicator, self._context.group.world_size > 1
        settles = int(any(each.owes for each in self._settling))
        with communicator.together():  # a worker of a unit may have more buckets than another one
            if several:
                settles = sum(row[0] for row in communicator.gather_ints([settles], with_gradients=True))
            if settles:  # on other ranks, perhaps, in other buckets
                for index in list(self._plain):
                    self._send_residual(index)
                self._settling.sort(key=lambda each: each.bucket.index)
            owing = self._all if settles else self._debtors
            sums = [each.owed() for each in owing]
            if several:
                for work in [communicator.gradients.all_reduce(total) for total in sums]:
                    communicator.wait(work)
        for each, total in zip(owing, sums, strict=True):
            each.residual.fold(total)

    def enter_group(self) -> None:
        """Enter a group, starting with an equal share of the summed residuals if all ranks know the sum.

        If any rank does not know the sum, each rank continues with its own residual. Ranks without residuals must call
        this too, because other ranks may have been in a group with a strategy that compresses gradients.

        Raises CommunicationFailedError if the group breaks again.
        """
        world_size = self._context.group.world_size
        owes = any(each.owes for each in self._all)
        known = all(each.knows for each in self._all)
        row = [int(known), int(self._holds), int(owes), self._members]
        rows = self._context.group.communicator.gather_ints(row) if world_size > 1 else [row]
        if all(row[0] for row in rows):
            for each in self._all:
                each.residual.share(world_size)
        elif any(row[2] for row in rows):
            self._report_lost(max(row[3] for row in rows) - sum(row[1] for row in rows))
        self._members, self._holds = world_size, True

    def _report_lost(self, workers: int) -> None:
        """Warn that some workers' residuals are lost."""
        if workers > 0:
            whose = count(workers)
            self._context.notify(
                "warning",
                f"what compression had left out of the gradients of {whose} is lost with the group: each worker keeps "
                "its own until a later step sends it. Training continues without",
                {"workers": workers},
            )

    def capture(self) -> Any:
        """Return the state common to all ranks: low-rank factors and, if computed, the sum of unsent gradients."""
        if not self._members or not self._all:
            return {}
        factors: dict[str, torch.Tensor] = {}
        folded: dict[str, torch.Tensor] = {}
        for each in self._all:
            factors |= each.factors()
            if each.residual.folded is not None:
                folded |= each.by_name(each.residual.folded)
        return {"owed": {"members": self._members, "factors": factors, "folded": folded}}

    def restore(self, tree: Any) -> None:
        """Restore a captured state, and discard this rank's own residual (unsent gradients)."""
        state = tree.get("owed", {})
        self._members, self._holds = state.get("members", 0), False
        self._continue_from({}, state.get("folded", {}), state.get("factors", {}))
