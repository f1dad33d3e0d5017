"""Objectives for the cluster's size, which decide how many workers each job should have if nodes can be rented."""

from placement.autoscaling.objectives.base import NodeTypeOption, Objective, WantedSize
from placement.autoscaling.objectives.registry import OBJECTIVES, make_objective

__all__ = ["OBJECTIVES", "NodeTypeOption", "Objective", "WantedSize", "make_objective"]
