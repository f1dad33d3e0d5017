"""Adaptation of a run by policies: what policies can observe, and how their requests are carried out."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from elastic_ray.adaptation.policy import Policy
from elastic_ray.adaptation.requests import (
    Checkpoint,
    Pause,
    Report,
    Request,
    Resize,
    ScaleRate,
    SetBatch,
    SetStrategy,
    SetTopology,
    Stop,
)
from elastic_ray.adaptation.runner import PolicyRunner, SharedValues
from elastic_ray.adaptation.view import PolicyView
from elastic_ray.batch.limits import BatchChoice, cut_within
from elastic_ray.run.registry import HookPoint
from elastic_ray.run.run import Run
from elastic_ray.state.codec import decode, encode
from elastic_ray.state.progress import PassProgress
from elastic_ray.state.shared_state import SharedState
from elastic_ray.steps.step import LoaderStep


class Adaptation:
    """Adaptation of one run by its policies.

    Args:
        sizes: Smallest and largest number of workers in the job; None if the group cannot change.
    """

    def __init__(self, run: Run, sizes: tuple[int, int] | None) -> None:
        self._run, self._sizes = run, sizes
        self.runner = PolicyRunner(self, run.notify, run.controller.notify)
        self._step: LoaderStep | None = None
        self.active = False  # whether there are any
        self._coming: tuple[tuple[float, int], ...] | None = None  # None where that is to be found out again

    def add(self, policies: Iterable[Policy]) -> None:
        """Add policies to the run. Raises PolicyError if a policy's state is not plain."""
        self.runner.add(policies)
        if self.runner and not self.active:
            self.active = True
            self._run.meter.ask()
            self._run.consensus.add(self.runner.watched, self.runner.ballot)

    def register(self, states: SharedState) -> None:
        """Register the policies' state, to be sent to joining ranks and rolled back with a lost step.

        Raises PolicyError if a policy's state cannot be sent to other ranks.
        """
        if self.runner:
            self.runner.check_plain()
            states.register("adaptation", self.runner)
            states.register_rollback(self.runner.capture, self.runner.restore, "adaptation")

    def with_state(self, trees: dict[str, Any]) -> dict[str, Any]:
        """Return saved states, adding the policies' initial state if the saved run had no policies."""
        return {"adaptation": self.runner.capture(), **trees} if self.active else trees

    @property
    def wish(self) -> tuple[int | None, int | None] | None:
        """Smallest and largest number of workers requested by policies (either may be None); None without a request."""
        epochs = self._run.progress.epochs
        is_over = self.stopped or (epochs is not None and self._run.progress.epoch >= epochs)
        return None if is_over else self.runner.values.wish

    @property
    def held_batch(self) -> int | None:
        """Global batch that a policy has set; None if the job chooses the batch."""
        values = self.runner.values
        return values.batch_size if values.trains else self._first_batch

    @property
    def _first_batch(self) -> int | None:
        """Global batch that the policies set for the start of the run; None if the job chooses it."""
        info = self._run.registry.loaders.info
        if info is None or info.limits.one_size or info.limits.per_worker or not self.runner.starts_at_initial:
            return None
        return info.limits.init_batch_size

    @property
    def coming(self) -> tuple[tuple[float, int], ...]:
        """Batches that policies plan to set later: (samples from now, batch), ordered by samples."""
        samples = self.runner.values.samples
        return tuple((at - samples, size) for at, size in self._coming or () if at > samples)

    @property
    def stopped(self) -> bool:
        """True if a policy has ended the training."""
        return self.runner.values.stopped is not None

    def ends(self, loader_pass: PassProgress) -> bool:
        """True if a policy has ended the training during ``loader_pass``, so that this pass must stop early."""
        stopped, progress = self.runner.values.stopped, self._run.progress
        if stopped is None or stopped[0] != progress.epoch or stopped[1] >= len(progress.passes):
            return False
        return progress.passes[stopped[1]] is loader_pass

    def held_shape(self) -> BatchChoice | None:
        """Return the policies' global batch, divided for the current group size; None if the job chooses the batch."""
        info, batch_size = self._run.registry.loaders.info, self.held_batch
        if info is None or batch_size is None:
            return None
        return cut_within(info.limits, batch_size, self._run.group.world_size)

    def before_step(self, step: LoaderStep) -> None:
        """Call the policies' ``before_step``, preceded by ``before_train`` and ``before_epoch`` if due."""
        if not step.leads:
            return
        values, self._step = self.runner.values, step
        if not values.trains:
            values.start_train(self._first_batch)
            self._call("before_train")
        if values.start_epoch(self._run.progress.epoch):
            self._call("before_epoch")
            self._coming = None
        self._call("before_step")

    def after_step(self, step: LoaderStep, samples: int) -> None:
        """Apply the requests agreed on with a committed training step, and call the policies' ``after_step``.

        Raises PolicyError on every rank if a strict policy failed.
        """
        values, watched, workers = self.runner.values, self.runner.watched, self._run.meter.workers
        if workers:
            values.advance(workers[0].passed_s, len(workers), samples)
        values.metrics, values.reports = dict(watched.latest), watched.reports
        self._step, wish = step, self.wish
        self.runner.complete(self._run.progress.steps)
        if self.wish != wish:
            self._run.controller.report_soon()
        self._call("after_step")
        if self._coming is None:
            self._coming = self.runner.coming_batches(self._view())

    def end_epoch(self) -> None:
        """Call the policies' ``after_epoch`` hook, unless it has already been called for this epoch."""
        if self.runner and self.runner.values.end_epoch(self._run.progress.epoch):
            self._call("after_epoch")

    def end_train(self) -> None:
        """Call the policies' ``after_train`` hook, after the train function has returned."""
        if self.runner:
            self._call("after_train")
            self.runner.end(self._run.progress.steps)

    def _call(self, hook: str) -> None:
        """Call a hook of the policies; in a unit, the leader alone decides for all its workers."""
        if not self.runner.wants(hook):
            return
        unit = self._run.unit
        if unit is None or unit.leads:
            self.runner.call(hook, self._view())
        if unit is not None:  # its workers measure and report apart from each other: one of them decides
            answers = unit.of_leader(encode(self.runner.answers()) if unit.leads else b"")
            if not unit.leads:
                self.runner.adopt(decode(answers))

    def _view(self) -> PolicyView:
        """Return the run's current state as shown to policies."""
        run, values, progress, step = self._run, self.runner.values, self._run.progress, self._step
        info, workers, first = run.registry.loaders.info, run.meter.workers, run.registry.models.first
        limits, tokens = (info.limits, info.tokens) if info is not None else (None, None)
        initial = limits.init_batch_size if limits is not None else 0
        fewest, most = self._sizes or (None, None)
        sums = [dict(progress.sums[key]) for key in sorted(progress.sums) if key[0] == progress.epoch]
        return PolicyView(
            step=progress.steps,
            epoch=progress.epoch,
            epochs=progress.epochs,
            epoch_progress=step.loader_pass.position / step.total if step is not None and step.total else 0.0,
            samples=values.samples,
            workers=run.group.world_size,
            generation=run.group.generation,
            nodes=len(set(run.group.nodes)),
            min_workers=fewest,
            max_workers=most,
            batch_size=round(step.scale * step.init_batch_size) if step is not None else initial,
            initial_batch_size=initial,
            max_batch_size=limits.max_batch_size if limits is not None else None,
            critical_batch=run.agreed.critical_batch,
            learning_rates=first.learning_rates() if first is not None else (),
            rate_factor=values.rate_factor,
            noise=run.registry.models.noise(),
            step_s=workers[0].step_s if workers else 0.0,
            sync_s=workers[0].sync_s if workers else 0.0,
            worker_measures=workers,
            elapsed_s=values.elapsed_s,
            worker_s=values.worker_s,
            strategies=run.registry.strategies,
            metrics=dict(values.metrics),
            tokens_per_sample=tokens.per_sample if tokens is not None else None,
            counted_tokens=progress.weighed if tokens is not None and tokens.counted else None,
            reports=values.reports,
            sums=sums,
        )

    def apply(self, request: Request, values: SharedValues) -> str:
        """Carry out a request on this rank; return the reason if this is impossible, otherwise ""."""
        match request:
            case SetBatch():
                return self._set_batch(request, values)
            case Resize():
                return self._resize(request, values)
            case SetStrategy() | SetTopology():
                return self._set_strategy(request)
            case ScaleRate():
                values.scale_rate(request.factor)
            case Stop():
                values.stopped = self._run.progress.epoch, self._step.ordinal - 1 if self._step is not None else 0
            case Report():
                pass  # its event is all there is to it
            case Pause() if self._sizes is None:
                return "there is no controller that would pause and resume it"
            case Checkpoint() | Pause():  # the controller pauses the job when the request is reported
                if not self._run.registry.hooks[HookPoint.CHECKPOINT_ASKED]:
                    return "this run makes no automatic checkpoints"
                self._run.registry.call(HookPoint.CHECKPOINT_ASKED)
        return ""

    def _set_batch(self, request: SetBatch, values: SharedValues) -> str:
        """Set the global batch for every group from now on; return the reason if it cannot be set, else ""."""
        info = self._run.registry.loaders.info
        if info is None or info.limits.fixed or info.limits.max_batch_size is None:
            return "the batch is fixed: call loader.autoscale_batch_size(max_batch_size=...) to let it change"
        if info.limits.per_worker:
            return "each worker has its own batch_size: the loader has scale_with_workers=True"
        most, batch_size = info.limits.max_batch_size, request.batch_size
        if batch_size is not None and batch_size > most:
            return f"max_batch_size is {most}"
        values.hold_batch(batch_size)
        self._coming = None
        shape = self.held_shape()
        if shape is not None:
            self._run.set_shape(shape)
        return ""

    def _resize(self, request: Resize, values: SharedValues) -> str:
        """Record the requested sizes for the next report to the controller; return the reason if refused, else ""."""
        if self._sizes is None:
            return "the group cannot change: there is no allocator to ask"
        least, most = self._sizes
        for wanted in request.bounds:
            if wanted is not None and not least <= wanted <= most:
                return f"the job has {least} to {most} workers"
        values.wish_for(request.bounds)
        return ""

    def _set_strategy(self, request: SetStrategy | SetTopology) -> str:
        """Set a model's strategy or topology; return the reason if the model cannot use it, else ""."""
        registry, wishes, refused = self._run.registry, self._run.wishes, ""
        try:
            if isinstance(request, SetTopology):
                registry.gradients_of(request.model).set_topology(request.topology)
            else:
                registry.gradients_of(request.model).set_strategy(request.strategy)
        except (ValueError, TypeError) as error:
            refused = str(error)
        if wishes is not None and not wishes.agree(not refused) and not refused:
            registry.gradients_of(request.model).keep_strategy()
            refused = "another worker of the unit cannot use it for its part of the model"
        return refused
