"""What of Ray's nodes elastic jobs may use."""

from __future__ import annotations

from placement.ray_cluster.snapshot import RawNode, group_name, usable


def raw(available: float, **reserved: float) -> tuple[RawNode, ...]:
    held = {job: {"CPU": amount} for job, amount in reserved.items()}
    node = RawNode(
        node_id="n0",
        total={"CPU": 8.0},
        available={"CPU": available},
        reserved=held,
        draining=False,
        labels={},
    )
    return (node,)


def free(*history: tuple[RawNode, ...], ours: set[str]) -> float:
    (node,) = usable(history, ours).nodes
    return node.free["CPU"]


def test_our_holdings_stay_usable_and_others_do_not() -> None:
    assert free(raw(8.0), ours=set()) == 8.0
    assert free(raw(3.0, a=3.0), ours={"a"}) == 6.0
    assert free(raw(3.0, a=3.0), ours=set()) == 3.0  # the job of those groups is gone or unknown


def test_one_snapshot_that_lags_is_no_news() -> None:
    steady, lags = raw(6.0), raw(2.0)
    assert free(steady, steady, lags, ours=set()) == 6.0
    assert free(steady, lags, lags, ours=set()) == 2.0
    over = raw(6.0, a=4.0)  # reserved, but not yet missing from what is available
    assert free(raw(6.0), raw(6.0), over, ours={"a"}) == 6.0


def test_group_names_tell_the_job() -> None:
    assert group_name("tune:trial", "w1") == "elastic_ray:tune:trial:w1"
    assert usable((), ()).nodes == ()
