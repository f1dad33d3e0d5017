"""Collectives for a train loop: all-reduce, all-gather, broadcast and barrier."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any, Literal, TypeVar, overload

import torch
import torch.distributed as dist

from elastic_ray.communication.communicator import CommunicationFailedError, Communicator
from elastic_ray.loop.api import current_session
from elastic_ray.state.codec import NotPlainError
from elastic_ray.state.tree import from_bytes, on_device_of, to_bytes

T = TypeVar("T")
ReduceOp = Literal["sum", "mean", "min", "max"]

_OPS: dict[str, Any] = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.SUM,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
}
_AS_THEY_ARE = {torch.float32, torch.float64, torch.int8, torch.uint8, torch.int32, torch.int64}
_WIDER = {
    torch.bool: torch.int32,
    torch.int16: torch.int32,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float8_e4m3fn: torch.float32,
    torch.float8_e4m3fnuz: torch.float32,
    torch.float8_e5m2: torch.float32,
    torch.float8_e5m2fnuz: torch.float32,
    torch.complex32: torch.complex64,
}
_COMPLEX = {torch.complex64, torch.complex128}
_INT64 = torch.iinfo(torch.int64)
_OF_WHOLE: dict[str, Callable[[Iterable[int]], int]] = {"sum": sum, "min": min, "max": max}


@overload
def all_reduce(value: float, op: ReduceOp = "sum") -> float: ...
@overload
def all_reduce(value: torch.Tensor, op: ReduceOp = "sum") -> torch.Tensor: ...
def all_reduce(value: float | torch.Tensor, op: ReduceOp = "sum") -> float | torch.Tensor:
    """Return the sum, mean, minimum or maximum of the values from all ranks; the same on every rank.

    Every rank must call this at the same point in the train function; the call blocks until all ranks have done so.
    This rank's own value is returned before the worker has joined the job (before its first epoch), and while it
    replays code that the other ranks have already run. If a rank is lost within a step, the step is voided and drawn
    again. If a rank is lost between steps, the remaining ranks repeat the call automatically. To sum over the steps of
    a pass, use an ``Accumulator``, which needs no extra collective.

    Args:
        value: a number, or a tensor of the same shape and type on every rank, on the CPU or a GPU; it is not modified.
        op: ``"sum"``, ``"mean"``, ``"min"`` or ``"max"``. The mean of integers is a float; complex tensors have neither
            minimum nor maximum.

    Raises:
        TypeError: the value is neither a number nor a dense tensor, or its type does not support ``op``. ValueError:
            ``op`` is unknown.
        OverflowError: an integer, or the sum of integers, exceeds 64 bits; raised on every rank. Sums of tensors wrap
            around, as in torch.
        RanksDisagreeError: the ranks make different calls, or pass tensors of different shapes.
    """
    if op not in _OPS:
        raise ValueError(f"op must be one of {', '.join(map(repr, _OPS))}, but got {op!r}")
    if isinstance(value, torch.Tensor):
        if value.layout != torch.strided:
            raise TypeError(f"value must be a dense tensor, but its layout is {value.layout}")
        return _reduced(value.detach(), op)
    if not isinstance(value, (int, float)):
        raise TypeError(f"value must be a number or a tensor, but got {type(value).__name__}; see all_gather()")
    if isinstance(value, int) and op != "mean":
        return _reduced_whole(int(value), op)
    return float(_reduced(torch.tensor(float(value), dtype=torch.float64), op))


def _reduced_whole(value: int, op: ReduceOp) -> int:
    """Reduce integers exactly: each rank receives all values, and whether each fits into 64 bits."""
    fits = _INT64.min <= value <= _INT64.max

    def perform(communicator: Communicator) -> bytes:
        return to_bytes(communicator.gather_ints([value if fits else 0, int(fits)]))

    content = current_session().collectives.call(
        "all_reduce", (op, "a whole number"), perform, lambda: to_bytes([[value if fits else 0, int(fits)]])
    )
    told = _told(content)
    if not all(each_fits for _, each_fits in told):
        ranks = [rank for rank, (_, each_fits) in enumerate(told) if not each_fits]
        raise OverflowError(
            f"all_reduce() takes whole numbers of 64 bits, but that of rank {ranks[0]} is larger: pass a float"
        )
    result: int = _OF_WHOLE[op](each for each, _ in told)
    if not _INT64.min <= result <= _INT64.max:
        raise OverflowError(f"all_reduce() returns 64-bit integers, but the sum is {result}: pass a float")
    return result


def _travels_as(dtype: torch.dtype, op: ReduceOp) -> torch.dtype:
    """Return the dtype used to reduce tensors of this dtype.

    Gloo and NCCL support few dtypes, and an error inside them would be mistaken for a lost rank.

    Raises TypeError if no dtype is suitable.
    """
    wide = _WIDER.get(dtype, dtype)
    if wide in _AS_THEY_ARE or (wide in _COMPLEX and op in ("sum", "mean")):
        return wide
    known = sorted(str(each).removeprefix("torch.") for each in _AS_THEY_ARE | _WIDER.keys() | _COMPLEX)
    raise TypeError(
        f"all_reduce(op={op!r}) cannot take a tensor of {dtype}; it takes {', '.join(known)}, complex ones for 'sum' "
        "and 'mean' only: convert it, or see all_gather()"
    )


def _reduced(tensor: torch.Tensor, op: ReduceOp) -> torch.Tensor:
    """Reduce a dense tensor; dtypes that gloo cannot sum, or only imprecisely, are sent as wider ones."""
    mean = op == "mean"
    whole = not (tensor.is_floating_point() or tensor.is_complex())
    summed = tensor.to(torch.get_default_dtype()) if mean and whole else tensor.resolve_conj()
    travels_as = _travels_as(summed.dtype, op)

    def perform(communicator: Communicator) -> bytes:
        wide = summed.to(travels_as, memory_format=torch.contiguous_format, copy=True)
        if wide.numel():
            parts = torch.view_as_real(wide) if wide.is_complex() else wide
            communicator.wait(communicator.all_reduce(parts, _OPS[op]))
        if mean:
            wide /= communicator.world_size
        return to_bytes(wide.to(summed.dtype))

    detail = op, tuple(summed.shape), str(summed.dtype), summed.is_cuda
    content = current_session().collectives.call("all_reduce", detail, perform, lambda: to_bytes(summed))
    result: torch.Tensor = _told(content)
    return result.to(summed.device)


def all_gather(value: T) -> list[T]:
    """Return every rank's value, in rank order; the same list on every rank.

    Every rank must call this; the call blocks until all ranks have done so. As in :func:`all_reduce`, the call is
    repeated if a rank is lost between steps, and is local before this worker has joined the job. The list has one entry
    for each participating rank.

    Args:
        value: tensors and plain values, in lists, tuples and dicts; ranks may pass different structures. Received
            tensors are moved to the device of this rank's tensors.

    Raises:
        UnsafeStateError: the value contains an object of any other type; such objects would need pickle, which is
            unsafe.
        RanksDisagreeError: the ranks make different calls.
    """
    mine = _plain(value)

    def perform(communicator: Communicator) -> bytes:
        sizes = [size for (size,) in communicator.gather_ints([len(mine)])]
        begin = sum(sizes[: communicator.rank])
        everything = torch.zeros(sum(sizes), dtype=torch.uint8)
        everything[begin : begin + len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        communicator.wait(communicator.all_reduce(everything))
        content = everything.numpy().tobytes()
        ends = list(itertools.accumulate(sizes))
        return to_bytes([content[end - size : end] for size, end in zip(sizes, ends, strict=True)])

    content = current_session().collectives.call("all_gather", "", perform, lambda: to_bytes([mine]))
    return [on_device_of(_told(part), value) for part in _told(content)]


def broadcast(value: T, src: int = 0) -> T:
    """Return rank ``src``'s value, on every rank.

    Every rank must call this; the call blocks until all ranks have done so. As in :func:`all_reduce`, the call is
    repeated if a rank is lost between steps, and is local before this worker has joined the job. If the lost rank is
    ``src``, the worker that then has this rank provides the value.

    Args:
        value: tensors and plain values, in lists, tuples and dicts; ignored on ranks other than ``src``.
        src: rank of the worker that provides the value.

    Raises:
        UnsafeStateError: the value contains an object of any other type; such objects would need pickle, which is
            unsafe.
        ValueError: ``src`` is not a rank of the current group.
        RanksDisagreeError: the ranks make different calls.
    """
    session = current_session()
    if isinstance(src, bool) or not isinstance(src, int) or src < 0:
        raise ValueError(f"src must be a rank, from 0, but got {src!r}")
    if session.synced and src >= session.world_size:
        raise ValueError(f"src must be a rank of the {session.world_size} that there are, but got {src}")
    mine = _plain(value)

    def perform(communicator: Communicator) -> bytes:
        root = min(src, communicator.world_size - 1)  # the group may have shrunk between the call and this
        return communicator.broadcast_bytes(mine if communicator.rank == root else b"", root)

    content = session.collectives.call("broadcast", src, perform, lambda: mine)
    result: T = on_device_of(_told(content), value)
    return result


def barrier() -> None:
    """Wait until all ranks have called this; return at once on workers that have not joined the job yet.

    Raises:
        RanksDisagreeError: the ranks make different calls.
    """
    current_session().collectives.call("barrier", "", lambda communicator: b"", lambda: b"")


def _plain(value: Any) -> bytes:
    """Return the value as bytes; raises UnsafeStateError if it holds more than tensors and plain values."""
    try:
        return to_bytes(value)
    except NotPlainError as error:
        from elastic_ray.state.tree import UnsafeStateError

        raise UnsafeStateError(
            f"workers exchange tensors and plain values only, nothing is pickled, but of this value {error}"
        ) from error


def _told(content: bytes) -> Any:
    try:
        return from_bytes(content)
    except ValueError as error:
        raise CommunicationFailedError(str(error)) from error
