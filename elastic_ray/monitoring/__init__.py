"""Monitoring of training steps: each worker's measurements, known to all workers."""

from elastic_ray.monitoring.gradient_measures import GradientNorms, GradientVariance, StepMeasures
from elastic_ray.monitoring.measures import WorkerMeasures
from elastic_ray.monitoring.monitor import Monitor

__all__ = ["GradientNorms", "GradientVariance", "Monitor", "StepMeasures", "WorkerMeasures"]
