"""SHELL over torch.distributed: one communicator per generation, with waits that can be cancelled.

Two generations must be able to coexist: the next one forms in the background while the current one is training, and a
broken one can be abandoned. ``init_process_group`` does not allow this, but low-level backends over a ``PrefixStore``
do.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import math
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from elastic_ray.authentication import MAC_BYTES, sign, verify
from elastic_ray.communication.background_work import BackgroundWork, TransferThreads, start_thread
from elastic_ray.communication.bootstrap_store import BootstrapStore
from elastic_ray.communication.connections import (
    ClosedBackend,
    Connections,
    drop_ended_groups,
    keep_group,
    leave_at_exit,
    refuse_connections,
)
from elastic_ray.communication.nccl import CUDA_POLL_S, abort_nccl, connect_nccl, has_run, identity_of, start_nccl
from elastic_ray.communication.staged_transfers import receive_staged, send_staged
from elastic_ray.monitoring.measures import OPERATIONS
from placement.text import first_line

# gloo runs as many operations at once: on a link with latency, further buckets would wait for that of the first ones.
_BUCKETS_AT_ONCE = 8
_BRIEFLY = timedelta(milliseconds=100)
_MAC_TAG = 8
_MOST_TAGS = 1 << 30  # of operations in the background, before they come again
_MAC_TIMEOUT_S = 10.0  # all have come by then, and a peer that is starved answers within that
_PARTING_POLL_S = 2e-3


class CommunicationFailedError(Exception):
    """Error raised if a collective cannot complete: a peer died or timed out, or the generation was cancelled."""


class Communicator:
    """Collectives of one generation, over gloo for CPU tensors and over NCCL for CUDA tensors.

    NCCL does not allow two ranks on one GPU. If ranks share a GPU (as threads in a test, or on GPU partitions), CUDA
    tensors also use gloo, through CPU memory.

    Gradients use separate connections, the gradient group. If one rank mistakenly reduces gradients while another
    votes, both wait, and no message ends up in the wrong buffer.

    Args:
        store: Store that the ranks use to find each other; None for a group of one.
        prefix: Unique name of this generation in the store.
        world_size: Number of ranks; no group is formed if it is 1.
        timeout_s: Maximum time a collective waits for a slow peer [s].
        form_timeout_s: Maximum wait for all ranks to connect [s].
        host: Address where peers can reach this machine.
        gpu: Index of this rank's GPU. If all ranks have different GPUs, an NCCL group is formed as well. None on all
            ranks if they have no GPUs.
        secret: Shared secret that connected ranks use to authenticate each other, because anyone who can reach gloo's
            port can connect to it. Empty to skip authentication.
        called_off: Returns True once the group is no longer wanted; polled while the group forms.

    Raises CommunicationFailedError if a peer did not arrive within ``form_timeout_s``, or does not belong to the group.
    """

    def __init__(
        self,
        store: Any,
        prefix: str,
        *,
        rank: int,
        world_size: int,
        timeout_s: float,
        form_timeout_s: float,
        host: str,
        gpu: int | None = None,
        secret: str = "",
        called_off: Callable[[], bool] = lambda: False,
    ) -> None:
        self.rank, self.world_size, self.timeout_s, self.host = rank, world_size, timeout_s, host
        self.broken = False
        self._closed = False
        self._voided = threading.Event()
        self._wake = threading.Event()
        self._calling = threading.RLock()  # held by each call to a backend: an abort frees what NCCL's calls use
        self._batching = False
        self._device = torch.device("cpu" if gpu is None else f"cuda:{gpu}")
        self._gloo: Any = None
        self._nccl: Any = None
        # bytes that were handed to collectives of either group, by operation; what forms the group is left out. Of a
        # broadcast only the root hands something over, of an all-gather each its own part.
        self.traffic = dict.fromkeys(OPERATIONS, 0)
        self.connections = Connections()  # of both gloo groups
        self._gradient_backends: dict[str, Any] = collections.defaultdict(ClosedBackend)  # by type of device
        self.gradients = GradientGroup(rank, world_size, self._gradient_backends, self._guard, self.traffic)
        if world_size == 1:
            return
        self._store = store  # torch keeps its C++ side only
        leave_at_exit(self)
        until_s = time.monotonic() + form_timeout_s
        named = dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]
        try:
            nonces, apart = _meet(named, rank, world_size, identity_of(gpu) if gpu is not None else "")
            others = set(Connections.of_process())  # a late rank takes long, and other threads connect meanwhile
            device = dist.ProcessGroupGloo.create_device(hostname=host)
            self._gloo = _form_gloo(named, rank, world_size, device, until_s)
            gradient_store = dist.PrefixStore("gradients", named)  # type: ignore[attr-defined]
            gradients = _form_gloo(gradient_store, rank, world_size, device, until_s, threads=_BUCKETS_AT_ONCE)
            self._gradient_backends.update(cpu=gradients, cuda=gradients)
            self.connections = Connections(set(Connections.of_process()) - others)
            if secret:
                self._authenticate_peers(prefix, secret, nonces, until_s)
            if isinstance(store, BootstrapStore):
                refuse_connections(store.told.values())
                store.publish_at_once()  # NCCL's first rank tells, and asks for nothing
            for backend in (self._gloo, gradients):
                backend._set_default_timeout(timedelta(seconds=timeout_s))
            if gpu is not None and apart:
                if called_off():
                    raise CommunicationFailedError(f"{prefix}: the group was called off")
                forming = start_nccl(named, rank, world_size, timeout_s)
                connect_nccl(forming, store, self._device, until_s, called_off)
                self._nccl = self._gradient_backends["cuda"] = forming
        except (RuntimeError, ValueError) as error:
            raise CommunicationFailedError(
                f"{prefix}: rank {rank} of {world_size} could not connect: {error}"
            ) from error

    def _authenticate_peers(self, prefix: str, secret: str, nonces: Sequence[bytes], until_s: float) -> None:
        """Make each pair of ranks authenticate each other with the job's secret.

        Raises:
            CommunicationFailedError: a peer does not know the secret.
            RuntimeError: a peer has not answered in time.
        """

        def facts(backend: int, source: int, destination: int) -> tuple[str | int | bytes, ...]:
            return "peer", prefix, backend, source, destination, nonces[source], nonces[destination]

        timeout = timedelta(seconds=max(0.1, min(_MAC_TIMEOUT_S, until_s - time.monotonic())))
        works, mine, theirs = [], [], {}  # gloo reads from what it sends until the work is done
        for number, backend in enumerate((self._gloo, self._gradient_backends["cpu"])):
            for peer in range(self.world_size):
                if peer == self.rank:
                    continue
                mac = bytearray(sign(secret, *facts(number, self.rank, peer)))
                mine.append(torch.frombuffer(mac, dtype=torch.uint8))
                theirs[number, peer] = torch.zeros(MAC_BYTES, dtype=torch.uint8)
                works.append(backend.recv([theirs[number, peer]], peer, _MAC_TAG))
                works.append(backend.send([mine[-1]], peer, _MAC_TAG))
        for work in works:
            work.wait(timeout)
        for (number, peer), told in theirs.items():
            if not verify(told.numpy().tobytes(), secret, *facts(number, peer, self.rank)):
                raise CommunicationFailedError(f"{prefix}: rank {peer} cannot prove that it is a worker of this job")

    def void(self) -> None:
        """Cancel the generation (this group of ranks): all current and future waits fail. Call it from any thread."""
        if self._voided.is_set():
            return
        self._voided.set()
        self._wake.set()
        if self._nccl is not None:
            backend, self._nccl = self._nccl, ClosedBackend()  # NCCL's buffers and the tensors in use go with the abort
            self._gradient_backends["cuda"] = self._nccl
            abort_nccl(backend, self._calling)

    def close(self) -> None:
        """Release an unused group's connections and join gloo's threads, which takes 20 to 80 ms.

        The group and its collectives refer to each other, so reference counting does not release them. Without this
        call, threads and sockets would remain until Python's cycle collector runs, in whichever thread triggers it.
        """
        self._closed = True
        if self._nccl is not None and not self._voided.is_set():
            abort_nccl(self._nccl, self._calling)  # torch's destructor would warn, and end the process if that fails
        self._gloo = self._nccl = None
        self._gradient_backends.clear()

    @property
    def backend(self) -> str:
        """Backend that reduces gradients on GPUs, ``nccl`` or ``gloo``; empty for a single rank."""
        return "" if self.world_size == 1 else "gloo" if self._nccl is None else "nccl"

    def leave(self, timeout_s: float) -> None:
        """End all operations and gloo's threads within ``timeout_s`` [s], before the interpreter exits.

        Otherwise, threads that are waiting for a peer or running a gloo callback would be ended inside C++ code that
        cannot be unwound, which leads to "terminate called without an active exception" or a segmentation fault, and a
        wrong exit status.
        """
        self._closed = True
        joining = start_thread(self._drop_gloo, "leave-group")
        joining.join(timeout_s / 2)
        self.connections.shut_down()  # what is under way waits for a peer, also in a group that was closed
        joining.join(timeout_s / 2)

    def _drop_gloo(self) -> None:
        self._gloo = None
        self._gradient_backends.clear()
        drop_ended_groups()

    @property
    def voided(self) -> bool:
        """True if the generation was cancelled."""
        return self._voided.is_set()

    def all_reduce(self, tensor: torch.Tensor, op: Any = None, *, timeout_s: float | None = None) -> Any:
        """Start summing ``tensor`` over all ranks, in place; returns the work object for :meth:`wait`.

        Args:
            tensor: Tensor of the same size on each rank.
            op: Torch's ``ReduceOp``; None for the sum.
            timeout_s: Maximum wait for a peer [s]; None for the group's timeout.
        """
        self.traffic["all_reduce"] += tensor.nbytes
        if op is None and timeout_s is None:
            return self._guard(lambda: self._backend(tensor).allreduce([tensor]))
        options = dist.AllreduceOptions()
        if op is not None:
            options.reduceOp = op
        if timeout_s is not None:
            options.timeout = timedelta(seconds=timeout_s)
        return self._guard(lambda: self._backend(tensor).allreduce([tensor], options))

    def ends_within(self, work: Any, wait_s: float) -> bool:
        """True if ``work`` ends within ``wait_s`` [s]; returns False at once if the generation is cancelled."""
        deadline = time.monotonic() + wait_s
        while not (work.is_completed() or self._voided.is_set()) and time.monotonic() < deadline:
            time.sleep(_PARTING_POLL_S)
        return bool(work.is_completed())

    def keep_for(self, work: Any) -> None:
        """Keep the group's connections open until the operation ``work`` has ended, even if the group is dropped.

        Dropping a gloo group waits for its operations, but the result of this operation may no longer matter. The
        operation ends when a peer drops its side.
        """
        keep_group(work, self._gloo)

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Copy the ``tensor`` of rank ``root`` to all ranks, in place."""
        if self.world_size == 1:
            return
        self.traffic["broadcast"] += tensor.nbytes if self.rank == root else 0
        options = dist.BroadcastOptions()
        options.rootRank = root
        options.rootTensor = 0
        self.wait(self._guard(lambda: self._backend(tensor).broadcast([tensor], options)))

    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor) -> Any:
        """Start gathering equal-sized tensors from all ranks into ``output``; pass the result to :meth:`wait`."""
        self.traffic["all_gather"] += tensor.nbytes
        return self._guard(lambda: self._backend(tensor)._allgather_base(output, tensor))

    def all_to_all(
        self, output: torch.Tensor, tensor: torch.Tensor, output_splits: Sequence[int], input_splits: Sequence[int]
    ) -> Any:
        """Start sending one piece of ``tensor`` to each rank; returns the work object for :meth:`wait`.

        Args:
            output: Buffer for the received pieces, in rank order.
            tensor: Pieces to send, in rank order.
            output_splits, input_splits: Sizes of the pieces along the first dimension.
        """
        self.traffic["all_to_all"] += tensor.nbytes
        options, splits = dist.AllToAllOptions(), (list(output_splits), list(input_splits))
        return self._guard(lambda: self._backend(tensor).alltoall_base(output, tensor, *splits, options))

    def connect_pairs(self) -> None:
        """Connect all pairs of ranks over NCCL, which otherwise does so in the first ``all_to_all``.

        Call this on all ranks at the same point in the program: one that is late, as a joiner is in its first step,
        would make the first ``all_to_all`` of the others fail.
        """
        if self._nccl is not None:
            sent = torch.zeros(self.world_size, dtype=torch.uint8, device=self._device)
            self.wait(self.gradients.all_to_all(torch.empty_like(sent), sent))

    def together(self) -> contextlib.AbstractContextManager[None]:
        """Return a context that makes operations succeed on all workers of a unit or fail on all of them.

        The unit agrees only once for the entire context. Code within the context must not use the unit's collectives.
        """
        return contextlib.nullcontext()

    def send(self, tensor: torch.Tensor, destination: int, tag: int = 0) -> Any:
        """Start sending ``tensor`` to rank ``destination`` under ``tag``; pass the result to :meth:`wait_all`.

        Outside of :meth:`batch`, CUDA tensors are sent through CPU memory: NCCL knows no tags, and runs one send at a
        time, so that two ranks that first send to each other and then receive would wait forever.
        """
        if self._is_staged(tensor):
            return send_staged(functools.partial(self.send, destination=destination, tag=tag), tensor)
        self.traffic["send"] += tensor.nbytes
        return self._guard(lambda: self._backend(tensor).send([tensor], destination, tag))

    def receive(self, tensor: torch.Tensor, source: int, tag: int = 0) -> Any:
        """Start receiving into ``tensor`` from rank ``source`` under ``tag``; pass the result to :meth:`wait_all`."""
        if self._is_staged(tensor):
            return receive_staged(functools.partial(self.receive, source=source, tag=tag), tensor)
        return self._guard(lambda: self._backend(tensor).recv([tensor], source, tag))

    @contextlib.contextmanager
    def batch(self) -> Iterator[list[Any]]:
        """Combine NCCL sends and receives in this context into one operation, which starts when the context ends.

        The operation's work object is then appended to the list that the context yields.
        """
        batched: list[Any] = []
        if self._nccl is None:
            yield batched
            return
        error: RuntimeError | None = None
        with self._calling:
            backend = self._nccl
            self._guard(backend._start_coalescing)
            self._batching = True
            try:
                yield batched
            finally:
                self._batching = False
                try:  # even if the group is cancelled: else NCCL would queue all that this thread calls later
                    work = backend._end_coalescing()
                    batched += [work] if work is not None else []
                except RuntimeError as raised:
                    error = raised
        if error is not None:
            self._refuse(error)

    def gather_ints(self, values: Sequence[int], *, with_gradients: bool = False) -> list[list[int]]:
        """Return the ``values`` from all ranks, in rank order; each rank must pass the same number of values.

        Args:
            with_gradients: True to use the gradient group's connections.
        """
        mine = torch.zeros(self.world_size, len(values), dtype=torch.int64)
        mine[self.rank] = torch.tensor(list(values), dtype=torch.int64)
        if self.world_size > 1:
            self.wait(self.gradients.all_reduce(mine) if with_gradients else self.all_reduce(mine))
        return [[int(v) for v in row] for row in mine]

    def broadcast_bytes(self, content: bytes, root: int, *, with_gradients: bool = False) -> bytes:
        """Return rank ``root``'s ``content`` on every rank; ``with_gradients`` uses the gradient group."""
        length = self.gather_ints([len(content)], with_gradients=with_gradients)[root][0]
        told = torch.zeros(length, dtype=torch.uint8)
        if self.rank == root and content:
            told[:] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        if with_gradients and self.world_size > 1:
            self.wait(self.gradients.broadcast(told, root))
        else:
            self.broadcast(told, root)
        return told.numpy().tobytes()

    def wait(self, work: Any, *, patience_s: float = math.inf, since_s: float | None = None) -> bool:
        """Wait for a started operation; return True if it has ended within ``patience_s``.

        Args:
            patience_s: Maximum wait before returning False [s], at least 0.1 s.
            since_s: Time when the group's timeout started, for a wait that consists of several calls [s, monotonic];
                None means now.

        Raises CommunicationFailedError if the peer is gone, the timeout has passed, or the generation was cancelled.
        """
        if self.waited_briefly(work):
            return True
        # Work of a group that is being aborted is not looked at: torch would wait for the abort, with Python's lock.
        if not (self._voided.is_set() or work.is_completed()):
            now_s = time.monotonic()
            if not self._block(work, now_s + patience_s, (since_s or now_s) + self.timeout_s + 1.0):
                return False
        if self._voided.is_set():
            self.broken = True
            raise CommunicationFailedError("the generation was called off")
        self._guard(work.wait)
        return True

    def mark_broken(self) -> None:
        """Mark the communicator as broken, because a peer violated the protocol and its operations may never end."""
        self.broken = True

    def wait_all(
        self, works: Sequence[Any], batched: Sequence[Any] = (), speak: Callable[[], None] | None = None
    ) -> None:
        """Wait for sends and receives in a separate thread, because gloo can neither poll nor cancel them.

        Args:
            works: work objects that :meth:`send` and :meth:`receive` returned; None for NCCL operations started within
                :meth:`batch`.
            batched: work objects in the list that :meth:`batch` yielded.
            speak: called repeatedly during the wait; None to call nothing.

        Raises CommunicationFailedError if the peer is gone, the timeout has passed, or the generation was cancelled.

        The thread ends at the group's timeout at the latest.
        """
        works = [work for work in works if work is not None]

        def finish() -> None:
            for work in works:  # without a timeout gloo keeps the one that the group was formed with
                work.wait(timedelta(seconds=self.timeout_s))
            for work in batched:
                work.wait()
            if batched and not has_run(batched, self._voided, deadline):
                raise RuntimeError("the generation was called off")
            for work in batched:
                work.wait()  # one that has failed has "run", too: now it says so

        self._wake.clear()
        deadline = time.monotonic() + self.timeout_s + 1.0
        ending = TransferThreads().start(finish)
        ending.add_done_callback(lambda _: self._wake.set())
        while not (ending.done() or self._voided.is_set()) and time.monotonic() < deadline:
            self._wake.wait(0.25)
            self._wake.clear()
            if speak is not None and not ending.done():
                speak()
        failure = ending.exception() if ending.done() else RuntimeError("the generation was called off")
        if failure is not None:
            self.broken = True
            if not isinstance(failure, RuntimeError):
                raise failure  # a fault of the code, which no new group mends
            raise CommunicationFailedError(first_line(failure))

    def waited_briefly(self, work: Any) -> bool:
        """True if the operation ended within a short wait by gloo, which is cheap but cannot be cancelled.

        If this returns False, call :meth:`wait`.
        """
        if self._nccl is not None:
            return False
        try:
            work.wait(_BRIEFLY)
        except RuntimeError:
            return False  # a wait that times out leaves the operation as it is
        return not self._voided.is_set()

    def _block(self, work: Any, until_s: float, deadline: float) -> bool:
        """Wait for an operation to end; False if ``until_s`` passes first."""
        # gloo tells a survivor nothing when it waits on another survivor (docs/protocol.md, pitfall 1), hence an event
        # that the abort can set too, instead of the blocking work.wait().
        self._wake.clear()
        wake = self._wake
        poll_s = 0.25
        finished: list[bool] = []
        if self._nccl is None:
            # gloo calls back a moment before is_completed() turns true, so what was called back is noted, too.
            def finish(_: Any) -> None:
                finished.append(True)
                wake.set()

            work.get_future().add_done_callback(finish)
        else:
            poll_s = CUDA_POLL_S  # a CUDA future is done when the kernel is queued, not when it has run
        while not (finished or self._voided.is_set() or work.is_completed()):
            wake.wait(poll_s)
            wake.clear()
            if time.monotonic() > min(until_s, deadline):
                if until_s < deadline:
                    return False
                self.broken = True
                raise CommunicationFailedError(f"a collective took longer than collective_timeout_s={self.timeout_s}")
        return True

    def _guard(self, operation: Callable[..., Any], *arguments: Any) -> Any:
        """Run an operation unless the generation was cancelled, converting errors to CommunicationFailedError."""
        try:
            with self._calling:
                if not (self._voided.is_set() or self._closed):
                    return operation(*arguments)
        except RuntimeError as error:
            self._refuse(error)
        raise self._failure("the generation was called off")

    def _refuse(self, error: RuntimeError) -> NoReturn:
        """Raise the error for an operation that could not be started."""
        self.broken = True
        raise self._failure(first_line(error)) from error

    def _failure(self, cause: str) -> CommunicationFailedError:
        """Return the error for an operation that could not be started."""
        return CommunicationFailedError(cause)

    def _backend(self, tensor: torch.Tensor) -> Any:
        return self._nccl if tensor.is_cuda and self._nccl is not None else self._gloo

    def _is_staged(self, tensor: torch.Tensor) -> bool:
        return tensor.is_cuda and not self._batching


