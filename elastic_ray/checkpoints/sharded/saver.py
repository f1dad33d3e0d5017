"""SHELL: saves this rank's part of a checkpoint, or all of it; copies between steps and writes in a thread."""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import io
import logging
import posixpath
import struct
import time
import uuid
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

import pyarrow
import torch
from torch import Tensor

from elastic_ray.checkpoints.automatic import StateFile, delete_state, new_path
from elastic_ray.checkpoints.checked_files import CheckedStream, write_checked
from elastic_ray.checkpoints.run_directory import RunStorage
from elastic_ray.checkpoints.sharded.completing import await_parts, finish
from elastic_ray.checkpoints.sharded.manifest import Part, Path, StoredPiece, StoredTensor, account_name, part_name
from elastic_ray.checkpoints.sharded.rectangles import rectangles
from elastic_ray.consensus.saving import Readiness, SaveOrder
from elastic_ray.state.codec import NotPlainError, SparseIndex, TensorIndex, dtype_name, encode
from elastic_ray.state.pieces import NamedPieces, split_tree
from elastic_ray.state.resume_point import ResumePoint
from elastic_ray.state.tree import UnsafeStateError
from placement.storage.private_files import make_directory
from placement.storage.storage_calls import Call, StorageCalls, StorageTimeoutError

if TYPE_CHECKING:
    from elastic_ray.state.shared_state import SharedState

Kind = tuple[torch.Size, torch.dtype, bool]
"""Shape and type of a tensor, and whether it is on a GPU."""


