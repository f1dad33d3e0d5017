"""Clusters that want a token: who has none, or another one, is told so at once; whoever has it gets everything."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_ray.access import split
from tests.local_cluster import free_port

ROOT = Path(__file__).parents[2]
CLI = [sys.executable, "-m", "elastic_ray.cli"]
SCRIPT = "import elastic_ray as er; er.ElasticTrainer(print).submit()"


@dataclasses.dataclass(frozen=True)
class Head:
    """A cluster whose token lies in a file of its own."""

    address: str
    token: Path

    def environment(self, **variables: str | None) -> dict[str, str]:
        """Of a process that would speak to it."""
        told = {**os.environ, "RAY_ADDRESS": self.address, "PYTHONPATH": str(ROOT), **variables}
        return {name: value for name, value in told.items() if value is not None}


def start_head(folder: Path, mode: str) -> tuple[subprocess.Popen[bytes], Head]:
    """``ray start --head``, in the foreground of a session of its own; again if Ray's 30 s for it were too few."""
    for last in (False, False, True):
        process, head = start_head_once(folder, mode)
        if process.poll() is None:
            break
        told = (folder / "log").read_text()
        assert not last and "timed out during startup" in told, told
    return process, head


def start_head_once(folder: Path, mode: str) -> tuple[subprocess.Popen[bytes], Head]:
    token = folder / "token"
    token.write_text("0123456789abcdef0123456789abcdef")
    port = free_port()
    head = Head(f"127.0.0.1:{port}", token)
    options = ["--num-cpus=1", f"--port={port}", "--include-dashboard=false", f"--dashboard-port={free_port()}"]
    ray = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--disable-usage-stats"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [*ray, f"--ray-client-server-port={free_port()}", *options],
            stdout=log,
            stderr=log,
            start_new_session=True,
            env=head.environment(RAY_AUTH_MODE=mode, RAY_AUTH_TOKEN_PATH=str(token), RAY_ADDRESS=None),
        )
    deadline = time.monotonic() + 120
    while b"Ray runtime started" not in (folder / "log").read_bytes() and process.poll() is None:
        assert time.monotonic() < deadline, (folder / "log").read_text()
        time.sleep(0.1)
    return process, head


def end(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)  # with it end the processes that it has started
    process.wait(timeout=180)


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Head]:
    process, head = start_head(tmp_path_factory.mktemp("head"), "token")
    yield head
    end(process)


def both(*commands: tuple[list[str], dict[str, str]]) -> list[tuple[int, str, str]]:
    """Several at once: most of their time, they import Ray."""
    running = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
        for command, environment in commands
    ]
    texts = [process.communicate(timeout=180) for process in running]
    return [(process.returncode, *text) for process, text in zip(running, texts, strict=True)]


@pytest.mark.thorough
def test_a_wrong_or_missing_token_is_one_line(head: Head, tmp_path: Path) -> None:
    (other := tmp_path / "other").write_text("fedcba9876543210")
    wrong = head.environment(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=str(other))
    silent = head.environment(RAY_AUTH_MODE=None, RAY_AUTH_TOKEN_PATH=None)
    absent = head.environment(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=None, HOME=str(tmp_path))
    answers = both(*(([*CLI, "jobs"], environment) for environment in (wrong, silent, absent)))
    expected = ("refuses the token of this process", "sends none (RAY_AUTH_MODE is not set)", "there is no token")
    for (code, out, err), text in zip(answers, expected, strict=True):
        assert (code, out) == (1, "") and text in err and "get-auth-token" in err, (code, out, err)
        assert len(err.splitlines()) == 1, err


@pytest.mark.thorough
def test_a_script_with_a_wrong_token_fails_at_once(head: Head, tmp_path: Path) -> None:
    (other := tmp_path / "other").write_text("fedcba9876543210")
    wrong = head.environment(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=str(other))
    asked = "import time, sys, ray; from elastic_ray import access\nt = time.monotonic()\ntry: access.join()\n"
    asked += "except ConnectionError: print(time.monotonic() - t)"
    (code, _, err), (_, took, said) = both(
        ([sys.executable, "-c", SCRIPT], wrong), ([sys.executable, "-c", asked], wrong)
    )
    assert code == 1 and err.splitlines()[-1].startswith("elastic_ray.access.AccessRefusedError: the Ray cluster at")
    assert said == "" and float(took) < 5.0


def test_every_command_says_so(head: Head, tmp_path: Path) -> None:
    """Also ``doctor``, which continues with the other checks; and whoever has the token is let in."""
    (other := tmp_path / "other").write_text("fedcba9876543210")
    wrong = head.environment(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=str(other))
    right = head.environment(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=str(head.token))
    (script := tmp_path / "train.py").touch()
    refused, diagnosed, let_in = both(
        ([*CLI, "submit", str(script)], wrong), ([*CLI, "doctor"], wrong), ([*CLI, "jobs"], right)
    )
    assert refused[0] == 1 and len(refused[2].splitlines()) == 1 and "refuses the token" in refused[2], refused
    assert diagnosed[0] == 1 and "refuses the token" in diagnosed[1], diagnosed
    assert let_in == (0, "no jobs\n", "")


@pytest.mark.slow
def test_a_token_for_a_cluster_without_one_is_told(tmp_path: Path) -> None:
    """Ray would join, and then refuse what the cluster's workers answer."""
    process, head = start_head(tmp_path, "disabled")
    try:
        ((code, _, err),) = both(
            ([*CLI, "jobs"], head.environment(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=str(head.token)))
        )
    finally:
        end(process)
    assert code == 1 and "started without a token" in err and len(err.splitlines()) == 1, err


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    "tests",
    [
        ("tests/cli/test_submit.py", "tests/cli/test_running_jobs.py"),
        (
            "tests/job/test_lifecycle.py",
            "tests/job/test_spot_notice.py",
            "tests/placement/test_actor.py",
            "tests/placement/test_ray_groups.py",
        ),
        ("tests/tuning/test_small_sweeps.py", "tests/tuning/test_sweep.py"),
        ("tests/tuning/test_nni_experiment.py",),
    ],
    ids=["commands", "jobs", "sweeps", "nni"],
)
def test_everything_works_with_a_token(tests: tuple[str, ...]) -> None:
    """Submission over HTTP, controllers, allocator, notice watchers, sweeps and NNI's trials: their own tests."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "slow or not slow", "-p", "no:cacheprovider", *tests]
    environment = {**os.environ, "ELASTIC_RAY_TESTS_WITH_TOKEN": "1"}
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment, timeout=1400)
    if answer.returncode == pytest.ExitCode.NO_TESTS_COLLECTED and "is not installed" in answer.stdout:
        pytest.skip(answer.stdout.strip().splitlines()[-2])
    assert answer.returncode == 0, answer.stdout[-8000:] + answer.stderr[-2000:]


@pytest.mark.parametrize(
    "address, place",
    [
        ("127.0.0.1:6379", ("127.0.0.1", 6379)),
        ("[::1]:6379", ("::1", 6379)),
        ("auto", None),
        ("local", None),
        ("ray://head:10001", None),
        ("host:", None),
    ],
)
def test_only_host_and_port_are_asked(address: str, place: tuple[str, int] | None) -> None:
    assert split(address) == place
