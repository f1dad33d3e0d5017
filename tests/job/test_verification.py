"""What a run's events prove, and what they do not once somebody has touched them."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
from click.testing import CliRunner

from elastic_ray.checkpoints.automatic import StateFile
from elastic_ray.checkpoints.run_directory import RunStorage
from elastic_ray.checkpoints.sharded.saver import write_state
from elastic_ray.cli.app import cli
from elastic_ray.driver.replay import ReplayResult, Window
from elastic_ray.events import EventKind, JobEvent
from elastic_ray.record.verification import Finding, has_proof, sealed, verify_events
from elastic_ray.state.progress import Link, RunProgress, hash_of_all
from elastic_ray.state.resume_point import ResumePoint

SAMPLES = 40


def event(kind: EventKind, link: Link, generation: int = 1, job: str = "digits") -> JobEvent:
    plain = JobEvent(
        kind=kind, time_s=1.0, from_workers=1, to_workers=2, reason="why", generation=generation, detail=link.detail
    )
    return sealed(plain, job)


def group(before: int, step: int) -> Link:
    facts = {"step": step, "epoch": 0, "positions": [8 * step], "members": ["w1", "w2"], "batch": None}
    return Link.after(before, {**facts, "digest": 12345, "bytes": 800})


def epoch(before: int, number: int, **changes: Any) -> Link:
    facts = {"epoch": number, "steps": 5 * (number + 1), "samples": SAMPLES, "of": SAMPLES}
    return Link.after(before, {**facts, "hash": hash_of_all(SAMPLES), "rest": 0, **changes})


@pytest.fixture
def lines() -> list[str]:
    return written()


def written(job: str = "digits", step: int = 0) -> list[str]:
    """A run: it starts, grows, ends an epoch, loses a worker, ends another one."""
    links = [group(0, step)]
    links.append(group(links[-1].link, 2))
    links.append(epoch(links[-1].link, 0))
    links.append(group(links[-1].link, 7))
    links.append(epoch(links[-1].link, 1))
    kinds = [EventKind.STARTED, EventKind.RESIZE, EventKind.PASS, EventKind.FAILURE, EventKind.PASS]
    return [event(kind, link, n, job).to_json() for n, (kind, link) in enumerate(zip(kinds, links, strict=True), 1)]


def states(found: Sequence[Finding]) -> list[tuple[str, bool | None]]:
    return [(each.what, each.proven) for each in found]


WHOLE = [("group", True), ("group", True), ("epoch", True), ("group", True), ("epoch", True)]


def test_a_whole_run_is_proven(lines: list[str]) -> None:
    found = verify_events(lines)
    assert states(found) == WHOLE
    assert (
        found[1].text == "generation 2 began at step 2 with w1, w2, which held the same 800 bytes (digest 0000003039)"
    )
    assert found[2].text == "epoch 0: 40 of 40 samples, each once"


def test_order_and_repetition_of_lines_change_nothing(lines: list[str]) -> None:
    assert sorted(map(str, states(verify_events([*lines[::-1], *lines])))) == sorted(map(str, WHOLE))


@pytest.mark.parametrize("missing", range(4))
def test_a_missing_line_is_reported(lines: list[str], missing: int) -> None:
    found = [each for each in verify_events(lines[:missing] + lines[missing + 1 :]) if each.proven is False]
    assert "unproven until there" in found[-1].text or "epoch 0: no line" in found[0].text


def test_lines_cut_off_are_missed_by_its_result(lines: list[str]) -> None:
    assert states(verify_events(lines, epochs=2)) == WHOLE
    (lost,) = (each for each in verify_events(lines[:4], epochs=2) if not each.proven)
    assert lost.text.startswith("epoch 1: no line says")


@pytest.mark.parametrize("command", ["verify", "usage"])
def test_a_path_without_a_run_is_no_answer(command: str, tmp_path: Path) -> None:
    answer = CliRunner().invoke(cli, [command, str(tmp_path / "none")])
    assert answer.exit_code == 1 and "none' cannot be read" in answer.output


def test_a_run_cut_short_is_proven_so_far(lines: list[str]) -> None:
    cut = [*lines[:3], lines[3][: len(lines[3]) // 2]]
    found = verify_events(cut)
    assert states(found) == [*WHOLE[:3], ("line", False)]
    assert found[3].text.startswith("line 4 cannot be read")


@pytest.mark.parametrize("fact", ["step", "digest", "members", "before"])
def test_an_edited_line_is_named(lines: list[str], fact: str) -> None:
    values = json.loads(lines[1])
    values["detail"]["proof"][fact] = ["w9"] if fact == "members" else 3
    lines[1] = json.dumps(values)
    assert any("line 2 was changed" in each.text for each in verify_events(lines) if each.proven is False)


def test_a_proof_that_is_none_is_named(lines: list[str]) -> None:
    lines[1] = event(EventKind.RESIZE, group(0, 1)).to_json().replace('"before": 0', '"before": "x"')
    assert any("line 2 has a proof that is none" in each.text for each in verify_events(lines))


@pytest.mark.parametrize(
    ("changes", "proven", "text"),
    [
        ({"hash": 5}, False, "but not each once"),
        ({"rest": None}, None, "counted only"),
        ({"samples": 38, "hash": (hash_of_all(SAMPLES) - 9) % (1 << 32), "rest": 9}, True, "2 left out at its end"),
    ],
)
def test_an_epoch_is_judged_by_its_samples(changes: dict[str, Any], proven: bool | None, text: str) -> None:
    first = group(0, 0)
    found = verify_events(
        [event(EventKind.STARTED, first).to_json(), event(EventKind.PASS, epoch(first.link, 0, **changes)).to_json()]
    )
    assert (found[-1].proven, text in found[-1].text) == (proven, True)


@pytest.mark.parametrize(
    "changes",
    [
        {"epoch": "x"},
        {"epoch": 1 << 70},
        {"of": -1},
        {"of": [1]},
        {"samples": None},
        {"steps": True},
        {"hash": "x"},
        {"hash": None},
        {"rest": "9" * 5000},
        {"rest": math.inf},
    ],
    ids=lambda each: f"{each:.40}" if isinstance(each, str) else str(each)[:40],
)
def test_a_strangers_file_is_no_proof(changes: dict[str, Any]) -> None:
    first = group(0, 0)
    lines = [event(EventKind.STARTED, first), event(EventKind.PASS, epoch(first.link, 0, **changes))]
    assert any(each.proven is False for each in verify_events([line.to_json() for line in lines]))


@pytest.mark.timeout(100)
def test_a_strangers_file_keeps_nobody_busy() -> None:
    first = group(0, 0)
    last = epoch(first.link, 10**15, of=10**18, samples=10**18)
    found = verify_events([event(EventKind.STARTED, first).to_json(), event(EventKind.PASS, last).to_json()])
    assert "epochs 0 to 999999999999999: no line says" in found[0].text
    assert "are not counted here" in found[-1].text


@pytest.mark.parametrize("changes", [{"digest": "x"}, {"step": [1]}, {"bytes": None}], ids=str)
def test_a_group_without_numbers_is_no_proof(changes: dict[str, Any]) -> None:
    strange = Link.after(0, {**group(0, 1).facts, **changes})
    found = verify_events([event(EventKind.RESIZE, strange).to_json()])
    assert any("a proof that is none" in each.text for each in found)


VALUES = (None, True, -1, 3.7, math.inf, math.nan, 10**400, "x", "9" * 5000, [], {}, [[]])


@hypothesis.settings(max_examples=400, deadline=None)
@hypothesis.given(st.data())
def test_no_damage_proves_anything_else(data: st.DataObject) -> None:
    """Whatever happens to a line: nothing is proven that was not before, and nothing raises."""
    lines = written()
    before = {str(each.text) for each in verify_events(lines) if each.proven}
    place = data.draw(st.integers(0, len(lines) - 1))
    line, how = lines[place], data.draw(st.sampled_from(["bit", "cut", "value", "key"]))
    if how == "bit":
        content = bytearray(line.encode())
        content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
        lines[place] = content.decode(errors="replace")
    elif how == "cut":
        lines[place] = line[: data.draw(st.integers(0, len(line) - 1))]
    else:
        values = json.loads(line)
        part = data.draw(st.sampled_from([values, values["detail"], values["detail"]["proof"]]))
        name = data.draw(st.sampled_from(sorted(part)))
        if how == "key":
            del part[name]
        else:
            part[name] = data.draw(st.sampled_from(VALUES))
        lines[place] = json.dumps(values)
    assert {str(each.text) for each in verify_events(lines, epochs=2) if each.proven} <= before


def test_what_a_chain_does_not_cover_is_sealed(lines: list[str]) -> None:
    lines[1] = lines[1].replace('"generation": 2', '"generation": 3').replace('"why"', '"because"')
    found = verify_events(lines)
    assert [each.text for each in found if each.proven is False] == [
        "line 2 was changed: its fields are not those that its seal was made of"
    ]
    assert not any("generation 3" in each.text for each in found)


def test_proofs_of_another_format_are_left_to_their_version(lines: list[str]) -> None:
    found = verify_events([line.replace('"format": 1', '"format": 2') for line in lines])
    assert {each.text.partition(" ")[2].partition(" ")[2] for each in found if each.line} == {
        "has a proof of format 2, and only 1 can be checked here"
    }
    assert not any(each.proven for each in found)


def test_lines_of_two_jobs_are_told_apart(lines: list[str]) -> None:
    found = verify_events([*lines, *written("mnist")])
    assert states(found) == [*WHOLE, *[("line", False)] * len(lines)]
    assert found[-1].text == "line 10 is of another job, 'mnist'"


def test_a_job_that_began_anew_says_so(lines: list[str]) -> None:
    (again,) = (each for each in verify_events([*lines, *written(step=1)]) if each.proven is None)
    assert again.text.startswith("a new chain of proofs begins with generation 1 at step 1: training began anew")


def test_checkpoints_show_what_is_cut_off(lines: list[str]) -> None:
    last = json.loads(lines[-1])["detail"]["proof"]["link"]
    assert states(verify_events(lines, saved={last: "step_10"})) == WHOLE
    (lost,) = (each for each in verify_events(lines[:-1], saved={last: "step_10"}) if each.proven is False)
    assert lost.text.startswith("what led to step_10 is not in the file: its last lines are missing, or")


def test_a_restarted_controller_adds_the_missing_proof(lines: list[str]) -> None:
    events, last = [JobEvent.from_json(line) for line in lines], group(0, 9)
    assert has_proof(events, events[1].detail) and not has_proof(events, last.detail)
    assert not has_proof([JobEvent.from_json(PLAIN)], last.detail)
    noted = group(events[-1].detail["proof"]["link"], 9)
    found = verify_events([*lines, event(EventKind.RECOVERED, noted, 6).to_json()])
    assert found[-1].proven and found[-1].text.startswith("generation 6 began at step 9")


def test_redone_steps_are_named(lines: list[str]) -> None:
    again = group(json.loads(lines[1])["detail"]["proof"]["link"], 3)
    found = verify_events([*lines, event(EventKind.STARTED, again, 6).to_json()])
    (redone,) = [each for each in found if each.what == "steps"]
    assert redone.text.startswith("the steps after step 2 (generation 2) were redone from a checkpoint: generation 6")


PLAIN = JobEvent(kind=EventKind.WARNING, time_s=1.0, from_workers=1, to_workers=1, reason="x").to_json()


def test_events_without_proofs_prove_nothing() -> None:
    assert states(verify_events([PLAIN])) == [("line", False)]


@pytest.fixture
def run(tmp_path: Path, lines: list[str]) -> RunStorage:
    """A run's directory with two automatic checkpoints and two reported ones."""
    storage = RunStorage(str(tmp_path / "run"))
    storage.create()
    storage.events.append(lines)
    links = [json.loads(line)["detail"]["proof"]["link"] for line in lines]
    for number, (at, steps) in enumerate(((2, 5), (4, 10)), 1):
        progress = RunProgress(epoch=number, epochs=3, steps=steps, proof=links[at])
        write_state(storage, {"run": progress.to_state()}, progress.resume_point())
        source = tmp_path / f"source_{number}"
        source.mkdir()
        (source / "model.pt").write_text(f"{number}")
        storage.persist_checkpoint(source, number, resume_point=progress.resume_point())
    return storage


