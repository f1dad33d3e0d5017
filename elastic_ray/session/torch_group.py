"""Default process group of torch.distributed whose collectives run in the job's current group (torch).

Torch's own groups cannot change size. This one has no connections: its collectives run in the current generation, and
behave like ``elastic_ray.all_reduce`` (see there). Objects that hold this group, such as a ``DeviceMesh``, survive
changes of the job's group, and always see the current rank and size. The group belongs to the process, and delegates to
the thread's session.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from elastic_ray.communication.communicator import CommunicationFailedError, Communicator
from elastic_ray.communication.ended_work import BACKEND, EndedWork
from elastic_ray.consensus.intents import Announced, RanksDisagreeError
from elastic_ray.run.current import check_thread, session_of_thread
from elastic_ray.state.tree import from_bytes, to_bytes

if TYPE_CHECKING:
    from elastic_ray.session.session import Session

_TAG = 1 << 16  # of the user's sends; lower ones are the protocol's
_LONGEST_TAG = 1 << 15
_NEVER = timedelta(seconds=1)
_SUM, _AVG = dist.ReduceOp.SUM, dist.ReduceOp.AVG
_NUMBERS: dict[Any, tuple[str, str]] = {
    dist.ReduceOp.SUM: ("SUM", "fic"),
    dist.ReduceOp.AVG: ("AVG", "fc"),
    dist.ReduceOp.PRODUCT: ("PRODUCT", "fi"),
    dist.ReduceOp.MIN: ("MIN", "fib"),
    dist.ReduceOp.MAX: ("MAX", "fib"),
    dist.ReduceOp.BAND: ("BAND", "ib"),
    dist.ReduceOp.BOR: ("BOR", "ib"),
    dist.ReduceOp.BXOR: ("BXOR", "ib"),
}
"""Reductions, with the kinds of numbers that they take: floats, integers, complex ones, bools."""
_SUBGROUP = (
    "torch.distributed.{what} of a part of the ranks is not there in a job whose group changes: a rank of it may leave."
    " Use all ranks, new_group() or dist.group.WORLD, and let ranks that have nothing to say pass zeros; a mesh has "
    "one dimension of get_world_size(), and others of 1"
)
_SIZES = (
    "{what} was prepared for a group of {prepared} workers, but the present one has {present}: ask "
    "dist.get_world_size() right before it, and make a DeviceMesh and its DTensors anew when the size has changed"
)


_ProcessGroup: Any = dist.ProcessGroup


class DefaultGroup(_ProcessGroup):  # type: ignore[misc]
    """Default process group that represents the job's current group.

    Collectives are complete when they return, even with ``async_op=True``.
    """

    def __init__(self) -> None:
        super().__init__(0, 1)

    # -- its place -----------------------------------------------------------------------------------------------------

    def rank(self) -> int:
        """Return this worker's rank; during catch-up, at most the last rank of the group whose results are replayed."""
        session = session_of_thread()
        return 0 if session is None else min(session.group.rank_info.rank, self.size() - 1)

    def size(self) -> int:
        """Return the number of workers; during catch-up, the size of the group whose results are replayed."""
        session = session_of_thread()
        if session is None:
            return 1
        known = session.collectives.next_known()
        return int(_of_bytes(known)[0]) if known is not None else session.group.rank_info.world_size

    getRank, getSize = rank, size

    def getBackendName(self) -> str:
        """Return the backend's name."""
        return BACKEND

    def new_group(self, ranks: Sequence[int], *args: Any, **options: Any) -> DefaultGroup | None:
        """Return a group of all ranks or, for a single rank, of that rank alone; None on ranks not in ``ranks``.

        Raises ValueError if ``ranks`` contains several ranks, but not all.
        """
        if len(ranks) == self.size():
            return made_group(str(options["group_name"]))
        if len(ranks) != 1:
            raise ValueError(_SUBGROUP.format(what="new_group()"))
        return made_group(str(options["group_name"]), SoloGroup()) if self.rank() in ranks else None

    def split_group(self, *args: Any, **options: Any) -> Any:
        """Raise ValueError, because the job's group cannot be split: all ranks form one group."""
        raise ValueError(_SUBGROUP.format(what="split_group()"))

    merge_remote_group = split_group

    # -- reductions ----------------------------------------------------------------------------------------------------

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> EndedWork:
        """Reduce tensors across all ranks, in place."""
        op, tensors = _op_of(opts), _listed(tensors)
        for tensor in tensors:
            _put([tensor], self._reduced("all_reduce", tensor, op))
        return EndedWork(tensors)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Sequence[Tensor], opts: Any) -> EndedWork:
        """Reduce tensors from all ranks onto rank ``opts.rootRank``, in place."""
        self._check_root("reduce", opts.rootRank)
        for tensor in tensors:
            found = self._reduced("reduce", tensor, _op_of(opts), root=opts.rootRank)
            if self.rank() == opts.rootRank:
                _put([tensor], found)
        return EndedWork(tensors)

    def _reduced(self, what: str, tensor: Tensor, op: Any, *, root: int = 0) -> list[Tensor]:
        """Return the reduction across all ranks."""
        name = _check_reduces(what, tensor, op)

        def perform(communicator: Communicator, device: Any) -> list[Tensor]:
            found = tensor.detach().to(device, copy=True, memory_format=torch.contiguous_format)
            numbers = found.to(torch.uint8) if found.dtype == torch.bool else found
            parts = torch.view_as_real(numbers) if numbers.is_complex() else numbers
            if parts.numel():
                communicator.wait(communicator.all_reduce(parts, _SUM if op == _AVG else op))
            return [numbers.to(tensor.dtype) if op != _AVG else numbers / communicator.world_size]

        return self._call(what, (name, _form(tensor), root), [tensor], perform, lambda: [tensor.detach().clone()])

    def reduce_scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any = None
    ) -> EndedWork:
        """Reduce one tensor per rank across all ranks; each rank receives the result for its own tensor."""
        for output, given in zip(outputs, inputs, strict=True):
            self._check_places("reduce_scatter", given)
            flat = torch.cat([each.reshape(-1) for each in given])
            sizes = [each.numel() for each in given]
            self._scattered("reduce_scatter", output, flat, sizes, _op_of(opts))
        return EndedWork(outputs)

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> EndedWork:
        """Reduce one tensor across all ranks, divided into equal parts by rank; each rank receives its own part."""
        self._scattered("reduce_scatter", output, tensor.reshape(-1), [output.numel()] * self.size(), _op_of(opts))
        return EndedWork([output])

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_tensor_coalesced(
        self, outputs: Sequence[Tensor], tensors: Sequence[Tensor], opts: Any = None
    ) -> EndedWork:
        """Reduce several tensors across all ranks; each rank receives its own part of each tensor."""
        for output, tensor in zip(outputs, tensors, strict=True):
            self.reduce_scatter_single(output, tensor, opts)
        return EndedWork(outputs)

    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    def _scattered(self, what: str, output: Tensor, flat: Tensor, sizes: Sequence[int], op: Any) -> None:
        """Reduce a flat tensor across all ranks, and copy this rank's part into ``output``."""
        if sum(sizes) != flat.numel():
            raise RuntimeError(_SIZES.format(what=what, prepared=flat.numel() // max(1, sizes[0]), present=self.size()))
        if output.numel() != sizes[self.rank()]:
            raise ValueError(
                f"{what} gives this rank {sizes[self.rank()]} numbers, but its output has {output.numel()}"
            )
        (found,), first = self._reduced(what, flat, op), sum(sizes[: self.rank()])
        _put([output], [found[first : first + output.numel()]])

    # -- what is gathered ----------------------------------------------------------------------------------------------

    def allgather(self, outputs: Sequence[Sequence[Tensor]], tensors: Sequence[Tensor], opts: Any = None) -> EndedWork:
        """Gather every rank's tensor into a list."""
        for places, tensor in zip(outputs, tensors, strict=True):
            self._check_places("all_gather", places, tensor)
            _put(places, self._gathered("all_gather", tensor))
        return EndedWork([each for places in outputs for each in places])

    def allgather_coalesced(
        self, outputs: Sequence[Sequence[Tensor]], tensors: Sequence[Tensor], opts: Any = None
    ) -> EndedWork:
        """Gather each of several tensors from every rank."""
        self._check_places("all_gather_coalesced", outputs)
        for number, tensor in enumerate(tensors):
            _put([places[number] for places in outputs], self._gathered("all_gather", tensor))
        return EndedWork([each for places in outputs for each in places])

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> EndedWork:
        """Gather every rank's tensor into one tensor (``output``), concatenated in rank order."""
        if output.numel() != tensor.numel() * self.size():
            prepared = output.numel() // max(1, tensor.numel())
            raise RuntimeError(_SIZES.format(what="all_gather", prepared=prepared, present=self.size()))
        _put(output.view(self.size(), *tensor.shape).unbind(), self._gathered("all_gather", tensor))
        return EndedWork([output])

    _allgather_base = all_gather_single

    def allgather_into_tensor_coalesced(
        self, outputs: Sequence[Tensor], tensors: Sequence[Tensor], opts: Any = None
    ) -> EndedWork:
        """Gather several tensors from every rank; each output is concatenated in rank order."""
        for output, tensor in zip(outputs, tensors, strict=True):
            self.all_gather_single(output, tensor)
        return EndedWork(outputs)

    all_gather_single_coalesced = allgather_into_tensor_coalesced

    def gather(self, outputs: Sequence[Sequence[Tensor]], tensors: Sequence[Tensor], opts: Any) -> EndedWork:
        """Gather every rank's tensor into a list on one rank."""
        (tensor,) = tensors
        self._check_root("gather", opts.rootRank)
        for places in outputs:
            self._check_places("gather", places, tensor)
        found = self._gathered("gather", tensor, root=opts.rootRank)
        for places in outputs:
            _put(places, found)
        return EndedWork([each for places in outputs for each in places])

    def _gathered(self, what: str, tensor: Tensor, *, root: int = 0) -> list[Tensor]:
        """Return every rank's tensor, in rank order."""

        def perform(communicator: Communicator, device: Any) -> list[Tensor]:
            world, sent = communicator.world_size, _bytes_of(tensor, device)
            received = sent.new_empty(world * sent.numel())
            if sent.numel():
                communicator.wait(communicator.all_gather(received, sent))
            return list(received.view(tensor.dtype).view(world, *tensor.shape).unbind())

        return self._call(what, (_form(tensor), root), [tensor], perform, lambda: [tensor.detach().clone()])

    # -- what is given out ---------------------------------------------------------------------------------------------

    def broadcast(self, tensors: Sequence[Tensor], opts: Any) -> EndedWork:
        """Broadcast one rank's tensor, in place."""
        root, tensors = getattr(opts, "rootRank", opts), _listed(tensors)
        self._check_root("broadcast", root)
        for tensor in tensors:

            def perform(communicator: Communicator, device: Any, tensor: Tensor = tensor) -> list[Tensor]:
                sent = _bytes_of(tensor, device)
                if sent.numel():
                    communicator.broadcast(sent, min(root, communicator.world_size - 1))
                return [sent.view(tensor.dtype).view(tensor.shape)]

            own = functools.partial(_copies, [tensor])
            _put([tensor], self._call("broadcast", (_form(tensor), root), [tensor], perform, own))
        return EndedWork(tensors)

    def scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any) -> EndedWork:
        """Scatter one rank's tensors, one to each rank."""
        (output,), root = outputs, opts.rootRank
        for places in inputs:
            self._check_places("scatter", places, output)
        given = torch.stack(list(inputs[0])) if inputs else output.new_zeros(self.size(), *output.shape)
        opts = dist.BroadcastOptions()
        opts.rootRank = root
        self.broadcast([given], opts)
        _put([output], [given[self.rank()]])
        return EndedWork(outputs)

    def alltoall_base(
        self,
        output: Tensor,
        tensor: Tensor,
        output_splits: Sequence[int] = (),
        input_splits: Sequence[int] = (),
        opts: Any = None,
    ) -> EndedWork:
        """Exchange parts of ``tensor``, divided along its first dimension, between all ranks."""
        size, rows = self.size(), tensor.shape[0] if tensor.dim() else 1
        places = output.shape[0] if output.dim() else 1
        given, taken = list(input_splits) or [rows // size] * size, list(output_splits) or [places // size] * size
        if len(given) != size or len(taken) != size:
            raise RuntimeError(_SIZES.format(what="all_to_all", prepared=len(given), present=size))
        if sum(given) != rows or sum(taken) != places or min(*given, *taken, 0) < 0:
            raise ValueError(
                f"all_to_all cannot send {rows} rows as {given} and put {taken} into {places}: splits must add up to "
                "the rows, which without splits must divide by dist.get_world_size()"
            )
        even = not (input_splits or output_splits)
        sizes = [each.element_size() * each.shape[1:].numel() for each in (tensor, output)]  # of a row [bytes]
        if even and rows * sizes[0] != places * sizes[1]:
            raise ValueError(
                f"all_to_all cannot put {_form(tensor)} into {_form(output)}: make it alike, or give splits"
            )

        def perform(communicator: Communicator, device: Any) -> list[Tensor]:
            if communicator.world_size != size:
                raise CommunicationFailedError(_SIZES.format(what="all_to_all", prepared=size, present="another size"))
            if not even:
                _check_splits([*given, *taken, *sizes], communicator)
            sent = _bytes_of(tensor, device)
            received = sent.new_empty(places * sizes[1])
            splits = [each * sizes[1] for each in taken], [each * sizes[0] for each in given]
            communicator.wait(communicator.all_to_all(received, sent, *splits))
            return [received.view(output.dtype).view(output.shape)]

        own = functools.partial(_copies, [output if size > 1 else tensor])
        detail = (str(tensor.dtype), f"{rows} rows of {sizes[0]} bytes") if even else (str(tensor.dtype),)
        _put([output], self._call("all_to_all", detail, [tensor], perform, own))
        return EndedWork([output])

    all_to_all_single = alltoall_base

    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None) -> EndedWork:
        """Send one tensor to every rank, and receive one tensor from every rank."""
        received = torch.cat([each.reshape(-1) for each in outputs])
        sent = torch.cat([each.reshape(-1) for each in inputs])
        self.alltoall_base(received, sent, [each.numel() for each in outputs], [each.numel() for each in inputs])
        _put(outputs, torch.split(received, [each.numel() for each in outputs]))
        return EndedWork(outputs)

    def barrier(self, opts: Any = None) -> EndedWork:
        """Wait until all ranks have reached the barrier."""
        self._call("barrier", (), [], lambda communicator, device: [], list)
        return EndedWork([])

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """Wait until all ranks have reached the barrier; an error shows each rank's call, as for all collectives."""
        self.barrier()

    # -- from one rank to another --------------------------------------------------------------------------------------

    def send(self, tensors: Sequence[Tensor], destination: int, tag: int = 0) -> EndedWork:
        """Send a tensor to rank ``destination``, which must receive it."""
        (tensor,) = tensors
        sent = tensor.detach().clone(memory_format=torch.contiguous_format)
        return Transfer(
            lambda communicator: communicator.send(sent, destination, _TAG + tag), destination, _checked(tag)
        )

    def recv(self, tensors: Sequence[Tensor], source: int, tag: int = 0) -> EndedWork:
        """Receive a tensor from rank ``source``, which must send it."""
        found = torch.empty_like(tensors[0], memory_format=torch.contiguous_format)
        return Transfer(
            lambda communicator: communicator.receive(found, source, _TAG + tag),
            source,
            _checked(tag),
            lambda: _put(tensors, [found]),
        )

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int = 0) -> Any:
        """Raise ValueError, because another rank could be the first to send if the step is drawn again."""
        raise ValueError("torch.distributed.recv() needs src= in a job whose group changes: name the rank that sends")

    # -- checks --------------------------------------------------------------------------------------------------------

    def _may_have_shrunk(self) -> bool:
        """True between steps, when a rank can be lost after the caller has asked for the size."""
        session = session_of_thread()
        return session is not None and session.run.group.generation > 0 and not session.run.ledger.depth

    def _check_root(self, what: str, root: int) -> None:
        """Raise ValueError unless rank ``root`` exists."""
        if not 0 <= root < self.size() and not (root >= 0 and self._may_have_shrunk()):
            raise ValueError(f"{what} names rank {root}, but the present ranks are 0 to {self.size() - 1}")

    def _check_places(self, what: str, places: Sequence[Any], tensor: Tensor | None = None) -> None:
        """Raise RuntimeError or ValueError unless a list has one tensor per rank, each as large as `tensor`."""
        size, count = self.size(), len(places)
        if count < size or (count > size and not self._may_have_shrunk()):
            raise RuntimeError(_SIZES.format(what=what, prepared=count, present=size))
        for each in places:
            if tensor is not None and (each.dtype, each.numel()) != (tensor.dtype, tensor.numel()):
                raise ValueError(f"{what} of {_form(tensor)} cannot use {_form(each)} in its list: make it alike")

    # -- one collective ------------------------------------------------------------------------------------------------

    def _call(
        self,
        what: str,
        detail: tuple[Any, ...],
        tensors: Sequence[Tensor],
        perform: Callable[[Communicator, Any], list[Tensor]],
        alone: Callable[[], list[Tensor]],
    ) -> list[Tensor]:
        """Return the result of a collective: in a step as tensors in place, between steps from its recorded bytes."""
        session = session_of_thread()
        if session is None:
            check_thread()
            return alone()  # code of this process that no run of ours is in: its rank is 0 of 1
        found: list[list[Tensor]] = []

        def told(world_size: int, result: list[Tensor]) -> bytes:
            found.append(result)
            return b"" if session.run.ledger.depth else to_bytes([world_size, *result])

        def carried_out(communicator: Communicator) -> bytes:
            own = tensors[0].device if tensors else torch.device("cpu")
            # Reductions of gradients may be on their way over NCCL, in another order on another rank.
            device = torch.device("cpu") if session.run.consensus.announcer.in_phase else own
            return told(communicator.world_size, perform(communicator, device))

        label = f"{what}({', '.join(map(str, detail))})"
        content = session.collectives.call(label, detail, carried_out, lambda: told(1, alone()))
        return _of_bytes(content)[1:] if content else found[-1]


