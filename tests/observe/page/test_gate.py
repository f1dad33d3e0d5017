"""Who may ask the page for what."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ray.observe.page.gate import HEADERS, Asked, Gate, is_loopback, new_token

TOKEN = new_token()
LOCAL = Gate(token=TOKEN)
WIDE = Gate(host="0.0.0.0", names=("head", "head.example.org"), token=TOKEN)


def get(gate: Gate, **asked: str) -> int | None:
    """Status of the refusal; None if the request is answered."""
    values = {"method": "GET", "path": "/api/snapshot", "host": "127.0.0.1:8270", **asked}
    refused = gate.refusal(Asked(**values))
    return refused[0] if refused is not None else None


@pytest.mark.parametrize(
    "host", ["127.0.0.1:8270", "localhost:1", "localhost", "LOCALHOST:80", "[::1]:8270", "127.0.0.1"]
)
def test_this_machine_sees_the_page_without_a_token(host: str) -> None:
    assert get(LOCAL, host=host) is None


@pytest.mark.parametrize(
    "host",
    ["evil.example.org:8270", "", "127.0.0.1.evil.org", "10.0.0.1", "localhost.evil.org:8270", "head", "localhost:1:2"],
)
def test_another_name_for_this_machine_is_refused(host: str) -> None:
    """A hostile site may let its name resolve to 127.0.0.1: its scripts then ask with its name as the host."""
    assert get(LOCAL, host=host) == 403


@pytest.mark.parametrize(
    "origin", ["http://evil.example.org", "null", "http://127.0.0.1:9999", "http://localhost:8270"]
)
def test_other_sites_are_refused(origin: str) -> None:
    assert get(LOCAL, origin=origin) == 403
    assert get(LOCAL, fetch_site="cross-site") == 403 and get(LOCAL, fetch_site="same-site") == 403


def test_page_itself_and_address_typed_by_hand_are_answered() -> None:
    assert get(LOCAL, origin="http://127.0.0.1:8270", fetch_site="same-origin") is None
    assert get(LOCAL, fetch_site="none") is None


def test_an_action_wants_the_token_and_json() -> None:
    action = {"method": "POST", "path": "/api/jobs/a/stop", "content_type": "application/json"}
    assert get(LOCAL, **action) == 401
    assert get(LOCAL, **action, authorization="Bearer wrong") == 401
    assert get(LOCAL, **action, authorization=f"Basic {TOKEN}") == 401
    assert get(LOCAL, **action, authorization=f"Bearer {TOKEN}") is None
    form = {**action, "content_type": "text/plain", "authorization": f"Bearer {TOKEN}"}
    assert get(LOCAL, **form) == 415  # what a form of another site can send without being asked first
    assert get(Gate(), **action, authorization="Bearer ") == 403  # no token, no actions
    assert get(Gate(), **action) == 403


def test_beyond_this_machine_everything_but_empty_page_wants_token() -> None:
    assert get(WIDE, host="head:8270") == 401 and get(WIDE, host="10.0.0.7:8270", path="/api/events") == 401
    assert get(WIDE, host="10.0.0.7:8270", authorization=f"Bearer {TOKEN}") is None
    assert get(WIDE, host="head.example.org", path="/app.js") is None
    assert get(WIDE, host="evil.example.org", authorization=f"Bearer {TOKEN}") == 403
    with pytest.raises(ValueError, match=r"host must be a loopback address .* but got '0.0.0.0'"):
        Gate(host="0.0.0.0")
    assert is_loopback("::1") and is_loopback("localhost") and not is_loopback("0.0.0.0") and not is_loopback("head")


def test_other_methods_are_refused() -> None:
    assert {get(LOCAL, method=method) for method in ("PUT", "DELETE", "OPTIONS", "PATCH", "TRACE")} == {405}


@given(st.text(), st.text())
def test_whatever_is_sent_as_host_and_token_is_refused(host: str, header: str) -> None:
    asked = Asked(method="POST", path="/api/x", host=host, authorization=header, content_type="application/json")
    assert WIDE.refusal(asked) is not None


def test_token_is_hidden_and_scripts_come_from_the_page() -> None:
    assert TOKEN not in repr(LOCAL) and len(TOKEN) >= 43 and new_token() != TOKEN
    policy = HEADERS["Content-Security-Policy"]
    assert "default-src 'none'" in policy and "script-src 'self'" in policy and "unsafe" not in policy
