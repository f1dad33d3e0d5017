"""Single samples' gradients that layers show are those of the samples by themselves."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from elastic_ray.sync.operations.buckets import Bucket
from elastic_ray.sync.preconditioners import FlatPreconditioner, preconditioner
from elastic_ray.sync.statistics.example_norms import (
    DENSE_STEPS,
    FRESH_SPACING,
    LEAST_COLUMNS,
    MOST_PARTS,
    MOST_SPACING,
    ExampleNorms,
    LayerNorms,
)

torch.set_num_threads(1)
SAMPLES, LENGTH, WORDS = 5, 7, 6


class Everything(nn.Module):
    """Layers of all kinds, on words [samples, positions] and images."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.layer, self.rms = nn.Embedding(WORDS, 8, padding_idx=2), nn.LayerNorm(8), nn.RMSNorm(8)
        self.inner, self.group, self.out = nn.Linear(8, 6), nn.GroupNorm(2, 6), nn.Linear(6, 3)
        self.planes = nn.Conv2d(2, 4, 3, padding=1, stride=2, dilation=2)
        self.batch, self.flat = nn.BatchNorm2d(4).eval(), nn.Linear(4, 3)

    def forward(self, words: torch.Tensor, images: torch.Tensor) -> torch.Tensor:
        hidden = self.inner(self.rms(self.layer(self.words(words)))).tanh()
        hidden = self.group(hidden.transpose(1, 2)).mean(2)
        seen = self.batch(self.planes(images)).tanh().mean((2, 3))
        return self.out(hidden) + self.flat(seen)


def everything() -> tuple[nn.Module, list[torch.Tensor]]:
    torch.manual_seed(0)
    model = Everything().double()
    for p in model.parameters():
        nn.init.normal_(p, std=0.5)
    return model, [torch.randint(WORDS, (SAMPLES, LENGTH)), torch.randn(SAMPLES, 2, 9, 9, dtype=torch.float64)]


def loss_of(model: Callable[..., torch.Tensor], inputs: Sequence[torch.Tensor]) -> torch.Tensor:
    out = model(*inputs)
    return nn.functional.cross_entropy(out, torch.arange(len(out)) % out.shape[1])


def by_itself(
    model: nn.Module, inputs: Sequence[torch.Tensor], factors: FlatPreconditioner | None
) -> list[torch.Tensor]:
    """Sum over the samples of the squared norm of each one's part of the gradient, by parameter."""
    params = list(model.parameters())
    found = [torch.zeros((), dtype=torch.float64) for _ in params]
    for i in range(len(inputs[0])):
        out = model(*[x[i : i + 1] for x in inputs])
        part = nn.functional.cross_entropy(out, torch.tensor([i % out.shape[1]])) / len(inputs[0])
        grads = list(torch.autograd.grad(part, params))
        norms = factors.squared_norms(params, grads) if factors is not None else [g.square().sum() for g in grads]
        found = [a + b for a, b in zip(found, norms, strict=True)]
    return found


def measured(
    model: nn.Module,
    inputs: Sequence[torch.Tensor],
    factors: FlatPreconditioner | None = None,
    *,
    norms: ExampleNorms | None = None,
    samples: int | None = None,
    backward: Callable[[], None] | None = None,
) -> list[LayerNorms] | None:
    params = list(model.parameters())
    norms = norms or ExampleNorms(model, params, every=1)
    model.zero_grad()
    norms.start(0, samples or len(inputs[0]), [Bucket(0, 0, params)], lambda bucket: factors)
    backward() if backward is not None else loss_of(model, inputs).backward()
    return norms.end()


def check(found: list[LayerNorms] | None, exact: Sequence[torch.Tensor], rel: float = 1e-6) -> None:
    assert found is not None and all(each.seen == each.whole for each in found), "all are seen"
    assert [each.seen_examples for each in found] == pytest.approx([float(each) for each in exact], rel=rel)


