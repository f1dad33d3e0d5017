"""Packed documents: every token of every document once an epoch, however the group changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import elastic_ray as er
from elastic_ray.data.packing import plan_rows
from tests.loop.changing import Change, Kill, run_job

LENGTH = 8
DOCUMENTS = [list(range(100 * n, 100 * n + size)) for n, size in enumerate([3, 8, 1, 21, 5, 0, 2, 9, 4, 16, 7, 6], 1)]
ALL = sorted(token for each in DOCUMENTS for token in each)


@given(st.lists(st.integers(0, 40), max_size=60), st.integers(1, 16), st.integers(0, 9), st.integers(0, 9))
def test_rows_hold_every_token_once(lengths: list[int], row: int, seed: int, epoch: int) -> None:
    rows = plan_rows(lengths, row, seed=seed, epoch=epoch)
    assert rows == plan_rows(lengths, row, seed=seed, epoch=epoch)
    assert all(0 < sum(stop - start for _, start, stop in pieces) <= row for pieces in rows)
    found = sorted((document, at) for pieces in rows for document, start, stop in pieces for at in range(start, stop))
    assert found == [(document, at) for document, size in enumerate(lengths) for at in range(size)]


def test_rows_are_well_filled_and_others_in_each_epoch() -> None:
    lengths = [1 + 37 * n % 61 for n in range(500)]
    rows = plan_rows(lengths, 64, seed=0, epoch=0)
    assert sum(lengths) / (64 * len(rows)) > 0.9
    assert rows != plan_rows(lengths, 64, seed=0, epoch=1) and rows != plan_rows(lengths, 64, seed=1, epoch=0)


def train() -> list[float]:
    """The sum over the tokens that each epoch has used, and over their squares."""
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    wrapped = er.AdaptiveDataParallel(model, optimizer, scaling_rule="none")
    packed = er.PackedDataset(DOCUMENTS, LENGTH, seed=2)
    loader = er.AdaptiveDataLoader(packed, batch_tokens=4 * LENGTH, tokens_per_sample="weigh", seed=1)
    found = []
    for epoch in er.remaining_epochs_until(3):
        packed.set_epoch(epoch)
        used = er.Accumulator()
        for tokens, documents in loader:
            counts = documents > 0
            loader.weigh(counts.sum().item())
            optimizer.zero_grad()
            wrapped(tokens[counts][:, None].float()).mean().backward()
            optimizer.step()
            used["sum"] += float(tokens[counts].sum())
            used["squares"] += float(tokens[counts].square().sum())
        found += [used["sum"], used["squares"]]
    return found


@pytest.mark.parametrize("script", [[], [Change(3, (1, 2, 3)), Change(6, (2, 3))], [Kill(4, 2, "backward")]])
def test_each_document_is_used_once_an_epoch(script: list[Any]) -> None:
    expected = [float(sum(ALL)), float(sum(token * token for token in ALL))]
    for found in run_job(train, script, first=(1, 2)).results.values():
        assert found[-2:] == expected  # of epochs that a worker has seen from their beginning
        assert all(total == value for total, value in zip(found, expected * 3, strict=False))


@pytest.mark.parametrize(
    ("documents", "length", "error", "said"),
    [
        ([[1]], 0, ValueError, r"PackedDataset\(length\) must be 1 token or more, but got 0"),
        ([[1]], 2.0, TypeError, r"PackedDataset\(length\) must be a whole number, but got 2.0"),
        ([[], []], 4, ValueError, "must hold a token, but got 2 empty documents"),
        ({"a": [1]}, 4, TypeError, r"PackedDataset\(documents\) must be a list or another sequence"),
        (iter([[1]]), 4, TypeError, r"PackedDataset\(documents\) must be a list or another sequence"),
        ([[1], {"ids": [1]}], 4, TypeError, "one number a token, but document 1 is {'ids'"),
        (["text"], 4, TypeError, "one number a token, but document 0 is 'text'"),
        ([torch.ones(2, 3)], 4, TypeError, "one number a token, but document 0 is tensor"),
    ],
)
def test_what_cannot_be_packed_is_named(documents: Any, length: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        er.PackedDataset(documents, length)


def test_tokens_that_are_no_integers_are_named() -> None:
    packed = er.PackedDataset([[1, 2], [0.5, 1.5]], 4)
    with pytest.raises(TypeError, match=r"but document 1 is torch.float32 of shape \(2,\)"):
        packed[0]