class SoloGroup(DefaultGroup):
    """Process group of this worker alone, as for a mesh dimension of size 1; changes of the job never break it."""

    def rank(self) -> int:
        """Return 0, the rank of the only member."""
        return 0

    def size(self) -> int:
        """Return 1, the number of members."""
        return 1

    getRank, getSize = rank, size

    def _call(
        self, what: str, detail: Any, tensors: Any, perform: Any, alone: Callable[[], list[Tensor]]
    ) -> list[Tensor]:
        return alone()


class Transfer(EndedWork):
    """Point-to-point transfer of a tensor; in a lost step nothing is sent or received."""

    def __init__(
        self, start: Callable[[Communicator], Any], peer: int, tag: int, come: Callable[[], None] | None = None
    ) -> None:
        super().__init__()
        self._run, self._come = _session().run, come
        self._run.refuse_in_round("nothing may be sent from one rank to another", "do so after the pass")
        self._communicator, self._announcer = self._run.group.communicator, self._run.consensus.announcer

        def begin() -> tuple[Any, Announced, int]:
            work = start(self._communicator)
            return work, *self._announcer.start_transfer(peer, tag, received=come is not None)

        self._begun: tuple[Any, Announced, int] | None = self._tried(begin)

    def wait(self, timeout: Any = None) -> bool:
        """Wait for the transfer to complete; raises CommunicationFailedError if a rank is lost between steps."""
        if (begun := self._begun) is not None:
            self._begun = None
            self._tried(functools.partial(self._end, *begun))
        return True

    def _end(self, work: Any, told: Announced, number: int) -> None:
        steps, since_s = self._run.progress.loader_steps, time.monotonic()
        speak = functools.partial(self._announcer.speak_in_transfer, told, number, steps, since_s)
        self._communicator.wait_all([work], speak=speak)
        if self._come is not None:
            self._come()

    def is_completed(self) -> bool:
        """True once :meth:`wait` has been called for the transfer."""
        return self._begun is None

    def _tried(self, act: Callable[[], Any]) -> Any:
        """Return the result of ``act``; None if the step is already lost, or is lost by the call."""
        ledger = self._run.ledger
        if ledger.failed or ledger.replaying:
            return None
        try:
            return act()
        except CommunicationFailedError as error:
            ledger.lose_by(error)
            return None


