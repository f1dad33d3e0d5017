"""Adaptation policies: control loops of the user's over what is measured inside the step.

A policy asks for changes as data; all workers apply them between the same two steps, or none does.
"""

from elastic_ray.adaptation.policy import Policy, PolicyError
from elastic_ray.adaptation.requests import (
    Checkpoint,
    Report,
    Request,
    Resize,
    ScaleRate,
    SetBatch,
    SetStrategy,
    Stop,
)
from elastic_ray.adaptation.view import PolicyView

__all__ = [
    "Checkpoint",
    "Policy",
    "PolicyError",
    "PolicyView",
    "Report",
    "Request",
    "Resize",
    "ScaleRate",
    "SetBatch",
    "SetStrategy",
    "Stop",
]
