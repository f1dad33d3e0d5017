"""Damaged and hostile files of sharded checkpoints: an error that says what is wrong, and never a wrong state."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_ray.checkpoints.automatic import CorruptStateError, StateFile, delete_others, state_files
from elastic_ray.checkpoints.run_directory import RunStorage
from elastic_ray.checkpoints.sharded.completing import PartsMissingError, await_parts, finish
from elastic_ray.checkpoints.sharded.manifest import Manifest, ManifestError, account_name, complete
from elastic_ray.checkpoints.sharded.reading import BLOCK_BYTES, PartFile, open_checkpoint
from elastic_ray.checkpoints.sharded.saver import write_part
from elastic_ray.state.codec import decode, encode
from elastic_ray.state.pieces import Pieces, shared_out, split_tree
from elastic_ray.state.resume_point import ResumePoint
from elastic_ray.state.tree import UnsafeStateError
from tests.sync.tiles.saving import read_checkpoint

RANKS = 3
POINT = ResumePoint(epoch=0, steps=7)


def state() -> dict[str, Any]:
    return {
        "model/0": {"weight": torch.arange(35.0).reshape(5, 7), "b": torch.arange(4), "scale": torch.tensor(2.0)},
        "run": {"epoch": 1, "sums": {(0, 1): {"loss": 0.25}}, "list": [torch.ones(2), 3]},
    }


def part_of(rank: int) -> Any:
    """Moments of 12 elements, of which the second rank has the middle; the last alone knows their count."""
    moments = torch.arange(12.0).reshape(3, 4)
    cuts = (0, 3, 9, 12)
    held = ((cuts[rank], moments.reshape(-1)[cuts[rank] : cuts[rank + 1]]),)
    tree: dict[str, Any] = {"model/0": shared_out(state()["model/0"], rank, RANKS)}
    tree["optimizer"] = {0: {"m": Pieces((3, 4), torch.float32, held)}}
    if rank == RANKS - 1:
        tree["optimizer"][1] = {"count": torch.tensor(3.0), "kind": None}
    return {**state(), **tree} if rank == 0 else tree


def write(storage: RunStorage, steps: int = 7, ranks: int = RANKS) -> StateFile:
    """A checkpoint that is complete."""
    directory = f"{storage.path}/automatic/step_{steps:012d}_ab"
    parts = []
    for rank in reversed(range(ranks)):
        skeleton, tensors = split_tree(part_of(rank))
        parts.append(write_part(storage, directory, rank=rank, steps=steps, skeleton=skeleton, tensors=tensors))
    point = dataclasses.replace(POINT, steps=steps)
    found = await_parts(storage, directory, parts[-1], ranks, timeout_s=5.0, go_on=lambda: True)
    return finish(storage, directory, found, point)


@pytest.fixture
def storage(tmp_path: Path) -> RunStorage:
    return RunStorage(str(tmp_path / "run"))


def test_what_ranks_have_written_is_read_as_one_state(storage: RunStorage) -> None:
    written = write(storage)
    assert state_files(storage) == (written,)
    found = read_checkpoint(storage, written)
    for name, value in state()["model/0"].items():
        assert torch.equal(found["model/0"][name], value) and found["model/0"][name].dtype == value.dtype
    assert torch.equal(found["optimizer"][0]["m"], torch.arange(12.0).reshape(3, 4))
    assert found["optimizer"][1] == {"count": torch.tensor(3.0), "kind": None}
    assert found["run"]["sums"] == {(0, 1): {"loss": 0.25}} and torch.equal(found["run"]["list"][0], torch.ones(2))


def retold(written: StateFile, change: Callable[[dict[str, Any]], None]) -> StateFile:
    """A manifest that somebody has changed, with the right checksum."""
    path = Path(written.path) / "manifest.bin"
    told = decode(path.read_bytes())
    change(told)
    path.write_bytes(encode(told))
    return dataclasses.replace(written, sha256=hashlib.sha256(path.read_bytes()).hexdigest())


def set_file(told: dict[str, Any], name: Any) -> None:
    told["files"][1] = (name, *told["files"][1][1:])


def set_tensor(told: dict[str, Any], **changes: Any) -> None:
    """Change the first piece of the tensor of moments."""
    number = next(i for i, each in enumerate(told["tensors"]) if each[0] == ("optimizer", 0, "m"))
    path, shape, dtype, pieces = told["tensors"][number]
    rank, *rest = pieces[0]
    fields = dict(zip(("start", "length", "offset", "nbytes", "offsets", "sizes", "archive"), rest, strict=True))
    shape, dtype = changes.pop("shape", shape), changes.pop("dtype", dtype)
    rank = changes.pop("rank", rank)
    told["tensors"][number] = (path, shape, dtype, [(rank, *(fields | changes).values()), *pieces[1:]])


HOSTILE: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "a path that leaves the directory": (lambda told: set_file(told, "../../../etc/passwd"), "must be the file __1_0"),
    "an absolute path": (lambda told: set_file(told, "/etc/passwd"), "must be the file __1_0.distcp, but"),
    "another rank's file": (lambda told: set_file(told, "__0_0.distcp"), "must be the file __1_0.distcp, but"),
    "a huge tensor": (lambda told: set_tensor(told, shape=(1 << 40, 1 << 20)), "ends at element 12 of"),
    "huge sizes": (lambda told: set_tensor(told, shape=(1 << 62, 4)), "a number from 0 was expected"),
    "a huge piece": (
        lambda told: set_tensor(told, length=1 << 50, nbytes=1 << 52),
        "a gap or an overlap at element 11",
    ),
    "a piece beyond its file": (lambda told: set_tensor(told, offset=1 << 30), "beyond the end of the part of rank 0"),
    "a negative place": (lambda told: set_tensor(told, offset=-4), "a number from 0 was expected"),
    "no such rank": (lambda told: set_tensor(told, rank=7), "beyond the end of the part of rank 7"),
    "a gap": (lambda told: set_tensor(told, start=1), "a gap or an overlap at element 0"),
    "another type": (lambda told: set_tensor(told, dtype="float64"), "a gap or an overlap at element 0"),
    "no type": (lambda told: set_tensor(told, dtype="__class__"), "torch has no type"),
    "too many dimensions": (lambda told: set_tensor(told, shape=(1,) * 70), "a shape was expected"),
    "a tensor that is not there": (lambda told: told["tree"].pop("optimizer"), "other tensors than its list"),
    "no tree": (lambda told: told.update(tree=[]), "no tree of states"),
    "another version": (lambda told: told.update(version=9), "not a record of version 1"),
    "nothing": (lambda told: told.clear(), "not a record of version 1"),
    "no files": (lambda told: told.pop("files"), "not complete"),
    "fewer files": (lambda told: told["files"].pop(), "beyond the end of the part of rank 2"),
    "another step": (lambda told: told.update(steps=8), "of step 8 and 3 ranks, but its note says step 7"),
}


@pytest.mark.parametrize("how", HOSTILE)
def test_a_hostile_manifest_is_refused_before_memory_is_taken(storage: RunStorage, how: str) -> None:
    change, why = HOSTILE[how]
    with pytest.raises(CorruptStateError, match=why.replace("(", r"\(")):
        read_checkpoint(storage, retold(write(storage), change))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("name", "damage", "why"),
    [
        ("__1_0.distcp", cut, "bytes, but"),
        ("__2_0.distcp", flip, "checksum of what was written"),
        ("__0_0.distcp", Path.unlink, "cannot be read"),
        ("manifest.bin", cut, "checksum of what was written"),
        ("manifest.bin", flip, "checksum of what was written"),
        ("manifest.bin", Path.unlink, "cannot be read"),
    ],
)
def test_damaged_files_are_recognised(storage: RunStorage, name: str, damage: Callable[[Path], None], why: str) -> None:
    written = write(storage)
    damage(Path(written.path) / name)
    for read in (read_checkpoint, open_checkpoint):
        with pytest.raises(CorruptStateError, match=why):
            read(storage, written)


def test_ranges_of_a_part_are_compared_with_the_whole(tmp_path: Path, storage: RunStorage) -> None:
    """Ranges within a block, over the edges of blocks and of readings, to the end, and empty ones."""
    content = random.Random(5).randbytes(20 * BLOCK_BYTES + 777)
    path = tmp_path / "part"
    path.write_bytes(content)
    part = PartFile(storage, str(path))
    whole = bytearray(len(content))
    assert part.scatter([(0, memoryview(whole))]) == hashlib.sha256(content).hexdigest() and whole == content
    ranges = [(5, 9), (BLOCK_BYTES - 1, BLOCK_BYTES + 1), (3, len(content)), (len(content) - 1, len(content)), (7, 7)]
    for first, last in ranges:
        found = bytearray(last - first)
        part.read(first, memoryview(found))
        assert found == content[first:last], (first, last)
    path.write_bytes(content[:-1])
    part.read(3, memoryview(bytearray(9)))
    with pytest.raises(CorruptStateError, match="part has changed since it was compared with its checksum"):
        part.read(len(content) - 9, memoryview(bytearray(5)))


def test_torchs_metadata_is_never_read(storage: RunStorage) -> None:
    written = write(storage)
    (Path(written.path) / ".metadata").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    assert read_checkpoint(storage, written)["run"]["epoch"] == 1


@pytest.mark.parametrize("parts", [-1, "x", 1 << 70, None])
def test_a_note_of_no_parts_is_passed_over(storage: RunStorage, parts: Any) -> None:
    written, problems = write(storage), list[str]()
    path = Path(written.path + ".json")
    path.write_text(json.dumps({**json.loads(path.read_text()), "parts": parts}))
    assert state_files(storage, problems.append) == () and len(problems) == 1


def test_parts_that_are_not_there_are_named(storage: RunStorage) -> None:
    directory = f"{storage.path}/automatic/step_000000000007_ab"
    own = [split_tree(part_of(rank)) for rank in range(2)]
    parts = [
        write_part(storage, directory, rank=rank, steps=7, skeleton=skeleton, tensors=tensors)
        for rank, (skeleton, tensors) in enumerate(own)
    ]
    with pytest.raises(PartsMissingError, match=r"there is no part of ranks 2 after 0\.1 s") as error:
        await_parts(storage, directory, parts[0], RANKS, timeout_s=0.1, go_on=lambda: True)
    assert error.value.unseen
    with pytest.raises(PartsMissingError, match=r"left the group whose part is not written: \[2\]"):
        await_parts(storage, directory, parts[0], RANKS, timeout_s=9, go_on=lambda: True, all_live=lambda: False)
    with pytest.raises(InterruptedError):
        await_parts(storage, directory, parts[0], RANKS, timeout_s=9, go_on=lambda: False)
    with pytest.raises(ManifestError, match=r"ends at element|a gap or an overlap"):
        complete(parts)
    with pytest.raises(ManifestError, match="of one step"):
        complete([parts[0], dataclasses.replace(parts[1], steps=8)])
    (Path(directory) / "__1_0.distcp").write_bytes(b"other")
    with pytest.raises(ManifestError, match=r"part_1.bin names rank 1, step 7 and .* has 5 bytes"):
        await_parts(storage, directory, parts[0], 2, timeout_s=9, go_on=lambda: True)
    assert state_files(storage) == ()


def test_an_account_that_is_being_written_is_waited_for(storage: RunStorage) -> None:
    directory = f"{storage.path}/automatic/step_000000000007_ab"
    write(storage)
    account = Path(directory) / account_name(1)
    content = account.read_bytes()
    account.write_bytes(content[:-5])
    skeleton, tensors = split_tree(part_of(0))
    own = write_part(storage, directory, rank=0, steps=7, skeleton=skeleton, tensors=tensors)
    asked = []

    def go_on() -> bool:
        asked.append(account.write_bytes(content))
        return True

    assert len(await_parts(storage, directory, own, RANKS, timeout_s=9, go_on=go_on)) == RANKS and asked


def test_what_only_running_code_could_load_is_refused(storage: RunStorage) -> None:
    skeleton, tensors = split_tree({"x": {"thing": storage}})
    with pytest.raises(UnsafeStateError, match=r"\['x'\]\['thing'\] is a .*RunStorage"):
        write_part(storage, f"{storage.path}/automatic/step_7", rank=0, steps=7, skeleton=skeleton, tensors=tensors)
    assert not list(Path(storage.path).rglob("*.distcp"))


def test_retention_deletes_whole_directories(storage: RunStorage) -> None:
    for steps in (3, 5, 7):
        delete_others(storage, write(storage, steps), keep=2)
    assert [each.steps for each in state_files(storage)] == [7, 5]
    assert len([path for path in (Path(storage.path) / "automatic").iterdir() if path.is_dir()]) == 2


def test_a_manifest_survives_its_own_bytes(storage: RunStorage) -> None:
    content = (Path(write(storage).path) / "manifest.bin").read_bytes()
    assert Manifest.from_bytes(content).to_bytes() == content
