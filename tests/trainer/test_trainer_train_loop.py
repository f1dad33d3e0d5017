"""Which functions can be sent to workers, and what is said of the others."""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from elastic_ray.driver.trainer import ElasticTrainer
from elastic_ray.worker.train_loop import call, pack

LOCK = threading.Lock()


def captures_closure() -> Any:
    guard = threading.Lock()

    def loop() -> Any:
        return guard

    return loop


class Loop:
    def __call__(self, config: Any) -> Any:
        return config["x"]


def two(a: int, config: Any) -> Any:
    return a, config


async def awaited() -> None: ...


def generated() -> Any:
    yield 1


@pytest.mark.parametrize(
    "loop, config, returned",
    [
        (lambda: 1, None, 1),
        (lambda: 1, {}, 1),
        (lambda config: config, {"x": 2}, {"x": 2}),
        (lambda config: config, None, {}),
        (lambda config=None: config, {"x": 2}, {"x": 2}),
        (lambda *args: args, {"x": 2}, ({"x": 2},)),
        (lambda **kwargs: kwargs, None, {}),
        (functools.partial(two, 1), {"x": 2}, (1, {"x": 2})),
        (Loop(), {"x": 2}, 2),
    ],
)
def test_a_function_is_called_with_or_without_its_config(loop: Any, config: Any, returned: Any) -> None:
    assert call(pack(loop, config)) == returned


@pytest.mark.parametrize(
    "loop, config, error, message",
    [
        (3, None, TypeError, "must be a function, but got 3"),
        (two, None, TypeError, r"two\(\) requires a, config; pass everything in train_loop_config"),
        (lambda *, lr: lr, None, TypeError, "requires lr"),
        (lambda: 1, {"lr": 1}, ValueError, r"train_loop_config has \['lr'\], but .* takes no argument"),
        (lambda config: 1, [1], TypeError, "train_loop_config must be a dict"),
        (awaited, None, TypeError, "coroutine or generator"),
        (generated, None, TypeError, "coroutine or generator"),
        (captures_closure(), None, TypeError, r"captures 'guard' \(a _thread.lock\).*create it inside"),
        (
            lambda config: 1,
            {"lock": LOCK},
            TypeError,
            r"train_loop_config\['lock'\], a _thread.lock, cannot be",
        ),
    ],
)
def test_other_functions_are_refused(loop: Any, config: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        ElasticTrainer(loop, train_loop_config=config)


def test_a_large_function_says_what_makes_it_so(caplog: pytest.LogCaptureFixture) -> None:
    small, rows = [1.0], bytearray(51_000_000)
    ElasticTrainer(lambda: len(small))
    assert not caplog.records
    ElasticTrainer(lambda: len(small) + len(rows))
    ElasticTrainer(lambda config: config, train_loop_config={"lr": 0.1, "data": {"rows": rows}})
    told = [record.getMessage() for record in caplog.records]
    assert ["takes 51 MB along, most of it 'rows': " in told[0], "most of it train_loop_config['data']" in told[1]] == [
        True,
        True,
    ]


@pytest.mark.parametrize("raises", [False, True])
def test_working_directory_is_as_before_for_processs_next_run(
    raises: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()

    def train() -> None:
        os.chdir("run")
        if raises:
            raise ZeroDivisionError

    for _ in range(2):
        with pytest.raises(ZeroDivisionError) if raises else contextlib.nullcontext():
            call(pack(train, None))
        assert Path.cwd() == tmp_path


def test_a_lacking_package_is_named_with_the_way_out() -> None:
    def train() -> None:
        import no_such_package.part  # type: ignore[import-not-found]  # noqa: F401

    with pytest.raises(ModuleNotFoundError) as raised:
        call(pack(train, None))
    told = str(pickle.loads(pickle.dumps(raised.value)))
    assert told.startswith("No module named 'no_such_package'")
    for part in (socket.gethostname(), sys.executable, 'worker_runtime_env={"pip": ["no_such_package"]}'):
        assert part in told


def test_a_packages_lacking_part_is_told_as_python_does() -> None:
    def train() -> None:
        import json.no_such_part  # type: ignore[import-not-found]  # noqa: F401

    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'json.no_such_part'$"):
        call(pack(train, None))


def test_signal_handlers_are_refused_with_the_way_out() -> None:
    def train() -> None:
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)

    told: list[str] = []

    def in_a_worker() -> None:
        with pytest.raises(ValueError, match="signal only works in main thread") as raised:
            call(pack(train, None))
        told.append(str(raised.value))

    thread = threading.Thread(target=in_a_worker)
    thread.start()
    thread.join()
    assert len(told) == 1 and "Leave the handler out: a job saves itself" in told[0]
