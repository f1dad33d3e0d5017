"""AutoDist's resource_spec.yml as a hint for planning without a cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_ray.sync import StrategyError
from elastic_ray.sync.choosing.resource_spec import links_by_formula, read_resource_spec

GOOD = """
nodes:
  - address: 10.20.41.51
    gpus: [0, 1]
    chief: true
    network_bandwidth: 100
  - address: 10.20.41.52
    gpus: [0]
    ssh_config: conf
    network_bandwidth: 10
  - address: 10.20.41.53
    cpus: [0]
    network_bandwidth: 50
ssh:
  conf: {username: me, key_file: /root/.ssh/id_rsa}
"""


def read(tmp_path: Path, text: str):  # type: ignore[no-untyped-def]
    (tmp_path / "resource_spec.yml").write_text(text)
    return read_resource_spec(tmp_path / "resource_spec.yml")


def test_ranks_and_links(tmp_path: Path) -> None:
    spec = read(tmp_path, GOOD)
    assert spec.topology.nodes == ("10.20.41.51", "10.20.41.51", "10.20.41.52", "10.20.41.53")
    assert spec.chief == "10.20.41.51"
    slowest = links_by_formula(4, 10)
    assert spec.links == slowest
    # 16 MiB, ring of four at 10 Gbit/s: 2 x 3/4 x 16 MiB / 1.25 GB/s and six messages.
    assert slowest.seconds("all_reduce", 16 << 20) == pytest.approx(1.5 * (16 << 20) / 1.25e9 + 6e-4)
    assert links_by_formula(1, 10).samples == ()


def test_one_node_needs_no_network(tmp_path: Path) -> None:
    spec = read(tmp_path, "nodes: [{address: localhost, gpus: [0, 1], network_bandwidth: 1}]")
    assert spec.chief == "localhost"
    assert spec.links.seconds("all_reduce", 16 << 20) < links_by_formula(2, 1).seconds("all_reduce", 16 << 20) / 10


@pytest.mark.parametrize(
    "text, told",
    [
        ("nodes: []", "nodes must be a list of at least one node"),
        ("[1, 2]", "nodes must be a list"),
        ("nodes: [5]", r"nodes\[0\] must be a mapping"),
        ("nodes: [{gpus: [0]}]", r"nodes\[0\].address must be"),
        ("nodes: [{address: a, gpus: 2}]", r"nodes\[0\].gpus must be a list of GPU numbers"),
        ("nodes: [{address: a, gpus: [0, 0]}]", r"nodes\[0\].gpus must be different"),
        ("nodes: [{address: a}, {address: b, network_bandwidth: 0}]", r"nodes\[1\].network_bandwidth must be"),
        ("nodes: [{address: a, network_bandwidth: fast}]", r"network_bandwidth must be a number .* 'fast'"),
        ("nodes: [{address: a}, {address: a}]", r"nodes\[1\].address must be another"),
        ("nodes: [{address: a, chief: 1}]", r"nodes\[0\].chief must be true or false"),
        ("nodes: [{address: a, chief: true}, {address: b, chief: true}]", "chief must be true of one node"),
        ("nodes: [{address: a, gpu: [0]}]", r"nodes\[0\] has no field gpu; it has address"),
        ("nodes: [", "cannot be read"),
        ("nodes: !!python/object/apply:os.getcwd []", "cannot be read"),
    ],
)
def test_errors_name_the_field(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(StrategyError, match=told) as caught:
        read(tmp_path, text)
    assert "resource_spec.yml" in str(caught.value)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(StrategyError, match=r"nothing\.yml.*cannot be read"):
        read_resource_spec(tmp_path / "nothing.yml")
