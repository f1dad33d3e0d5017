"""A run's directory: events, whole checkpoints, results."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import stat
from pathlib import Path
from typing import Any

import pyarrow.fs
import pytest
import ray.train

from elastic_ray.checkpoints.run_directory import EVENTS_FILE, PROGRESS_FILE, RunStorage, resolve
from elastic_ray.driver.handle import make_result
from elastic_ray.errors import TrainFunctionError
from elastic_ray.events import EventKind, JobEvent, JobOutcome, JobPhase, Report
from elastic_ray.sealed import Raised, Sealed, seal, seal_error
from elastic_ray.state.resume_point import ResumePoint

POINT = ResumePoint(epoch=2, passes=((5, False),))


@pytest.fixture(params=["local", "renameless"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> RunStorage:
    if request.param == "local":
        made = RunStorage(str(tmp_path / "runs" / "a"))
    else:  # anything that is not the local file system takes the way of the object stores
        (tmp_path / "bucket").mkdir()
        made = RunStorage(
            "runs/a", pyarrow.fs.SubTreeFileSystem(str(tmp_path / "bucket"), pyarrow.fs.LocalFileSystem())
        )
    made.create()
    return made


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "src" / "deep").mkdir(parents=True)
    (tmp_path / "src" / "model.pt").write_bytes(b"weights")
    (tmp_path / "src" / "deep" / "opt.pt").write_bytes(b"moments")
    return tmp_path / "src"


def event(step: int) -> JobEvent:
    return JobEvent(
        kind=EventKind.RESIZE,
        time_s=float(step),
        from_workers=1,
        to_workers=2,
        reason="r",
        detail={"step": step},
    )


def names(storage: RunStorage) -> list[str]:
    return sorted(Path(i.path).name for i in storage.filesystem.get_file_info(pyarrow.fs.FileSelector(storage.path)))


def test_events_come_back_and_survive_a_second_writer(storage: RunStorage) -> None:
    for writer in (storage, pickle.loads(pickle.dumps(RunStorage(storage.path, storage.filesystem)))):
        writer.events.append([event(1).to_json(), event(2).to_json()])
    assert [e.detail["step"] for e in storage.read_events()] == [1, 2, 1, 2]
    assert storage.read_events()[0] == event(1)


def test_a_torn_last_line_is_left_out(storage: RunStorage) -> None:
    storage.events.append([event(1).to_json()])
    with storage.filesystem.open_input_stream(f"{storage.path}/{EVENTS_FILE}") as stream:
        whole = stream.readall()
    with storage.filesystem.open_output_stream(f"{storage.path}/{EVENTS_FILE}") as stream:
        stream.write(whole + event(2).to_json()[:20].encode())
    assert storage.read_events() == (event(1),)


def test_a_checkpoint_is_copied_with_its_progress(storage: RunStorage, source: Path) -> None:
    kept = storage.persist_checkpoint(source, 7, resume_point=POINT, metrics={"loss": 0.5})
    assert kept.path == f"{storage.path}/checkpoint_000007"
    with kept.as_directory() as directory:
        assert (Path(directory) / "deep" / "opt.pt").read_bytes() == b"moments"
    assert storage.load_resume_point(kept) == POINT
    (stored,) = storage.stored_checkpoints()
    assert (stored.index, stored.path, stored.metrics) == (7, kept.path, {"loss": 0.5})
    assert not [name for name in names(storage) if name.startswith(".part")]


def test_a_checkpoint_object_replaces_its_namesake(storage: RunStorage, source: Path) -> None:
    storage.persist_checkpoint(source, 0)
    (source / "model.pt").write_bytes(b"better")
    (source / "deep" / "opt.pt").unlink()
    kept = storage.persist_checkpoint(ray.train.Checkpoint.from_directory(source), 0)
    with kept.as_directory() as directory:
        assert (Path(directory) / "model.pt").read_bytes() == b"better"
        assert not (Path(directory) / "deep" / "opt.pt").exists()


def test_an_incomplete_checkpoint_does_not_count(
    storage: RunStorage, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError("disk full")

    storage.persist_checkpoint(source, 0)
    with monkeypatch.context() as patched:
        patched.setattr(RunStorage, "_write_note", fail)
        with pytest.raises(OSError, match="disk full"):
            storage.persist_checkpoint(source, 1)
    storage.filesystem.create_dir(f"{storage.path}/checkpoint_000002")
    assert [stored.index for stored in storage.stored_checkpoints()] == [0]


def test_deleting(storage: RunStorage, source: Path) -> None:
    kept = storage.persist_checkpoint(source, 0)
    storage.delete_checkpoint(kept.path)
    storage.delete_checkpoint(kept.path)
    assert storage.stored_checkpoints() == ()
    with pytest.raises(ValueError, match="only directories in the run's own"):
        storage.delete_checkpoint(str(source))


def test_metrics_that_json_cannot_hold(storage: RunStorage, source: Path) -> None:
    numpy = pytest.importorskip("numpy")
    storage.persist_checkpoint(source, 0, metrics={"loss": numpy.float32(0.5), "who": object})
    assert storage.stored_checkpoints()[0].metrics == {"loss": 0.5, "who": repr(object)}


def test_node_that_does_not_see_the_directory_says_so(tmp_path: Path, source: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"does not see the run's directory .*storage_path"):
        RunStorage(str(tmp_path / "elsewhere")).persist_checkpoint(source, 0)


def test_a_missing_source_is_named(storage: RunStorage, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="must be a directory"):
        storage.persist_checkpoint(tmp_path / "none", 0)


def test_an_unwritable_place_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"cannot be written.*set RunConfig\(storage_path\)"):
        RunStorage(str(tmp_path / "file" / "run")).create()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
@pytest.mark.parametrize("mode", [0o777, 0o700])
def test_somebody_elses_run_directory_is_refused_before_writing(tmp_path: Path, mode: int) -> None:
    (run := tmp_path / "run").mkdir()
    run.chmod(mode)
    os.chown(run, 12345, -1)
    with pytest.raises(PermissionError, match=r"'/.*/run' belongs to uid 12345, .*storage_path.*private_files=False"):
        RunStorage(str(run)).create()
    assert list(run.iterdir()) == [] and stat.S_IMODE(run.stat().st_mode) == mode
    RunStorage(str(run), private=False).create()
    os.chown(run, 0, -1)
    RunStorage(str(run)).create()
    assert stat.S_IMODE(run.stat().st_mode) == 0o700, "one of our own that all may write is made private"


def test_storage_that_knows_us_by_another_number_is_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As NFS that maps users does, and FUSE: whatever we write there belongs to the directory's owner."""
    RunStorage(str(tmp_path / "run")).create()
    monkeypatch.setattr(os, "geteuid", lambda: 4321)
    RunStorage(str(tmp_path / "run")).create()
    assert [path.name for path in (tmp_path / "run").iterdir()] == [".elastic_ray_run"]