# -- its parts ---------------------------------------------------------------------------------------------------------


def _session() -> Session:
    """Return the session of this thread's train loop; raises RuntimeError in a thread without one."""
    session = session_of_thread()
    if session is None:
        check_thread()
        raise RuntimeError("the default group of torch.distributed is the train function's: it was called elsewhere")
    return session


def _of_bytes(content: bytes) -> Any:
    """Return a recorded result, preceded by the size of the group that produced it.

    Raises RuntimeError if the other ranks called a different collective at this point.
    """
    found = from_bytes(content)
    if not isinstance(found, list) or not found or not isinstance(found[0], int):
        raise RuntimeError("this worker repeats a collective that the other workers never made: see docs/limits.md")
    return found


def _put(places: Sequence[Tensor], results: Sequence[Tensor]) -> None:
    """Copy results to the user's tensors; if the group has shrunk since, the last result fills the rest.

    As in torch's own groups, autograd does not count the copy as a modification of saved tensors.
    """
    for number, place in enumerate(places):
        place.data.copy_(results[min(number, len(results) - 1)].view(place.shape))


def _copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [each.detach().clone() for each in tensors]


def _bytes_of(tensor: Tensor, device: Any) -> Tensor:
    """Return a copy of a tensor's memory as uint8, which can be sent regardless of the dtype."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    return plain.to(device, copy=True, memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


def _form(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _op_of(options: Any) -> Any:
    return (
        options if isinstance(options, (dist.ReduceOp, dist.ReduceOp.RedOpType)) else getattr(options, "reduceOp", _SUM)
    )


def _listed(tensors: Tensor | Sequence[Tensor]) -> Sequence[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else tensors


def _check_reduces(what: str, tensor: Tensor, op: Any) -> str:
    """Return the name of a reduction; raises TypeError if it does not support the tensor (gloo raises too late)."""
    name, kinds = next((each for known, each in _NUMBERS.items() if op == known), ("", ""))
    kind = "c" if tensor.is_complex() else "f" if tensor.is_floating_point() else "i"
    kind = "b" if tensor.dtype == torch.bool else kind
    if tensor.layout != torch.strided or kind not in kinds:
        raise TypeError(
            f"torch.distributed.{what}(op={name or op}) cannot take a tensor of {tensor.dtype} ({tensor.layout}): "
            "convert it, or use another op"
        )
    return name


def _check_splits(splits: Sequence[int], communicator: Communicator) -> None:
    """Raise RanksDisagreeError on all ranks unless each rank expects exactly what it is sent.

    Args:
        splits: Number of rows that this rank sends to each rank, number that it expects from each, and both row sizes.
    """
    world = communicator.world_size
    everywhere = torch.empty(world * len(splits), dtype=torch.int64)
    communicator.wait(communicator.all_gather(everywhere, torch.tensor(splits)))
    rows = everywhere.view(world, -1)
    sent, expected, sizes = rows[:, :world], rows[:, world:-2], rows[:, -2:]
    for source, target in (sent != expected.T).nonzero().tolist():
        raise RanksDisagreeError(
            f"all_to_all: rank {source} sends {sent[source, target]} rows to rank {target}, which expects "
            f"{expected[target, source]} from it: exchange the splits before the rows"
        )
    for source, target in sent.nonzero().tolist():
        if sizes[source, 0] != sizes[target, 1]:
            raise RanksDisagreeError(
                f"all_to_all: rank {source} sends rows of {sizes[source, 0]} bytes to rank {target}, which expects "
                f"rows of {sizes[target, 1]}"
            )


def _checked(tag: int) -> int:
    if not 0 <= tag < _LONGEST_TAG:
        raise ValueError(f"tag must be from 0 to {_LONGEST_TAG - 1}, but got {tag}")
    return tag


def made_group(name: str, made: DefaultGroup | None = None) -> DefaultGroup:
    """Return ``made``, or else a new group, with the name and the backend per device that torch expects."""
    group: Any = made or DefaultGroup()
    backend: Any = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, _NEVER)  # type: ignore[attr-defined]
    for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
        group._register_backend(torch.device(device), dist.ProcessGroup.BackendType.CUSTOM, backend)
    group._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
    group._set_group_name(name)
    return cast(DefaultGroup, group)
