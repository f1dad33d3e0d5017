"""Objectives of the cluster's size: how many workers each job should have if nodes can be had for money."""

from placement.autoscaling.objectives.base import Objective, Offer, Want
from placement.autoscaling.objectives.registry import OBJECTIVES, make_objective

__all__ = ["OBJECTIVES", "Objective", "Offer", "Want", "make_objective"]
