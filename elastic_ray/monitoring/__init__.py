"""Monitoring of training steps: measurements made by each worker and shared with all workers."""

from elastic_ray.monitoring.gradient_measures import GradientNorms, GradientVariance, StepMeasures
from elastic_ray.monitoring.measures import WorkerMeasures
from elastic_ray.monitoring.monitor import Monitor

__all__ = ["GradientNorms", "GradientVariance", "Monitor", "StepMeasures", "WorkerMeasures"]
