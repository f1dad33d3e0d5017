"""What a run proves of itself: its groups begin alike, and its passes use each sample once."""

from __future__ import annotations

from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import torch

import elastic_ray as er
from elastic_ray.state.layout import ReplicasDifferError
from elastic_ray.state.progress import BITS, Link, hash_of_all, sample_hashes
from elastic_ray.state.replicas import different_ranks, digest_of_tensors
from tests.loop.changing import Change, Kill, Outcome, Spoil, run_job

# -- the parts ---------------------------------------------------------------------------------------------------------


@hypothesis.given(st.integers(2, 300), st.data())
def test_the_sum_shows_a_repeated_sample(samples: int, data: st.DataObject) -> None:
    order = np.random.default_rng(samples).permutation(samples)
    assert int(sample_hashes(order).sum()) & BITS == hash_of_all(samples)
    place, other = data.draw(st.integers(0, samples - 1)), data.draw(st.integers(0, samples - 1))
    hypothesis.assume(order[place] != other)
    order[place] = other
    assert int(sample_hashes(order).sum()) & BITS != hash_of_all(samples)


DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.complex64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("numel", [1, 3, 17, 1000, 70_001])
def test_a_digest_depends_on_each_value(dtype: torch.dtype, numel: int) -> None:
    first, rest = torch.rand(5), torch.zeros(numel, dtype=dtype)
    changed = rest.clone()
    changed[-1] = 1
    assert digest_of_tensors([first, rest]) == digest_of_tensors([first.clone(), rest.clone()])
    assert digest_of_tensors([first, rest]) != digest_of_tensors([first, changed])


def test_a_digest_depends_on_the_order() -> None:
    one, two = torch.rand(20), torch.rand(20)
    assert digest_of_tensors([one, two]) != digest_of_tensors([two, one])
    assert digest_of_tensors([torch.cat([one, two])]) != digest_of_tensors([torch.cat([two, one])])
    assert digest_of_tensors([]) == 0


@pytest.mark.parametrize("numel", [1000, 70_001, 1_000_000])
def test_a_digest_sees_values_that_changed_places(numel: int) -> None:
    values = torch.arange(numel, dtype=torch.float32)
    swapped = values.clone()
    swapped[[0, numel - 200]] = swapped[[numel - 200, 0]]
    assert digest_of_tensors([values]) != digest_of_tensors([swapped])


@pytest.mark.parametrize(
    ("told", "joined", "different"),
    [
        ([7, 7, 7], [False, False, False], ()),
        ([7, 7, 8], [False, False, True], (2,)),
        ([8, 7, 7], [False, True, True], (1, 2)),  # most of them joined: the member is right
        ([7, 8, 8], [False, False, False], (0,)),
        ([7, 8], [False, False], (1,)),
        ([7, 8], [True, True], (1,)),
    ],
)
def test_members_decide_what_is_right(told: list[int], joined: list[bool], different: tuple[int, ...]) -> None:
    assert different_ranks(told, joined) == different


def test_a_link_depends_on_facts_and_predecessor() -> None:
    first = Link.after(0, {"step": 1, "members": ["w1"]})
    assert first == Link.after(0, {"members": ["w1"], "step": 1})
    assert first.link not in (0, Link.after(0, {"step": 2, "members": ["w1"]}).link)
    assert Link.after(first.link, {"step": 2}).link != Link.after(0, {"step": 2}).link


# -- in a job ----------------------------------------------------------------------------------------------------------

SAMPLES = 53


def train(
    *, epochs: int = 3, drop_last: bool = False, harm: Any = None, sampler: Any = None, strategy: str | None = None
) -> None:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    options = {} if strategy is None else {"strategy": strategy}
    model: Any = er.AdaptiveDataParallel(net, optimizer, **options)
    data = torch.utils.data.TensorDataset(torch.randn(SAMPLES, 3))
    loader = er.AdaptiveDataLoader(data, batch_size=8, drop_last=drop_last, sampler=sampler)
    step = 0
    for _ in er.remaining_epochs_until(epochs):
        for (x,) in loader:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            step += 1
            if harm is not None:
                harm(optimizer, step)


