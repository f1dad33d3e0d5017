"""``deploy/kubernetes`` and ``deploy/kueue``: files load, and the names in them lead to something."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import elastic_ray

DEPLOY = Path(__file__).parents[2] / "deploy"
FOLDERS = {name: DEPLOY / name for name in ("kubernetes/base", "kubernetes/production", "kueue")}
MADE_BY_HAND = {"redis-password"}  # secrets that a page tells people to make


def read(path: Path) -> list[dict[str, Any]]:
    return [each for each in yaml.safe_load_all(path.read_text()) if each is not None]


def built(folder: Path) -> list[dict[str, Any]]:
    """What ``kubectl kustomize`` makes of a folder, as far as these folders use it."""
    (kustomization,) = read(folder / "kustomization.yaml")
    objects: list[dict[str, Any]] = []
    for name in kustomization["resources"]:
        path = folder / name
        objects += built(path.resolve()) if path.is_dir() else read(path)
    for patch in kustomization.get("patches", ()):
        operations = yaml.safe_load(patch["patch"]) if "patch" in patch else read(folder / patch["path"])[0]
        (target,) = [
            each
            for each in objects
            if (each["kind"], each["metadata"]["name"]) == (patch["target"]["kind"], patch["target"]["name"])
        ]
        for operation in operations:
            assert operation["op"] == "add"
            *way, last = operation["path"].strip("/").split("/")
            place: Any = target
            for part in way:
                place = place[int(part) if isinstance(place, list) else part]
            assert last not in place, f"{operation['path']} is there already"
            place[last] = operation["value"]
    return objects


def pods(objects: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Specs of all pods, by what they are for."""
    for each in objects:
        if each["kind"] == "RayCluster":
            yield "head", each["spec"]["headGroupSpec"]["template"]["spec"]
            for group in each["spec"]["workerGroupSpecs"]:
                yield group["groupName"], group["template"]["spec"]
        elif each["kind"] == "StatefulSet":
            yield each["metadata"]["name"], each["spec"]["template"]["spec"]


def named(value: Any, key: str) -> Iterator[Any]:
    """Values of a key at any depth."""
    for name, inside in value.items() if isinstance(value, dict) else enumerate(value):
        if name == key:
            yield inside
        if isinstance(inside, dict | list):
            yield from named(inside, key)


@pytest.mark.parametrize("folder", FOLDERS.values(), ids=FOLDERS)
def test_every_file_of_a_folder_is_used_and_complete(folder: Path) -> None:
    used = str(read(folder / "kustomization.yaml"))
    assert [path.name for path in folder.glob("*.yaml") if path.stem != "kustomization" and path.name not in used] == []
    for each in built(folder):
        assert each["apiVersion"] and each["kind"] and each["metadata"]["name"], each


def test_what_production_names_is_there() -> None:
    objects = built(FOLDERS["kubernetes/production"])
    names = {(each["kind"], each["metadata"]["name"]) for each in objects}
    (cluster,) = [each for each in objects if each["kind"] == "RayCluster"]
    (namespace,) = [each for each in objects if each["kind"] == "Namespace"]
    assert (
        read(FOLDERS["kubernetes/production"] / "kustomization.yaml")[0]["namespace"] == namespace["metadata"]["name"]
    )
    assert {each["name"] for each in named(objects, "secretKeyRef")} <= MADE_BY_HAND
    host, port = cluster["spec"]["gcsFaultToleranceOptions"]["redisAddress"].split(":")
    (service,) = [each for each in objects if each["kind"] == "Service"]
    assert (service["metadata"]["name"], service["spec"]["ports"][0]["port"]) == (host, int(port))
    (redis,) = [each for each in objects if each["kind"] == "StatefulSet"]
    assert service["spec"]["selector"] == redis["spec"]["template"]["metadata"]["labels"]
    assert {("PersistentVolumeClaim", each["claimName"]) for each in named(objects, "persistentVolumeClaim")} <= names
    policies = [each["spec"] for each in objects if each["kind"] == "NetworkPolicy"]
    assert [each["podSelector"]["matchLabels"] for each in policies] == [
        {"ray.io/cluster": cluster["metadata"]["name"]},
        service["spec"]["selector"],
    ]
    assert cluster["spec"]["authOptions"] == {"mode": "token"}


def test_no_production_pod_runs_as_root_mounts_have_volumes() -> None:
    for name, pod in pods(built(FOLDERS["kubernetes/production"])):
        assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["runAsUser"] > 0, name
        volumes = {each["name"] for each in pod.get("volumes", ())} | ({"data"} if name == "redis" else set())
        for container in pod["containers"]:
            assert container["securityContext"]["allowPrivilegeEscalation"] is False, name
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}, name
            assert container["volumeMounts"] and {each["name"] for each in container["volumeMounts"]} <= volumes, name


def test_images_are_of_this_release_and_of_one_ray() -> None:
    (cluster,) = built(FOLDERS["kubernetes/base"])
    (image,) = read(FOLDERS["kubernetes/base"] / "kustomization.yaml")[0]["images"]
    dockerfile = (DEPLOY / "kubernetes" / "Dockerfile").read_text()
    assert image["newTag"] == elastic_ray.__version__ and f"{image['name']}:{image['newTag']} ." in dockerfile
    assert {each.rpartition(":")[0] for each in named(cluster, "image")} == {image["name"]}
    (ray,) = re.findall(r"^FROM rayproject/ray:([\d.]+)-", dockerfile, re.MULTILINE)
    assert ray == cluster["spec"]["rayVersion"]
    assert f"ray=={ray}" in (DEPLOY.parent / "constraints.txt").read_text()


def test_kueue_has_a_flavor_per_selector_and_a_queue() -> None:
    objects = built(FOLDERS["kueue"])
    (cluster,) = [each for each in objects if each["kind"] == "RayCluster"]
    (local,) = [each for each in objects if each["kind"] == "LocalQueue"]
    (queue,) = [each for each in objects if each["kind"] == "ClusterQueue"]
    flavors = {
        each["metadata"]["name"]: each["spec"]["nodeLabels"] for each in objects if each["kind"] == "ResourceFlavor"
    }
    assert cluster["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == local["metadata"]["name"]
    assert local["spec"]["clusterQueue"] == queue["metadata"]["name"]
    (group,) = queue["spec"]["resourceGroups"]
    assert {each["name"] for each in group["flavors"]} == set(flavors)
    for each in group["flavors"]:
        assert [resource["name"] for resource in each["resources"]] == group["coveredResources"]
    for name, pod in pods(objects):
        if "nodeSelector" in pod:
            assert any(labels.items() <= pod["nodeSelector"].items() for labels in flavors.values()), name
        if name in ("redis", "head"):
            continue
        (container,) = pod["containers"]
        assert set(container["resources"]["requests"]) == set(group["coveredResources"])
