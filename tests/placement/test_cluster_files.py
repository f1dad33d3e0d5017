"""Cluster files: ours pass Ray's own validation and our check; wrong ones are one clear error."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from placement.autoscaling.cluster_file import main, read_cluster_file
from placement.cluster.price_table import Price, PriceTable
from placement.errors import InputError

ROOT = Path(__file__).resolve().parents[2]
RAY_UP = [ROOT / "cluster.yaml", ROOT / "examples" / "clusters" / "gcp.yaml"]
RAY_CLUSTER = ROOT / "deploy" / "kubernetes" / "base" / "raycluster.yaml"


@pytest.mark.parametrize("path", RAY_UP, ids=lambda path: path.name)
def test_files_for_ray_up_pass_rays_own_validation(path: Path) -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    config = prepare_config(yaml.safe_load(path.read_text()))
    validate_config(config)
    assert config["available_node_types"][config["head_node_type"]]["resources"] == {"CPU": 0}


def test_the_ray_cluster_passes_rays_own_converter() -> None:
    from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr
    from ray.autoscaler._private.util import validate_config

    written = yaml.safe_load(RAY_CLUSTER.read_text())
    written["metadata"]["namespace"] = "default"  # kubectl's to fill in
    config = _derive_autoscaling_config_from_ray_cr(written)
    validate_config(config)
    types = config["available_node_types"]
    ours = {each.name: each for each in read_cluster_file(RAY_CLUSTER).types}
    assert {name: types[name]["labels"] for name in ours} == {name: dict(each.labels) for name, each in ours.items()}
    assert {name: types[name]["max_workers"] for name in ours} == {name: each.max_nodes for name, each in ours.items()}
    assert all(types[name]["resources"][r] == n for name, each in ours.items() for r, n in each.resources.items())


@pytest.mark.parametrize("path", [*RAY_UP, RAY_CLUSTER], ids=lambda path: path.name)
def test_every_file_offers_spot_and_frees_idle_nodes(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = read_cluster_file(path)
    markets = {each.spot: each for each in found.types}
    assert set(markets) == {True, False}
    assert markets[True].usd_per_h < markets[False].usd_per_h
    assert markets[True].gpu_type == markets[False].gpu_type != ""
    assert found.idle_s == 180.0
    assert all(each.min_nodes == 0 for each in found.types)
    assert main([str(path)]) == 0
    assert "4 x" in capsys.readouterr().out


def _no_worker(config: dict[str, Any]) -> None:
    config["available_node_types"] = {"head": config["available_node_types"]["head"]}


def _at(name: str, **fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda config: config["available_node_types"][name].update(fields)


def _set(**fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda config: config.update(fields)


def _no_body(name: str) -> Callable[[dict[str, Any]], None]:
    return lambda config: config["available_node_types"].update({name: None})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_no_worker, "must have a worker type with a maximum of 1 or more under available_node_types"),
        (
            _at("t4-spot", node_config={"InstanceType": "z9.huge"}),
            "'t4-spot': instance type 'z9.huge' is unknown: the default",
        ),
        (_at("t4-spot", labels={}), "labels must say ray.io/market-type: spot, .* but got None"),
        (_at("t4-on-demand", labels={"ray.io/market-type": "spot"}), "labels must say ray.io/market-type: on-demand"),
        (_at("t4-spot", labels={"ray.io/market-type": "spot"}), "ray.io/accelerator-type: T4"),
        (_at("t4-spot", resources={"CPU": 48}), "resources must have GPU: 4, as g4dn.12xlarge has, but got 0"),
        (_at("t4-spot", resources={}), "resources must say what a node has"),
        (_at("head", resources={"CPU": 8}), "resources must have CPU: 0, or jobs train on the head"),
        (
            _set(head_node_type="boss"),
            "head_node_type .* must be one of head, .* but got 'boss'",
        ),
        (lambda config: config.pop("available_node_types"), "must have node types under available_node_types"),
        (_set(head_node_type=["head"]), r"head_node_type .* must be one of head, .* but got \['head'\]"),
        (_no_body("t4-spot"), "cluster.yaml: node type 't4-spot' must be a mapping, such as .* but it is left empty"),
        (_no_body("head"), "cluster.yaml: node type 'head' must be a mapping, such as .* but it is left empty"),
        (
            _at("t4-spot", min_workers=None),
            "cluster.yaml, node type 't4-spot': min_workers must be a whole number, 0 or more, but it is left empty",
        ),
        (_at("t4-spot", max_workers=None), "'t4-spot': max_workers must be a whole number, .* but it is left empty"),
        (_at("t4-spot", max_workers="many"), "'t4-spot': max_workers must be a whole number, .* but got 'many'"),
        (_at("t4-spot", max_workers=1.5), "'t4-spot': max_workers must be a whole number, .* but got 1.5"),
        (_at("t4-spot", min_workers=-1), "'t4-spot': min_workers must be a whole number, 0 or more, but got -1"),
        (_set(max_workers=None), "cluster.yaml: max_workers must be a whole number, .* but it is left empty"),
        (_set(max_workers=True), "cluster.yaml: max_workers must be a whole number, .* but got True"),
        (_set(idle_timeout_minutes=None), "idle_timeout_minutes must be a number, 0 or more, but it is left empty"),
        (_set(idle_timeout_minutes=-1), "idle_timeout_minutes must be a number, 0 or more, but got -1"),
        (
            _at("head", resources={"CPU": "none"}),
            "head node type 'head': resources: CPU must be a number, 0 or more, but got 'none'",
        ),
        (_at("head", resources=[1]), r"'head': resources must be a mapping, such as {CPU: 0}, but got \[1\]"),
        (
            _at("t4-spot", labels=["a"]),
            r"'t4-spot': labels must be a mapping, such as .*market-type.*, but got \['a'\]",
        ),
        (_at("t4-spot", node_config=[1]), r"node_config must be a mapping, such as {InstanceType.*}, but got \[1\]"),
        (_at("t4-spot", node_config={"scheduling": ["x"]}), "'t4-spot': scheduling must be a mapping, .* but got 'x'"),
        (
            _at("t4-spot", node_config={"InstanceMarketOptions": "spot"}),
            "'t4-spot': InstanceMarketOptions must be a mapping, such as {MarketType: spot}, but got 'spot'",
        ),
    ],
)
def test_a_wrong_file_is_refused_with_what_is_right(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: Callable[[dict[str, Any]], None], message: str
) -> None:
    _refused(RAY_UP[0], tmp_path, capsys, change, message)


def _refused(
    right: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    change: Callable[[dict[str, Any]], None],
    message: str,
) -> None:
    config = copy.deepcopy(yaml.safe_load(right.read_text()))
    change(config)
    path = tmp_path / "cluster.yaml"
    path.write_text(yaml.safe_dump(config))
    with pytest.raises(InputError, match=message):
        read_cluster_file(path)
    assert main([str(path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def _group(**fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda config: config["spec"]["workerGroupSpecs"][1].update(fields)


def _spec(**fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda config: config["spec"].update(fields)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_set(spec=None), "cluster.yaml: spec must be a mapping, .* but it is left empty"),
        (_spec(headGroupSpec={}), 'headGroupSpec: rayStartParams must have num-cpus: "0"'),
        (_spec(headGroupSpec=[1]), r"headGroupSpec must be a mapping, .* but got \[1\]"),
        (
            _spec(headGroupSpec={"rayStartParams": {"num-cpus": "none"}}),
            "headGroupSpec: rayStartParams: num-cpus must be a number, 0 or more, but got 'none'",
        ),
        (_spec(autoscalerOptions=["v2"]), r"autoscalerOptions must be a mapping, .* but got \['v2'\]"),
        (_spec(autoscalerOptions={"idleTimeoutSeconds": None}), "idleTimeoutSeconds must be a number, .* left empty"),
        (_spec(workerGroupSpecs={"a": 1}), "workerGroupSpecs must be a list of worker groups, but got {'a': 1}"),
        (_spec(workerGroupSpecs=[None]), "each worker group must be a mapping, .* but it is left empty"),
        (
            _group(maxReplicas=None),
            "cluster.yaml, worker group 't4-spot': maxReplicas must be a whole number, 0 or more, but it is left empty",
        ),
        (_group(minReplicas="some"), "'t4-spot': minReplicas must be a whole number, 0 or more, but got 'some'"),
        (_group(labels=["a"]), r"'t4-spot': labels must be a mapping, .* but got \['a'\]"),
        (_group(template={"spec": ["a"]}), r"'t4-spot': spec must be a mapping, .* but got \['a'\]"),
        (_group(template={"spec": {"containers": {"a": 1}}}), "'t4-spot': containers must be a list, but got {'a': 1}"),
        (
            _group(template={"spec": {"containers": [None]}}),
            "'t4-spot': each container must be a mapping, .* left empty",
        ),
    ],
)
def test_a_wrong_ray_cluster_is_refused_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: Callable[[dict[str, Any]], None], message: str
) -> None:
    _refused(RAY_CLUSTER, tmp_path, capsys, change, message)


@pytest.mark.parametrize("text", ["- a\n", "a: [\n"])
def test_what_is_no_cluster_file_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(InputError, match=r"cluster file .*c\.yaml"):
        read_cluster_file(tmp_path / "c.yaml")


def test_prices_of_ones_own_count(tmp_path: Path) -> None:
    table = PriceTable(source="mine", prices={"g4dn.12xlarge": Price(on_demand=3.0, spot=0.5, gpu="T4", gpus=4)})
    assert {each.usd_per_h for each in read_cluster_file(RAY_UP[0], table).types} == {3.0, 0.5}
    with pytest.raises(InputError, match="'l4-on-demand': instance type 'g2-standard-48' is unknown: mine has g4dn"):
        read_cluster_file(RAY_UP[1], table)
