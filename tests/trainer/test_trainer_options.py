"""Ray Train's configuration: honoured or refused, never ignored."""

from __future__ import annotations

import dataclasses
import inspect
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.v2.api.callback import UserCallback
from ray.train.v2.api.config import LoggingConfig
from ray.train.v2.torch.torch_trainer import TorchTrainer

import elastic_ray
import placement
import tuning
from elastic_ray.config import ElasticConfig, SchedulingConfig
from elastic_ray.driver.ray_train_config import read_run, read_scaling
from elastic_ray.driver.sharded_memory import sharded_memory
from elastic_ray.driver.trainer import _ARGUMENTS, ElasticTrainer
from elastic_ray.observe.trackers.callbacks import unpack_callbacks
from placement.cluster.sizes import MemoryNeed

FOUR = MemoryNeed(available_bytes=4 << 30, sharded_bytes=8 << 30)  # fits from four workers on


def changed(config: Any, **fields: Any) -> Any:
    """The config with fields set behind its own checks, as a user may do after construction."""
    for name, value in fields.items():
        setattr(config, name, value)
    return config


@pytest.mark.parametrize(
    "config, limits, bundle",
    [
        (None, (1, 1), {"CPU": 1}),
        (ScalingConfig(num_workers=3), (3, 3), {"CPU": 1}),
        (ScalingConfig(num_workers=(1, 8), use_gpu=True), (1, 8), {"GPU": 1}),
        (ScalingConfig(num_workers=2, resources_per_worker={"CPU": 4, "memory": 1e9}), (2, 2), None),
        (
            ScalingConfig(num_workers=2, use_gpu=True, resources_per_worker={"CPU": 2}),
            (2, 2),
            {"CPU": 2, "GPU": 1},
        ),
        (ScalingConfig(use_gpu=True, resources_per_worker={"CPU": 0, "GPU": 0.5}), (1, 1), {"GPU": 0.5}),
        (
            ScalingConfig(use_gpu=True, accelerator_type="A100"),
            (1, 1),
            {"GPU": 1, "accelerator_type:A100": 0.001},
        ),
    ],
)
def test_workers_and_bundles_are_ray_trains(config: Any, limits: tuple[int, int], bundle: Any) -> None:
    scaling = read_scaling(config)
    assert (scaling.min_workers, scaling.max_workers) == limits
    assert scaling.bundle == (bundle or {"CPU": 4, "memory": 1e9})
    if config is not None:
        assert scaling.bundle == config._resources_per_worker_not_none


@pytest.mark.parametrize("selector", [{"zone": "a"}, [{"zone": "a"}, {"zone": "a"}]])
def test_one_label_selector_is_honoured(selector: Any) -> None:
    assert read_scaling(ScalingConfig(num_workers=2, label_selector=selector)).label_selector == {"zone": "a"}  # type: ignore[call-arg]