def test_paths_are_resolved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve("rel", None)[1] == str(tmp_path / "rel")
    for unset in ("", " "):
        with pytest.raises(ValueError, match="must name a directory or a bucket, but got"):
            resolve(unset, None)
    assert resolve("~/x", None)[1] == str(tmp_path / "x")
    assert resolve(f"file://{tmp_path}/y", None)[1] == f"{tmp_path}/y"
    with pytest.raises(ValueError, match="storage_path must be a local path or a URI"):
        resolve("nope://x/y", None)
    with pytest.raises(OSError, match=r"storage_path='hdfs://nowhere/x' cannot be opened \(hdfs:// needs Java"):
        resolve("hdfs://nowhere/x", None)


def test_result_of_a_finished_job(storage: RunStorage, source: Path) -> None:
    kept = storage.persist_checkpoint(source, 0, metrics={"loss": 0.4})
    before = [Report(index=3, metrics={"loss": 0.7}), Report(index=3, metrics={"loss": 0.6})]
    storage.reports.append([report.to_json() for report in [*before, Report(index=99, metrics={"loss": 9.0})]])
    reports = (
        Report(index=4, metrics={"loss": 0.5}),
        Report(index=5, metrics={"loss": 0.4}, checkpoint=kept.path),
        Report(index=6, metrics={"loss": 0.3}),
    )
    outcome = JobOutcome(
        phase=JobPhase.FINISHED,
        metrics={"loss": 0.3},
        reports=reports,
        first_report=3,
        checkpoints=((kept.path, {"loss": 0.4}),),
        return_value=seal(42),
    )
    result = make_result(outcome, storage)
    assert isinstance(result, ray.train.Result)
    assert result.metrics == {"loss": 0.3}
    assert result.checkpoint is not None
    assert result.checkpoint.path == kept.path
    assert result.metrics_dataframe is not None
    assert list(result.metrics_dataframe["loss"]) == [0.6, 0.5, 0.4, 0.3]
    assert result.get_best_checkpoint("loss", "min") is not None
    assert (result.error, result.return_value, result.path) == (None, 42, storage.path)
    assert "loss" in repr(result)


