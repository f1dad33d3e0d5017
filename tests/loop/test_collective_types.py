"""Types that ``all_reduce`` takes: what gloo does not know travels as another type, or is refused by name at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import elastic_ray as er
from elastic_ray.run.current import set_session
from tests.loop.changing import Change, run_job

REAL = [
    torch.bool,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
]
COMPLEX = [torch.complex32, torch.complex64, torch.complex128]
ALL = [(dtype, op) for dtype in REAL for op in ("sum", "mean", "min", "max")]
ALL += [(dtype, op) for dtype in COMPLEX for op in ("sum", "mean")]
EXPECTED = {"sum": 4.0, "mean": 2.0, "min": 1.0, "max": 3.0}


def after_joining(what: Any) -> dict[int, Any]:
    """What two ranks get of it, by worker."""

    def train() -> Any:
        for _ in er.remaining_epochs_until(1):
            pass
        return what(er.get_context().get_world_rank())

    return run_job(train, first=(1, 2)).results


def test_every_type_is_reduced_in_its_own() -> None:
    def every(rank: int) -> list[torch.Tensor]:
        mine = torch.tensor([1.0, 3.0][rank])
        return [
            er.all_reduce(torch.complex(mine, -mine).to(dtype) if dtype in COMPLEX else mine.to(dtype), op)
            for dtype, op in ALL
        ]

    for results in after_joining(every).values():
        for (dtype, op), result in zip(ALL, results, strict=True):
            integer = not (dtype.is_floating_point or dtype.is_complex)
            assert result.dtype == (torch.float32 if integer and op == "mean" else dtype), (dtype, op)
            expected = 1.0 if dtype is torch.bool else EXPECTED[op]
            found = result.to(torch.complex128)
            assert found == complex(expected, -expected if dtype in COMPLEX else 0.0), (dtype, op, result)


def test_a_conjugate_view_is_what_it_shows() -> None:
    found = after_joining(lambda rank: er.all_reduce(torch.tensor([1 + 2j]).conj()))
    assert all(each.tolist() == [2 - 4j] for each in found.values())


@pytest.mark.parametrize(
    ("dtype", "op"),
    [(torch.complex64, "max"), (torch.complex128, "min"), (torch.uint64, "sum"), (torch.float8_e8m0fnu, "sum")],
)
def test_what_has_no_such_reduction_is_refused_by_name(dtype: torch.dtype, op: Any) -> None:
    set_session(None)
    says = rf"all_reduce\(op='{op}'\) cannot take a tensor of {dtype}; it takes bfloat16, bool, complex"
    with pytest.raises(TypeError, match=says):
        er.all_reduce(torch.empty(2, dtype=dtype), op)
    with pytest.raises(TypeError, match=says):
        after_joining(lambda rank: er.all_reduce(torch.empty(2, dtype=dtype), op))


def caught(value: int, op: Any) -> Any:
    """The result, or the error that it is instead."""
    try:
        return er.all_reduce(value, op)
    except OverflowError as error:
        return str(error)


@pytest.mark.parametrize(
    ("values", "op", "expected"),
    [
        ((2**62, 2**62 - 1), "sum", 2**63 - 1),
        ((2**62, 2**62), "sum", f"64-bit integers, but the sum is {2**63}"),
        ((-(2**62), -(2**62)), "sum", -(2**63)),
        ((-(2**63), -1), "sum", f"64-bit integers, but the sum is {-(2**63) - 1}"),
        ((2**63 - 1, -(2**63)), "min", -(2**63)),
        ((5, 2**70), "sum", "that of rank 1 is larger"),
        ((-(2**70), 5), "max", "that of rank 0 is larger"),
        ((2**70, 2**70), "mean", 2.0**70),
    ],
)
def test_whole_numbers_are_exact_or_an_error_everywhere(values: Any, op: Any, expected: Any) -> None:
    for found in after_joining(lambda rank: caught(values[rank], op)).values():
        if isinstance(expected, str):
            assert isinstance(found, str) and expected in found
        else:
            assert found == expected and type(found) is type(expected)


def test_a_too_large_number_is_one_for_joiners_too() -> None:
    set_session(None)
    with pytest.raises(OverflowError, match="that of rank 0 is larger"):
        er.all_reduce(2**64)

    def train() -> list[Any]:
        told = []
        loader = er.AdaptiveDataLoader(torch.utils.data.TensorDataset(torch.zeros(8)), batch_size=4)
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        wrapped = er.AdaptiveDataParallel(model, optimizer)
        for _ in er.remaining_epochs_until(1):
            for (x,) in loader:
                optimizer.zero_grad()
                wrapped(x[:, None]).mean().backward()
                optimizer.step()
            told.append(caught(2**62, "sum"))
        return told

    results = run_job(train, [Change(1, (1, 2))], first=(1,)).results
    assert len(results) == 2 and all("the sum is 9223372036854775808" in told[0] for told in results.values())
