"""What the jobs that run now would do on other nodes."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from placement.cluster.jobs import Progress
from placement.errors import InputError
from placement.goodput.fitting import Observation
from placement.planning.constraints import Constraints
from placement.planning.tenants import Tenant
from placement.simulator.results.outlook import outlook, read_nodes
from tests.placement.views import model, view

HALFWAY = Progress(done=500.0, epoch_ends=(250.0, 500.0), epochs=4.0)
GPU = {"GPU": 1.0, "CPU": 2.0}


def job(name: str, **fields: Any) -> Any:
    return view(name, **{"bundle": GPU, "progress": HALFWAY, "most_workers": 8, **fields})


def test_more_nodes_end_everything_sooner_by_work_over_goodput() -> None:
    views = [job("a")]
    (small,) = outlook(views, read_nodes("T4:1x1", views), "goodput", 0.0)
    (large,) = outlook(views, read_nodes("T4:2x4", views), "goodput", 0.0)
    assert (small.workers, large.workers) == (1, 8) and small.reason
    rate, _, _ = model().best(1, 1, max_batch_size=4096, atomic_bsz_range=(8, 512), accumulation=True)
    assert small.goodput == pytest.approx(rate, rel=2e-3), "policies try fewer batch sizes than the job itself"
    assert small.ends_s == pytest.approx(500 * 64 / small.goodput)
    assert large.ends_s is not None and large.ends_s < small.ends_s


def test_measured_times_count_before_the_fitted_model() -> None:
    """A job alone on all nodes was said to end a quarter too late, although it had measured that it is faster."""
    nodes = read_nodes("T4:1x1", [job("a")])
    (fitted,) = outlook([job("a")], nodes, "goodput", 0.0)
    expected_s = float(model().step_time(1, 1, 64, 0))
    seen = {"T4": (Observation(1, 1, 64.0, 0, expected_s / 2),)}
    (measured,) = outlook([job("a", observations=seen)], nodes, "goodput", 0.0)
    assert fitted.ends_s is not None and measured.ends_s == pytest.approx(fitted.ends_s / 2)


def test_whoever_is_left_gets_room_of_who_is_done() -> None:
    short = job("short", progress=Progress(done=90.0, epoch_ends=(45.0, 90.0), epochs=4.0), max_workers=2)
    views = [short, job("long", max_workers=2)]
    first = {each.job: each for each in outlook(views, read_nodes("T4:1x2", views), "fair_share", 0.0)}
    assert first["short"].workers == first["long"].workers == 1
    (alone,) = outlook([views[1]], read_nodes("T4:1x1", views), "fair_share", 0.0)
    assert first["short"].ends_s is not None and first["long"].ends_s is not None and alone.ends_s is not None
    assert first["short"].ends_s < first["long"].ends_s < alone.ends_s


def test_what_nobody_knows_is_none() -> None:
    unknown = {
        "no length": job("no length", progress=None),
        "first epoch": job("first epoch", progress=Progress(done=3.0, epochs=4.0)),
        "no model": job("no model", goodput=None),
        "too large": job("too large", min_workers=9, max_workers=9),
    }
    rows = {row.job: row for row in outlook(list(unknown.values()), read_nodes("T4:2x4", []), "goodput", 0.0)}
    assert {name for name, row in rows.items() if row.ends_s is None} == set(unknown)
    assert rows["no model"].goodput is None and rows["no length"].goodput
    assert rows["too large"].workers == 0 and rows["too large"].goodput == 0.0


def test_a_first_epochs_length_is_known_from_its_model() -> None:
    views = [job("a", progress=Progress(done=3.0, epochs=4.0, usual_epoch=250.0)), job("b")]
    rows = outlook(views, read_nodes("T4:2x8", views), "goodput", 0.0)
    assert rows[0].ends_s is not None and rows[1].ends_s is not None and rows[0].ends_s > rows[1].ends_s


def test_it_changes_nothing_and_says_the_same_again() -> None:
    views = [job("a"), job("b", allocation={"elsewhere": 2})]
    before = [dataclasses.replace(each) for each in views]
    nodes = read_nodes("T4:2x4", views)
    assert outlook(views, nodes, "goodput", 5.0) == outlook(views, nodes, "goodput", 5.0)
    assert views == before


def test_nodes_have_plenty_of_what_string_does_not_count() -> None:
    views = [job("a", bundle={"GPU": 1.0, "memory": 1e5, "accelerator_type:T4": 0.001})]
    (t4,) = read_nodes("T4:1x4", views).nodes
    (a100,) = read_nodes("A100:1x4", views).nodes
    (cpu,) = read_nodes("cpu:1x4", views).nodes
    assert t4.total["GPU"] == 4.0 and t4.total["accelerator_type:T4"] > 1 and t4.total["memory"] > 1e5
    assert "accelerator_type:T4" not in a100.total
    assert cpu.total["CPU"] == 4.0 and "GPU" not in cpu.total and cpu.gpu_type == ""


def test_bad_input_is_named() -> None:
    with pytest.raises(InputError, match="policy must be one of"):
        outlook([job("a")], read_nodes("T4:1x1", []), "nonsense", 0.0)
    with pytest.raises(InputError, match="cluster must look like"):
        read_nodes("T4", [])


def test_tenants_quotas_and_holds_count_now_is_present() -> None:
    views = [
        job("a", tenant="a").placed({"T4-0": 2}),
        job("b", tenant="b", submitted_s=1.0).placed({"T4-0": 1}),
        job("held", tenant="b", submitted_s=2.0, held_at=1).placed({"T4-0": 1}),
    ]
    nodes = read_nodes("T4:1x8", views)
    rules = Constraints(tenants=(Tenant(name="a", weight=1.0, quota={"GPU": 2}), Tenant(name="b", weight=3.0)))
    views = [each.placed({nodes.nodes[0].node_id: each.workers}) for each in views]
    now = {each.job: each for each in outlook(views, nodes, "goodput", 0.0, stay=True, constraints=rules)}
    then = {each.job: each for each in outlook(views, nodes, "goodput", 0.0, constraints=rules)}
    assert {name: row.workers for name, row in now.items()} == {"a": 2, "b": 1, "held": 1}
    assert now["b"].reason.startswith("decided on 5 workers: ")
    assert {name: row.workers for name, row in then.items()} == {"a": 2, "b": 5, "held": 1}
    free = {each.job: each.workers for each in outlook(views, nodes, "goodput", 0.0)}
    assert free["a"] > 2, "without the quota"
