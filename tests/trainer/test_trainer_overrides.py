"""What the command line says of a script's trainers."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest
from ray.train import RunConfig, ScalingConfig

from elastic_ray.config import SchedulingConfig
from elastic_ray.driver.overrides import Overrides, parse_workers, read_overrides, script_stem
from elastic_ray.driver.trainer import ElasticTrainer


def train() -> None:
    """Never runs."""


def test_it_comes_before_the_scripts_own_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    scheduling = {"tenant": "vision", "sizes": [2, 6]}
    told = Overrides(workers=(2, 6), use_gpu=True, scheduling=scheduling, name="bert", submission="bert.2")
    for variable, value in told.environment().items():
        monkeypatch.setenv(variable, value)
    with caplog.at_level(logging.WARNING):
        own = SchedulingConfig(priority=3, tenant="speech")
        trainer = ElasticTrainer(train, scaling_config=ScalingConfig(num_workers=3), scheduling_config=own)
        spec = trainer.spec()
    assert spec.scheduling == SchedulingConfig(priority=3, tenant="vision", sizes=(2, 6))
    assert (spec.min_workers, spec.max_workers, spec.use_gpu, spec.bundle) == (2, 6, True, {"GPU": 1.0})
    assert (spec.job, spec.submission) == ("bert", "bert.2")
    assert "num_workers=3" in caplog.text and "ELASTIC_RAY_WORKERS is set" in caplog.text
    other = ElasticTrainer(train).spec()
    assert other.max_workers == 6 and other.job.startswith(script_stem()[:4]), "one has the name, the next the script's"


def test_a_name_of_the_scripts_own_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELASTIC_RAY_NAME", "from-outside")
    assert ElasticTrainer(train, run_config=RunConfig(name="own")).spec().job == "own"
    assert ElasticTrainer(train).spec().job == "from-outside", "and the next one gets what it left"


def test_nothing_is_changed_without_it(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    config = ScalingConfig(num_workers=(1, 2))
    assert read_overrides({}).scaling(config, ScalingConfig) is config
    assert read_overrides({}).scaling(None, ScalingConfig) is None
    assert read_overrides({"ELASTIC_RAY_WORKERS": "4"}).scaling("no config", ScalingConfig) == "no config"
    assert caplog.text == ""


@pytest.mark.parametrize(
    "variable, value", [("WORKERS", "4:2"), ("WORKERS", "x"), ("USE_GPU", "yes"), ("SCHEDULING", "[1]")]
)
def test_a_wrong_value_is_refused_by_the_trainer(monkeypatch: pytest.MonkeyPatch, variable: str, value: str) -> None:
    monkeypatch.setenv(f"ELASTIC_RAY_{variable}", value)
    with pytest.raises(ValueError, match=rf"ELASTIC_RAY_{variable}.*{re.escape(repr(value))}"):
        ElasticTrainer(train)


def test_a_variable_that_is_none_of_ours_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        read_overrides({"ELASTIC_RAY_WORKER": "3", "ELASTIC_RAY_POOL": "off", "OTHER": ""})
    (told,) = caplog.messages
    assert "ELASTIC_RAY_WORKER has no effect; did you mean 'ELASTIC_RAY_WORKERS'?" in told


@pytest.mark.parametrize("told", [Overrides(), Overrides(workers=(1, 8)), Overrides(use_gpu=False, name="a")])
def test_the_variables_say_what_was_told(told: Any) -> None:
    assert read_overrides(told.environment()) == told


def test_workers_are_a_number_or_a_range() -> None:
    assert parse_workers("4") == (4, 4) and parse_workers(" 1:8 ") == (1, 8)
    for text in ("", "0", "-1", "1:", ":4", "1:2:3", "8:1", "1.5"):
        with pytest.raises(ValueError, match="1 <= min <= max"):
            parse_workers(text)
