"""A process of another user that attacks ports: ``python -m tests.job.stranger UID``, ports on standard input.

Each line of input is a JSON list of ports, the last one counts; at its end it tells what answered, and ends.
"""

from __future__ import annotations

import contextlib
import encodings.idna  # noqa: F401  # now: another user may not read where Python lies
import json
import os
import pickle
import random
import socket
import sys
import threading

# torch's TCPStore: one byte says what is wanted; every connection begins with a fixed number.
_VALIDATE, _SET, _PING = b"\x00", b"\x01", b"\x0d"
_MAGIC = (0x3C85F7CE).to_bytes(4, "little")
_NONCE = (0x1234567).to_bytes(4, "little")
_TIMEOUT_S = 0.05


def _text(content: bytes) -> bytes:
    return len(content).to_bytes(8, "little") + content


def is_a_store(host: str, port: int, timeout_s: float = 1.0) -> bool:
    """Whether torch's TCPStore answers there."""
    with contextlib.suppress(OSError), socket.create_connection((host, port), timeout_s) as connection:
        connection.sendall(_VALIDATE + _MAGIC + _PING + _NONCE)
        return connection.recv(64) == _NONCE
    return False


def _payloads(dice: random.Random) -> list[bytes]:
    keys = [f"generation/{dice.randrange(12)}/0/{rank}".encode() for rank in range(4)]
    keys += [b"generation/%d/here/%d" % (dice.randrange(12), rank) for rank in range(4)]
    store = _VALIDATE + _MAGIC + b"".join(_SET + _text(key) + _text(b"garbage") for key in keys)
    return [
        store,
        *(number.to_bytes(8, "little") for number in range(6)),
        dice.randrange(51).to_bytes(8, "little") + dice.randbytes(256),
        dice.randbytes(1 << 20),
        pickle.dumps(_Evil()),
        b"GET / HTTP/1.1\r\n\r\n",
        b"",  # half open
    ]


class _Evil:
    def __reduce__(self) -> object:
        return os.system, ("touch /tmp/elastic-ray-was-here",)


class Stranger:
    """Attacks the ports that it was told last, from all sides, until it is told to end."""

    def __init__(self) -> None:
        self.ports: list[tuple[str, int]] = []
        self.ended = threading.Event()
        self.stores: set[int] = set()
        self.connected: set[int] = set()
        self._open: list[socket.socket] = []

    def attack(self) -> None:
        """Until the end."""
        dice = random.Random(0)
        while not self.ended.wait(0.005):
            for host, port in self.ports:
                for payload in _payloads(dice):
                    if not self._send(host, port, payload):
                        break  # it is closed
                else:
                    if is_a_store(host, port, _TIMEOUT_S):
                        self.stores.add(port)

    def _send(self, host: str, port: int, payload: bytes) -> bool:
        try:
            connection = socket.create_connection((host, port), _TIMEOUT_S)
        except OSError:
            return False
        self.connected.add(port)
        with contextlib.suppress(OSError):
            connection.sendall(payload)
        self._open = [*self._open[-60:], connection]
        return True


def main() -> None:
    """See the module's text."""
    os.setgid(int(sys.argv[1]))
    os.setuid(int(sys.argv[1]))
    assert os.getuid() != 0
    stranger = Stranger()
    thread = threading.Thread(target=stranger.attack, daemon=True)
    thread.start()
    for line in sys.stdin:
        stranger.ports = [(host, port) for host, port in json.loads(line)]
    stranger.ended.set()
    thread.join(10)
    print(json.dumps({"stores": sorted(stranger.stores), "connected": sorted(stranger.connected)}), flush=True)


if __name__ == "__main__":
    main()
