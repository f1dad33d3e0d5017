"""A job whose loop counts tokens: the declared batch follows, in the controller as well."""

from __future__ import annotations

from elastic_ray.batch.limits import BatchChoice, BatchLimits
from elastic_ray.batch.planner import BatchPlanner
from elastic_ray.batch.reports import LoaderInfo, StepReport
from elastic_ray.batch.tokens import read_token_batch
from elastic_ray.driver.display import status_fields
from elastic_ray.events import JobPhase, JobStatus
from elastic_ray.membership.messages import GenerationSpec, Member
from elastic_ray.observe.page.job_memory import JobMemory
from elastic_ray.observe.page.rows import job_row
from elastic_ray.observe.page.source import JobLook
from elastic_ray.observe.trackers.series import job_numbers

ONE = GenerationSpec(generation=1, members=(Member(worker="w", node="n", gpu_type="a"),))


def report(per_sample: float) -> StepReport:
    return StepReport(
        generation=1,
        nodes=1,
        replicas=1,
        shape=BatchChoice(atomic_bsz=8),
        steps=10,
        step_time=0.1,
        grad_time=0.0,
        noise=None,
        epoch=0,
        epochs=2,
        total_steps=10,
        batch_size=8,
        tokens_per_sample=per_sample,
    )


def test_limits_follow_what_was_counted() -> None:
    tokens = read_token_batch(512, 4096, "weigh", counted_first=64.0)
    assert tokens is not None
    planner = BatchPlanner()
    limits = BatchLimits(init_batch_size=tokens.batch_size, max_batch_size=tokens.max_batch_size)
    planner.open(LoaderInfo(limits=limits, dataset_size=100, tokens=tokens))
    planner.choose(ONE, "a")
    planner.observe(report(64.0))
    assert planner.loader is not None and planner.loader.limits == limits
    planner.observe(report(32.0))
    assert (planner.loader.limits.init_batch_size, planner.loader.limits.max_batch_size) == (16, 100)
    assert planner.tuner is not None and planner.tuner.limits == planner.loader.limits


def test_speed_and_rest_are_shown_in_tokens() -> None:
    status = JobStatus(
        job="a", phase=JobPhase.RUNNING, workers=1, throughput=80.0, tokens_per_s=5120.0, tokens_left=10_000
    )
    assert status_fields(status)["tokens/s"] == "5.12k" and "samples/s" not in status_fields(status)
    memory = JobMemory("a", "#000000", 0.0)
    memory.receive(JobLook(job="a", status=status), 0.0)
    row = job_row(memory)
    assert (row.tokens_per_s, row.tokens_left) == (5120.0, 10_000)
    told = job_numbers(report(64.0), throughput=80.0, goodput=None, noise_scale=None, resizes=0, failures=0, time_s=0.0)
    assert told.values["tokens_per_s"] == 5120.0