def verified(storage: RunStorage) -> tuple[int, str]:
    answer = CliRunner().invoke(cli, ["verify", storage.path], env={"COLUMNS": "400"})
    assert answer.exception is None or isinstance(answer.exception, SystemExit), answer.exception
    return answer.exit_code, answer.output


def test_a_whole_directory_is_proven(run: RunStorage) -> None:
    code, said = verified(run)
    assert (code, said.count("is whole"), "UNPROVEN" in said) == (0, 4, False)


def test_events_cut_before_a_checkpoint_are_unproven(run: RunStorage) -> None:
    path = Path(run.path, "events.jsonl")
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    code, said = verified(run)
    assert code == 1 and said.count("UNPROVEN") == 1 and "is not in the file: its last lines are missing" in said


def swap(one: Path, other: Path) -> None:
    one.rename(one.with_name("third"))
    other.rename(one)
    one.with_name("third").rename(other)


def test_checkpoints_that_changed_places_are_named(run: RunStorage) -> None:
    swap(*Path(run.path).glob("checkpoint_*"))
    code, said = verified(run)
    assert code == 1 and said.count("UNPROVEN") == 2 and "its note says that it is number" in said


def test_automatic_checkpoints_that_changed_places_are_named(run: RunStorage) -> None:
    swap(*(path for path in Path(run.path, "automatic").iterdir() if path.is_dir()))
    code, said = verified(run)
    assert code == 1 and said.count("UNPROVEN") == 2 and "does not have the checksum" in said


