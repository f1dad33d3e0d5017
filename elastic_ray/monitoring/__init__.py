"""Monitoring inside the step: what each worker measures of it, known to all of them."""

from elastic_ray.monitoring.gradient_measures import GradientNorms, GradientVariance, StepMeasures
from elastic_ray.monitoring.measures import WorkerMeasures
from elastic_ray.monitoring.monitor import Monitor

__all__ = ["GradientNorms", "GradientVariance", "Monitor", "StepMeasures", "WorkerMeasures"]
