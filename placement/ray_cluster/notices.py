"""Cloud notices that a spot node will be reclaimed, in each metadata server's format (pure).

Sources: AWS "Spot Instance interruption notices" (``spot/instance-action``, two minutes ahead), Google Cloud "Spot
VMs" (``instance/preempted``, 30 s ahead), Azure "Scheduled Events" (``Preempt``, 30 s ahead or more).
"""

from __future__ import annotations

import dataclasses
import datetime
import email.utils
import json
from collections.abc import Mapping

from placement.arguments import NamesArguments
from placement.checks import check_choice, check_number

GOOGLE_NOTICE_S = 30.0
CLOUDS = ("auto", "aws", "gcp", "azure")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NoticeConfig(NamesArguments):
    """Configuration for watching for notices that the cloud will reclaim a spot node.

    Attributes:
        cloud: "aws", "gcp" or "azure"; "auto" detects the cloud from the metadata server.
        address: Address of the metadata server.
        poll_s: Polling interval [s].
        enabled: False disables the watch.

    Examples:
        >>> from placement import NoticeConfig
        >>> NoticeConfig(poll_s=5.0).cloud
        'auto'
    """

    cloud: str = "auto"
    address: str = "http://169.254.169.254"
    poll_s: float = 2.0
    enabled: bool = True

    def __post_init__(self) -> None:
        check_choice("cloud", self.cloud, CLOUDS)
        if not self.address.startswith(("http://", "https://")):
            raise ValueError(f"address must be a URL such as http://169.254.169.254, but got {self.address!r}")
        check_number("poll_s", self.poll_s, above=0, unit="seconds")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """HTTP request to a metadata server, with a path relative to the server's address."""

    path: str
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict)
    method: str = "GET"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """Notice that the cloud will reclaim a node."""

    deadline_s: float  # when, in seconds since the epoch
    reason: str  # as a sentence for the log


AWS_TOKEN = Request(path="/latest/api/token", headers={"X-aws-ec2-metadata-token-ttl-seconds": "21600"}, method="PUT")
AZURE_NAME = Request(
    path="/metadata/instance/compute/name?api-version=2021-02-01&format=text", headers={"Metadata": "true"}
)


def probe(cloud: str) -> Request:
    """Return a request that only this cloud's metadata server answers, to detect the cloud."""
    requests = {
        "aws": AWS_TOKEN,
        "gcp": Request(path="/computeMetadata/v1/instance/id", headers={"Metadata-Flavor": "Google"}),
        "azure": AZURE_NAME,
    }
    return requests[cloud]


def question(cloud: str, token: str = "") -> Request:
    """Return the request that asks this cloud's metadata server for a notice; ``token`` is used only for AWS."""
    if cloud == "aws":
        return Request(path="/latest/meta-data/spot/instance-action", headers={"X-aws-ec2-metadata-token": token})
    if cloud == "gcp":
        return Request(path="/computeMetadata/v1/instance/preempted", headers={"Metadata-Flavor": "Google"})
    return Request(path="/metadata/scheduledevents?api-version=2020-07-01", headers={"Metadata": "true"})


def read_notice(cloud: str, answer: str | None, *, now_s: float, machine: str = "") -> Notice | None:
    """Return the notice in a metadata server's response; None if the response contains no notice.

    Args:
        machine: Azure's name of this machine; Azure's responses list all machines of a scale set.
    """
    if answer is None:
        return None
    try:
        if cloud == "aws":
            return _aws(json.loads(answer))
        if cloud == "gcp":
            gone = answer.strip().upper() == "TRUE"
            return Notice(deadline_s=now_s + GOOGLE_NOTICE_S, reason="Google Cloud preempts it") if gone else None
        return _azure(json.loads(answer), now_s, machine)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"the metadata server's answer makes no sense ({error!r}): {answer[:200]!r}") from error


def _aws(answer: Mapping[str, str]) -> Notice | None:
    if answer["action"] not in ("terminate", "stop", "hibernate"):
        return None
    end = datetime.datetime.strptime(answer["time"], "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=datetime.timezone.utc)
    return Notice(deadline_s=end.timestamp(), reason=f"AWS will {answer['action']} it")


def _azure(answer: Mapping[str, list[Mapping[str, object]]], now_s: float, machine: str) -> Notice | None:
    """Return the first event that ends this machine (any machine, if ``machine`` is empty); None if none does."""
    for event in answer["Events"]:
        resources = event.get("Resources") or []
        if event["EventType"] not in ("Preempt", "Terminate") or (machine and machine not in resources):  # type: ignore[operator]
            continue
        begins = str(event.get("NotBefore") or "")  # empty once it has begun
        deadline_s = email.utils.parsedate_to_datetime(begins).timestamp() if begins else now_s
        return Notice(deadline_s=deadline_s, reason=f"Azure schedules {event['EventType']}")
    return None
