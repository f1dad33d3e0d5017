"""What ``doctor`` finds on a machine."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

import pytest

from elastic_ray.cli import machine_checks as checks


def test_every_check_of_this_machine_says_something() -> None:
    found = checks.machine_checks()
    assert [check.name for check in found] == ["versions", "GPU", "NCCL", "ports", "shared memory", "Ray's folders"]
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
