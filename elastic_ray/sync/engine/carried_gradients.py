"""Gradients that user code accumulates over several loader steps: state of the run between these steps (torch)."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

from elastic_ray.sync.engine.local_parameters import local_groups
from elastic_ray.sync.operations.gradient_checks import refuse_own
from elastic_ray.sync.sliced_gradients.sliced_gradient import SlicedGradient, plain_or_sliced

if TYPE_CHECKING:
    from elastic_ray.run.run import Run
    from elastic_ray.steps.step import LoaderStep

_TWICE = (
    "the loop adds up gradients over several steps, and the job accumulates micro-batches within each: they count "
    "more than once. Either step the optimizer in every step, or leave gradient_accumulation=True out"
)


class CarriedGradients:
    """Tracks what one model's ``.grad`` has accumulated for a future optimizer step.

    A loop that applies the gradients of each step at once carries none, and this class costs it nothing. Some loops
    leave gradients after the optimizer's step and then throw them away, as a GAN does with those of its other loss: the
    first such step shows it.
    """

    def __init__(self, context: Run, optimizer: torch.optim.Optimizer) -> None:
        self._context, self._optimizer = context, optimizer
        self._steps = 0  # whose gradients the optimizer was not asked to apply yet
        self._lost = 0  # of those, what the rank that this one's state is from could not pass on
        self._step: LoaderStep | None = None
        self._asked = self._behind = self._throws_away = False
        self._local = False
        self._left: tuple[weakref.ref[torch.Tensor], int] | None = None
        self._left_behind = self._warned = False
        self.watched: torch.Tensor | None = None
        self._last: weakref.ref[torch.Tensor] | None = None  # the first gradient of the last update
        self._last_version = 0
        self._applied = False  # the optimizer has stepped in the step in progress
        self._updated: tuple[weakref.ref[torch.Tensor], int] | None = None  # a gradient that the last update has left
        self._beneath = False  # the present gradients were added to it
        self._alike = False  # all ranks have come by an update in the present group

    @property
    def is_open(self) -> bool:
        """True if accumulated gradients wait for the optimizer."""
        return self._steps > 0

    @property
    def local(self) -> bool:
        """True if the accumulated gradients differ between ranks because ``no_sync`` has left them unreduced."""
        return self._local

    def add(self, step: LoaderStep | None, *, local: bool = False) -> None:
        """Record a backward pass that adds to ``.grad``; ``local`` if it is not to be reduced."""
        if step is None or (self._asked and self._throws_away):
            return
        if step is not self._step or not self._steps:
            self._step, self._steps = step, self._steps + 1
            if local:
                self._context.ledger.mark_training()
        self._local = self._local or (local and self._context.group.world_size > 1)
        self._behind = self._asked

    @property
    def note(self) -> int:
        """Value that ranks must share when they reduce: 1 if gradients were added to those of the last update.

        How many passes within ``no_sync`` are in them is each rank's own, as under DDP: shares that are cut by tokens
        differ. 0 up to the first update in a group: a rank that has joined lacks what the others have done since their
        last.
        """
        if not self._alike:
            return 0
        return int(self._beneath)

    def look(self, param: torch.Tensor) -> None:
        """Check the watched parameter after a pass: were gradients added to those of the last update?"""
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
                self._context.tell("warning", _TWICE)

    def mark_reduced(self) -> None:
        """Mark all accumulated gradients as equal on all ranks."""
        self._local = False

    def refuse_own(self) -> None:
        """Refuse an optimizer step without a backward pass that averages gradients.

        Raises RuntimeError: gradients are this rank's own: neither reduced, as what is carried and what lies in slices,
        nor zero, nor what the last update has left.
        """
        ledger = self._context.ledger
        step = ledger.step
        if step is None or not step.is_last_micro or self._context.group.world_size == 1:
            return
        if ledger.failed or ledger.replaying or (self.is_open and not self._local):
            return
        grads = [p.grad for p in self._params() if p.grad is not None]
        left = self._last() if self._last is not None else None
        if grads and grads[0] is left and grads[0]._version == self._last_version:
            return
        refuse_own(grad for grad in map(plain_or_sliced, grads) if not isinstance(grad, SlicedGradient))

    def note_applied(self) -> None:
        """Record that the optimizer applies the gradients in the step in progress."""
        self._applied = True

    def taken(self) -> None:
        """Reset the accumulation, because the optimizer was asked to step."""
        self._steps, self._asked, self._local = 0, True, False
        self._alike, self._beneath = True, False
        self._last, self._last_version, self._updated, self.watched = None, 0, None, None
        for group in self._optimizer.param_groups:
            for p in group["params"]:
                if p.grad is not None:  # the next pass adds to it, or it is thrown away
                    self._last, self._last_version = weakref.ref(p.grad), p.grad._version
                    self._updated, self.watched = (self._last, self._last_version), p
                    return

    def remember(self) -> Any:
        """Return what is needed to undo the step that starts now; None if nothing is accumulated."""
        self._asked = self._applied = False
        if not self._steps:
            return None
        self._left_behind = self._behind
        self._watch()
        # Local ones do not outlast a group that has lost a step.
        return self._steps, self._local, {} if self._local else self._gradients()

    def roll_back(self, remembered: Any) -> None:
        """Undo a lost step; one that the optimizer has applied has left nothing to carry."""
        if remembered is None or self._applied:
            self._take(0, {})
            return
        steps, local, gradients = remembered
        self._take(steps, gradients)
        self._local = local

    def _watch(self) -> None:
        for p in self._params():
            if p.grad is not None:
                self.watched, self._left = p, (weakref.ref(p.grad), p.grad._version)
                return

    def capture(self) -> Any:
        """Return state for joiners and checkpoints; of gradients that differ by rank only that they are lost."""
        if self._local:
            return {"lost": self._steps}
        gradients = self._gradients() if self._steps else {}
        if any(isinstance(grad, SlicedGradient) for grad in gradients.values()):
            return {}  # no backward pass can add to them, so that they are of one step, which has not applied them
        return {"steps": self._steps, "gradients": gradients} if self._steps else {}

    def restore(self, tree: Any) -> None:
        """Restore a captured state."""
        self._take(tree.get("steps", 0), tree.get("gradients", {}))
        self._lost = tree.get("lost", 0)

    def enter_group(self) -> None:
        """Enter a group, in which what only some ranks hold no longer counts."""
        self._updated, self.watched, self._beneath, self._alike = None, None, False, False
        lost, self._lost = self._steps if self._local else self._lost, 0
        if self._local:
            self._take(0, {})
        if lost:
            self._context.tell(
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

    def _take(self, steps: int, gradients: dict[int, torch.Tensor]) -> None:
        self._steps, self._step, self._local = steps, None, False
        self._beneath = False
        for i, p in enumerate(local_groups([self._params()])[0]):
            p.grad = gradients[i].to(p.device) if i in gradients else None
