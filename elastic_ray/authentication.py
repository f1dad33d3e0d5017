"""Message authentication: who signs knows a job's secret, which travels through Ray alone (pure)."""

from __future__ import annotations

import hmac
import secrets
from hashlib import sha256

MAC_BYTES = 32


def new_secret() -> str:
    """A secret for one job."""
    return secrets.token_hex(32)


def sign(secret: str, *facts: str | int | bytes) -> bytes:
    """HMAC-SHA256 of these facts under the secret: who holds it can tell that somebody else does.

    Args:
        secret: the job's; not empty.
        facts: what the code is for, so that it serves for nothing else.
    """
    if not secret:
        raise ValueError("secret must not be empty: anybody could prove to know it")
    digest = hmac.new(secret.encode(), digestmod=sha256)
    for fact in facts:
        content = fact if isinstance(fact, bytes) else str(fact).encode()
        digest.update(len(content).to_bytes(8, "little") + content)  # else ("a", "bc") would prove ("ab", "c")
    return digest.digest()


def verify(mac: bytes, secret: str, *facts: str | int | bytes) -> bool:
    """True if `mac` is the code of these facts; takes the same time for a wrong one."""
    return hmac.compare_digest(mac, sign(secret, *facts))