def passes(outcome: Outcome) -> list[dict[str, Any]]:
    return [detail["proof"] for _, _, detail in outcome.passes]


CHANGES = {
    "alone": ((1,), []),
    "still": ((1, 2), []),
    "grows and shrinks": ((1, 2), [Change(4, (1, 2, 3)), Change(10, (1, 3))]),
    "a kill": ((1, 2, 3), [Kill(9, 2, "allreduce")]),
    "the first is killed after the update": ((1, 2), [Kill(6, 1, "after_step", joins=(3,))]),
}


@pytest.mark.parametrize(("first", "script"), CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("drop_last", [False, True])
def test_each_epoch_proves_its_samples(first: Any, script: Any, drop_last: bool) -> None:
    found = passes(run_job(lambda: train(drop_last=drop_last), script, first=first))
    assert [each["epoch"] for each in found] == [0, 1, 2]
    for each in found:
        assert each["of"] == SAMPLES
        assert (each["hash"] + each["rest"]) & BITS == hash_of_all(SAMPLES)
        assert (each["samples"] == SAMPLES) == (each["rest"] == 0)


@pytest.mark.parametrize(("first", "script"), list(CHANGES.values())[2:], ids=list(CHANGES)[2:])
def test_each_group_proves_a_common_state(first: Any, script: Any) -> None:
    outcome = run_job(train, script, first=first)
    before = 0
    lines = [*passes(outcome)]
    for generation, told in outcome.proofs.items():
        links = {(each.before, each.link) for each in told.values()}
        assert len(links) == 1, generation
        (link,) = {each.link for each in told.values()}
        facts = dict(next(iter(told.values())).facts)
        assert Link.after(next(iter(links))[0], facts).link == link
        assert facts["digest"] != 0
        assert facts["bytes"] > 0
        lines.append({**facts, "before": next(iter(links))[0], "link": link})
    # Every line follows another: nothing is left out.
    following = {each["before"]: each["link"] for each in lines}
    while before in following:
        before = following.pop(before)
    assert not following


def test_members_with_other_moments_are_named() -> None:
    def harm(optimizer: Any, step: int) -> None:
        if step == 5 and er.get_context().get_world_rank() == 1:
            optimizer.state[optimizer.param_groups[0]["params"][0]]["exp_avg"].add_(1.0)

    with pytest.raises(
        ReplicasDifferError, match="rank 1 and the other 2 hold different values in optimizer/0/0/exp_avg"
    ):
        run_job(lambda: train(harm=harm), [Change(4, (1, 2, 3))], first=(1, 2))


def test_a_spoilt_joiner_is_refused() -> None:
    text = r"does not hold the state that it was sent when it joined: rank 2 and the other 2 .* model/0/0.weight"
    with pytest.raises(ReplicasDifferError, match=text):
        run_job(train, [Change(4, (1, 2, 3)), Spoil(5, 3)], first=(1, 2))


def test_a_spoilt_beginning_is_refused() -> None:
    with pytest.raises(ReplicasDifferError, match=r"rank 1 and the other 1 hold different values in model/0/0.weight"):
        run_job(train, [Spoil(0, 2)], first=(1, 2))


def test_users_samplers_are_counted_only() -> None:
    sampler = [*range(20), *range(20)]
    found = passes(run_job(lambda: train(epochs=1, sampler=sampler), first=(1, 2)))
    assert [(each["samples"], each["rest"]) for each in found] == [(40, None)]


def test_drifting_models_prove_samples_alone() -> None:
    outcome = run_job(lambda: train(strategy="local_sgd"), [Change(4, (1, 2, 3))], first=(1, 2))
    assert {each.facts["digest"] for told in outcome.proofs.values() for each in told.values()} == {0}
    assert all(each["hash"] == hash_of_all(SAMPLES) for each in passes(outcome))
