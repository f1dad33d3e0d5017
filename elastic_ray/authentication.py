"""Message authentication with one secret per job; the secret is sent through Ray only (pure)."""

from __future__ import annotations

import hmac
import secrets
from hashlib import sha256

MAC_BYTES = 32


def new_secret() -> str:
    """Return a new random secret for one job."""
    return secrets.token_hex(32)


def sign(secret: str, *facts: str | int | bytes) -> bytes:
    """Return the HMAC-SHA256 of the facts (message parts), which proves that the signer knows the job's secret.

    Args:
        secret: The job's secret; must not be empty.
        facts: Purpose and content of the message. The purpose prevents the HMAC from being reused for other messages.
    """
    if not secret:
        raise ValueError("secret must not be empty: anybody could prove to know it")
    digest = hmac.new(secret.encode(), digestmod=sha256)
    for fact in facts:
        content = fact if isinstance(fact, bytes) else str(fact).encode()
        digest.update(len(content).to_bytes(8, "little") + content)  # else ("a", "bc") would prove ("ab", "c")
    return digest.digest()


def verify(mac: bytes, secret: str, *facts: str | int | bytes) -> bool:
    """True if `mac` is the HMAC of these facts (message parts) under the secret; compares in constant time."""
    return hmac.compare_digest(mac, sign(secret, *facts))