def test_result_of_a_failed_job(storage: RunStorage) -> None:
    error = TrainFunctionError.of(seal_error(ValueError("x"), rank=0, node="n"))
    assert make_result(JobOutcome(phase=JobPhase.FAILED, error=error), storage).error is error
    raised = seal_error(ValueError("x"), rank=2, node="n")
    opened = make_result(JobOutcome(phase=JobPhase.FAILED, error=raised), storage).error
    assert isinstance(opened, TrainFunctionError) and isinstance(opened, ValueError) and opened.rank == 2
    unknown = Raised(traceback_text="Traceback\nNoSuchError: x", rank=2, node="n", pickled=b"cno_such\nmodule\n.")
    told = make_result(JobOutcome(phase=JobPhase.FAILED, error=unknown), storage).error
    assert type(told) is TrainFunctionError and "NoSuchError: x" in str(told)
    plain = make_result(JobOutcome(phase=JobPhase.FAILED, error=OSError("x")), storage).error
    assert isinstance(plain, ray.train.TrainingFailedError)


def test_an_unreadable_return_value_costs_nothing_else(storage: RunStorage, caplog: pytest.LogCaptureFixture) -> None:
    outcome = JobOutcome(
        phase=JobPhase.FINISHED, metrics={"loss": 0.3}, return_value=Sealed(pickled=b"cno_such\nmodule\n.")
    )
    result = make_result(outcome, storage)
    assert result.metrics == {"loss": 0.3} and result.return_value is None
    assert "cannot be unpickled in this process" in caplog.text and "no_such" in caplog.text


def test_a_very_long_traceback_is_told_by_its_ends() -> None:
    raised = seal_error(ValueError("a" + "b" * 10**6 + "c"), rank=0, node="n")
    assert len(raised.traceback_text) < 300_000
    assert raised.traceback_text.startswith("ValueError: ab") and raised.traceback_text.endswith("bc\n")


def test_the_note_is_json(storage: RunStorage, source: Path) -> None:
    kept = storage.persist_checkpoint(source, 3, resume_point=POINT)
    with storage.filesystem.open_input_stream(f"{kept.path}/{PROGRESS_FILE}") as stream:
        note = json.loads(stream.readall())
    files = {
        name: {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content)}
        for name, content in (("model.pt", b"weights"), ("deep/opt.pt", b"moments"))
    }
    assert note == {
        "format": 1,
        "index": 3,
        "progress": json.loads(json.dumps(POINT.to_json())),
        "metrics": {},
        "files": files,
    }
