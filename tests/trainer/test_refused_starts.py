"""Jobs that cannot be submitted: the cluster is gone, or the trainer is in a worker."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
import ray

import elastic_ray as er
from elastic_ray.access import check_answers, find_address
from elastic_ray.cli.cluster import connect

ASKING: dict[str, Callable[[], Any]] = {
    "fit": lambda: er.ElasticTrainer(lambda: None).fit(),
    "submit": lambda: er.ElasticTrainer(lambda: None).submit(),
    "attach": lambda: er.JobHandle.attach("job"),
    "command line": connect,
}


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The address file of a machine of its own."""
    if ray.is_initialized():
        ray.shutdown()
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    (tmp_path / "ray").mkdir()
    return tmp_path / "ray" / "ray_current_cluster"


@pytest.mark.parametrize("way", ASKING)
@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1", "http://127.0.0.1:1", ""])
def test_a_cluster_that_is_gone_is_told_at_once(
    monkeypatch: pytest.MonkeyPatch, apart: Path, address: str, way: str
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    if not address:
        apart.write_text("127.0.0.1:1")
        if way == "command line":
            monkeypatch.setattr("ray._private.services.find_gcs_addresses", set)  # other tests' clusters
    since_s = time.monotonic()
    match = "dashboard's address" if "http" in address else r"no Ray cluster answers at .*127.0.0.1:1.*RAY_ADDRESS"
    with pytest.raises((ConnectionError, click.ClickException), match=match):
        ASKING[way]()
    assert time.monotonic() - since_s < 20


def test_without_address_or_a_file_ray_starts_a_cluster(apart: Path) -> None:
    assert find_address("") == ""
    check_answers("", "")
    check_answers("local", "local")


def test_a_trainer_within_a_train_function_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastic_ray.run.current._in_worker", True)
    for call in ("fit", "submit"):
        with pytest.raises(RuntimeError, match=r"must be used by the driver.*__name__ == '__main__'"):
            ASKING[call]()
