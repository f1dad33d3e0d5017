"""What a job knows about its speed and its batch, from rank 0's reports (pure)."""

from __future__ import annotations

import dataclasses

from elastic_ray.batch.limits import BatchChoice
from elastic_ray.batch.tuner import BatchTuner, TunerSnapshot
from elastic_ray.link import LoaderInfo, StepReport
from elastic_ray.membership.plan import Plan
from placement.goodput import GoodputModel, NoiseScale

# A fit costs about 20 ms of the controller's thread.
_FIT_EVERY_S = 2.0


class BatchDesk:
    """Collects step reports, keeps the fitted model, and chooses batches.

    Attributes:
        loader: the training loader's limits, None before a worker is ready.
        latest: the latest report.
    """

    def __init__(self, *, fixed: bool) -> None:
        self._fixed = fixed
        self._tuner: BatchTuner | None = None
        self._fresh = False
        self._fitted_s = 0.0
        self._choice: BatchChoice | None = None
        self._replicas = 1
        self._before: tuple[BatchChoice | None, int] = (None, 1)
        self._chosen_for = 0
        self._measured: StepReport | None = None  # the latest that saw a step
        self.loader: LoaderInfo | None = None
        self.latest: StepReport | None = None
        self.throughput = 0.0

    @property
    def model(self) -> GoodputModel | None:
        """The fitted goodput model, None before there is one."""
        return self._tuner.model if self._tuner is not None else None

    @property
    def tuner(self) -> BatchTuner | None:
        """The job's tuner, None before the loader is known."""
        return self._tuner

    def goodput(self) -> float | None:
        """Goodput [samples/s] of the present configuration; None before there is a model."""
        report, model = self.latest, self.model
        if model is None or report is None or report.shape is None:
            return None
        shape = report.shape
        return float(model.goodput(report.nodes, report.replicas, shape.atomic_bsz, shape.accum_steps))

    def open(self, loader: LoaderInfo | None) -> None:
        """A worker has told the loader's limits."""
        if self.loader is not None or loader is None:
            return
        limits = dataclasses.replace(loader.limits, max_batch_size=None) if self._fixed else loader.limits
        self.loader = dataclasses.replace(loader, limits=limits)
        self._tuner = BatchTuner(limits)

    def choose(self, plan: Plan) -> BatchChoice | None:
        """The batch for a new generation; None where the loader decides (a batch that is fixed)."""
        if self._tuner is None or self.loader is None:
            return None
        decision = self._tuner.decide(plan.nodes, plan.world_size, self._choice, current_replicas=self._replicas)
        self._before = (self._choice, self._replicas)
        self._choice, self._replicas, self._chosen_for = decision.choice, plan.world_size, plan.generation
        return decision.choice

    def withdraw(self) -> None:
        """The generation that was chosen for last will not come to be, unless it has been reported from already."""
        if self.latest is not None and self.latest.generation >= self._chosen_for:
            return
        self._choice, self._replicas = self._before

    def observe(self, report: StepReport) -> int | None:
        """Take rank 0's report; returns the batch size before, where the same workers train with another one now."""
        self.latest = report
        if report.shape is None or report.steps == 0:
            return None
        before, self._measured = self._measured, report
        self._learn(report)
        same = before is not None and before.replicas == report.replicas and before.shape != report.shape
        return before.batch_size if before is not None and same and before.batch_size != report.batch_size else None

    def _learn(self, report: StepReport) -> None:
        if self._tuner is None or report.shape is None:
            return
        self.throughput = report.batch_size / report.step_time if report.step_time > 0 else 0.0
        self._tuner.observe(
            nodes=report.nodes,
            replicas=report.replicas,
            atomic_bsz=report.shape.atomic_bsz,
            accum_steps=report.shape.accum_steps,
            step_time=report.step_time,
            grad_time=report.grad_time,
            steps=report.steps,
        )
        self._tuner.set_noise(NoiseScale(*report.noise) if report.noise is not None else None)
        self._fresh = True

    def due(self, now_s: float) -> TunerSnapshot | None:
        """What to fit now; None while nothing new is known or the last fit is recent."""
        if self._tuner is None or not self._fresh or now_s - self._fitted_s < _FIT_EVERY_S:
            return None
        self._fresh, self._fitted_s = False, now_s
        return self._tuner.snapshot()

    def fitted(self, model: GoodputModel | None) -> tuple[BatchChoice, str] | None:
        """Take a fit; the batch to change to and why, None to go on as it is."""
        tuner, report = self._tuner, self.latest
        if tuner is None:
            return None
        tuner.set_model(model)
        if report is None or report.shape is None or report.replicas != self._replicas or tuner.limits.fixed:
            return None
        decision = tuner.decide(report.nodes, report.replicas, report.shape)
        if not decision.changed or decision.choice == self._choice != report.shape:
            return None
        self._choice = decision.choice
        return decision.choice, f"batch {decision.batch_size}: {decision.reason}"

    def out_of_memory(self, atomic_bsz: int) -> str:
        """Lower the local bound; raises ``BatchDoesNotFitError`` at the smallest batch."""
        if self._tuner is None:
            return "the batch is not known yet"
        return self._tuner.out_of_memory(max(1, atomic_bsz))
