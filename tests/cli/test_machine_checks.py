"""What ``doctor`` finds on a machine."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

import pytest

from elastic_ray.cli import machine_checks as checks


def test_every_check_of_this_machine_says_something() -> None:
    found = checks.machine_checks()
    names = ["versions", "GPU", "NCCL", "GPU links", "GPU traps", "ports", "shared memory", "Ray's folders"]
    assert [check.name for check in found] == names
    assert all(check.detail for check in found)
    assert {check.name: check.state for check in found}["ports"] == "ok", found


def test_a_version_below_what_is_asked_for_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ["click>=8.1", "rich>=999", "no-such-package-of-ours>=1", "absent>=1; extra == 'plot'"]
    monkeypatch.setattr(importlib.metadata, "requires", lambda _: asked)
    check = checks.check_versions()
    assert check.state == "fail" and "rich must be >=999" in check.detail
    assert "no-such-package-of-ours is missing" in check.detail and "absent" not in check.detail
    monkeypatch.setattr(importlib.metadata, "requires", lambda _: ["click>=8.1"])
    assert checks.check_versions().state == "ok"


@pytest.mark.parametrize(
    ("version", "state"),
    [("2.9.0+cu130", "ok"), ("2.9.0a0+145a3a7.nv25.10", "ok"), ("2.16.0.dev20261128", "ok"), ("2.8.1", "fail")],
)
def test_builds_count_as_their_release(monkeypatch: pytest.MonkeyPatch, version: str, state: str) -> None:
    monkeypatch.setattr(importlib.metadata, "requires", lambda _: ["torch>=2.9"])
    monkeypatch.setattr(importlib.metadata, "version", lambda _: version)
    assert checks.check_versions().state == state


@pytest.mark.parametrize("version", [None, "unknown"])
def test_packages_without_a_version_are_named(monkeypatch: pytest.MonkeyPatch, version: str | None) -> None:
    monkeypatch.setattr(importlib.metadata, "requires", lambda _: ["torch>=2.9"])
    monkeypatch.setattr(importlib.metadata, "version", lambda _: version)
    assert "torch must be >=2.9, but has no version" in checks.check_versions().detail


def test_storage_is_tried_and_left_as_it_was(tmp_path: Path) -> None:
    assert checks.check_storage(str(tmp_path), nodes=1).state == "ok"
    shared = checks.check_storage(str(tmp_path), nodes=2)
    assert shared.state == "warn" and "must share it" in shared.detail
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    wrong = checks.check_storage(str(tmp_path / "file"), nodes=1)
    assert wrong.state == "fail" and "cannot be written" in wrong.detail
    unknown = checks.check_storage("nowhere://bucket", nodes=1)
    assert unknown.state == "fail" and "nowhere://bucket" in unknown.detail


def test_a_check_that_breaks_is_a_finding_others_continue(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Any:
        raise OSError("no such device\nand more")

    monkeypatch.setattr(checks, "check_ports", broken)
    found = {check.name: check for check in checks.machine_checks()}
    assert found["ports"].state == "fail" and found["ports"].detail == "OSError: no such device"
    assert found["shared memory"].state != "fail"


def test_known_traps_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*checks.TRAPS, "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NCCL_P2P_DISABLE", "0")
    assert checks.check_traps().state == "ok"
    monkeypatch.setenv("NCCL_SHM_DISABLE", "1")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "nowhere")
    found = checks.check_traps()
    assert found.state == "warn" and "NCCL_SHM_DISABLE=1" in found.detail and "no such interface" in found.detail


@pytest.mark.parametrize(
    ("wanted", "there"),
    [("lo", True), ("=lo", True), ("=l", False), ("eth,lo", True), ("^docker", True), ("ib", False)],
)
def test_interfaces_are_matched_as_nccl_does(wanted: str, there: bool) -> None:
    assert checks.is_there(wanted, ["lo", "ens3"]) is there
