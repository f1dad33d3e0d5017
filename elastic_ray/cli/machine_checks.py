"""Checks of ``elastic-ray doctor`` on one machine; each returns a result and, if it fails, a remedy."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import platform
import re
import secrets
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

from placement.text import count, one_line

State = Literal["ok", "warn", "fail"]

_PACKAGE = "elastic-ray"
_SHARED_MEMORY = Path("/dev/shm")
_DEVICES = Path("/dev")
_LEAST_SHARED_BYTES = 1 << 30
_WORD = b"heard"
_REACH_S = 5.0
_STORAGE_S = 30.0
_COPIED_BYTES = 64 << 20


@dataclasses.dataclass(frozen=True, slots=True)
class Check:
    """Result of one check of ``elastic-ray doctor``."""

    name: str  # what was looked at
    state: State  # ``warn`` is worth knowing, ``fail`` is in the way of jobs
    detail: str  # what was found, and the way out
    where: str = ""  # the node; empty for this machine


def machine_checks() -> tuple[Check, ...]:
    """Run all checks of this machine and return their results."""
    looks: Mapping[str, Callable[[], Check]] = {
        "versions": check_versions,
        "GPU": check_gpu,
        "NCCL": check_nccl,
        "GPU links": check_links,
        "GPU traps": check_traps,
        "ports": check_ports,
        "shared memory": check_shared_memory,
        "Ray's folders": check_session,
    }
    return tuple(_survive(name, look) for name, look in looks.items())


def _survive(name: str, look: Callable[[], Check]) -> Check:
    """Run a check; if it raises, report that as a failure so that the remaining checks still run."""
    try:
        return look()
    except Exception as error:
        torch = sys.modules.get("torch")  # it may be what is missing
        if torch is not None and isinstance(error, torch.OutOfMemoryError):
            return Check(name, "warn", "not checked, since a GPU has no memory left: other processes use it")
        return Check(name, "fail", f"{type(error).__name__}: {error}".splitlines()[0])


def check_versions() -> Check:
    """Check that the installed package's requirements are met."""
    from packaging.requirements import Requirement
    from packaging.version import InvalidVersion, Version

    try:
        required = importlib.metadata.requires(_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        return Check("versions", "warn", f"{_PACKAGE} runs from a source tree: pip install it on every node")
    found, wrong = [f"Python {platform.python_version()}"], []
    for requirement in (Requirement(text) for text in required):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            version = importlib.metadata.version(requirement.name)
            release = Version(version).base_version  # of a vendor's build, such as torch 2.9.0a0+nv25.10
        except importlib.metadata.PackageNotFoundError:
            wrong.append(f"{requirement.name} is missing")
            continue
        except (InvalidVersion, TypeError):  # None without metadata in its folder
            wrong.append(f"{requirement.name} must be {requirement.specifier}, but has no version")
            continue
        found.append(f"{requirement.name} {version}")
        if not requirement.specifier.contains(release, prereleases=True):
            wrong.append(f"{requirement.name} must be {requirement.specifier}, but is {version}")
    if wrong:
        return Check("versions", "fail", f"{'; '.join(wrong)}: pip install -U {_PACKAGE}")
    return Check("versions", "ok", ", ".join(found))


def check_gpu() -> Check:
    """Check that torch sees the machine's GPUs and that each GPU computes correctly."""
    import torch

    with warnings.catch_warnings(record=True) as told:  # torch warns of a driver that is too old, and goes on
        warnings.simplefilter("always")
        available = torch.cuda.is_available()
    if not available:
        return _unseen_gpus("; ".join(one_line(each.message) for each in told if isinstance(each.message, Warning)))
    seen, kernels = list[str](), torch.cuda.get_arch_list() if torch.version.cuda else []
    for number in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(number)
        if kernels and not has_kernels(kernels, major, minor):
            detail = f"torch {torch.__version__} ({' '.join(kernels)}) has no kernels for GPU {number}"
            return Check("GPU", "fail", f"{detail} (sm_{major}{minor}): install a torch with kernels for it")
        ones = torch.ones(8, 8, device=f"cuda:{number}")
        if float((ones @ ones).sum()) != 512.0:
            return Check("GPU", "fail", f"GPU {number} computes wrong results")
        memory = torch.cuda.get_device_properties(number).total_memory / (1 << 30)
        seen.append(f"{torch.cuda.get_device_name(number)}, {memory:.0f} GiB")
    kinds = "; ".join(f"{seen.count(each)} x {each}" for each in dict.fromkeys(seen))
    driver = f", driver {version}" if (version := _driver_version()) else ""
    platform_version = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {torch.version.hip}"
    return Check("GPU", "ok", f"{kinds}; {platform_version}{driver}")


def has_kernels(kernels: Sequence[str], major: int, minor: int) -> bool:
    """True if torch can run on a GPU of this compute capability: it has binaries, or code to compile (``compute_``).

    A binary runs on GPUs of its major version from its minor version on, and compiled code on all later ones. With
    the suffix ``a``, both are for one capability only.
    """
    for each in kernels:
        if (parsed := re.fullmatch(r"(sm|compute)_(\d+)(\d)([a-z]?)", each)) is None:
            continue
        built = int(parsed[2]), int(parsed[3])
        same = built == (major, minor)
        later = built <= (major, minor) and (parsed[1] == "compute" or built[0] == major)
        if same or (later and parsed[4] != "a"):
            return True
    return False


def _unseen_gpus(reason: str) -> Check:
    """Return the finding on a machine where torch sees no GPU; ``reason`` is torch's warning, or empty."""
    import torch

    number, complaint = _nvidia_gpus()
    if complaint:
        return Check("GPU", "warn", f"nvidia-smi is here, but finds no GPU: {complaint}; jobs train on CPUs")
    if not number:
        return Check("GPU", "ok", "none here: jobs train on CPUs")
    here = f"{count(number, 'NVIDIA GPU')} here"
    if not torch.version.cuda:
        way = "install torch's CUDA build"
        return Check("GPU", "fail", f"{here}, but torch {torch.__version__} was built without CUDA: {way}")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and not (visible and reason):  # Slurm always sets it, also where the driver is too old
        way = "unset it, also where Ray is started, for jobs on GPUs"
        return Check("GPU", "warn", f"{here}, but CUDA_VISIBLE_DEVICES={visible!r} hides them: {way}")
    driver = f"driver {version}" if (version := _driver_version()) else "the driver"
    what = f"{here}, but torch {torch.__version__} (CUDA {torch.version.cuda}) sees none with {driver}"
    way = "update the driver, or install a torch for an older CUDA"
    return Check("GPU", "fail", f"{what}{f' ({reason})' if reason else ''}: {way}")


def _nvidia_gpus() -> tuple[int, str]:
    """Return the number of NVIDIA GPUs that this process may use, and what nvidia-smi complains of if there are none.

    A container sees the driver of its host, but has a device file only for each GPU that it was given.
    """
    files = len([each for each in _DEVICES.glob("nvidia*") if each.name.removeprefix("nvidia").isdigit()])
    if files or shutil.which("nvidia-smi") is None:
        return files, ""
    try:
        answer = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=_REACH_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return 0, one_line(error)
    lines = [each for each in f"{answer.stdout}\n{answer.stderr}".splitlines() if each.strip()]
    found = sum(each.startswith("GPU ") for each in lines)
    return found, "" if found else (lines[0] if lines else "no device")


def _driver_version() -> str:
    """Return the version of the NVIDIA driver; empty if it cannot be read."""
    try:
        return Path("/proc/driver/nvidia/version").read_text().split("  ")[1].split()[0]
    except (OSError, IndexError):
        return ""


def check_nccl() -> Check:
    """Check that torch has the communication backends that jobs need, with an NCCL all-reduce over all local GPUs."""
    import torch
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_gloo_available():
        return Check("NCCL", "fail", "torch has no gloo, which every job needs: install a usual build")
    if not torch.cuda.is_available():
        return Check("NCCL", "ok", "not needed without GPUs; gloo is there")
    if not dist.is_nccl_available():
        return Check("NCCL", "fail", "torch was built without NCCL: install torch's CUDA build")
    from torch.cuda import nccl

    ones = [torch.ones(4, device=f"cuda:{number}") for number in range(torch.cuda.device_count())]
    sums = [torch.zeros_like(each) for each in ones]
    nccl.all_reduce(ones, sums)  # type: ignore[no-untyped-call]
    if any(float(each.sum()) != 4.0 * len(ones) for each in sums):
        return Check("NCCL", "fail", f"an all-reduce over {count(len(ones), 'GPU')} gave a wrong sum")
    version = ".".join(str(part) for part in nccl.version())  # type: ignore[no-untyped-call]
    return Check("NCCL", "ok", f"{version}; an all-reduce over {count(len(ones), 'GPU')} is right")


def check_links() -> Check:
    """Check how this machine's GPUs are connected, and measure the speed of copies between them."""
    import torch

    number = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not number:
        return Check("GPU links", "ok", "none without GPUs")
    if number == 1:
        rate = _copied("cuda:0", "cpu")
        several = "several ranks on it talk by TCP, if each has a NCCL_HOSTID of its own; else over gloo"
        return Check("GPU links", "ok", f"one GPU, {rate:.1f} GB/s to the host; {several}")
    pairs = [(a, b) for a in range(number) for b in range(a + 1, number)]
    cut_off = [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]
    rates = sorted(_copied(f"cuda:{a}", f"cuda:{b}") for a, b in pairs)
    detail = f"{count(number, 'GPU')}, one rank on each; copies between two: {rates[0]:.1f} to {rates[-1]:.1f} GB/s"
    if not cut_off:
        return Check("GPU links", "ok", f"{detail}, all by NVLink or PCIe peer access")
    named = ", ".join(f"{a} and {b}" for a, b in cut_off[:4])
    return Check("GPU links", "warn", f"{detail}; no peer access between {named}: by host memory")


def _copied(source: str, target: str) -> float:
    """Return the best rate of three timed copies [GB/s]."""
    import time

    import torch

    given = torch.empty(_COPIED_BYTES, dtype=torch.uint8, device=source)
    taken = torch.empty(_COPIED_BYTES, dtype=torch.uint8, device=target, pin_memory=target == "cpu")
    rates = []
    for _ in range(4):
        torch.cuda.synchronize(source)
        since_s = time.perf_counter()
        taken.copy_(given)
        torch.cuda.synchronize(source)
        rates.append(_COPIED_BYTES / (time.perf_counter() - since_s) / 1e9)
    return max(rates[1:])


TRAPS = {
    "CUDA_LAUNCH_BLOCKING": "each kernel is waited for, which makes steps slow",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "each tensor is allocated by the driver, which makes steps slow, also with 0",
    "NCCL_P2P_DISABLE": "GPUs of one machine talk by host memory",
    "NCCL_SHM_DISABLE": "ranks of one machine talk by the network",
    "NCCL_IB_DISABLE": "NCCL leaves InfiniBand out, and talks by TCP",
    "NCCL_COMM_BLOCKING": "NCCL's calls block, and a lost worker can hang the others",
    "TORCH_NCCL_BLOCKING_WAIT": "each reduction is waited for, which makes steps slow",
    "NCCL_BLOCKING_WAIT": "each reduction is waited for, which makes steps slow",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "torch ends workers whose peer is lost, instead of letting them continue",
    "TORCH_NCCL_ENABLE_MONITORING": "torch ends workers whose group hangs, instead of letting them continue",
    "CUDA_MPS_PIPE_DIRECTORY": "under MPS a worker that dies with work outstanding leaves the others undefined",
}
"""Environment variables that are set by mistake, or left from a test, and what they do."""

_SET_IN_ANY_CASE = ("PYTORCH_NO_CUDA_MEMORY_CACHING",)  # torch looks whether it is there, not at its value


def check_traps() -> Check:
    """Check for environment variables that are known to slow down NCCL and CUDA or to make them fail."""
    here = {name: os.environ[name] for name in TRAPS if name in os.environ}
    found = [
        f"{name}={value}: {TRAPS[name]}"
        for name, value in here.items()
        if value not in ("", "0") or name in _SET_IN_ANY_CASE
    ]
    wanted = os.environ.get("NCCL_SOCKET_IFNAME", "")
    interfaces = Path("/sys/class/net")
    if wanted and interfaces.is_dir() and not is_there(wanted, [each.name for each in interfaces.iterdir()]):
        found.append(f"NCCL_SOCKET_IFNAME={wanted}: this machine has no such interface, and NCCL would find no way out")
    if found:
        return Check("GPU traps", "warn", "; ".join(found))
    return Check("GPU traps", "ok", "no variable of CUDA or NCCL is set that is known to do harm")


def is_there(wanted: str, names: list[str]) -> bool:
    """True if ``wanted`` fits an interface: prefixes, exact names after ``=``, or any value with ``^`` (exclusions)."""
    if wanted.startswith("^"):
        return True
    exact, given = wanted.startswith("="), wanted.lstrip("=").split(",")
    return any(name == each if exact else name.startswith(each) for name in names for each in given)


def check_ports() -> Check:
    """Check that a socket on a free port, like those workers open, can be reached at this machine's address."""
    import socket

    import ray

    host = str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.create_server((host, 0), family=family) as listener:
            listener.settimeout(_REACH_S)
            with socket.create_connection(listener.getsockname()[:2], _REACH_S) as caller:
                caller.sendall(_WORD)
                answering, _ = listener.accept()
                with answering:
                    answering.settimeout(_REACH_S)
                    heard = answering.recv(len(_WORD)) == _WORD
    except Exception as error:
        return Check("ports", "fail", f"nothing can listen and be reached at {host}: {one_line(error)}")
    if not heard:
        return Check("ports", "fail", f"something else answers at {host}")
    return Check(
        "ports",
        "ok",
        f"{host} listens and answers; between nodes, TCP ports {_free_ports()} must be open, and Ray's own",
    )


def _free_ports() -> str:
    """Return the range of ports that the operating system assigns."""
    try:
        low, high = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    except (OSError, ValueError):
        return "above 1024"
    return f"{low} to {high}"


def check_shared_memory() -> Check:
    """Check the free shared memory, which Ray's object store and data loader processes use."""
    if not _SHARED_MEMORY.is_dir():
        return Check("shared memory", "ok", "this system has no /dev/shm")
    free = shutil.disk_usage(_SHARED_MEMORY).free
    text = f"{free / (1 << 30):.1f} GiB free in {_SHARED_MEMORY}"
    if free < _LEAST_SHARED_BYTES:
        return Check("shared memory", "warn", f"{text}: in a container, start it with --shm-size=8g")
    return Check("shared memory", "ok", detail=text)


def check_session() -> Check:
    """Check that no other account on the machine can replace code that Ray's workers import."""
    from elastic_ray.access import session_warning

    warning = session_warning()
    detail = warning or "no other account can write into them, or no cluster runs here"
    return Check("Ray's folders", "warn" if warning else "ok", detail)


def default_storage() -> str:
    """Return the storage path for runs whose RunConfig does not set one."""
    return os.environ.get("RAY_AIR_LOCAL_CACHE_DIR") or "~/ray_results"


def check_storage(path: str, nodes: int) -> Check:
    """Check that a run's directory can be created in ``path`` and deleted again."""
    from elastic_ray.checkpoints.run_directory import RunStorage, resolve
    from placement.storage.storage_calls import call_storage

    try:
        resolve(path, None)
        storage = RunStorage(f"{path.rstrip('/')}/.elastic_ray_doctor-{secrets.token_hex(4)}")
        storage.create_within(_STORAGE_S)
        call_storage(path, "deleting", lambda: storage.filesystem.delete_dir(storage.path), timeout_s=_STORAGE_S)
    except (OSError, ValueError) as error:
        return Check("storage", "fail", detail=one_line(error))
    if nodes > 1 and "://" not in path:
        detail = f"{path} can be written here; all {nodes} nodes must share it (NFS), or use s3://bucket/dir"
        return Check("storage", "warn", detail)
    return Check("storage", "ok", f"{path} can be written")
