"""Reader of Ray Train's configuration for an elastic job: each field is either used or refused with a reason."""

from __future__ import annotations

import dataclasses
import logging
import os
import re
from collections.abc import Collection, Mapping
from typing import Any

# What `from ray.train import ...` gives at run time; type checkers see Ray Train's older classes there.
import ray
from ray.runtime_env import RuntimeEnv
from ray.train.v2.api.callback import UserCallback
from ray.train.v2.api.config import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig

from elastic_ray.job_spec import RunSettings
from placement.arguments import check_argument_names, meant
from placement.checks import check_number, check_switch, check_whole
from placement.cluster.cluster import check_selector

_JOB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=,+-]{0,127}")
_RAYS_DEFAULT_NAME = re.compile(r"ray_train_run-\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d")
_ACCELERATOR = "accelerator_type:"
_GIVEN_UP = "DEPRECATED"  # what Ray Train's classes hold for it
_PLUGINS = "RAY_RUNTIME_ENV_PLUGINS"  # which bring fields of their own
_WHOLE_ABOVE_ONE = ("GPU", "TPU", "neuron_cores", "NPU", "HPU")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """Values read from ``ScalingConfig``, with fields as in ``JobSpec``."""

    min_workers: int
    max_workers: int
    bundle: Mapping[str, float]
    use_gpu: bool
    label_selector: Mapping[str, str]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions(RunSettings):
    """Values read from ``RunConfig``; ``name`` is None unless the user chose a name; ``callbacks`` are unchanged."""

    name: str | None
    callbacks: tuple[Any, ...]


def read_scaling(config: ScalingConfig | None) -> Scaling:
    """Return the checked values of a ``ScalingConfig``; None means one worker with one CPU."""
    config = _instance(config, ScalingConfig, "scaling_config")
    _refuse_unsupported_scaling(config)
    low, high = _worker_limits(config.num_workers)
    return Scaling(
        min_workers=low,
        max_workers=high,
        bundle=_bundle(config),
        use_gpu=bool(config.use_gpu),
        label_selector=_label_selector(config.label_selector),
    )


def _refuse_unsupported_scaling(config: ScalingConfig) -> None:
    """Raise ValueError with the reason for each option that elastic jobs do not support."""
    default = ScalingConfig()
    refused = {
        "use_tpu": "workers train on CPUs and CUDA GPUs; leave it out, or use Ray Train's JaxTrainer",
        "topology": "it describes TPU slices, and an elastic job has none; leave it out",
        "trainer_resources": "the job's controller needs none (it runs with num_cpus=0); leave it out",
        "elastic_resize_monitor_interval_s": (
            "sizes change on events (a job's arrival or end, a lost or new node), not at intervals; leave it out"
        ),
    }
    for name, reason in refused.items():
        _refuse("ScalingConfig", name, getattr(config, name), getattr(default, name), reason)
    if config.placement_strategy != "PACK":
        raise ValueError(
            f"ScalingConfig(placement_strategy={config.placement_strategy!r}) is not supported: the "
            "allocator decides where workers run, on as few nodes as possible, and moves them; leave it at "
            "'PACK'"
        )


def _worker_limits(num_workers: Any) -> tuple[int, int]:
    """Return the minimum and maximum number of workers."""
    limits = num_workers if isinstance(num_workers, tuple) else (num_workers, num_workers)
    if len(limits) != 2 or not all(type(limit) is int for limit in limits):
        raise ValueError(f"ScalingConfig(num_workers) must be a whole number or (min, max), but got {num_workers!r}")
    if limits == (0, 0):
        raise ValueError(
            "ScalingConfig(num_workers=0), Ray Train's local mode, is not supported: to train in this "
            "process, call the train function yourself (it runs alone unchanged); otherwise ask for at "
            "least 1 worker"
        )
    if not 1 <= limits[0] <= limits[1]:
        raise ValueError(
            f"ScalingConfig(num_workers) must satisfy 1 <= min <= max, but got {num_workers!r}; "
            "for example num_workers=(1, 8)"
        )
    return limits


