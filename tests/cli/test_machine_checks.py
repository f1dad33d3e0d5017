"""What ``doctor`` finds on a machine."""

from __future__ import annotations

import importlib.metadata
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_ray.cli import machine_checks as checks
from elastic_ray.cli.doctor import check_alike


def test_every_check_of_this_machine_says_something() -> None:
    found = checks.machine_checks()
    names = ["versions", "GPU", "NCCL", "GPU links", "GPU traps", "ports", "shared memory", "Ray's folders"]
    assert [check.name for check in found] == names
    assert all(check.detail for check in found)
    assert {check.name: check.state for check in found}["ports"] == "ok", found


def test_a_machine_without_torch_is_checked_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    found = {check.name: check for check in checks.machine_checks()}
    assert found["GPU"].state == "fail" and "torch" in found["GPU"].detail
    assert found["ports"].state == "ok"


def test_a_version_below_what_is_asked_for_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ["click>=8.1", "rich>=999", "no-such-package-of-ours>=1", "absent>=1; extra == 'plot'"]
    monkeypatch.setattr(importlib.metadata, "requires", lambda _: asked)
    check = checks.check_versions()
    assert check.state == "fail" and "rich must be >=999" in check.detail
    assert "no-such-package-of-ours is missing" in check.detail and "absent" not in check.detail
    monkeypatch.setattr(importlib.metadata, "requires", lambda _: ["click>=8.1"])
    assert checks.check_versions().state == "ok"


def test_nodes_with_other_versions_are_named() -> None:
    same = dict.fromkeys(["a", "b", "c", "d"], "Python 3.11.2, torch 2.13.0")
    assert check_alike(same).state == check_alike({}).state == "ok"
    found = check_alike({**same, "e": "Python 3.11.2, torch 2.14.1"})
    assert found.state == "warn" and "torch is 2.13.0 on a, b, c and 1 more and 2.14.1 on e" in found.detail
    assert "Python" not in found.detail


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
    unset = checks.check_storage("", nodes=1)
    assert unset.state == "fail" and "must name a directory or a bucket" in unset.detail


def test_a_check_that_breaks_is_a_finding_others_continue(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Any:
        raise OSError("no such device\nand more")

    monkeypatch.setattr(checks, "check_ports", broken)
    found = {check.name: check for check in checks.machine_checks()}
    assert found["ports"].state == "fail" and found["ports"].detail == "OSError: no such device"
    assert found["shared memory"].state != "fail"


def test_a_gpu_that_is_full_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def full() -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(checks, "check_links", full)
    (found,) = (check for check in checks.machine_checks() if check.name == "GPU links")
    assert found.state == "warn" and "no memory left" in found.detail


def machine(monkeypatch: pytest.MonkeyPatch, folder: Path, *, gpus: int, smi: str = "", cuda: str | None) -> None:
    """Set up a machine of so many device files, an nvidia-smi of this shell code, and a torch for this CUDA."""
    (folder / "nvidiactl").touch()
    for number in range(gpus):
        (folder / f"nvidia{number}").touch()
    if smi:
        (folder / "nvidia-smi").write_text(f"#!/bin/sh\n{smi}\n")
        (folder / "nvidia-smi").chmod(0o755)
    monkeypatch.setattr(checks, "_DEVICES", folder)
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: warnings.warn("driver too old", stacklevel=1))


@pytest.mark.parametrize(
    ("gpus", "smi", "cuda", "state", "says"),
    [
        (0, "", "13.0", "ok", "none here"),
        (0, "echo NVIDIA-SMI has failed; exit 9", "13.0", "warn", "NVIDIA-SMI has failed"),
        (0, "echo GPU 0: H100", "13.0", "fail", "1 NVIDIA GPU here, but torch"),
        (2, "", None, "fail", "2 NVIDIA GPUs here, but torch"),
        (2, "", "13.0", "fail", "driver too old"),
    ],
)
def test_gpus_that_torch_does_not_see(
    gpus: int, smi: str, cuda: str | None, state: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(monkeypatch, tmp_path, gpus=gpus, smi=smi, cuda=cuda)
    found = checks.check_gpu()
    assert found.state == state and says in found.detail
    if state == "fail" and cuda:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        hidden = checks.check_gpu()
        assert hidden.state == "warn" and "CUDA_VISIBLE_DEVICES='' hides them" in hidden.detail


def test_old_driver_is_named_where_slurm_chose_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, tmp_path, gpus=1, cuda="13.0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    found = checks.check_gpu()
    assert found.state == "fail" and "driver too old" in found.detail
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    assert "CUDA_VISIBLE_DEVICES='7' hides them" in checks.check_gpu().detail


@pytest.mark.parametrize(
    ("kernels", "capability", "run"),
    [
        ("sm_80 sm_86 sm_90", (8, 0), True),
        ("sm_80 sm_86 sm_90", (8, 9), True),
        ("sm_86", (8, 0), False),
        ("sm_80 sm_90", (12, 0), False),
        ("sm_80 sm_90 compute_90", (12, 0), True),
        ("sm_90a", (9, 0), True),
        ("sm_100a compute_100a", (12, 0), False),
        ("sm_100 sm_120", (10, 3), True),
    ],
)
def test_kernels_fit_gpus_as_cuda_says(kernels: str, capability: tuple[int, int], run: bool) -> None:
    assert checks.has_kernels(kernels.split(), *capability) is run


def test_known_traps_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*checks.TRAPS, "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NCCL_P2P_DISABLE", "0")
    assert checks.check_traps().state == "ok"
    monkeypatch.setenv("NCCL_SHM_DISABLE", "1")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "nowhere")
    found = checks.check_traps()
    assert found.state == "warn" and "NCCL_SHM_DISABLE=1" in found.detail and "no such interface" in found.detail
    monkeypatch.setenv("PYTORCH_NO_CUDA_MEMORY_CACHING", "0")
    assert "PYTORCH_NO_CUDA_MEMORY_CACHING=0" in checks.check_traps().detail, "torch does not look at its value"


@pytest.mark.parametrize(
    ("wanted", "there"),
    [("lo", True), ("=lo", True), ("=l", False), ("eth,lo", True), ("^docker", True), ("ib", False)],
)
def test_interfaces_are_matched_as_nccl_does(wanted: str, there: bool) -> None:
    assert checks.is_there(wanted, ["lo", "ens3"]) is there
