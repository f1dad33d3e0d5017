"""SHELL: what ``ray.tune``'s own functions find in the workers of a trial: there they mean ``elastic_ray``'s."""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

from elastic_ray.job.train_loop import Packed, pack

_HOME = "ray.train._internal.session"


def in_tune(packed: bytes) -> bytes:
    """A packed train loop in which ``ray.tune.report`` and ``ray.tune.get_checkpoint`` do what ours do."""
    return pack(_InTune(packed), {})


class _InTune(Packed):
    def __call__(self, config: Mapping[str, Any]) -> Any:
        with _stand_in():
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


@contextlib.contextmanager
def _stand_in() -> Iterator[None]:
    """Be Ray's session, in its module now or as soon as something imports it: not everybody needs that second."""
    session = _Session()
    late = _WhenImported(lambda module: setattr(module, "_session", session))
    if _HOME in sys.modules:
        late.then(sys.modules[_HOME])
    else:
        sys.meta_path.insert(0, late)
    try:
        yield
    finally:
        if late in sys.meta_path:
            sys.meta_path.remove(late)
        if _HOME in sys.modules:
            sys.modules[_HOME]._session = None  # type: ignore[attr-defined]


class _WhenImported(importlib.abc.MetaPathFinder):
    """Does something with Ray's module once it has been imported."""

    def __init__(self, then: Callable[[ModuleType], None]) -> None:
        self.then = then

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        spec = importlib.machinery.PathFinder.find_spec(name, path, target) if name == _HOME else None
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                self.then(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