def _bundle(config: ScalingConfig) -> dict[str, float]:
    """Return the resources of one worker, with Ray Train's defaults and without zero amounts."""
    given = config.resources_per_worker
    if given is not None and not isinstance(given, Mapping):
        raise TypeError(f"ScalingConfig(resources_per_worker) must be a dict of amounts, but got {given!r}")
    bundle = dict(given) if given is not None else ({} if config.use_gpu else {"CPU": 1})
    if config.use_gpu:
        bundle.setdefault("GPU", 1)
    if config.accelerator_type:
        bundle.setdefault(f"{_ACCELERATOR}{config.accelerator_type}", 0.001)
    for name, amount in bundle.items():
        _check_amount(name, amount)
    if not config.use_gpu and bundle.get("GPU"):
        raise ValueError(f"resources_per_worker asks for {bundle['GPU']:g} GPU, but use_gpu is False; set use_gpu=True")
    if config.use_gpu and not bundle["GPU"]:
        raise ValueError("use_gpu is True, but resources_per_worker gives a worker 0 GPU; set use_gpu=False")
    bundle = {name: float(amount) for name, amount in bundle.items() if amount}
    if not bundle:
        raise ValueError(
            f"ScalingConfig(resources_per_worker) must give a worker at least one resource above 0, but got {given!r}; "
            "for example {'CPU': 1}"
        )
    return bundle


def _check_amount(name: Any, amount: Any) -> None:
    """Raise TypeError or ValueError unless Ray can reserve this amount of the resource."""
    if not isinstance(name, str) or not name:
        raise TypeError(f"resources_per_worker must be keyed by resource names, but got {name!r}")
    check_number(f"resources_per_worker[{name!r}]", amount, least=0, finite=True)
    if 0 < amount < 1e-4:
        raise ValueError(f"resources_per_worker[{name!r}] must be at least 0.0001, Ray's unit: got {amount}")
    if name in _WHOLE_ABOVE_ONE and amount > 1 and amount != int(amount):
        raise ValueError(f"resources_per_worker[{name!r}] must be whole above 1, but got {amount}")


def _label_selector(selector: Any) -> dict[str, str]:
    """Return the label selector, which must be the same for all workers."""
    if selector is None:
        return {}
    if isinstance(selector, list):
        if any(entry != selector[0] for entry in selector):
            raise ValueError(
                f"ScalingConfig(label_selector) must be the same for all workers, but got {selector!r}: "
                "ranks of an elastic job come and go; pass one dict"
            )
        selector = selector[0] if selector else {}
    if not isinstance(selector, Mapping):
        raise TypeError(f"ScalingConfig(label_selector) must be a dict of labels, but got {selector!r}")
    check_selector(selector, "ScalingConfig(label_selector)")
    return dict(selector)


def read_run(config: RunConfig | None) -> RunOptions:
    """Return the checked values of a ``RunConfig``; None means Ray Train's defaults."""
    config = _instance(config, RunConfig, "run_config")
    failures = _instance(config.failure_config, FailureConfig, "RunConfig(failure_config)")
    checkpoints = _instance(config.checkpoint_config, CheckpointConfig, "RunConfig(checkpoint_config)")
    callbacks = _callbacks(config.callbacks)
    _check_failures(failures)
    for owner, given in (("RunConfig", config), ("CheckpointConfig", checkpoints), ("FailureConfig", failures)):
        for field in dataclasses.fields(given):
            if field.default == _GIVEN_UP:
                value = getattr(given, field.name)
                _refuse(owner, field.name, value, _GIVEN_UP, "Ray Train has given it up; leave it out")
    keep = checkpoints.num_to_keep
    if keep is not None:
        check_whole("CheckpointConfig(num_to_keep)", keep, least=1)
    if not isinstance(config.storage_path, str | os.PathLike):
        raise ValueError(f"RunConfig(storage_path) must be a path or a URI, but got {config.storage_path!r}")
    return RunOptions(
        name=job_name(config.name),
        callbacks=callbacks,
        storage_path=str(config.storage_path),
        storage_filesystem=config.storage_filesystem,
        max_failures=failures.max_failures,
        num_to_keep=checkpoints.num_to_keep,
        checkpoint_score_attribute=checkpoints.checkpoint_score_attribute,
        checkpoint_score_order=checkpoints.checkpoint_score_order,
        runtime_env=_runtime_env(config.worker_runtime_env),
        log_level=_log_level(config.logging_config),
    )


