"""A job in a file for ``elastic-ray submit``: what it may say, and what is reported of mistakes."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_ray.cli.submit import JobFile, read_job_file
from placement.errors import InputError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text("")
    return tmp_path


def read(folder: Path, text: str) -> JobFile:
    (file := folder / "job.yaml").write_text(text)
    return read_job_file(file)


def test_a_file_says_what_the_options_would(folder: Path) -> None:
    found = read(
        folder,
        "script: train.py\narguments: --lr 0.1 --name 'a b'\nworkers: 1:8\ngpus: true\nname: bert\n"
        "working_dir: .\nruntime_env: {pip: [einops]}\nscheduling: {tenant: vision, sizes: [2, 4]}\n",
    )
    assert found == JobFile(
        script=folder / "train.py",
        arguments=("--lr", "0.1", "--name", "a b"),
        workers=(1, 8),
        gpus=True,
        name="bert",
        working_dir=folder / ".",
        runtime_env={"pip": ["einops"]},
        scheduling={"tenant": "vision", "sizes": [2, 4]},
    )
    assert read(folder, "{script: train.py, workers: 4, arguments: [--epochs, 3]}").arguments == ("--epochs", "3")
    as_written = ("--seed", "010", "--lr", "0.10", "--fast", "yes", "--day", "2026-11-27")
    assert read(folder, f"{{script: train.py, arguments: [{', '.join(as_written)}]}}").arguments == as_written
    with pytest.raises(InputError, match="line 1: each of arguments must be one text or number"):
        read(folder, "{script: train.py, arguments: [[--epochs, 3]]}")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("workers: 4", "must be a mapping with script"),
        ("{script: train.py, worker: 4}", "there is no field 'worker'; did you mean 'workers'?"),
        ("{script: train.py, workers: 8:1}", "1 <= min <= max"),
        ("{script: train.py, workers: true}", "workers must be a number such as 4"),
        ("{script: train.py, gpus: 2}", "gpus must be true or false, but got 2"),
        ("{script: train.py, scheduling: {tenants: a}}", "there is no field 'tenants'; did you mean 'tenant'?"),
        ("{script: train.py, scheduling: {spot: maybe}}", "scheduling: spot must be one of"),
        ("{script: train.py, scheduling: 3}", "scheduling must be a mapping such as {tenant: vision}, but got 3"),
        ("{script: other.py}", "script must be a file, but there is no"),
        ("script: [", "cannot be read"),
        ("{script: train.py, runtime_env: {env_var: {A: b}}}", "no field 'env_var'; did you mean 'env_vars'?"),
        ("{script: train.py, runtime_env: {working_dir: .}}", "working_dir is an option of its own"),
        (10**4 * "[", "nested too deeply"),
        ("{script: train.py, name: 2024-02-30}", "cannot be read: the value of name, '2024-02-30', is not valid"),
        ("{script: train.py, gpus: !!bool x}", "cannot be read: the value of gpus, 'x', is not valid"),
        ("{script: train.py, workers: " + 5000 * "9" + "}", "cannot be read: the value of workers, '999"),
        ("script: train.py\nworkers: 1\nworkers: 4", "key 'workers' occurs twice"),
    ],
)
def test_mistakes_are_told(folder: Path, text: str, told: str) -> None:
    with pytest.raises(InputError) as error:
        read(folder, text)
    assert told in str(error.value)