def test_another_runs_checkpoint_is_named(run: RunStorage) -> None:
    progress = RunProgress(epoch=2, epochs=3, steps=12, proof=77)
    state = write_state(run, {"run": progress.to_state()}, progress.resume_point())
    code, said = verified(run)
    assert code == 1 and said.count("UNPROVEN") == 1 and f"what led to {state.path} is not in the file" in said


def test_a_note_that_lies_about_its_place_is_named(run: RunStorage) -> None:
    note = next(Path(run.path, "automatic").glob("step_000000000010*.json"))
    note.write_text(note.read_text().replace('"epoch": 2', '"epoch": 1'))
    code, said = verified(run)
    assert code == 1 and "is in epoch 2 after 10 steps, but its note says otherwise" in said


def test_the_exit_code_tells(tmp_path: Path, lines: list[str]) -> None:
    (tmp_path / "events.jsonl").write_text("\n".join(lines) + "\n")
    good = CliRunner().invoke(cli, ["verify", str(tmp_path)])
    assert (good.exit_code, "40 of 40 samples, each once" in good.output) == (0, True)
    (tmp_path / "events.jsonl").write_text("\n".join(lines[1:]) + "\n")
    bad = CliRunner().invoke(cli, ["verify", str(tmp_path), "--json"])
    assert bad.exit_code == 1
    assert any(each["proven"] is False for each in json.loads(bad.output))
    nothing = CliRunner().invoke(cli, ["verify", str(tmp_path / "no")])
    assert nothing.exit_code == 1


def test_another_model_contradicts_only_fixed_batches() -> None:
    for off, adapts, proven in ((1e-6, False, True), (1e-6, True, True), (0.1, False, False), (0.1, True, None)):
        result = ReplayResult(steps="steps 0 to 9", differences={"weight": off, "bias": 0.0}, adapts=adapts)
        assert result.proven is proven
        assert ("proves nothing" in str(result)) == (proven is None)


def test_a_replay_that_ends_or_hangs_without_a_model(tmp_path: Path) -> None:
    after = StateFile(path="state", resume_point=ResumePoint(epoch=0, steps=8), sha256="", size=0)
    window = Window(run=RunStorage(str(tmp_path / "digits")), before=None, after=after, name="digits-replay-8")
    window.replayed.create()
    with pytest.raises(ValueError, match="the replay has ended before step 8"):
        window.await_result(lambda: True, 60.0)
    with pytest.raises(TimeoutError, match="the replay has not reached step 8 within 0 s"):
        window.await_result(lambda: False, 0.0)
