"""Policies of users' own, every way they may be given."""

from __future__ import annotations

import dataclasses
import pickle
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from placement.allocator.core import AllocatorCore
from placement.allocator.events import JobHeartbeat, NodesChanged
from placement.allocator.packed_policy import pack_policy
from placement.cluster.cluster import Cluster
from placement.cluster.jobs import JobView
from placement.policies import FairSharePolicy, Target, make_policy
from placement.simulator.cli import main
from tests.placement.simulator.worlds import profiles, trace
from tests.placement.views import AT_ONCE, cluster, view


def two_each(jobs: Sequence[JobView], cluster: Cluster, now_s: float) -> dict[str, int]:
    """As short as a policy can be."""
    return {job.job: 2 for job in jobs}


class TwoEach:
    """A class without a name of its own, with reasons."""

    def decide(self, jobs: Sequence[JobView], cluster: Cluster, now_s: float) -> dict[str, Target]:
        return {job.job: Target(workers=2, reason="two for all") for job in jobs}


@dataclasses.dataclass(frozen=True)
class Each:
    """A policy object with settings."""

    workers: int
    name: str = "each"

    def decide(self, jobs: Sequence[JobView], cluster: Cluster, now_s: float) -> Mapping[str, Any]:
        return dict.fromkeys((job.job for job in jobs), self.workers)


class Forgetful:
    """Its method lacks an argument."""

    def decide(self, jobs: Any) -> dict[str, int]:
        return {}


FILE = "def all_to_the_first(jobs, cluster, now_s):\n    return {j.job: 4 * (i == 0) for i, j in enumerate(jobs)}\n"


def sizes(policy: Any) -> tuple[dict[str, int], AllocatorCore]:
    core = AllocatorCore(make_policy(policy), AT_ONCE)
    core.handle(NodesChanged(cluster=cluster(8)), 0.0)
    core.handle(JobHeartbeat(view=view("a")), 1.0)
    core.handle(JobHeartbeat(view=view("b", submitted_s=1.0)), 2.0)
    return {name: sum(job.target.values()) for name, job in core.snapshot().jobs.items()}, core


@pytest.mark.parametrize(
    "policy",
    [
        two_each,
        TwoEach,
        TwoEach(),
        Each(2),
        f"{__name__}:two_each",
        f"{__name__}:TwoEach",
        lambda a, b, c: two_each(a, b, c),
    ],
    ids=["function", "class", "object", "object with settings", "module:function", "module:class", "lambda"],
)
def test_a_policy_of_ones_own_decides(policy: Any) -> None:
    assert sizes(policy)[0] == {"a": 2, "b": 2}
    assert sizes(pack_policy(policy).open())[0] == {"a": 2, "b": 2}


def test_a_file_is_loaded_by_its_path(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FILE)
    counts, core = sizes(f"{tmp_path}/mine.py:all_to_the_first")
    assert counts == {"a": 4, "b": 0}
    assert core.snapshot().policy == "all_to_the_first"
    assert core.snapshot().jobs["a"].reason.words == "decided by all_to_the_first"


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        ("godput", "must be one of boa, .*utility_cost, or a policy of your own as module:name .* got 'godput'"),
        ("nowhere:f", "'nowhere:f' must be module:name .*No module named 'nowhere'"),
        ("nowhere.py:f", "there is no file .*nowhere.py"),
        (f"{__name__}:two_eech", "has no 'two_eech'; it has .*two_each"),
        (f"{__name__}:FILE", "must be a registered name, a function .* but got 'def all"),
    ],
)
def test_a_wrong_name_is_answered_with_what_is_right(policy: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make_policy(policy)


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        (7, "must be a registered name, a function .* got 7"),
        (dict, "got the class dict without decide"),
        (Forgetful, r"must be a function .*Forgetful.* takes \(jobs: 'Any'\).*: too many positional"),
        (Each, "class Each wants arguments; pass an object of it"),
        (lambda jobs: {}, r"takes \(jobs\): too many positional"),
    ],
)
def test_an_object_that_can_be_no_policy_is_refused(policy: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        make_policy(policy)


def raising(jobs: Any, cluster: Any, now_s: float) -> Any:
    raise RuntimeError("my own mistake")


@pytest.mark.parametrize(
    ("policy", "rule", "words"),
    [
        (Each(9), "capacity", "was given 9 workers, but 8 x 1 CPU fit onto all nodes"),
        (Each(-1), "whole number", "was given -1 workers"),
        (lambda jobs, cluster, now_s: {}, "every job", "no target for job"),
        (lambda jobs, cluster, now_s: [2, 2], "mapping", "answers with {job: workers or Target}, but got [2, 2]"),
        (raising, "RuntimeError", "my own mistake"),
    ],
)
def test_broken_policy_is_named_with_rule_and_changes_nothing(policy: Any, rule: str, words: str) -> None:
    core = AllocatorCore(make_policy(policy), AT_ONCE)
    core.handle(NodesChanged(cluster=cluster(8)), 0.0)
    for name in "ab":
        core.handle(JobHeartbeat(view=view(name, max_workers=99, allocation={"n0": 1})), 1.0)
    assert [sum(job.target.values()) for job in core.snapshot().jobs.values()] == [1, 1]
    refused = core.log[-1]
    assert refused.trigger == "refused"
    assert f"policy {make_policy(policy).name!r} broke rule {rule!r}" in refused.reason.explained
    assert words in refused.reason.explained


def test_a_parcel_is_known_again_by_code_and_settings() -> None:
    assert pack_policy("fair_share").identity == pack_policy(FairSharePolicy()).identity
    assert pack_policy(Each(2)).identity == pack_policy(Each(2)).identity != pack_policy(Each(3)).identity
    assert pack_policy(two_each).identity != pack_policy(raising).identity
    packed = pack_policy(two_each)
    assert pack_policy(packed) is packed == pickle.loads(pickle.dumps(packed))


def test_what_cannot_be_pickled_is_named() -> None:
    import threading

    lock = threading.Lock()

    def holds(jobs: Any, cluster: Any, now_s: float) -> Any:
        return lock and {}

    with pytest.raises(TypeError, match="policy 'holds' cannot be sent to the allocator"):
        pack_policy(holds)


def test_the_simulator_takes_one_by_its_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The very file of the example, beside one that comes with it; a name that is wrong is answered in one line."""
    trace(tmp_path / "t.csv", [("a", 0.0, "toy", 1, 32), ("b", 10.0, "toy", 2, 64)])
    world = [
        "--trace",
        f"{tmp_path}/t.csv",
        "--profiles",
        str(profiles(tmp_path / "p")),
        "--cluster",
        "t4:2x4",
        "--quiet",
    ]
    file = Path(__file__).resolve().parents[2] / "examples" / "custom_policy.py"
    assert main([*world, "--processes", "1", "--policy", f"{file}:least_left_first,fair_share"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"least_left_first +\d", shown) and re.search(r"fair_share +\d", shown)
    assert main([*world, "--policy", f"{file}:nothing"]) == 2
    assert re.search(r"has no 'nothing'; it has .*least_left_first", capsys.readouterr().err)
