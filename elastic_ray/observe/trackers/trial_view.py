"""A job as Ray Tune's loggers see a trial (pure)."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrialView:
    """What loggers read of a ``ray.tune`` trial. Two of the same ``trial_id`` are equal: loggers keep them as keys.

    Attributes:
        trial_id: the same for the whole run, whatever controllers it has.
        trial_name: the job's name.
        config: ``train_loop_config``.
        experiment_dir_name: the job's name.
        local_experiment_path: directory of this node in which loggers may write.
        local_path: the same.
        path: the run's directory.
        node_ip: address of the controller's node.
        checkpoint: the latest reported ``ray.train.Checkpoint``.
        status: as Tune calls it.
    """

    trial_id: str
    trial_name: str
    config: Mapping[str, Any]
    local_path: str
    path: str
    node_ip: str = ""
    checkpoint: Any = None
    status: str = "RUNNING"

    @property
    def logdir(self) -> str:
        """The old name of ``local_path``."""
        return self.local_path

    @property
    def local_dir(self) -> str:
        """Where ``local_path`` lies."""
        return os.path.dirname(self.local_path)

    @property
    def local_experiment_path(self) -> str:
        """A job is its own experiment."""
        return self.local_path

    @property
    def experiment_dir_name(self) -> str:
        """A job is its own experiment."""
        return self.trial_name

    @property
    def trainable_name(self) -> str:
        """By which some loggers group trials."""
        return self.trial_name

    @property
    def experiment_tag(self) -> str:
        """What tells it from the other trials of its experiment: there are none."""
        return self.trial_id

    @property
    def evaluated_params(self) -> dict[str, Any]:
        """No sampled ones."""
        return {}

    def init_local_path(self) -> None:
        """Make its directory."""
        os.makedirs(self.local_path, exist_ok=True)

    def get_ray_actor_ip(self) -> str:
        """Address of the controller's node."""
        return self.node_ip

    def __hash__(self) -> int:
        return hash(self.trial_id)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TrialView) and other.trial_id == self.trial_id

    def __str__(self) -> str:
        return self.trial_name
