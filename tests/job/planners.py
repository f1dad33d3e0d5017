"""Planners and reports of a job on known hardware."""

from __future__ import annotations

from typing import Any

from elastic_ray.batch.limits import BatchChoice, BatchLimits
from elastic_ray.batch.planner import BatchPlanner
from elastic_ray.batch.reports import LoaderInfo, ModelInfo, StepReport
from elastic_ray.membership.messages import GenerationSpec, Member
from placement.cluster.jobs import Progress
from placement.goodput.model import NoiseScale, ThroughputModel

TRUTH = ThroughputModel(0.010, 0.0001, 0.02, 0.001, 0.005, 0.0002, 1.5)
LIMITS = BatchLimits(init_batch_size=64, max_batch_size=4096, local_bsz_bounds=(16, 512))
NET = ModelInfo(kind="Net", details="weight (2, 2) float32")
LOADER = LoaderInfo(limits=LIMITS, dataset_size=10_000, sample="TensorDataset (3,)", models=(NET,))


def plan(workers: int, generation: int) -> GenerationSpec:
    return GenerationSpec(
        generation=generation, members=tuple(Member(worker=f"w{i}", node="n") for i in range(workers))
    )


def report(workers: int, shape: BatchChoice, generation: int = 1, **fields: Any) -> StepReport:
    values = {
        "generation": generation,
        "nodes": 1,
        "replicas": workers,
        "shape": shape,
        "steps": 20,
        "step_time": float(TRUTH.step_time(1, workers, shape.atomic_bsz, shape.accum_steps)),
        "grad_time": 0.0,
        "noise": NoiseScale(sqr=1.0, var=20.0),
        "epoch": 0,
        "epochs": 4,
        "total_steps": 20,
        "batch_size": shape.batch_size(workers),
        "progress": Progress(done=20.0, epochs=4),
    }
    return StepReport(**{**values, **fields})


def planner_on(gpu: str = "T4", generation: int = 1) -> tuple[BatchPlanner, BatchChoice]:
    planner = BatchPlanner()
    planner.open(LOADER)
    choice = planner.choose(plan(2, generation), gpu)
    assert choice is not None
    return planner, choice