@pytest.mark.parametrize(
    "config, message",
    [
        (ScalingConfig(use_tpu=True), r"use_tpu=True\) is not supported: .*JaxTrainer"),  # type: ignore[call-arg]
        (ScalingConfig(topology="4x4"), r"topology='4x4'\) is not supported: .*leave it out"),  # type: ignore[call-arg]
        (changed(ScalingConfig(), trainer_resources={"CPU": 1}), r"trainer_resources=.* is not supported"),
        (
            ScalingConfig(elastic_resize_monitor_interval_s=5),  # type: ignore[call-arg]
            r"monitor_interval_s=5\) is not supported: .*events",
        ),
        (
            ScalingConfig(placement_strategy="SPREAD"),
            r"placement_strategy='SPREAD'\) is not supported: .*'PACK'",
        ),
        (ScalingConfig(num_workers=0), r"num_workers=0.*local mode.*call the train function yourself"),
        (ScalingConfig(num_workers=(0, 2)), r"1 <= min <= max, but got \(0, 2\)"),
        (changed(ScalingConfig(), num_workers=(3, 2)), r"1 <= min <= max, but got \(3, 2\)"),
        (changed(ScalingConfig(), num_workers=-1), r"1 <= min <= max, but got -1"),
        (changed(ScalingConfig(), num_workers=True), r"whole number or \(min, max\), but got True"),
        (changed(ScalingConfig(), num_workers=2.0), r"whole number or \(min, max\), but got 2.0"),
        (ScalingConfig(resources_per_worker={"CPU": 0}), r"at least one resource above 0, but got \{'CPU': 0\}"),
        (
            ScalingConfig(resources_per_worker={"CPU": -1}),
            r"\['CPU'\] must be 0 or more and finite, but got -1",
        ),
        (ScalingConfig(resources_per_worker={"x": 1e-6}), r"at least 0.0001"),
        (ScalingConfig(use_gpu=True, resources_per_worker={"GPU": 1.5}), r"whole above 1, but got 1.5"),
        (
            changed(ScalingConfig(resources_per_worker={"GPU": 1}, use_gpu=True), use_gpu=False),
            "set use_gpu=True",
        ),
        (
            ScalingConfig(num_workers=2, label_selector=[{"a": "1"}, {"a": "2"}]),  # type: ignore[call-arg]
            "must be the same for all workers.*pass one dict",
        ),
        (changed(ScalingConfig(), label_selector={"a": "in(b,"}), r"ScalingConfig\(label_selector\).*'in\(b,' for 'a'"),
        (changed(ScalingConfig(), label_selector={"a": "!"}), r"must hold 'value', '!value'.*but got '!' for 'a'"),
    ],
)
def test_what_scaling_cannot_be_is_refused(config: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_scaling(config)


def test_run_config_is_honoured() -> None:
    run = read_run(
        RunConfig(  # type: ignore[call-arg]
            name="digits",
            storage_path="/tmp/x",
            failure_config=FailureConfig(max_failures=3, controller_failure_limit=0),  # type: ignore[call-arg]
            checkpoint_config=CheckpointConfig(
                num_to_keep=2, checkpoint_score_attribute="acc", checkpoint_score_order="min"
            ),
            worker_runtime_env={"env_vars": {"A": "1"}},
            logging_config=LoggingConfig(log_level="debug"),
        )
    )
    assert dataclasses.asdict(run) == {
        "name": "digits",
        "callbacks": (),
        "storage_path": "/tmp/x",
        "storage_filesystem": None,
        "max_failures": 3,
        "num_to_keep": 2,
        "checkpoint_score_attribute": "acc",
        "checkpoint_score_order": "min",
        "runtime_env": {"env_vars": {"A": "1"}},
        "log_level": "DEBUG",
    }


def test_rays_own_default_name_does_not_count_as_chosen() -> None:
    assert read_run(None).name is None
    assert read_run(RunConfig()).name is None


def test_callbacks_are_taken_and_packed_with_their_arguments(tmp_path: Path) -> None:
    callback = UserCallback()
    config = RunConfig(name="told", storage_path=str(tmp_path), callbacks=[callback])
    assert read_run(config).callbacks == (callback,)
    spec = ElasticTrainer(lambda config: None, train_loop_config={"lr": 0.1}, run_config=config).spec()
    assert spec.callback_names == ("UserCallback",)
    (unpacked,), context = unpack_callbacks(spec.callbacks, "run")
    assert isinstance(unpacked, UserCallback) and context.train_loop_config == {"lr": 0.1}
    assert context.get_run_config().name == "told" and context.run_id == "run"


def test_a_callback_that_cannot_be_sent_is_named(tmp_path: Path) -> None:
    callback = UserCallback()
    callback.lock = threading.Lock()  # type: ignore[attr-defined]
    config = RunConfig(storage_path=str(tmp_path), callbacks=[callback])
    with pytest.raises(TypeError, match=r"callback UserCallback .* cannot be sent"):
        ElasticTrainer(lambda: None, run_config=config)


@pytest.mark.parametrize(
    "config, message",
    [
        (RunConfig(name="a/b"), r"RunConfig\(name\) must start with .*but got 'a/b'"),
        (RunConfig(name="../up"), r"RunConfig\(name\) must"),
        (RunConfig(storage_path=3), r"storage_path\) must be a path or a URI, but got 3"),
        (RunConfig(failure_config=FailureConfig(max_failures=-2)), r"a whole number, -1 or more, but got -2"),
        (RunConfig(failure_config=FailureConfig(controller_failure_limit=2)), "controller_failure_limit=2"),  # type: ignore[call-arg]
        (RunConfig(failure_config=FailureConfig(max_preemption_failures=2)), "max_preemption_failures=2"),  # type: ignore[call-arg]
        (RunConfig(failure_config=changed(FailureConfig(), relax_collectives_on_preemption=1)), "True or False"),
        (
            RunConfig(failure_config=FailureConfig(preemption_grace_s=-1.0)),  # type: ignore[call-arg]
            "0 seconds or more and finite, but got -1.0",
        ),
        (
            RunConfig(checkpoint_config=changed(CheckpointConfig(), num_to_keep=0)),
            "a whole number, 1 or more, but got 0",
        ),
    ],
)
def test_what_a_run_cannot_be_is_refused(config: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        read_run(config)


def test_a_field_that_no_runtime_environment_has_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    config: Any = RunConfig(worker_runtime_env={"pipp": ["einops"]})  # type: ignore[call-arg]
    with pytest.raises(ValueError, match=r"no field 'pipp'; did you mean 'pip'.* set RAY_RUNTIME_ENV_PLUGINS"):
        read_run(config)
    monkeypatch.setenv("RAY_RUNTIME_ENV_PLUGINS", '[{"class": "some.PippPlugin"}]')
    assert read_run(config).runtime_env == {"pipp": ["einops"]}


@pytest.mark.parametrize("env", [{"working_dir": "."}, {"py_modules": ["."]}, {"env_vars": {"A": 1}}, {"pip": 3}])
def test_runtime_environment_that_ray_refuses_is_refused_at_once(env: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError), match=r"RunConfig\(worker_runtime_env\) must be one that Ray accepts"):
        read_run(RunConfig(worker_runtime_env=env))  # type: ignore[call-arg]


def test_what_every_elastic_job_has_may_be_asked_for() -> None:
    read_run(RunConfig(failure_config=FailureConfig(relax_collectives_on_preemption=True, preemption_grace_s=30)))  # type: ignore[call-arg]


def test_every_field_of_ray_trains_configs_is_accounted_for() -> None:
    """A field that a newer Ray adds must be honoured or refused: this test makes us decide."""
    known = {
        ScalingConfig: {
            *("num_workers", "use_gpu", "resources_per_worker", "accelerator_type", "label_selector"),
            *("use_tpu", "topology", "trainer_resources", "placement_strategy"),
            "elastic_resize_monitor_interval_s",
        },
        RunConfig: {
            *("name", "storage_path", "storage_filesystem", "failure_config", "checkpoint_config"),
            *("callbacks", "worker_runtime_env", "logging_config"),
            *(
                "sync_config",
                "verbose",
                "stop",
                "progress_reporter",
                "log_to_file",
            ),  # Ray Train refuses these
        },
        FailureConfig: {
            *("max_failures", "controller_failure_limit", "max_preemption_failures"),
            *("relax_collectives_on_preemption", "preemption_grace_s"),
            "fail_fast",  # Ray Train refuses it
        },
        CheckpointConfig: {
            *("num_to_keep", "checkpoint_score_attribute", "checkpoint_score_order"),
            *("checkpoint_frequency", "checkpoint_at_end"),  # Ray Train refuses these
        },
    }
    for config, fields in known.items():
        assert {field.name for field in dataclasses.fields(config)} <= fields  # older releases have fewer


def test_wrong_types_are_named() -> None:
    import ray.tune

    with pytest.raises(TypeError, match=r"scaling_config must be a ray.train.ScalingConfig, but got a builtins.dict"):
        read_scaling({"num_workers": 2})
    with pytest.raises(TypeError, match=r"run_config must be a ray.train.RunConfig, but got a .*RunConfig"):
        read_run(ray.tune.RunConfig())


@pytest.mark.parametrize(
    "values, message",
    [
        ({"lease_s": 0}, "lease_s must be above 0 seconds"),
        ({"lease_s": float("inf")}, "finite, but got inf"),
        ({"warm_workers_per_node": -1}, "0 or more, but got -1"),
        ({"storage_timeout_s": 0}, "storage_timeout_s must be above 0 seconds"),
        ({"collective_timeout_s": 1.0}, "collective_timeout_s must be above heartbeat_timeout_s"),
    ],
)
def test_elastic_config_ranges(values: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ElasticConfig(**values)


@pytest.mark.parametrize("condition", ["b", "!b", "in(b,c)", "!in(b, c)"])
def test_rays_label_operators_are_honoured(condition: str) -> None:
    assert read_scaling(ScalingConfig(label_selector={"a": condition})).label_selector == {"a": condition}  # type: ignore[call-arg]


@pytest.mark.parametrize(
    "values, error, message",
    [
        ({"priority": 1.5}, TypeError, "priority must be a whole number, but got 1.5"),
        ({"tenant": None}, TypeError, "tenant must be text, but got None"),
        ({"preemptible": 0}, TypeError, "preemptible must be True or False, but got 0"),
        ({"whole_nodes": "yes"}, TypeError, "whole_nodes must be True or False, but got 'yes'"),
        ({"mixed_gpu_types": 1}, TypeError, "mixed_gpu_types must be True or False, but got 1"),
        ({"deadline_s": "1h"}, TypeError, "deadline_s must be a number of seconds after submit\\(\\), but got '1h'"),
        (
            {"deadline_s": 0},
            ValueError,
            r"deadline_s must be above 0 seconds after submit\(\) and finite, but got 0",
        ),
        ({"sizes": 4}, TypeError, "sizes must be a tuple of numbers of workers, such as"),
        ({"sizes": ()}, ValueError, "or be None for any, but got"),
        ({"sizes": (4, 2)}, ValueError, "ascending"),
        ({"sizes": (2, "4")}, TypeError, "sizes must be a whole number, 1 or more, but got '4'"),
        ({"multiple_of": 0}, ValueError, "multiple_of must be a whole number, 1 or more, but got 0"),
        ({"sizes": (2, 3), "multiple_of": 2}, ValueError, "3 is no multiple of 2"),
        ({"memory": 8 << 30}, TypeError, "memory must be a MemoryNeed or None, but got 8589934592"),
        ({"sizes": (1, 2), "memory": FOUR}, ValueError, "sizes and memory exclude each other"),
    ],
)
def test_scheduling_config_is_checked(values: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        SchedulingConfig(**values)


def test_the_least_and_the_most_workers_are_allowed_sizes() -> None:
    def limits(workers: Any, **values: Any) -> tuple[int, int]:
        config = SchedulingConfig(**values)
        trainer = ElasticTrainer(print, scaling_config=ScalingConfig(num_workers=workers), scheduling_config=config)
        return trainer.spec().min_workers, trainer.spec().max_workers

    assert limits((1, 7), sizes=(2, 4, 8)) == (2, 4)
    assert limits((1, 7), multiple_of=3) == (3, 6)
    assert limits(4, multiple_of=4) == (4, 4)
    with pytest.raises(
        ValueError, match=r"num_workers=\(5, 7\) and SchedulingConfig exclude each other.*sizes=\(2, 4, 8"
    ):
        limits((5, 7), sizes=(2, 4, 8))
    assert limits((1, 7), memory=FOUR) == (4, 7)
    assert limits((1, 7), memory=FOUR, multiple_of=3) == (6, 6)
    with pytest.raises(ValueError, match=r"num_workers=\(1, 3\) and SchedulingConfig exclude.*that fits is 4"):
        limits((1, 3), memory=FOUR)
    with pytest.raises(ValueError, match=r"num_workers=\(2, 2\) and SchedulingConfig exclude.*that fits is 4"):
        limits(2, memory=FOUR)


def test_memory_of_a_model_is_counted_from_its_shapes() -> None:
    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Linear(100, 10, bias=False), torch.nn.BatchNorm1d(10, affine=False))
        model.append(torch.nn.Linear(10, 5, bias=False).requires_grad_(False))
    need = sharded_memory(model, available_bytes=20_000, other_bytes=2_000, optimizer_states=2)
    assert need == MemoryNeed(
        available_bytes=20_000, sharded_bytes=3 * (4_000 * 3 + 200), replicated_bytes=2 * 40 + 8 + 2_000
    )
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, but got list"):
        sharded_memory([model], available_bytes=1)
    with pytest.raises(ValueError, match="optimizer_states must be a whole number, 0 or more, but got -1"):
        sharded_memory(model, available_bytes=1, optimizer_states=-1)


@pytest.mark.parametrize("values", [{"lease_s": "10"}, {"fixed_batch": 1}, {"warm_workers_per_node": 1.5}])
def test_elastic_config_types(values: Any) -> None:
    with pytest.raises(TypeError, match=r"must be .*but got"):
        ElasticConfig(**values)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"model_fingerprint": 3}, TypeError, "model_fingerprint must be a name for the model, or None, but got 3"),
        ({"model_fingerprint": " "}, ValueError, "model_fingerprint must be a non-empty name, such as 'resnet18-224'"),
    ],
)
def test_a_wrong_fingerprint_is_refused_at_once(arguments: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        ElasticTrainer(lambda: None, **arguments)


TORCH_TRAINERS = set(inspect.signature(TorchTrainer.__init__).parameters) | {"backend_config"}


def test_every_argument_of_torch_trainer_is_taken_or_answered() -> None:
    own = set(inspect.signature(ElasticTrainer.__init__).parameters)
    assert set(_ARGUMENTS) == own - {"self", "unsupported"}
    others = TORCH_TRAINERS - own
    assert {"dataset_config", "torch_config", "metadata", "resume_from_checkpoint"} <= others
    for name in sorted(others):
        with pytest.raises(TypeError, match=rf"ElasticTrainer\({name}=\.\.\.\) is not supported: \w+"):
            ElasticTrainer(print, **{name: object()})
        ElasticTrainer(print, **{name: None})


def test_a_misspelt_argument_is_answered_with_the_right_one() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'scaling_confg'; did you mean 'scaling_config'"):
        ElasticTrainer(print, scaling_confg=None)
    with pytest.raises(TypeError, match="argument 'x'; there are adaptation, datasets, "):
        ElasticTrainer(print, x=None)


@pytest.mark.parametrize(
    ("config", "wrong", "right"),
    [
        (ElasticConfig, "lease", "lease_s"),
        (SchedulingConfig, "priorty", "priority"),
        (elastic_ray.RunConfig, "nam", "name"),
        (placement.AllocatorConfig, "autoscalling", "autoscaling"),
        (placement.Autoscaling, "max_node", "max_nodes"),
        (placement.AutoscalerConfig, "linger", "linger_s"),
        (placement.Tenant, "wieght", "weight"),
        (placement.NoticeConfig, "adress", "address"),
        (tuning.Promise, "metrics", "metric"),
        (tuning.Sweep, "deadline", "deadline_s"),
        (elastic_ray.AdaptiveDataLoader, "batchsize", "batch_size"),
        (elastic_ray.AdaptiveDataLoader, "num_worker", "num_workers"),
    ],
)
def test_a_misspelt_field_is_answered_with_the_right_one(config: Any, wrong: str, right: str) -> None:
    given = (torch.utils.data.TensorDataset(torch.ones(2)),) if config is elastic_ray.AdaptiveDataLoader else ()
    with pytest.raises(TypeError, match=f"{config.__name__} got an unexpected .* {wrong!r}; did you mean {right!r}"):
        config(*given, **{wrong: 1})


@pytest.mark.parametrize("name", ["sync_config", "verbose", "stop", "progress_reporter", "log_to_file"])
def test_what_ray_train_has_given_up_is_not_ignored(name: str) -> None:
    with pytest.raises((ValueError, DeprecationWarning), match=name):
        read_run(RunConfig(**{name: 1}))
    with pytest.raises(ValueError, match=name):
        read_run(changed(RunConfig(), **{name: 1}))


@pytest.mark.parametrize(
    "name", ["a/b", "../up", ".hidden", "-x", "a\x1b[31m", "a\nb", "a\n", "a b", "\u202ea", "x" * 129, "[red]"]
)
def test_a_name_that_is_no_directory_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="must start with a letter or digit") as caught:
        read_run(RunConfig(name=name))
    assert str(caught.value).isprintable()
