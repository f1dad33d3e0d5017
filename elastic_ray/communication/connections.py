"""TCP connections of a group and the time they spend sending (Linux), and groups that are kept alive (no torch)."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import logging
import os
import socket
import struct
import sys
import threading
import weakref
from collections.abc import Callable, Collection, Iterable
from typing import Any, NoReturn

from elastic_ray.communication.background_work import exiting, join_threads

Connection = tuple[int, int]
"""A descriptor and the number of the socket behind it, by which another one in its place is told apart."""

# struct tcp_info of linux/tcp.h (since 4.10): tcpi_busy_time and tcpi_rwnd_limited [microseconds].
_ROOM = 256
_BUSY = struct.Struct("=QQ")
_BUSY_AT = 168
_DESCRIPTORS = "/proc/self/fd"
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform.startswith("linux") else None


class Connections:
    """TCP connections of this process, identified by file descriptor. Gloo owns them and may close them at any time."""

    def __init__(self, connections: Collection[Connection] = ()) -> None:
        self._connections = tuple(sorted(connections))

    @staticmethod
    def of_process() -> list[Connection]:
        """Return all sockets of this process; an empty list if ``/proc`` is not readable."""
        found: list[Connection] = []
        if _LIBC is None:
            return found
        try:
            names = os.listdir(_DESCRIPTORS)
        except OSError:  # some sandboxes: a group must form there as well
            return found
        for name in names:
            with contextlib.suppress(OSError):  # it is gone again
                if os.readlink(f"{_DESCRIPTORS}/{name}").startswith("socket:"):
                    found.append((int(name), os.fstat(int(name)).st_ino))
        return found

    def sending_s(self) -> float:
        """Return the total time that connections were busy sending [s].

        A connection is busy while it has unacknowledged bytes and the receiver has room for them. The kernel counts
        in ticks of 1 to 10 ms, so data that is acknowledged at once counts as no time.
        """
        return sum(_sending_s(descriptor) for descriptor, number in self._connections if _is(descriptor, number))

    def shut_down(self) -> None:
        """Shut down all connections, which ends operations waiting for a peer; data already sent still arrives."""
        for descriptor, number in self._connections:
            if _is(descriptor, number):
                with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as same:
                    same.getpeername()  # one that listens has none, and gloo may not find that one ended
                    same.shutdown(socket.SHUT_RDWR)


def _is(descriptor: int, number: int) -> bool:
    """True if the descriptor still refers to this socket."""
    try:
        return os.fstat(descriptor).st_ino == number
    except OSError:
        return False


def _sending_s(descriptor: int) -> float:
    """Return the time that a connection has spent sending [s]; 0 if it is not TCP or the kernel is too old."""
    assert _LIBC is not None, "no connection was found elsewhere"
    told, size = ctypes.create_string_buffer(_ROOM), ctypes.c_uint32(_ROOM)
    failed = _LIBC.getsockopt(descriptor, socket.IPPROTO_TCP, socket.TCP_INFO, told, ctypes.byref(size))
    if failed or size.value < _BUSY_AT + _BUSY.size:
        return 0.0
    busy_us, full_us = _BUSY.unpack_from(told.raw, _BUSY_AT)
    return max(0.0, float(busy_us - full_us) * 1e-6)


_KEPT: list[tuple[Any, Any]] = []  # operations, and their groups
_KEEPING = threading.Lock()


def keep_group(work: Any, group: Any) -> None:
    """Keep the process group ``group`` alive until ``work``, an operation started in it, has ended."""
    drop_ended_groups()
    with _KEEPING:
        _KEPT.append((work, group))


def drop_ended_groups() -> None:
    """Release groups held by :func:`keep_group` whose operations have ended."""
    with _KEEPING:
        ended = [each for each in _KEPT if each[0].is_completed()]
        _KEPT[:] = [each for each in _KEPT if each not in ended]
    del ended  # joins their threads, which nobody else is to wait for


_LEAVE_S = 2.0
_OPEN: weakref.WeakSet[Any] = weakref.WeakSet()


def leave_at_exit(group: Any) -> None:
    """Call ``group.leave`` before the interpreter exits, if the group still exists."""
    _OPEN.add(group)


def _leave_all() -> None:
    """Leave all groups of this process before the interpreter exits."""
    exiting.set()
    leaving = [threading.Thread(target=each.leave, args=(_LEAVE_S,), daemon=True) for each in list(_OPEN)]
    for each in leaving:
        each.start()
    for each in leaving:
        each.join()
    join_threads(_LEAVE_S)


atexit.register(_leave_all)
os.register_at_fork(after_in_child=_OPEN.clear)  # the parent's groups, whose connections a child shares


class ClosedBackend:
    """Backend of a closed or cancelled group, whose operations all raise RuntimeError."""

    def __getattr__(self, name: str) -> Callable[..., NoReturn]:
        return _refuse


def _refuse(*arguments: Any) -> NoReturn:
    raise RuntimeError("the generation was called off")


class NoGroup:
    """Placeholder for a missing group that raises RuntimeError on any use."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("the session has not entered a generation yet, or has left the last one")


logger = logging.getLogger(__name__)

_SO_ATTACH_FILTER = 26
_RETURN_NOTHING = struct.pack("HBBI", 0x06, 0, 0, 0)  # a packet filter's whole program: take 0 bytes of any packet


def refuse_connections(told: Iterable[bytes]) -> int:
    """Make the kernel drop new connections to the listening sockets whose addresses this process has published.

    gloo keeps listening while a group exists, even after all members have connected. Unknown callers' connections would
    use up its file descriptors, and gloo would read their data. Existing connections are not affected.

    Returns the number of sockets found.
    """
    if not sys.platform.startswith("linux"):
        return 0
    addresses = list(told)
    closed = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # it is gone again
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                closed += _close(int(name), addresses)
    return closed


def _close(descriptor: int, told: list[bytes]) -> bool:
    """Block new connections to a listening socket at a published address; False if this is no such socket."""
    with socket.socket(fileno=os.dup(descriptor)) as listener:
        if listener.family not in (socket.AF_INET, socket.AF_INET6):
            return False
        if not listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return False
        host, port = listener.getsockname()[:2]
        address = struct.pack("!H", port)
        if listener.family == socket.AF_INET6:
            address += bytes(4)  # its flow
        address += socket.inet_pton(listener.family, host.partition("%")[0])
        if not any(address in each for each in told):
            return False
        program = ctypes.create_string_buffer(_RETURN_NOTHING, len(_RETURN_NOTHING))
        listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HP", 1, ctypes.addressof(program)))
        return True
