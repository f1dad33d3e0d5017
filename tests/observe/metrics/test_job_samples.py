"""What a job's metrics say, from its status and events alone."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ray.batch.reports import LoaderInfo, StepReport
from elastic_ray.config import ElasticConfig
from elastic_ray.events import EventKind, JobEvent, JobPhase, JobStatus
from elastic_ray.observe.metrics.job_metrics import (
    FAILURES,
    GAUGES,
    GPU_MEMORY,
    INSTRUMENTS,
    LOST_STEPS,
    NOISE_SCALE,
    PAUSE,
    PERIOD_S,
    RESIZES,
    SPEED_GAUGES,
    TIME,
    JobLabels,
    JobMetrics,
    event_samples,
    gauge_samples,
)
from elastic_ray.record.outlook import TimeSpent
from placement.instruments import Instrument, Sample, counter, gauge, histogram, label_value
from tests.job.specs import spec
from tests.observe.metrics.panels import metrics_of, queries

WORKERS = GAUGES["workers"]
LABELS = JobLabels(job="bert", tenant="vision", model="Net")
FLOATS = st.none() | st.floats()


@dataclasses.dataclass(slots=True)
class Speed:
    """What a planner would tell."""

    latest: StepReport | None = None
    noise_scale: float | None = None
    loader: LoaderInfo | None = None


def report(steps: int = 7, **facts: Any) -> StepReport:
    values: dict[str, Any] = {
        "generation": 1,
        "nodes": 1,
        "replicas": 2,
        "shape": None,
        "steps": 1,
        "step_time": 0.1,
        "grad_time": 0.05,
        "noise": None,
        "epoch": 0,
        "epochs": None,
        "total_steps": steps,
        "batch_size": 64,
    }
    return StepReport(**(values | facts))


def event(kind: EventKind, before: int = 2, after: int = 2, **facts: Any) -> JobEvent:
    return JobEvent(kind=kind, time_s=0, from_workers=before, to_workers=after, reason="because", **facts)


def by_name(samples: Iterable[Sample]) -> dict[str, float]:
    return {" ".join([each.instrument.name, *each.labels[3:]]): each.value for each in samples}


def test_what_is_not_known_is_not_written() -> None:
    waiting = JobStatus(job="bert", phase=JobPhase.WAITING, waiting_s=3)
    found = by_name(gauge_samples(waiting, Speed(), LABELS))
    parts = {f"elastic_job_time_seconds {field.name.removesuffix('_s')}" for field in dataclasses.fields(TimeSpent)}
    assert found.keys() == {"elastic_job_workers", "elastic_job_target_workers", *parts}
    assert found["elastic_job_workers"] == 0 and found["elastic_job_time_seconds waiting"] == 3


def test_a_running_job_says_all_that_it_knows() -> None:
    status = JobStatus(
        job="bert",
        phase=JobPhase.RUNNING,
        workers=2,
        target_workers=3,
        step=7,
        batch_size=64,
        learning_rate_factor=1.5,
        throughput=640.0,
        tokens_per_s=40_960.0,
        tokens_left=1_000_000,
        goodput=600.0,
        efficiency=0.9,
        cost_usd=1.5,
        progress=0.25,
        eta_s=90.0,
        productive_share=0.8,
        gpu_memory_used_bytes=1 << 30,
        gpu_memory_reserved_bytes=2 << 30,
        memory_bound=32,
        mfu=0.4,
    )
    speed = Speed(latest=report(), noise_scale=512.0)
    found = by_name(gauge_samples(status, speed, LABELS))
    gauges = {each.name for each in INSTRUMENTS if each.kind.value == "gauge"} - {TIME.name, GPU_MEMORY.name}
    assert gauges <= found.keys()
    assert found["elastic_job_gpu_memory_bytes reserved"] == 2 << 30
    assert found["elastic_job_eta_seconds"] == 90 and found["elastic_job_statistical_efficiency"] == 0.9
    assert found["elastic_job_global_batch"] == 64 and found["elastic_job_steps"] == 7
    assert found["elastic_job_tokens_per_second"] == 40_960 and found["elastic_job_tokens_left"] == 1_000_000


def test_an_ended_job_has_no_workers_and_no_speed() -> None:
    ended = JobStatus(
        job="bert", phase=JobPhase.FINISHED, throughput=640.0, goodput=600.0, efficiency=0.9, progress=1.0
    )
    found = by_name(gauge_samples(ended, Speed(latest=report(), noise_scale=5.0), LABELS))
    assert found["elastic_job_workers"] == 0 and found["elastic_job_progress_ratio"] == 1
    gone = {NOISE_SCALE, *SPEED_GAUGES.values()}
    assert not {each.name for each in gone} & found.keys()


@given(
    st.builds(
        dict, goodput=FLOATS, efficiency=FLOATS, eta_s=FLOATS, progress=FLOATS, cost_usd=FLOATS, throughput=st.floats()
    ),
    FLOATS,
)
def test_no_sample_is_nan_or_infinite(values: dict[str, Any], other: float | None) -> None:
    status = JobStatus(job="bert", phase=JobPhase.RUNNING, workers=1, learning_rate_factor=other, **values)
    speed = Speed(latest=report(), noise_scale=other)
    assert all(math.isfinite(each.value) for each in gauge_samples(status, speed, LABELS))


def test_resizes_failures_and_pauses_by_a_few_words() -> None:
    events = [
        event(EventKind.STARTED, 0, 2),
        event(EventKind.RESIZE, 2, 4, pause_s=0.2),
        event(EventKind.RESIZE, 4, 4, pause_s=0.1),
        event(EventKind.RESIZE, 4, 1),
        event(EventKind.FAILURE, 4, 3, pause_s=0.3),
        event(EventKind.OUT_OF_MEMORY),
        event(EventKind.WARNING),
    ]
    samples = event_samples(events, 0, LABELS)
    told = [(each.instrument.name, each.labels[-1], each.value) for each in samples]
    assert [each for each in told if each[0] == RESIZES.name] == [
        (RESIZES.name, reason, 1.0) for reason in ("grow", "move", "shrink", "failure")
    ]
    assert [value for name, _, value in told if name == PAUSE.name] == [0.2, 0.1, 0.3]
    assert [label for name, label, _ in told if name == FAILURES.name] == ["workers_lost", "out_of_memory"]


@given(st.lists(st.builds(event, st.sampled_from(EventKind), st.integers(0, 9), st.integers(0, 9))), st.text())
def test_labels_of_events_are_few_whatever_the_reasons_say(events: list[JobEvent], job: str) -> None:
    samples = event_samples(events, 5, JobLabels(job=job))
    assert len({each.labels[3:] for each in samples}) <= 6 + 6 + 1


def test_restarts_lose_the_steps_that_come_again() -> None:
    events = [
        event(EventKind.RESTART, 2, 0, detail={"steps": 24}),
        event(EventKind.RESTART, 2, 0, detail={"steps": 24}),
    ]
    lost = [each.value for each in event_samples(events, 30, LABELS) if each.instrument is LOST_STEPS]
    assert lost == [6.0], "the second had nothing to lose"
    told = [event(EventKind.RESTART, 2, 0, detail={"steps": 24, "reached_steps": 90})]
    assert [each.value for each in event_samples(told, 30, LABELS) if each.instrument is LOST_STEPS] == [66.0]
    anew = [each.value for each in event_samples([event(EventKind.RESTART)], 30, LABELS)]
    assert 30.0 in anew


@pytest.mark.parametrize("name", ['<script>"\n', "x" * 1000, "\u202egnp.exe", 'a\\b{c}="d",', "\ud800", "h\xe9"])
def test_hostile_names_are_short_printable_labels_that_stay_different(name: str) -> None:
    shown = label_value(name)
    assert len(shown) <= 128 and shown.isprintable()
    shown.encode("ascii")
    assert shown == name or label_value(shown) != label_value(name + "!")
    assert label_value(name) != label_value(name + "\n"), "two names stay two"


def test_an_instrument_is_what_its_name_says() -> None:
    for wrong in (
        lambda: gauge("job_workers", ""),
        lambda: gauge("elastic_steps_total", ""),
        lambda: counter("elastic_steps", ""),
        lambda: histogram("elastic_pause", "", ()),
    ):
        with pytest.raises(ValueError, match="but got"):
            wrong()
    with pytest.raises(ValueError, match="elastic_pair must get values for"):
        gauge("elastic_pair", "", "one", "two").sample(1.0, "only one")


class Written:
    """Takes samples as the writer does."""

    def __init__(self) -> None:
        self.samples: list[Sample] = []

    def __call__(self, samples: Iterable[Sample]) -> None:
        self.samples += samples

    def take(self, instrument: Instrument) -> list[float]:
        found = [each.value for each in self.samples if each.instrument is instrument]
        self.samples = [each for each in self.samples if each.instrument is not instrument]
        return found


def test_events_count_once_and_not_again_under_another_controller() -> None:
    events, written = [event(EventKind.RESIZE, 1, 2, pause_s=0.1)], Written()
    status = JobStatus(job="bert", phase=JobPhase.RUNNING, workers=2)
    metrics = JobMetrics(spec(job="bert"), Speed(), lambda: status, lambda: events, written)
    metrics.tick(0.0)
    metrics.tick(PERIOD_S / 2)
    assert written.take(WORKERS) == [2.0] and written.take(RESIZES) == [1.0]
    events.append(event(EventKind.RESIZE, 2, 1))
    metrics.tick(PERIOD_S)
    assert written.take(WORKERS) == [2.0] and written.take(RESIZES) == [1.0]
    after = JobMetrics(spec(job="bert"), Speed(), lambda: status, lambda: events, written)
    after.recall(len(events))
    after.tick(0.0)
    assert written.take(RESIZES) == []


def test_the_end_says_no_workers_and_why_once() -> None:
    written = Written()
    status = JobStatus(job="bert", phase=JobPhase.FAILED)
    metrics = JobMetrics(spec(job="bert"), Speed(), lambda: status, list, written)
    metrics.end()
    metrics.end()
    assert written.take(WORKERS) == [0.0] and written.take(FAILURES) == [1.0]


def test_a_job_without_metrics_writes_none_and_asks_nothing() -> None:
    def never() -> JobStatus:
        raise AssertionError("asked")

    written = Written()
    metrics = JobMetrics(spec(job="bert", elastic=ElasticConfig(metrics=False)), Speed(), never, list, written)
    metrics.tick(0.0)
    metrics.end()
    assert written.samples == []


def test_metrics_that_fail_harm_no_job(caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> JobStatus:
        raise KeyError("gone")

    metrics = JobMetrics(spec(job="bert"), Speed(), broken, list, Written())
    metrics.tick(0.0)
    metrics.tick(PERIOD_S)
    metrics.end()
    assert [each.message for each in caplog.records] == ["metrics of job bert are not complete: KeyError: 'gone'"]


def test_every_metric_of_a_job_has_a_panel() -> None:
    shown = {name for panel in queries().values() for each in panel for name in metrics_of(each)}
    assert {each.name for each in INSTRUMENTS} <= shown
