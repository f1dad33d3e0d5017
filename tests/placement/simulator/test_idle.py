"""GPUs that are idle although a job could use them are found, and only those."""

from __future__ import annotations

from placement.cluster.jobs import JobView, Progress
from placement.simulator.nodes.clusters import parse_cluster
from placement.simulator.world.state import IdleWatch
from tests.placement.views import model, view

NODES = parse_cluster("t4:2x4")


def gpu_view(job: str, **kwargs: object) -> JobView:
    length = Progress(done=10.0, epoch_ends=(10.0,), epochs=1e6)
    return view(job, **{"bundle": {"GPU": 1.0}, "progress": length, "resize_cost_s": 30.0, **kwargs})


def longest_s(*views: JobView) -> float:
    watch = IdleWatch()
    for now_s in (1e4, 1e4 + 60.0, 1e4 + 120.0):
        watch.poll(views, NODES, now_s)
    return watch.longest_s


def test_job_that_would_be_faster_could_use_idle_gpus() -> None:
    node = NODES.nodes[0].node_id
    assert longest_s(gpu_view("a", allocation={node: 2})) == 120.0
    assert longest_s(gpu_view("a", allocation={node: 2}, max_workers=2)) == 0.0
    assert longest_s(gpu_view("a", allocation={node: 2}, growth_limit=2)) == 0.0
    assert longest_s(gpu_view("a", allocation={node: 2}, held_at=2)) == 0.0


def test_job_not_faster_with_more_or_ending_could_not() -> None:
    node = NODES.nodes[0].node_id
    assert longest_s(gpu_view("a", allocation={node: 4}, goodput=model(sync_s=10.0))) == 0.0
    soon = Progress(done=10.0, epoch_ends=(10.0,), epochs=1)
    assert longest_s(gpu_view("a", allocation={node: 2}, progress=soon)) == 0.0


def test_a_waiting_job_could_use_what_it_fits_on() -> None:
    first, second = (node.node_id for node in NODES.nodes)
    running = gpu_view("a", allocation={first: 4, second: 2}, max_workers=6)
    assert longest_s(running, gpu_view("b")) == 120.0
    assert longest_s(running, gpu_view("b", min_workers=3)) == 0.0


def test_gpu_seconds_are_those_of_the_idle_gpus() -> None:
    watch = IdleWatch()
    alone = gpu_view("a", allocation={NODES.nodes[0].node_id: 2})
    watch.poll([alone], NODES, 1e4)
    watch.poll([], NODES, 1e4 + 60.0)
    watch.poll([], NODES, 1e4 + 120.0)
    assert watch.gpu_s == 6 * 60.0
