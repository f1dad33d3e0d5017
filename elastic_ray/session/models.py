"""The models that a train loop has wrapped, as far as its session needs to know them (pure)."""

from __future__ import annotations

from collections.abc import Callable

from elastic_ray.batch.reports import ModelInfo
from elastic_ray.batch.scaling_rules import step_gain
from placement.goodput.model import NoiseScale

Noise = Callable[[], "NoiseScale | None"]


class WrappedModels:
    """In the order in which the loop wraps them; the first stands for the job's statistical efficiency."""

    def __init__(self) -> None:
        self._noises: list[Noise] = []
        self._told: list[ModelInfo] = []

    @property
    def told(self) -> tuple[ModelInfo, ...]:
        """What they tell the job."""
        return tuple(self._told)

    def add(self, told: ModelInfo, noise: Noise) -> int:
        """A newly wrapped model; returns its number."""
        self._told.append(told)
        self._noises.append(noise)
        return len(self._noises) - 1

    def noise(self) -> NoiseScale | None:
        """Of the first model; None before an estimate."""
        return self._noises[0]() if self._noises else None

    def gain(self, scale: float) -> float:
        """Statistical progress of a step at ``scale`` x the initial batch size, in steps at that size."""
        if scale == 1.0:
            return 1.0
        return step_gain(scale, self.noise())
