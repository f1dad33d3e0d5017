"""Access rules for the page: host names against DNS rebinding, origins against other sites, a token (pure)."""

from __future__ import annotations

import dataclasses
import hmac
import ipaddress
import secrets
from collections.abc import Hashable, Mapping

LOOPBACK = ("127.0.0.1", "::1", "localhost")

HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
"""Of every answer."""


def new_token() -> str:
    """Return a new random token of 256 bits, as text."""
    return secrets.token_urlsafe(32)


def is_loopback(host: str) -> bool:
    """True if only this machine can reach a server that listens on ``host``."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Properties of an HTTP request that determine whether the page allows it."""

    method: str  # ``GET``..
    path: str
    host: str = ""  # its header; empty if there is none. The others likewise.
    origin: str = ""
    fetch_site: str = ""
    authorization: str = ""  # ``Bearer <token>``
    content_type: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """Access rules for one web page: the hosts, origins and tokens that its requests must have."""

    host: str = "127.0.0.1"  # where it listens
    # further names of this machine, by which a browser may ask for the page where it listens on all addresses
    names: tuple[str, ...] = ()
    # for actions, and for everything under ``/api/`` where others than this machine can reach the page; None where no
    # action is allowed
    token: str | None = dataclasses.field(default=None, repr=False)

    def __post_init__(self) -> None:
        if not is_loopback(self.host) and not self.token:
            raise ValueError(f"host must be a loopback address where there is no token, but got {self.host!r}")

    @property
    def open_to_others(self) -> bool:
        """True if other machines can reach the page."""
        return not is_loopback(self.host)

    def refusal(self, asked: Asked) -> tuple[int, str] | None:
        """Return the HTTP status and reason if the request ``asked`` must be refused; None if it is allowed."""
        if not self._knows(asked.host):
            return 403, f"this page is not called {asked.host!r}: open it by the address that it printed"
        if asked.origin and asked.origin not in (f"http://{asked.host}", f"https://{asked.host}"):
            return 403, "other sites may not ask this page"
        if asked.fetch_site in ("cross-site", "same-site"):
            return 403, "other sites may not ask this page"
        if asked.method not in ("GET", "HEAD", "POST"):
            return 405, f"method {asked.method} is not allowed"
        if asked.method == "POST":
            if self.token is None:
                return 403, "this page only shows: start it with `elastic-ray dashboard` for actions"
            if asked.content_type.partition(";")[0].strip().lower() != "application/json":
                return 415, "actions are sent as application/json"
        wants_token = asked.method == "POST" or (self.open_to_others and asked.path.startswith("/api/"))
        if wants_token and not self._has_token(asked.authorization):
            return 401, "the token is missing or wrong: it was printed when the page was started"
        return None

    def _knows(self, host: str) -> bool:
        """True if ``host`` is a name of this page; a hostile site's name may also resolve to this machine."""
        name = _name(host).lower()
        if name in LOOPBACK or name == self.host.strip("[]").lower():
            return True
        if not self.open_to_others:
            return False
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return name in {each.lower() for each in self.names}
        return True  # no site can have an address for its name

    def _has_token(self, authorization: str) -> bool:
        """True if the header contains the token; the comparison takes constant time."""
        kind, _, given = authorization.partition(" ")
        token = self.token or ""
        same = hmac.compare_digest(given.strip().encode("utf-8", "replace"), token.encode())
        return same and kind.lower() == "bearer" and bool(token)


def _name(host: str) -> str:
    """Return the name in a ``Host`` header, without the port and IPv6 brackets."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.rpartition(":")[0] if host.count(":") == 1 else host


MOST = 256
MOST_OF_ONE = 128  # all processes of this machine are one peer
LONGEST_WAIT_S = 20.0


@dataclasses.dataclass(frozen=True, slots=True)
class _Connection:
    peer: str
    since_s: float
    asks: int = 0  # requests that are being answered


class Doors:
    """Limited set of open connections to a page, in total and per peer (client address)."""

    def __init__(self, most: int = MOST, most_of_one: int = MOST_OF_ONE) -> None:
        self._most, self._most_of_one = most, most_of_one
        self._connections: dict[Hashable, _Connection] = {}

    def __len__(self) -> int:
        return len(self._connections)

    def open(self, key: Hashable, peer: str, now_s: float) -> Hashable | None:
        """Add a connection from ``peer``; if too many are open, remove and return the longest idle one, else None."""
        of_peer = [each for each, one in self._connections.items() if one.peer == peer]
        self._connections[key] = _Connection(peer, now_s)
        if len(of_peer) >= self._most_of_one:
            return self._longest_waiting([*of_peer, key])
        if len(self._connections) > self._most:
            return self._longest_waiting(list(self._connections))
        return None

    def close(self, key: Hashable) -> None:
        """Remove a connection that has ended."""
        self._connections.pop(key, None)

    def start(self, key: Hashable) -> None:
        """Record that a complete request has arrived on a connection."""
        if (one := self._connections.get(key)) is not None:
            self._connections[key] = dataclasses.replace(one, asks=one.asks + 1)

    def end(self, key: Hashable, now_s: float) -> None:
        """Record that a request on a connection has been answered at ``now_s``."""
        if (one := self._connections.get(key)) is not None:
            self._connections[key] = dataclasses.replace(one, asks=one.asks - 1, since_s=now_s)

    def late(self, now_s: float) -> list[Hashable]:
        """Return the connections to close at ``now_s``, because no request has arrived on them for too long."""
        return [key for key, one in self._connections.items() if not one.asks and now_s - one.since_s >= LONGEST_WAIT_S]

    def _longest_waiting(self, keys: list[Hashable]) -> Hashable:
        waiting = [key for key in keys if not self._connections[key].asks]  # the new one at least
        leaves = min(waiting, key=lambda key: self._connections[key].since_s)
        del self._connections[leaves]
        return leaves
