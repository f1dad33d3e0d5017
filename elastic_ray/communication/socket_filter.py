"""Socket filter: a formed group accepts no more connections where it listened (Linux; no torch, no Ray)."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import socket
import struct
import sys
from collections.abc import Iterable

logger = logging.getLogger(__name__)

_SO_ATTACH_FILTER = 26
_RETURN_NOTHING = struct.pack("HBBI", 0x06, 0, 0, 0)  # a packet filter's whole program: take 0 bytes of any packet


def refuse_connections(told: Iterable[bytes]) -> int:
    """Have the kernel drop new connections to the published sockets on which this process listens.

    gloo listens for as long as a group lasts, though all have connected: strangers' connections would take up its
    file descriptors, and what they send would be looked at. The connections that there are continue.

    Args:
        told: values that peers received; in them gloo writes a socket's address as the kernel has it.

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
    """Close a listening socket at a published address to new connections; True if the descriptor is one."""
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