def _callbacks(given: Any) -> tuple[Any, ...]:
    """Return the callbacks as a tuple; raise TypeError for any that is neither a UserCallback nor a LoggerCallback."""
    callbacks: tuple[Any, ...] = tuple(given or ())
    if not callbacks:
        return ()
    from ray.tune.logger import LoggerCallback  # takes a while

    for callback in callbacks:
        if isinstance(callback, UserCallback | LoggerCallback):
            continue
        what = (
            f"the class {callback.__qualname__}"
            if isinstance(callback, type)
            else f"a {type(callback).__module__}.{type(callback).__qualname__}"
        )
        hint = "; pass an instance of it" if isinstance(callback, type) else ""
        raise TypeError(
            f"RunConfig(callbacks) takes ray.train.UserCallback and Ray Tune's LoggerCallback (W&B, MLflow, Comet...), "
            f"but got {what}{hint}. A ray.tune.Callback of another kind belongs to tune.RunConfig(callbacks)"
        )
    return callbacks


def _check_failures(config: FailureConfig) -> None:
    """Raise ValueError for failure settings that are invalid or not supported by elastic jobs."""
    check_whole("FailureConfig(max_failures)", config.max_failures, least=-1)  # -1 is no limit
    if config.controller_failure_limit not in (-1, 0):
        raise ValueError(
            f"FailureConfig(controller_failure_limit={config.controller_failure_limit!r}) is not supported: "
            "the controller of an elastic job is not restarted; leave it out, and submit the job again "
            "under its name to continue from its last checkpoint"
        )
    reason = (
        "a preempted node costs an elastic job workers, not a restart, so there is nothing to count "
        "(max_failures counts losses of all workers, and workers that raised); leave it out"
    )
    given, default = config.max_preemption_failures, FailureConfig().max_preemption_failures
    _refuse("FailureConfig", "max_preemption_failures", given, default, reason)
    # What the other two ask for holds in every elastic job: no collective waits for workers that are gone, and no
    # survivor is ever torn down.
    relax = getattr(config, "relax_collectives_on_preemption", False)  # from Ray 2.60 on
    check_switch("FailureConfig(relax_collectives_on_preemption)", relax)
    grace_s = getattr(config, "preemption_grace_s", 0)
    check_number("FailureConfig(preemption_grace_s)", grace_s, least=0, unit="seconds", finite=True)


def job_name(name: Any) -> str | None:
    """Return the job name that the user chose; None for Ray Train's default, which is not unique within a second."""
    if name is None or (isinstance(name, str) and _RAYS_DEFAULT_NAME.fullmatch(name)):
        return None
    if not isinstance(name, str) or not _JOB_NAME.fullmatch(name):
        raise ValueError(
            "RunConfig(name) must start with a letter or digit and continue with at most 127 letters, digits "
            f"or ._=,+- (it names a directory and an actor), but got {name!r}"
        )
    return name


def check_env_fields(env: Mapping[str, Any], what: str) -> None:
    """Raise ValueError for a field that Ray's runtime environments do not have: Ray would ignore it silently."""
    known = {field for name in RuntimeEnv.known_fields for field in (name, name.removeprefix("_"))}
    for field in env:
        if field not in known and not os.environ.get(_PLUGINS):
            hint = meant(field, {name for name in known if name[0] != "_"})
            raise ValueError(
                f"{what}: there is no field {field!r}{hint} (for a field of a plugin, set {_PLUGINS} here, too)"
            )


