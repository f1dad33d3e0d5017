"""A port that is free."""

from __future__ import annotations

import random
import socket

# Above the ports of Ray's workers, and below those that the kernel gives to connections of other processes meanwhile.
_PORTS = range(20_000, 32_000)


def free_port() -> int:
    while True:
        port = random.SystemRandom().choice(_PORTS)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
