"""Adaptation policies: user-defined control loops during training.

A policy returns requests for changes. A change is applied between two steps, either on all workers or on none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from placement.lazy_names import lazy_names

if TYPE_CHECKING:
    from elastic_ray.adaptation.policies.batch_schedule import BatchSchedule
    from elastic_ray.adaptation.policies.by_metric import EarlyStop, LossPlateau
    from elastic_ray.adaptation.policies.cost_cap import CostCap
    from elastic_ray.adaptation.policies.interference import Interference
    from elastic_ray.adaptation.policies.noise_scale_batch import NoiseScaleBatch
    from elastic_ray.adaptation.policies.scaling import ThroughputScaling, UtilityCost
    from elastic_ray.adaptation.policy import Policy, PolicyError
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
    from elastic_ray.adaptation.view import PolicyView

_HOMES = {
    "elastic_ray.adaptation.policies.batch_schedule": "BatchSchedule",
    "elastic_ray.adaptation.policies.by_metric": "EarlyStop LossPlateau",
    "elastic_ray.adaptation.policies.cost_cap": "CostCap",
    "elastic_ray.adaptation.policies.interference": "Interference",
    "elastic_ray.adaptation.policies.noise_scale_batch": "NoiseScaleBatch",
    "elastic_ray.adaptation.policies.scaling": "ThroughputScaling UtilityCost",
    "elastic_ray.adaptation.policy": "Policy PolicyError",
    "elastic_ray.adaptation.requests": (
        "Checkpoint Pause Report Request Resize ScaleRate SetBatch SetStrategy SetTopology Stop"
    ),
    "elastic_ray.adaptation.view": "PolicyView",
}

__all__ = [
    "BatchSchedule",
    "Checkpoint",
    "CostCap",
    "EarlyStop",
    "Interference",
    "LossPlateau",
    "NoiseScaleBatch",
    "Pause",
    "Policy",
    "PolicyError",
    "PolicyView",
    "Report",
    "Request",
    "Resize",
    "ScaleRate",
    "SetBatch",
    "SetStrategy",
    "SetTopology",
    "Stop",
    "ThroughputScaling",
    "UtilityCost",
]

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
