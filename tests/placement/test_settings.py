"""An operator's file: what it may say, what it comes to, and what is reported of mistakes."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import yaml

from placement.allocator.config import AllocatorConfig
from placement.allocator.core import AllocatorCore
from placement.allocator.events import JobHeartbeat, NodesChanged, SettingsChanged
from placement.allocator.settings import OperatorSettings, check_quotas, in_force
from placement.autoscaling.autoscaler import Autoscaling
from placement.errors import InputError
from placement.planning.tenants import Tenant
from placement.policies import GoodputPolicy
from placement.ray_cluster.cluster_scaler import demand
from placement.unique_keys import load_json, load_yaml
from tests.placement.views import AT_ONCE, cluster, view

ROOT = Path(__file__).parents[2]
WHOLE = """
tenants:
  vision: {weight: 2, quota: {GPU: 16}}
  speech:
priorities:
  prod-*: 10
autoscaling:
  cluster_file: cluster.yaml
  objective: budget
  budget_usd_per_h: 20
page: true
"""


def read(folder: Path, text: str) -> OperatorSettings:
    (file := folder / "cluster-policy.yaml").write_text(text)
    return OperatorSettings.from_file(file)


def test_a_file_outranks_the_configuration_in_what_it_says(tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").write_text((ROOT / "cluster.yaml").read_text())
    found = read(tmp_path, WHOLE)
    config = found.over(AllocatorConfig(gather_s=0.5, tenants=(Tenant(name="old"),)))
    assert config.tenants == (Tenant(name="vision", weight=2, quota={"GPU": 16}), Tenant(name="speech"))
    assert (config.gather_s, config.dashboard, config.priority_of("prod-7"), config.priority_of("x")) == (
        0.5, True, 10, None,
    )  # fmt: skip
    assert config.scaling is not None and config.scaling.budget_usd_per_h == 20 and config.scaling.node_types
    kept = json.loads(json.dumps(found.to_plain()))  # as the allocator after this one reads it
    assert OperatorSettings.from_plain(kept, where="note") == found
    assert in_force(config).over(AllocatorConfig()) == dataclasses.replace(config, gather_s=0.1)


def test_what_a_file_leaves_out_is_as_before(tmp_path: Path) -> None:
    config = AllocatorConfig(tenants=(Tenant(name="old"),), dashboard=True)
    assert read(tmp_path, "").over(config) == config
    assert config.autoscaling == "auto" and config.scaling is None
    assert read(tmp_path, "autoscaling: off").over(config).autoscaling is None


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("tenant: {a: }", "there is no setting 'tenant'; did you mean 'tenants'?"),
        ("tenants: {a: {wieght: 2}}", "tenants: a: there is no setting 'wieght'; did you mean 'weight'?"),
        ("tenants: {a: {weight: 0}}", "weight of tenant 'a' must be above 0 and finite, but got 0"),
        ("tenants: {a: {weight: heavy}}", "tenants: weight of tenant 'a' must be a number, but got 'heavy'"),
        ("tenants: {a: {quota: {GPU: -1}}}", "quota['GPU'] of tenant 'a' must be 0 or more, but got -1"),
        ("tenants: {a: {quota: 3}}", "tenants: a: quota must be a mapping, but got 3"),
        ("tenants: [a]", "tenants must be a mapping"),
        ("tenants: {1: }", "1 must be text"),
        ("priorities: {a: high}", "priorities: a must be a whole number, but got 'high'"),
        ("page: 1.5", "page must be true or false, but got 1.5"),
        ("autoscaling: on_demand", "must be auto, off, or a mapping with cluster_file"),
        ("autoscaling: {objective: budget}", "must have either cluster_file or node_types"),
        ("autoscaling: {clusterfile: c.yaml}", "did you mean 'cluster_file'?"),
        ("autoscaling: {cluster_file: none.yaml}", "none.yaml cannot be read"),
        ("autoscaling: {node_types: [{name: a, resource: {CPU: 1}}]}", "did you mean 'resources'?"),
        ("autoscaling: {node_types: [{name: a, resources: {CPU: 1}}], objective: cheap}", "cheap"),
        (
            "autoscaling: {node_types: [{name: a, resources: {CPU: 1}}], objective: budget, budget_usd_per_h: x}",
            "autoscaling: budget_usd_per_h must be a number, but got 'x'",
        ),
        ("- a", "must be a mapping, but got ['a']"),
        ("a: [", "cannot be read"),
        ("tenants: {a: {weight: 1}}\ntenants: {b: {weight: 2}}", "key 'tenants' occurs twice"),
        ("tenants: {a: {quota: {GPU: 1, GPU: 2}}}", "key 'GPU' occurs twice"),
    ],
)
def test_mistakes_are_told_with_their_place(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(InputError) as error:
        read(tmp_path, text)
    assert told in str(error.value)


def test_a_mapping_may_take_in_several() -> None:
    text = "- &base {weight: 2}\n- &gpus {quota: {GPU: 4}}\n- vision:\n    <<: *base\n    <<: *gpus\n"
    assert load_yaml(text)[2] == yaml.safe_load(text)[2] == {"vision": {"weight": 2, "quota": {"GPU": 4}}}


def test_a_quota_of_an_unknown_resource_is_refused() -> None:
    tenants = (Tenant(name="a", quota={"GPUs": 3}),)
    with pytest.raises(InputError, match="quota of tenant 'a': no node has the resource 'GPUs'; did you mean 'GPU'"):
        check_quotas(tenants, {"CPU", "GPU"})
    check_quotas(tenants, {"GPUs"})


def test_settings_change_what_jobs_have_while_they_run() -> None:
    core = AllocatorCore(GoodputPolicy(), AT_ONCE)
    core.handle(NodesChanged(cluster=cluster(8)), 0.0)
    views = {job: view(job, tenant=job) for job in "ab"}

    def sizes(at_s: float) -> dict[str, int]:
        for name, each in views.items():
            core.handle(JobHeartbeat(view=each.placed(core.snapshot().jobs[name].target if at_s else {})), at_s)
        return {name: sum(state.target.values()) for name, state in core.snapshot().jobs.items()}

    for each in views.values():
        core.handle(JobHeartbeat(view=each), 0.1)
    assert sizes(1.0) == {"a": 4, "b": 4}
    quota = (Tenant(name="a", quota={"CPU": 1}),)
    core.handle(SettingsChanged(tenants=quota, priorities={"b*": 7}), 2.0)
    assert sizes(3.0) == {"a": 1, "b": 7}
    assert core.snapshot().jobs["b"].view.priority == 7 and core.snapshot().jobs["a"].view.priority == 0
    core.handle(SettingsChanged(), 4.0)
    sizes(5.0)
    assert core.snapshot().jobs["b"].view.priority == 0 and sizes(6.0)["a"] > 1


def test_nodes_are_asked_for_while_a_permitted_job_waits() -> None:
    jobs = [view("a", max_workers=4), view("b", min_workers=2, label_selector={"x": "y"}), view("c", held_at=3)]
    assert demand(jobs, ()) == ()
    assert demand(jobs, {"b"}) == [({"CPU": 1.0}, {})] * 4 + [({"CPU": 1.0}, {"x": "y"})] * 2
    full = (Tenant(name="", quota={"CPU": 5}),)
    assert len(demand(jobs, {"b"}, full)) == 4  # its tenant may not have more
    assert len(demand(jobs, {"b"}, (Tenant(name="", quota={"CPU": 6}),))) == 6


def test_autoscaling_is_auto_unless_said_otherwise() -> None:
    assert AllocatorConfig().autoscaling == "auto" and AllocatorConfig(autoscaling=None).scaling is None
    with pytest.raises(ValueError, match='autoscaling must be "auto", None or Autoscaling'):
        AllocatorConfig(autoscaling="on")
    assert isinstance(Autoscaling.from_file(ROOT / "cluster.yaml"), Autoscaling)


def test_a_whole_number_in_json_has_a_longest_length() -> None:
    with pytest.raises(ValueError, match=r"the whole number 99999999999999999999... is too long: it has 5000 digits"):
        load_json('{"a": ' + 5000 * "9" + "}")