class CopyBuffers:
    """Preallocated buffers for copies of tensors, since writing to fresh memory is several times slower."""

    def __init__(self) -> None:
        self._buffers: list[torch.Tensor] = []
        self.made = 0

    def fit(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
        """Return a buffer for each tensor, in order; None if one has none. Some stay unused: gradients come and go."""
        free = collections.defaultdict(list)
        for buffer in reversed(self._buffers):
            free[buffer.shape, buffer.dtype].append(buffer)
        found = [free[t.shape, t.dtype].pop() for t in tensors if free[t.shape, t.dtype]]
        return found if len(found) == len(tensors) else None

    def make(self, kinds: Sequence[Kind]) -> None:
        """Replace all buffers with new ones of the given kinds. Raises MemoryError if memory is insufficient."""
        self.made += 1
        self._buffers = []  # old and new buffers must not take memory at the same time
        why = ""
        for pin in (True, False):  # pinned memory is scarce; without it a copy from a GPU takes longer
            try:
                self._buffers = [
                    torch.zeros(shape, dtype=dtype, pin_memory=pin and cuda) for shape, dtype, cuda in kinds
                ]
                return
            except Exception as error:
                why = str(error)
        raise MemoryError(f"there is no memory for a copy of the state: {why}")


def kinds_of(tensors: Iterable[torch.Tensor]) -> list[Kind]:
    """Return each tensor's kind: its shape, dtype, and whether it is on a GPU."""
    return [(tensor.shape, tensor.dtype, tensor.is_cuda) for tensor in tensors]


def copy_into(buffers: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> None:
    """Copy tensors into buffers, and wait until the copies are complete."""
    devices = {tensor.device for tensor in tensors if tensor.is_cuda}
    for device in devices:  # the copies run on other streams than what computes the tensors
        torch.cuda.synchronize(device)
    pairs = sorted(zip(buffers, tensors, strict=True), key=lambda pair: -pair[0].nbytes)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:  # one thread does not fill the memory's bandwidth
        other = pool.submit(_copy_all, pairs[1::2])
        _copy_all(pairs[::2])
        other.result()
    for device in devices:
        torch.cuda.synchronize(device)


def _copy_all(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for buffer, tensor in pairs:
        buffer.copy_(tensor, non_blocking=True)


_LONGEST_LOOK_S = 10.0
logger = logging.getLogger(__name__)
_LOCAL_HEADER = struct.Struct("<26xHH")  # of a file in a zip archive: lengths of its name and of what follows that


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CapturedPart:
    """State for this rank to write: its part, or the entire state if ``order`` is None."""

    order: SaveOrder | None
    resume_point: ResumePoint
    skeleton: Any
    tensors: Sequence[NamedPieces]
    workers: tuple[str, ...]


class PartSaver:
    """Saver of this rank's part of a checkpoint.

    Args:
        workers: returns the workers of the current group in rank order; empty while the group changes.
        busy: returns True while something is being written.
    """

    def __init__(
        self,
        states: SharedState,
        storage: RunStorage,
        calls: StorageCalls,
        *,
        workers: Callable[[], tuple[str, ...]],
        busy: Callable[[], bool],
        timeout_s: float,
    ) -> None:
        self._states, self._storage, self._calls = states, storage, calls
        self._workers, self._busy, self._timeout_s = workers, busy, timeout_s
        self._buffers = CopyBuffers()
        self.no_memory = ""  # why there is none for a copy; empty while that is not known
        self._making: Call | None = None
        self._looking: Call | None = None
        self._never = ""
        self._groups = 0  # that were entered
        self._fits = -1  # how often memory had been made when it was known to fit this group's part

    def start(self) -> None:
        """Prepare for a new group, where this rank may write a different part of the state."""
        self._groups, self._fits = self._groups + 1, -1

    def standing(self) -> Readiness:
        """Return whether this rank can write its part with what is already prepared; prepares nothing more."""
        if self._looking is None:
            return Readiness.NOT_YET
        self._poll(wait=False)
        if self._never:
            return Readiness.NEVER
        waits = self._fits != self._buffers.made or self.makes_memory or self._busy()
        return Readiness.NOT_YET if waits or not self._looking.answer.done() else Readiness.READY

    def refuse(self, why: str) -> None:
        """Make this rank refuse to write parts of checkpoints from now on; `why` is the reason."""
        self._never = why

    def readiness(self, rank: int, world_size: int, *, now: bool) -> Readiness:
        """Return if this rank can write its part of a checkpoint now, later, or never.

        Unless ``now``, memory for a copy of the state is needed as well; if it is missing, its allocation starts. With
        ``now``, training does not continue during the save, so that no copy is needed.
        """
        if self._looking is None:
            self._looking = self._calls.start("looking for the run's directory", self._storage.check_reachable)
        self._poll(wait=now)
        if self._never:
            logger.warning("rank %d writes no part of checkpoints: %s", rank, self._never)
            return Readiness.NEVER
        if not self._looking.answer.done():
            if time.monotonic() - self._looking.heard_s > self._timeout_s:
                self._never = f"storage has not answered for {self._timeout_s:g} s: {self._looking.what}"
            return Readiness.NEVER if now else Readiness.NOT_YET
        if now:
            return Readiness.READY
        if self._busy() or self.makes_memory:
            return Readiness.NOT_YET
        tensors = _tensors(split_tree(self._states.capture_part(rank, world_size))[1])
        if self._buffers.fit(tensors) is None:
            self._make(tensors, self._groups, completes=rank == 0)
            return Readiness.NOT_YET
        self._fits = self._buffers.made
        return Readiness.READY

    @property
    def makes_memory(self) -> bool:
        """True while memory for a copy is being allocated."""
        return self._making is not None and not self._making.answer.done()

    def _poll(self, *, wait: bool) -> None:
        """Check that this node sees the run's directory."""
        assert self._looking is not None, "it was begun"
        try:
            if wait:
                self._calls.wait(self._looking, timeout_s=min(self._timeout_s, _LONGEST_LOOK_S))
            if self._looking.answer.done():
                self._looking.answer.result()
        except (OSError, StorageTimeoutError, pyarrow.ArrowException) as error:
            self._never = str(error)

    def _make(self, tensors: Sequence[Tensor], group: int, *, completes: bool) -> None:
        """Allocate memory for copies of `tensors`, which `group` writes (-1: one rank alone)."""
        kinds = kinds_of(tensors)

        def make() -> None:
            try:
                self._buffers.make(kinds)
                if group == self._groups:
                    self._fits = self._buffers.made
            except MemoryError as error:
                self._never = self.no_memory = str(error)
            if completes:  # importing torch's side takes a second, which is not to count as a checkpoint's cost
                import_module("elastic_ray.checkpoints.sharded.completing")

        self._making = self._calls.start("making memory for a checkpoint", make)

    def capture(self, order: SaveOrder | None, resume_point: ResumePoint, *, copy: bool) -> CapturedPart | None:
        """Capture this rank's state for :meth:`write`; return None if memory for a copy must be allocated first.

        None is returned only without ``order``; the allocation then runs in the background.

        Args:
            order: the ranks' agreement on this checkpoint; None if this rank alone writes the entire state.
            copy: copy the state, because training continues while it is written.

        Raises MemoryError if there is not enough memory for a copy.
        """
        states = self._states
        trees = states.capture_part(order.rank, order.world_size) if order is not None else states.capture_to_save()
        skeleton, tensors = split_tree(trees)
        if copy and order is None and self._buffers.fit(originals := _tensors(tensors)) is None:
            # Writing to fresh memory is several times slower, so a thread prepares the memory first.
            self._make(originals, -1, completes=True)
            return None
        if copy:
            tensors = self._copied(tensors)
        return CapturedPart(
            order=order, resume_point=resume_point, skeleton=skeleton, tensors=tensors, workers=self._workers()
        )

    def _copied(self, tensors: Sequence[NamedPieces]) -> list[NamedPieces]:
        """Return the tensors with their elements copied into buffers."""
        originals = _tensors(tensors)
        buffers = self._buffers.fit(originals)
        if buffers is None:  # the state has come to have other tensors since it was looked at
            self._buffers.make(kinds_of(originals))
            buffers = self._buffers.fit(originals)
        assert buffers is not None, "they are of the same kinds"
        copy_into(buffers, originals)
        copies = iter(buffers)
        return [
            dataclasses.replace(
                each,
                pieces=dataclasses.replace(
                    each.pieces, held=tuple((start, next(copies)) for start, _ in each.pieces.held)
                ),
            )
            for each in tensors
        ]

    def write(self, part: CapturedPart, go_on: Callable[[], bool]) -> StateFile | None:
        """Write a captured part; rank 0 awaits the others' parts and returns the completed checkpoint, others None."""
        order, steps = part.order, part.resume_point.steps
        tensors = [_on_cpu(each) for each in part.tensors]
        if order is None:
            return _write_alone(self._storage, part.skeleton, tensors, part.resume_point, go_on)
        directory = new_path(self._storage, steps, order.token)
        written = write_part(
            self._storage, directory, rank=order.rank, steps=steps, skeleton=part.skeleton, tensors=tensors, go_on=go_on
        )
        if order.rank:
            return None
        parts = await_parts(
            self._storage,
            directory,
            written,
            order.world_size,
            timeout_s=self._timeout_s,
            go_on=go_on,
            all_live=lambda: self._all_live(part.workers),
        )
        return finish(self._storage, directory, parts, part.resume_point, go_on)

    def _all_live(self, workers: tuple[str, ...]) -> bool:
        """True if all `workers` are in the current group, or if the group is changing."""
        present = self._workers()
        return not present or set(workers) <= set(present)


def _tensors(named: Sequence[NamedPieces]) -> list[Any]:
    return [tensor for each in named for _, tensor in each.pieces.held]


def _on_cpu(named: NamedPieces) -> NamedPieces:
    """Return the tensors in CPU memory; a preempted job's tensors were not copied."""
    held = tuple((start, tensor.cpu()) for start, tensor in named.pieces.held)
    return dataclasses.replace(named, pieces=dataclasses.replace(named.pieces, held=held))


def write_state(
    storage: RunStorage,
    trees: Mapping[str, Any],
    resume_point: ResumePoint,
    *,
    go_on: Callable[[], bool] = lambda: True,
) -> StateFile:
    """Write captured states (``SharedState.capture``) as a checkpoint of one part, completely or not at all."""
    skeleton, tensors = split_tree(trees)
    return _write_alone(storage, skeleton, [_on_cpu(each) for each in tensors], resume_point, go_on)


def _write_alone(
    storage: RunStorage,
    skeleton: Any,
    tensors: Sequence[NamedPieces],
    resume_point: ResumePoint,
    go_on: Callable[[], bool],
) -> StateFile:
    """Write the entire state as rank 0's part; if writing fails, nothing is left behind."""
    steps = resume_point.steps
    directory = new_path(storage, steps, uuid.uuid4().hex[:8])
    try:
        part = write_part(storage, directory, rank=0, steps=steps, skeleton=skeleton, tensors=tensors, go_on=go_on)
        return finish(storage, directory, [part], resume_point, go_on)
    except BaseException:
        with contextlib.suppress(Exception):
            delete_state(storage, directory)
        raise


def write_part(
    storage: RunStorage,
    directory: str,
    *,
    rank: int,
    steps: int,
    skeleton: Any,
    tensors: Sequence[NamedPieces],
    go_on: Callable[[], bool] = lambda: True,
) -> Part:
    """Write a rank's part and then, for ranks other than 0, the file that describes the part.

    Raises UnsafeStateError: ``skeleton`` holds more than indices of tensors and plain values.
    """
    try:
        encode(skeleton)  # what cannot be told is found before anything is written
    except NotPlainError as error:
        raise UnsafeStateError(f"the state holds something else than tensors and plain values: {error}") from error
    make_directory(storage.filesystem, posixpath.dirname(directory), private=storage.private)
    make_directory(storage.filesystem, directory, private=storage.private)
    stored: list[StoredTensor] = []
    values: list[tuple[Path, tuple[int, int]]] = []
    path = posixpath.join(directory, part_name(rank))

    def write(stream: CheckedStream) -> None:
        stored.extend(_write_tensor(stream, rank, each) for each in tensors)
        if rank == 0:  # for torch's own readers; ours has the skeleton
            values.extend((path, _archived(stream, value)[0]) for path, value in plain_values(skeleton))

    try:
        written = write_checked(storage, path, write, go_on)
        part = Part(
            rank=rank,
            steps=steps,
            sha256=written.sha256,
            size=written.size,
            tensors=tuple(stored),
            plain=tuple(plain_values(skeleton)) if rank else (),
            tree=None if rank else skeleton,
            values=tuple(values),
        )
        if rank:
            content = part.to_bytes()
            account = posixpath.join(directory, account_name(rank))
            write_checked(storage, account, lambda stream: stream.write(content), go_on)
    except BaseException:
        with contextlib.suppress(Exception):
            storage.filesystem.delete_file(path)
        raise
    return part


def plain_values(skeleton: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield the path and value of each non-tensor leaf in a state tree; a list without tensors is one leaf."""
    if isinstance(skeleton, Mapping) and skeleton:
        for key, value in skeleton.items():
            yield from plain_values(value, (*path, key))
    elif type(skeleton) in (list, tuple) and _has_tensors(skeleton):
        for index, value in enumerate(skeleton):
            yield from plain_values(value, (*path, index))
    elif not isinstance(skeleton, (TensorIndex, SparseIndex)):
        yield path, skeleton


def _has_tensors(node: Any) -> bool:
    if isinstance(node, Mapping):
        return any(map(_has_tensors, node.values()))
    if type(node) in (list, tuple):
        return any(map(_has_tensors, node))
    return isinstance(node, (TensorIndex, SparseIndex))


def _write_tensor(stream: CheckedStream, rank: int, named: NamedPieces) -> StoredTensor:
    """Write this rank's elements of a tensor, as rectangles."""
    pieces = named.pieces
    stored = []
    for start, tensor in sorted(pieces.held, key=lambda held: held[0]):
        flat = tensor.reshape(-1)
        for part in rectangles(pieces.shape, start, flat.numel()):
            elements = flat[part.start - start : part.start - start + part.length]
            archive, offset = _archived(stream, elements.view(part.sizes))
            stored.append(
                StoredPiece(
                    start=part.start,
                    length=part.length,
                    offset=offset,
                    nbytes=elements.nbytes,
                    offsets=part.offsets,
                    sizes=part.sizes,
                    archive=archive,
                )
            )
    return StoredTensor(
        path=named.path,
        shape=pieces.shape,
        dtype=dtype_name(pieces.dtype),
        pieces=tuple((rank, piece) for piece in stored),
    )


def _archived(stream: CheckedStream, value: Any) -> tuple[tuple[int, int], int]:
    """Write torch's archive of a value; return its position and size, and the position of a tensor's bytes."""
    archive, begin = io.BytesIO(), stream.size
    if isinstance(value, Tensor) and value.untyped_storage().nbytes() > value.nbytes:
        value = value.clone()  # a view would bring all of its storage along
    torch.save(value, archive)
    offset = begin
    if isinstance(value, Tensor):
        with zipfile.ZipFile(archive) as files:
            (entry,) = [each for each in files.infolist() if each.filename.endswith("/data/0")]
        header = archive.getbuffer()[entry.header_offset : entry.header_offset + _LOCAL_HEADER.size]
        offset = begin + entry.header_offset + _LOCAL_HEADER.size + sum(_LOCAL_HEADER.unpack(header))
        del header
    stream.write(archive.getbuffer())
    return (begin, stream.size - begin), offset