@pytest.mark.parametrize("adam", [False, True])
def test_each_layer_shows_what_samples_have_alone(adam: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastic_ray.sync.statistics.example_norms.MOST_PARTS", 1)
    model, inputs = everything()
    optimizer, factors = torch.optim.Adam(model.parameters(), lr=1e-3), None
    for _ in range(6 if adam else 0):
        optimizer.zero_grad()
        loss_of(model, inputs).backward()
        optimizer.step()
    if adam:
        factors = preconditioner(optimizer, list(model.parameters()))
        assert factors is not None
    found = measured(model, inputs, factors)
    check(found, by_itself(model, inputs, factors))
    assert found is not None
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    whole = torch.cat([grad.reshape(-1) for grad in grads])
    exact = float(whole.square().sum()) if factors is None else float(factors.squared_norm(whole))
    assert sum(each.whole for each in found) == pytest.approx(exact, rel=1e-6)


@settings(deadline=None, max_examples=30)
@given(features=st.integers(1, 70), outputs=st.integers(1, 5), samples=st.integers(2, 6), positions=st.integers(1, 4))
def test_columns_make_the_whole_in_turn(features: int, outputs: int, samples: int, positions: int) -> None:
    torch.manual_seed(features)
    model = nn.Linear(features, outputs).double()
    x = torch.randn(samples, positions + samples, features, dtype=torch.float64)  # else it might be by position
    norms, found = ExampleNorms(model, list(model.parameters()), every=1), list[float]()
    for _ in range(max(1, min(MOST_PARTS, features // LEAST_COLUMNS))):
        step = measured(model, [x], norms=norms, backward=lambda: model(x).square().mean().backward())
        assert step is not None
        found.append(step[0].seen_examples)
    exact = sum(
        float(torch.autograd.grad(model(each).square().mean() / samples, model.weight)[0].square().sum()) for each in x
    )
    assert sum(found) / len(found) == pytest.approx(exact, rel=1e-9)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("weights", [False, True])
def test_attention_shows_the_projection_of_its_input(
    bias: bool, batch_first: bool, weights: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("elastic_ray.sync.statistics.example_norms.MOST_PARTS", 1)
    torch.manual_seed(0)
    model = nn.MultiheadAttention(8, 2, bias=bias, batch_first=batch_first).double()
    x = torch.randn(SAMPLES, LENGTH, 8, dtype=torch.float64)
    inner = [model.in_proj_weight] + ([model.in_proj_bias] if bias else [])

    def loss(rows: torch.Tensor) -> torch.Tensor:
        given = rows if batch_first else rows.transpose(0, 1)
        return model(given, given, given, need_weights=weights)[0].square().sum() / SAMPLES

    found = measured(model, [x], backward=lambda: loss(x).backward())
    assert found is not None
    grads = [torch.autograd.grad(loss(each[None]), inner) for each in x]
    exact = [float(sum(g.square().sum() for g in each)) for each in zip(*grads, strict=True)]
    assert [each.seen_examples for each in found[: len(inner)]] == pytest.approx(exact)


def test_attention_to_other_tokens_is_not_measured() -> None:
    model, x = nn.MultiheadAttention(8, 2, batch_first=True), torch.randn(SAMPLES, LENGTH, 8)
    assert measured(model, [x], backward=lambda: model(x, x + 1, x + 1)[0].square().mean().backward()) is None


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_layers_show_it_once(reentrant: bool) -> None:
    model, (words, images) = everything()
    exact = by_itself(model, [words, images], None)

    class Again(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.unit = model, torch.nn.Parameter(torch.ones(1, dtype=torch.float64))

        def forward(self, words: torch.Tensor, images: torch.Tensor) -> Any:
            return checkpoint(self.inner, words, images * self.unit, use_reentrant=reentrant)

    found = measured(Again(), [words, images])
    assert found is not None and not found[0].seen, "the factor is in no layer"
    assert sum(each.seen_examples > 0 for each in found) == len(exact)
    plain = measured(model, [words, images])
    assert plain is not None
    assert [each.seen_examples for each in found[1:]] == pytest.approx([each.seen_examples for each in plain])


def test_half_precision_is_close() -> None:
    model, inputs = everything()
    model, inputs = model.float(), [inputs[0], inputs[1].float()]
    exact = measured(model, inputs)

    def backward() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(model, inputs)
        (loss * 1024.0).backward()

    found = measured(model, inputs, backward=backward)
    assert exact is not None and found is not None
    mine, theirs = (sum(each.seen_examples for each in which) for which in (found, exact))
    assert mine / 1024.0**2 == pytest.approx(theirs, rel=0.03)


class Swapped(nn.Module):
    """Positions come first."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x.transpose(0, 1)).mean(0)


class Tied(nn.Module):
    """One weight in two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).tanh()).mean(1)


class Twice(nn.Module):
    """One layer that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(self.inner(x).tanh()).mean(1)


class Own(nn.Linear):
    """A forward pass of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.flip(0)).mean(1)


class Mixing(nn.Module):
    """Samples depend on each other."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.inner(x).mean(1))


@pytest.mark.parametrize("kind", [Swapped, Tied, Twice, lambda: Own(4, 4), Mixing])
@pytest.mark.parametrize("length", [SAMPLES, SAMPLES + 1])
def test_what_is_not_sample_by_sample_is_refused(kind: Callable[[], nn.Module], length: int) -> None:
    assert measured(kind(), [torch.randn(SAMPLES, length, 4)]) is None


def test_samples_that_come_first_are_known_again() -> None:
    """Where there are as many positions as samples, an earlier pass has told which is which."""
    model = nn.Linear(4, 4)
    norms = ExampleNorms(model, list(model.parameters()), every=1)
    for length, seen in ((SAMPLES, False), (SAMPLES + 1, True), (SAMPLES, True)):
        x = torch.randn(SAMPLES, length, 4)
        found = measured(model, [x], norms=norms, backward=lambda x=x: model(x).square().mean().backward())
        assert (found is not None) == seen


def test_frozen_layers_are_no_part_of_it() -> None:
    model, inputs = everything()
    model.inner.requires_grad_(False)
    found = measured(model, inputs)
    assert found is not None and len(found) == len(list(model.parameters())) - 2


def test_gradients_and_layers_stay_as_they_are() -> None:
    model, inputs = everything()
    measured(model, inputs)
    mine = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    loss_of(model, inputs).backward()
    assert all(torch.equal(a, p.grad) for a, p in zip(mine, model.parameters(), strict=True) if p.grad is not None)
    assert not any(module._forward_hooks for module in model.modules())


def test_copies_of_a_measured_model_measure_nothing() -> None:
    model, inputs = everything()
    params = list(model.parameters())
    norms = ExampleNorms(model, params, every=1)
    norms.start(0, SAMPLES, [Bucket(0, 0, params)], lambda bucket: None)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        loss_of(copied, inputs).backward()
    assert norms.end() is None


def test_steps_are_measured_as_often_as_costs_little() -> None:
    model = nn.Linear(4, 4)
    x, now_s = torch.randn(SAMPLES, 4), 0.0

    def clock() -> float:
        return now_s

    def spend(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    def run(cost_s: float) -> list[int]:
        norms, found = ExampleNorms(model, list(model.parameters()), clock=clock), list[int]()
        for step in range(400):
            spend(1.0)
            if norms.due(step, 1.0 + (step >= 100)):
                found.append(step)
                norms.start(step, SAMPLES, [Bucket(0, 0, list(model.parameters()))], lambda bucket: spend(cost_s))
                model(x).square().mean().backward()
                norms.end()
        return found

    assert run(0.001) == list(range(400)), "each one where it costs a thousandth"
    for cost_s, spacing in ((0.044, 5), (0.9, MOST_SPACING)):
        found = run(cost_s)
        assert found[:DENSE_STEPS] == list(range(DENSE_STEPS))
        late = [step for step in found if step >= 140]
        assert {b - a for a, b in itertools.pairwise(late)} == {spacing}
        assert {*range(100, 132, FRESH_SPACING)} <= {*found}, "most is to be learnt after a change"
