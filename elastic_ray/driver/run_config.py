"""SHELL: Ray Train's ``RunConfig`` with callbacks of Ray Tune as well, which Ray's own refuses."""

from __future__ import annotations

import dataclasses
from typing import Any

from ray.train.v2.api.callback import UserCallback
from ray.train.v2.api.config import RunConfig as RayRunConfig

from placement.arguments import NamesArguments


@dataclasses.dataclass
class RunConfig(NamesArguments, RayRunConfig):
    """``ray.train.RunConfig``, whose ``callbacks`` may hold Ray Tune's loggers beside Ray Train's ``UserCallback``.

    Fields are Ray Train's. ``ElasticTrainer`` takes either class.

    Example:
        ``RunConfig(name="bert", callbacks=[MLflowLoggerCallback(experiment_name="bert")])``

    Examples:
        >>> from elastic_ray import RunConfig
        >>> RunConfig(name="digits", storage_path="/tmp/runs").name
        'digits'
    """

    def __post_init__(self) -> None:
        """Check everything else as Ray does; ``ElasticTrainer`` checks the callbacks."""
        given: list[Any] = list(self.callbacks or [])
        self.callbacks = [each for each in given if isinstance(each, UserCallback)]
        RayRunConfig.__post_init__(self)  # type: ignore[no-untyped-call]
        self.callbacks = given
