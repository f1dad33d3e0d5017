"""SHELL: what ``ray.tune``'s own functions find in the workers of a trial: there they mean ``elastic_ray``'s."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from elastic_ray.worker.lazy_patch import patched
from elastic_ray.worker.train_loop import PickledTrainLoop, pack

_HOME = "ray.train._internal.session"


def in_tune(packed: bytes) -> bytes:
    """A packed train loop in which ``ray.tune.report`` and ``ray.tune.get_checkpoint`` do what ours do."""
    return pack(_InTune(packed), {})


class _InTune(PickledTrainLoop):
    def __call__(self, config: Mapping[str, Any]) -> Any:
        with patched(_HOME, "_session", _Session()):
            return super().__call__(config)


class _Session:
    """What ``ray.tune``'s functions ask. Without it they would warn once and lose every report."""

    world_rank = None  # by this Ray knows a session of Tune from one of Ray Train

    def report(self, metrics: dict[str, Any], checkpoint: Any = None, **_: Any) -> None:
        import elastic_ray

        elastic_ray.report(metrics, checkpoint)

    @property
    def loaded_checkpoint(self) -> Any:
        import elastic_ray

        return elastic_ray.get_checkpoint()

    @property
    def trial_id(self) -> str:
        return self._names()[1]

    @property
    def experiment_name(self) -> str:
        return self._names()[0]

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"the workers of an elastic trial do not know Ray's {name!r}; elastic_ray.get_context() knows rank, size "
            "and job, the train loop's config the trial's parameters"
        )

    @staticmethod
    def _names() -> tuple[str, str]:
        import elastic_ray

        experiment, _, trial = elastic_ray.get_context().get_job_name().rpartition("-")
        return experiment, trial
