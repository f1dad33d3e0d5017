"""Collectives for a train loop: sums, gathered values, a value of one rank, a meeting."""

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
    """Return the sum, mean, least or largest of all ranks' values; the same on every rank.

    Every rank must call it at the same place. Before this worker has joined the job (before its first epoch), and while
    it catches up with code that the others have run, it stands alone: the result is its own value. Within a step a rank
    that is lost voids the step, which is drawn again; between steps those that are left make the call again by
    themselves. For sums over the steps of a pass an ``Accumulator`` costs no collective of its own.

    Args:
        value: a number, or a tensor of the same shape and type on every rank, on the CPU or a GPU; it stays as it is.
        op: ``"sum"``, ``"mean"``, ``"min"`` or ``"max"``. The mean of integers is a float; complex tensors have neither
            a least nor a largest.

    Raises:
        TypeError: it is neither, or the tensor's type has no such ``op``. ValueError: there is no such ``op``.
        OverflowError: whole numbers, or their sum, do not fit into 64 bits; on every rank alike. Sums of tensors wrap
            around, as torch's do.
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
    """Reduce whole numbers exactly: each rank knows all of them, and whether any exceeds 64 bits."""
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
        raise OverflowError(f"all_reduce() gives whole numbers of 64 bits, but the sum is {result}: pass a float")
    return result


def _travels_as(dtype: torch.dtype, op: ReduceOp) -> torch.dtype:
    """Return the type in which ranks add up tensors of this one.

    Gloo and NCCL know few, and take an error for a lost rank.

    Raises TypeError: there is none.
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
    """Reduce a dense tensor; types that gloo cannot sum, or only roughly, travel as wider ones."""
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

    When it stands alone, and what a lost rank does, is as in :func:`all_reduce`: the list is then as long as there are
    ranks that took part.

    Args:
        value: tensors and plain values, in lists, tuples and dicts; others on each rank. Tensors come to the device
            of this rank's own.

    Raises:
        UnsafeStateError: it holds something else, which is never pickled.
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
    """Return the value of rank ``src``, on every rank.

    When it stands alone, and what a lost rank does, is as in :func:`all_reduce`; where ``src`` is lost, its rank is
    another worker's, whose value it is then.

    Args:
        value: tensors and plain values, in lists, tuples and dicts; what other ranks than ``src`` pass is not used.
        src: a rank.

    Raises:
        UnsafeStateError: it holds something else, which is never pickled.
        ValueError: there is no such rank; at least in the present group.
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
    """Wait until all ranks have called it; :func:`all_reduce` says when a rank counts as alone.

    Raises:
        RanksDisagreeError: the ranks make different calls.
    """
    current_session().collectives.call("barrier", "", lambda communicator: b"", lambda: b"")


def _plain(value: Any) -> bytes:
    """Return the value as bytes; raises UnsafeStateError."""
    try:
        return to_bytes(value)
    except NotPlainError as error:
        from elastic_ray.state.tree import UnsafeStateError

        raise UnsafeStateError(
            f"what is sent between workers is tensors and plain values, never pickled, but of this value {error}"
        ) from error


def _told(content: bytes) -> Any:
    try:
        return from_bytes(content)
    except ValueError as error:
        raise CommunicationFailedError(str(error)) from error
