"""SHELL: Ray Train's ``RunConfig``, extended to accept Ray Tune callbacks, which Ray's own class refuses."""

from __future__ import annotations

import dataclasses
from typing import Any

from ray.train.v2.api.callback import UserCallback
from ray.train.v2.api.config import RunConfig as RayRunConfig

from placement.arguments import NamesArguments


@dataclasses.dataclass
class RunConfig(NamesArguments, RayRunConfig):
    """``ray.train.RunConfig`` whose ``callbacks`` accept not only ``UserCallback`` but also Ray Tune loggers.

    The fields are Ray Train's. ``ElasticTrainer`` accepts either class.

    Example:
        ``RunConfig(name="bert", callbacks=[MLflowLoggerCallback(experiment_name="bert")])``

    Examples:
        >>> from elastic_ray import RunConfig
        >>> RunConfig(name="digits", storage_path="/tmp/runs").name
        'digits'
    """

    def __post_init__(self) -> None:
        """Check all fields as Ray does, except for other callbacks, which ``ElasticTrainer`` checks."""
        given: list[Any] = list(self.callbacks or [])
        self.callbacks = [each for each in given if isinstance(each, UserCallback)]
        RayRunConfig.__post_init__(self)  # type: ignore[no-untyped-call]
        self.callbacks = given
