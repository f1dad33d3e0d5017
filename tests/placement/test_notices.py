"""What metadata servers say about the end of a node, by the clouds' own documents."""

from __future__ import annotations

import datetime

import pytest

from placement.notices import Notice, NoticeConfig, read_notice

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
        NoticeConfig(**values)  # type: ignore[arg-type]