def _runtime_env(env: Any) -> dict[str, Any]:
    """Return the runtime environment of a job's actors; raise TypeError or ValueError if Ray refuses it."""
    if env is None:
        return {}
    if not isinstance(env, Mapping):
        raise TypeError(f"RunConfig(worker_runtime_env) must be a dict or RuntimeEnv, but got {env!r}")
    check_env_fields(env, "RunConfig(worker_runtime_env)")
    try:  # Ray's own check of an actor's, which none of them would pass later
        ray.remote(_runtime_env).options(runtime_env=dict(env))
    except (TypeError, ValueError) as error:
        raise type(error)(
            f"RunConfig(worker_runtime_env) must be one that Ray accepts for an actor, but got {dict(env)!r}: {error} "
            "(Local directories and modules are uploaded for the whole job: ray.init(runtime_env=...), or elastic-ray "
            "submit --working-dir)"
        ) from error
    return dict(env)


def _log_level(config: Any) -> str:
    level = str(getattr(config, "log_level", "INFO")).upper()
    if not isinstance(logging.getLevelName(level), int):
        raise ValueError(f"LoggingConfig(log_level) must be a level of Python's logging, but got {level!r}")
    return level


_ELSEWHERE = {
    "dataset_config": "it says how Ray Data is split among ranks, and elastic_ray.AdaptiveDataLoader splits by itself",
    "torch_config": (
        "the job forms its process groups itself, with NCCL for CUDA tensors and gloo for others; time limits are "
        "elastic_config=elastic_ray.ElasticConfig(collective_timeout_s=..., switch_timeout_s=...)"
    ),
    "backend_config": "the job forms its process groups itself: leave it out",
    "validation_config": "validate in the train function, with an AdaptiveDataLoader of its own",
    "metadata": (
        "pass what the train function is to know in train_loop_config, and write into the checkpoint's directory what "
        "is to lie beside it"
    ),
    "resume_from_checkpoint": (
        "a job that is submitted again under the same RunConfig(name, storage_path) continues from its last "
        "checkpoint by itself; to start another job from one, pass its path in train_loop_config and load it in "
        "the train function"
    ),
    "use_gpu": "it belongs to scaling_config=ray.train.ScalingConfig(num_workers=(1, 8), use_gpu=True)",
    "num_workers": "it belongs to scaling_config=ray.train.ScalingConfig(num_workers=(1, 8))",
    "name": "it belongs to run_config=ray.train.RunConfig(name=...)",
    "storage_path": "it belongs to run_config=ray.train.RunConfig(storage_path=...)",
}


def refuse_arguments(given: Mapping[str, Any], known: Collection[str]) -> None:
    """Raise TypeError if an elastic job does not support an argument in ``given``; the message names an alternative."""
    for name, value in given.items():
        if name in _ELSEWHERE:
            if value is not None:
                raise TypeError(f"ElasticTrainer({name}=...) is not supported: {_ELSEWHERE[name]}")
            continue
        check_argument_names("ElasticTrainer", [name], known)


def _refuse(owner: str, name: str, value: Any, default: Any, reason: str) -> None:
    if value != default:
        raise ValueError(f"{owner}({name}={value!r}) is not supported: {reason}")


def _instance(value: Any, wanted: Any, name: str) -> Any:
    """Return the value, or a default instance for None; raise TypeError unless it is of Ray Train's type."""
    if value is None:
        return wanted()
    if not isinstance(value, wanted):
        got = f"{type(value).__module__}.{type(value).__qualname__}"
        hint = " (is RAY_TRAIN_V2_ENABLED=0 set? unset it)" if got.startswith("ray.air") else ""
        raise TypeError(f"{name} must be a ray.train.{wanted.__name__}, but got a {got}{hint}")
    return value
