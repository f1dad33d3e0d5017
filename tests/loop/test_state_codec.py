"""Plain values and tensors as bytes: exactly as they were, or refused."""

from __future__ import annotations

import collections
import math
import struct
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic_ray.state.codec import NotPlainError, SparseIndex, TensorIndex, decode, encode
from tests.loop.plain_values import Thing, alike

scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.binary(), st.complex_numbers(),
    st.sampled_from([torch.float32, torch.bfloat16, torch.device("cpu"), torch.Size([2, 3]), np.float64(0.1)]),
)  # fmt: skip
keys = st.one_of(st.integers(), st.text(), st.tuples(st.integers(), st.text()), st.floats(allow_nan=False))
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner),
        st.lists(inner).map(tuple),
        st.dictionaries(keys, inner),
        st.dictionaries(keys, inner).map(collections.OrderedDict),
        st.dictionaries(keys, st.integers()).map(collections.Counter),
        st.sets(keys),
        st.frozensets(keys),
    ),
)


@given(values)
def test_values_arrive_as_they_were(value: Any) -> None:
    assert alike(decode(encode(value)), value)


@pytest.mark.parametrize(
    "value",
    [
        struct.unpack("<d", b"\x01\x02\x03\x04\x05\x06\xf8\x7f")[0],  # a NaN with a payload
        -0.0, math.inf, 5e-324, 2**200, -(2**63), "\ud800", np.float32(1) / 3, np.bool_(True), np.int8(-3),
        SparseIndex(TensorIndex(0), TensorIndex(3), (5, 2)),
        np.arange(6, dtype=">u2").reshape(2, 3), np.zeros((0, 3)), {1: "int", "1": "str", 1.5: "float", None: 0},
    ],
    ids=str,
)  # fmt: skip
def test_the_odd_ones_too(value: Any) -> None:
    assert alike(decode(encode(value)), value)


class Mode(int):
    """Not a plain int: only its own code knows what it does."""


@pytest.mark.parametrize(
    "value, where",
    [
        (Thing(), r"it is a .*Thing"),
        ({"a": [1, (Thing(),)]}, r"\['a'\]\[1\]\[0\] is a .*Thing"),
        ({"f": len}, r"\['f'\] is a builtins.builtin_function_or_method"),
        (Mode(3), r"it is a .*Mode"),
        (np.array([Thing()]), r"it is a numpy.ndarray"),
        (collections.deque([1]), r"it is a collections.deque"),
    ],
)
def test_other_types_are_refused_with_their_place(value: Any, where: str) -> None:
    with pytest.raises(NotPlainError, match=where):
        encode(value)


def test_what_holds_itself_is_refused() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(NotPlainError, match="deeper than 100 levels"):
        encode(endless)


@given(st.binary(max_size=200))
def test_a_stranger_s_bytes_are_values_or_refused(data: bytes) -> None:
    try:
        decode(data)
    except ValueError:
        return


@given(values, st.data())
def test_damaged_bytes_are_values_or_refused(value: Any, data: st.DataObject) -> None:
    content = bytearray(encode(value))
    content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    try:
        decode(bytes(content))
    except ValueError:
        return


def test_a_length_is_not_believed() -> None:
    for claimed in (b"b" + (2**63).to_bytes(8, "little"), b"l" + (10**9).to_bytes(8, "little"), b"l" * 10_000):
        with pytest.raises(ValueError, match="not a plain value"):
            decode(claimed)
