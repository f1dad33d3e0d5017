"""The metrics of a job: names, units, labels (pure)."""

from __future__ import annotations

from placement.instruments import Instrument, counter, gauge, histogram

_OF = ("job", "tenant", "model")


def _gauge(name: str, description: str, *labels: str) -> Instrument:
    return gauge(f"elastic_job_{name}", description, *_OF, *labels)


WORKERS = _gauge("workers", "Workers that train now; 0 once the job has ended.")
TARGET_WORKERS = _gauge("target_workers", "Workers that the job is heading for; 0 once it has ended.")
GLOBAL_BATCH = _gauge("global_batch", "Samples of one optimizer step over all workers.")
SAMPLES_PER_SECOND = _gauge("samples_per_second", "Measured throughput [samples/s].")
GOODPUT = _gauge("goodput", "Throughput x statistical efficiency by the fitted model [samples/s].")
EFFICIENCY = _gauge("statistical_efficiency", "Progress per sample relative to the initial batch.")
NOISE_SCALE = _gauge("noise_scale", "Gradient noise scale [samples].")
LEARNING_RATE_FACTOR = _gauge("learning_rate_factor", "What the learning rates are multiplied by for the batch.")
STEPS = _gauge("steps", "Optimizer steps committed by the run; falls where a restart goes back.")
PROGRESS = _gauge("progress_ratio", "Part of the declared epochs that is done, 0 to 1.")
ETA = _gauge("eta_seconds", "Time to the end at the present goodput [s].")
PRODUCTIVE = _gauge("productive_ratio", "Training time / time since submission, 0 to 1.")
TIME = _gauge("time_seconds", "Where the time since submission went [s].", "part")
COST = _gauge("cost_usd", "What the job has cost so far [USD].")
RESIZES = counter("elastic_job_resizes_total", "Changes of the number of workers.", *_OF, "reason")
PAUSE = histogram(
    "elastic_job_pause_seconds",
    "Time without a step at a change of workers [s].",
    (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 300.0),
    *_OF,
)
LOST_STEPS = counter("elastic_job_lost_steps_total", "Committed steps that restarts have undone.", *_OF)
FAILURES = counter("elastic_job_failures_total", "What went wrong.", *_OF, "cause")

INSTRUMENTS = (
    WORKERS,
    TARGET_WORKERS,
    GLOBAL_BATCH,
    SAMPLES_PER_SECOND,
    GOODPUT,
    EFFICIENCY,
    NOISE_SCALE,
    LEARNING_RATE_FACTOR,
    STEPS,
    PROGRESS,
    ETA,
    PRODUCTIVE,
    TIME,
    COST,
    RESIZES,
    PAUSE,
    LOST_STEPS,
    FAILURES,
)
