"""What a run ends with is saved, by all ranks where each holds a part, and any process gets the model out of it."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from ray.train import Checkpoint

import elastic_ray as er
from elastic_ray.checkpoints.automatic import CorruptStateError, find_stored, keep_last
from elastic_ray.checkpoints.sharded import model_loading
from elastic_ray.cli.app import cli
from elastic_ray.session import session as sessions
from elastic_ray.session.session import Session
from tests.sync.sharded_parameters import sharded
from tests.sync.tiles import trained
from tests.sync.tiles.saving import Job


class Scaled(trained.Net):
    """Has a state that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = 2.0

    def get_extra_state(self) -> dict[str, float]:
        return {"scale": self.scale}

    def set_extra_state(self, state: dict[str, float]) -> None:
        self.scale = state["scale"]


def ended(folder: Path, kind: str, ends: Any = lambda session: None) -> tuple[Job, torch.nn.Module]:
    """A job that has ended, and its model as its first rank holds it."""
    options: dict[str, Any] = {"strategy": None if kind in ("replicated", "sharded") else kind}
    if kind == "sharded":
        options |= {"optimizers": sharded.OPTIMIZERS, "data": sharded.data, "make": sharded.sharded_net}
    job = Job(folder, ends=ends, epochs=1, **options)
    results = job.run((1, 2, 3)).results
    model = sharded.Net() if kind == "sharded" else trained.Net()
    model.load_state_dict(next(each for each in results.values() if each.rank == 0).model_state)
    return job, model


@pytest.mark.parametrize("kind", ["replicated", "zero1", "sharded", "sma"])
def test_model_of_finished_run_is_loaded_in_one_process(tmp_path: Path, kind: str) -> None:
    job, model = ended(tmp_path / "run", kind)
    (state,) = job.files()
    assert state.steps == 8 and state.parts == (3 if kind in ("zero1", "sharded") else 1)
    fresh = type(model)()
    with torch.no_grad():
        for param in fresh.parameters():
            param.zero_()
    found = er.load_model_state(tmp_path / "run", fresh)
    assert found.keys() == {**dict(fresh.named_parameters()), **dict(fresh.named_buffers())}.keys()
    for own, wanted in zip(fresh.parameters(), model.parameters(), strict=True):
        assert torch.equal(own, wanted)


def test_what_is_done_after_last_epoch_is_in_it(tmp_path: Path) -> None:
    def ends(session: Session) -> None:
        time.sleep(1.5 if session.rank == 0 else 0.0)  # it evaluates, for longer than a vote waits

    job, _ = ended(tmp_path / "run", "zero1", ends)
    assert len(job.files()) == 1


@pytest.mark.thorough
def test_ranks_that_do_not_return_are_not_awaited_forever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "_SAVED_TOGETHER_WAIT_S", 0.5)
    # the last rank does not return in time
    job, _ = ended(tmp_path / "run", "zero1", lambda session: time.sleep(3.0 if session.rank == 2 else 0.0))
    assert job.files() == (), "no part of it is taken for the whole"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Job:
    folder = tmp_path_factory.mktemp("finished")
    job, _ = ended(folder / "run", "replicated")
    keep_last(job.storage, job.files()[0])
    return job


def test_checkpoint_copy_of_it_and_the_run_are_found(finished: Job, tmp_path: Path) -> None:
    storage = finished.storage
    checkpoint = Checkpoint(storage.path + "/automatic", storage.filesystem)
    copy = checkpoint.to_directory(str(tmp_path / "copy"))
    shutil.copytree(storage.path, tmp_path / "run")
    for source in (checkpoint, Checkpoint(copy), copy, f"file://{tmp_path}/run", tmp_path / "run"):
        assert len(er.load_model_state(source)) == 6


@pytest.mark.parametrize("damaged", [False, True])
def test_verify_reads_what_a_run_ended_with(finished: Job, tmp_path: Path, damaged: bool) -> None:
    shutil.copytree(finished.storage.path, tmp_path / "run")
    (tmp_path / "run" / "events.jsonl").touch()
    (part,) = (tmp_path / "run").rglob("*.distcp")
    content = bytearray(part.read_bytes())
    content[len(content) // 2] ^= damaged
    part.write_bytes(content)
    answer = CliRunner().invoke(cli, ["verify", str(tmp_path / "run"), "--json"])
    found = [each for each in json.loads(answer.output) if each["what"] == "checkpoint"]
    assert [each["proven"] for each in found] == [not damaged]


@pytest.mark.parametrize("note", ["[]", "{}", "", "0"])
def test_a_damaged_note_is_named(finished: Job, tmp_path: Path, note: str, caplog: pytest.LogCaptureFixture) -> None:
    shutil.copytree(finished.storage.path, tmp_path / "run")
    (only,) = (tmp_path / "run").rglob("step_*.json")
    newer = only.with_name("step_000000000099_new.json")
    newer.write_text(note)
    er.load_model_state(tmp_path / "run")
    assert f"{newer.stem} is not used" in caplog.text and f"{only.stem} is loaded" in caplog.text
    only.unlink()
    with pytest.raises(FileNotFoundError, match=f"{newer.stem} is not used: "):
        er.load_model_state(tmp_path / "run")


def test_a_job_of_the_name_begins_anew(finished: Job) -> None:
    stored = find_stored(finished.storage, start_from=None, is_trial=False, with_states=True)
    assert stored.states == () and stored.result == finished.files()


def test_extra_states_are_loaded_and_modes_stay(tmp_path: Path) -> None:
    job = Job(tmp_path / "run", ends=lambda session: None, epochs=1, strategy=None, make=Scaled)
    job.run((1, 2))
    model = Scaled().eval()
    model.scale = 1.0
    er.load_model_state(tmp_path / "run", model)
    assert model.scale == 2.0 and not model.training


def test_errors_name_the_way_out(finished: Job, tmp_path: Path) -> None:
    (tmp_path / "checkpoint_000001").mkdir()
    with pytest.raises(FileNotFoundError, match=r"train function's own format\. Give the Result, or the run's"):
        er.load_model_state(tmp_path / "checkpoint_000001")
    with pytest.raises(FileNotFoundError, match="automatic_checkpoints=False or keep_last_state=False"):
        er.load_model_state(tmp_path / "none")
    with pytest.raises(KeyError, match=r"one of the 1 models in .*, from 0, but got 1"):
        er.load_model_state(finished.folder, number=1)
    with pytest.raises(RuntimeError, match=r"lacks \['first.bias', .* and has \['bias', 'weight'\] instead"):
        er.load_model_state(finished.folder, torch.nn.Linear(13, 5))
    net = trained.Net()
    net.last = torch.nn.Linear(57, 4)
    with pytest.raises(RuntimeError, match=r"'last.weight' is \(4, 57\) here and \(5, 57\) in "):
        er.load_model_state(finished.folder, net)


@pytest.mark.parametrize(
    ("tree", "message"), [([1, 2], "must be a tree of tensors, but is a list"), ({"first.bias": "x"}, "first.bias in ")]
)
def test_what_is_no_model_is_corrupt(
    finished: Job, monkeypatch: pytest.MonkeyPatch, tree: object, message: str
) -> None:
    monkeypatch.setattr(model_loading, "open_checkpoint", lambda storage, state: {"model/0": tree})
    with pytest.raises(CorruptStateError, match=message):
        er.load_model_state(finished.folder, trained.Net())
