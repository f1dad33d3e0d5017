"""What metadata servers say about the end of a node, by the clouds' own documents, and how they are asked for it."""

from __future__ import annotations

import datetime
import http.client
import http.server
import time
from collections.abc import Callable

import pytest

from placement.ray_cluster.notice_watcher import Metadata
from placement.ray_cluster.notices import Notice, NoticeConfig, read_notice
from tests.metadata_server import Handler, MetadataServer

NOW_S = datetime.datetime(2026, 11, 21, 8, 20, tzinfo=datetime.timezone.utc).timestamp()


def test_aws_names_the_action_and_the_time() -> None:
    notice = read_notice("aws", '{"action": "terminate", "time": "2026-11-21T08:22:00Z"}', now_s=NOW_S)
    assert notice == Notice(deadline_s=NOW_S + 120, reason="AWS will terminate it")
    assert read_notice("aws", None, now_s=NOW_S) is None, "404: nothing is planned"


def test_google_says_true_half_a_minute_before() -> None:
    assert read_notice("gcp", "FALSE", now_s=NOW_S) is None
    notice = read_notice("gcp", "TRUE\n", now_s=NOW_S)
    assert notice is not None and notice.deadline_s == NOW_S + 30


@pytest.mark.parametrize(
    "kind, machine, begins, left_s",
    [
        ("Preempt", "vm_1", "Sat, 21 Nov 2026 08:20:30 GMT", 30.0),
        ("Preempt", "vm_1", "", 0.0),
        ("Preempt", "vm_2", "Sat, 21 Nov 2026 08:20:30 GMT", None),
        ("Freeze", "vm_1", "Sat, 21 Nov 2026 08:20:30 GMT", None),
    ],
)
def test_azure_names_machine_and_event(kind: str, machine: str, begins: str, left_s: float | None) -> None:
    answer = f'{{"Events": [{{"EventType": "{kind}", "Resources": ["{machine}"], "NotBefore": "{begins}"}}]}}'
    notice = read_notice("azure", answer, now_s=NOW_S, machine="vm_1")
    assert (None if notice is None else notice.deadline_s - NOW_S) == left_s
    assert read_notice("azure", '{"DocumentIncarnation": 1, "Events": []}', now_s=NOW_S) is None


@pytest.mark.parametrize("cloud, answer", [("aws", "<html>"), ("aws", '{"action": "stop"}'), ("azure", "[]")])
def test_an_answer_without_sense_is_shown(cloud: str, answer: str) -> None:
    with pytest.raises(ValueError, match="makes no sense"):
        read_notice(cloud, answer, now_s=NOW_S)


@pytest.mark.parametrize(
    "values, message",
    [
        ({"cloud": "ibm"}, r"cloud must be one of auto, aws, gcp, azure, but got 'ibm'"),
        ({"address": "169.254.169.254"}, r"address must be a URL such as http://169.254.169.254, but got"),
        ({"poll_s": 0}, r"poll_s must be above 0 seconds, but got 0"),
    ],
)
def test_settings_that_make_no_sense_are_named(values: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NoticeConfig(**values)


# Over HTTP
# ----------------------------------------------------------------------------------------------------------------------

SOON = '"NotBefore": "Sat, 21 Nov 2026 08:20:30 GMT"'
NOTICES = {
    "aws": ('{"action": "terminate", "time": "2026-11-21T08:22:00Z"}', "AWS will terminate it"),
    "gcp": ("TRUE", "Google Cloud preempts it"),
    "azure": (f'{{"Events": [{{"EventType": "Preempt", "Resources": ["vm_1"], {SOON}}}]}}', "Azure schedules Preempt"),
}
NOTHING = {"aws": None, "gcp": "FALSE", "azure": '{"Events": []}'}
HOUR_S = 3600.0


def metadata(server: MetadataServer, cloud: str = "auto", clock: Callable[[], float] = time.monotonic) -> Metadata:
    return Metadata(NoticeConfig(address=server.address, cloud=cloud), clock)


@pytest.mark.parametrize("cloud", sorted(NOTICES))
@pytest.mark.parametrize("asked_for", ["auto", "its own"])
def test_each_cloud_is_found_and_its_notice_read(cloud: str, asked_for: str) -> None:
    with MetadataServer(cloud) as server:
        asking = metadata(server, "auto" if asked_for == "auto" else cloud)
        assert asking.find_cloud() == cloud
        server.notice = NOTHING[cloud]
        assert asking.poll(cloud) is None
        server.notice, reason = NOTICES[cloud]
        notice = asking.poll(cloud)
        assert notice is not None and notice.reason == reason


def test_no_cloud_is_found_where_nobody_answers() -> None:
    with MetadataServer("gcp") as server:
        assert metadata(server, "aws").find_cloud() is None
    assert metadata(server).find_cloud() is None, "nobody listens there any more"


def test_azure_tells_the_end_of_other_machines_too() -> None:
    with MetadataServer("azure") as server:
        asking = metadata(server)
        asking.find_cloud()
        server.notice = NOTICES["azure"][0].replace("vm_1", "vm_2")
        assert asking.poll("azure") is None


@pytest.mark.parametrize("booted_s", [0.0, 300.0, 25 * HOUR_S])
def test_awss_notice_is_read_from_machines_first_second_on(booted_s: float) -> None:
    """The clock counts from the machine's boot; the server answers 401 to any token but its own."""
    with MetadataServer("aws") as server:
        asking = metadata(server, "aws", clock=lambda: booted_s)
        assert asking.find_cloud() == "aws"
        server.notice = NOTICES["aws"][0]
        assert asking.poll("aws") is not None and server.tokens_refused == 0


def test_awss_token_is_asked_for_hourly_and_when_refused() -> None:
    clock = [0.0]
    with MetadataServer("aws") as server:
        asking = metadata(server, "aws", clock=lambda: clock[0])
        for clock[0] in (0.0, 2.0, HOUR_S):
            asking.poll("aws")
        assert server.tokens_given == 1
        server.forget_token()
        server.notice = NOTICES["aws"][0]
        assert asking.poll("aws") is not None and (server.tokens_refused, server.tokens_given) == (1, 2)
        clock[0] = 3 * HOUR_S
        asking.poll("aws")
        assert server.tokens_given == 3


class Odd(Handler):
    """A server that speaks no HTTP where other clouds are asked, but AWS's where it is."""

    def parse_request(self) -> bool:
        if b"/latest/" in self.raw_requestline:  # type: ignore[attr-defined]
            return super().parse_request()
        self.wfile.write(b"hello\r\n\r\n")
        self.close_connection = True
        return False


class Hanging(Odd):
    """One that takes the question and never answers."""

    def parse_request(self) -> bool:
        if b"/latest/" in self.raw_requestline:  # type: ignore[attr-defined]
            return super().parse_request()
        time.sleep(5.0)  # a service that hangs
        return False


@pytest.mark.parametrize("handler", [Odd, Hanging])
def test_what_is_no_answer_keeps_nobody_from_asking_on(handler: type[http.server.BaseHTTPRequestHandler]) -> None:
    with MetadataServer("aws", handler) as server:
        asking, began_s = metadata(server), time.monotonic()
        assert asking.find_cloud() == "aws"
        with pytest.raises((OSError, http.client.HTTPException)):
            asking.poll("gcp")
        assert time.monotonic() - began_s < 14.0, "three questions without an answer, of a second each"


def test_other_refusals_are_raised() -> None:
    with MetadataServer("gcp") as server, pytest.raises(OSError, match="HTTP Error 403"):
        metadata(server).poll("azure")