def _meet(store: Any, rank: int, world_size: int, gpu: str) -> tuple[list[bytes], bool]:
    """Wait for all ranks before any of them listens; return a nonce from each, and whether all GPUs differ.

    A rank therefore listens only while its peers connect, not while it waits for a late peer.
    """
    store.set(f"here/{rank}", f"{secrets.token_hex(16)} {gpu}")
    keys = [f"here/{peer}" for peer in range(world_size)]
    store.wait(keys)
    nonces = [bytes(store.get(key)) for key in keys]
    return nonces, len({nonce.partition(b" ")[2] for nonce in nonces}) == world_size


def _form_gloo(store: Any, rank: int, world_size: int, device: Any, until_s: float, threads: int = 2) -> Any:
    """Return a gloo backend for all ranks, connected by ``until_s``, that runs ``threads`` operations at once."""
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    # gloo takes it for the rendezvous too
    options._timeout = timedelta(seconds=max(0.1, until_s - time.monotonic()))
    options._devices, options._threads = [device], threads
    return dist.ProcessGroupGloo(store, rank, world_size, options)


class GradientGroup:
    """Collectives of the gradient group, which is used only for synchronisation.

    Wait for the returned work objects with ``Communicator.wait``. A group with one rank starts no operations.

    Args:
        guard: Runs an operation unless the generation was cancelled, and converts errors to
            ``CommunicationFailedError``.
        traffic: Bytes passed to collectives, keyed by operation; updated by each call.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        backends: Mapping[str, Any],
        guard: Callable[..., Any],
        traffic: dict[str, int],
    ) -> None:
        self.rank, self.world_size, self._backends, self._guard = rank, world_size, backends, guard
        self._traffic = traffic
        self._next_tag, self._transfers = 0, TransferThreads(_BUCKETS_AT_ONCE)

    def all_reduce(self, tensor: torch.Tensor) -> Any:
        """Start summing the tensor over all ranks, in place; return the work object."""
        self._traffic["all_reduce"] += tensor.nbytes
        return self._guard(self._backends[tensor.device.type].allreduce, [tensor])

    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor) -> Any:
        """Start gathering equal-sized tensors from all ranks into ``output``, concatenated in rank order."""
        self._traffic["all_gather"] += tensor.nbytes
        return self._guard(self._backends[tensor.device.type]._allgather_base, output, tensor)

    def all_to_all(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_splits: Sequence[int] = (),
        input_splits: Sequence[int] = (),
    ) -> Any:
        """Start sending piece ``i`` of ``tensor`` to rank ``i``; ``output`` receives the pieces in rank order.

        Splits are sizes along the first dimension; without splits, all pieces have the same size. Unlike sends and
        receives, this operation can be polled and cancelled. For this reason, ranks with nothing to exchange
        participate with splits of 0.
        """
        self._traffic["all_to_all"] += tensor.nbytes
        options = dist.AllToAllOptions()
        # Without splits torch calls ncclAlltoAll, and takes "in progress", as it is without blocking, for an error.
        into = list(output_splits) or [len(output) // self.world_size] * self.world_size
        out = list(input_splits) or [len(tensor) // self.world_size] * self.world_size
        return self._guard(self._backends[tensor.device.type].alltoall_base, output, tensor, into, out, options)

    def in_background(self, transfer: Callable[[Any, int], None], tags: int, sent_bytes: int) -> BackgroundWork:
        """Start sending and receiving CPU tensors in a thread that waits for the transfers; return a work object.

        Args:
            transfer: Function called with torch's process group and the first tag. It raises RuntimeError if a peer is
                gone.
            tags: Number of tags it uses; this number and the order of these calls must be the same on all ranks.
            sent_bytes: Bytes that it sends.
        """
        first, self._next_tag = self._next_tag, (self._next_tag + tags) % _MOST_TAGS
        self._traffic["send"] += sent_bytes
        work: BackgroundWork = self._guard(
            self._transfers.start, functools.partial(transfer, self._backends["cpu"], first)
        )
        return work

    def reduce(self, tensor: torch.Tensor, root: int) -> Any:
        """Start summing the tensor over all ranks, in place on ``root``; other ranks' tensors may be overwritten."""
        self._traffic["reduce"] += tensor.nbytes
        options = dist.ReduceOptions()
        options.rootRank = root
        return self._guard(self._backends[tensor.device.type].reduce, [tensor], options)

    def broadcast(self, tensor: torch.Tensor, root: int) -> Any:
        """Start copying rank ``root``'s tensor to all ranks, in place; return the work object."""
        self._traffic["broadcast"] += tensor.nbytes if self.rank == root else 0
        options = dist.BroadcastOptions()
        options.rootRank = root
        return self._guard(self._backends[tensor.device.type].broadcast, [tensor], options)
