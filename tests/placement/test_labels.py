"""Label selectors, held to Ray's own parser."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from ray._private.label_utils import validate_label_selector_value

from placement.cluster.cluster import Node, check_selector, matches, satisfying
from tests.placement.views import view


@pytest.mark.parametrize(
    ("condition", "fitting"),
    [
        ("a", {"a"}),
        ("!a", {"b", None}),
        ("in(a)", {"a"}),
        ("in(a,b)", {"a", "b"}),
        ("!in(a, b)", {None}),
        ("!in(c)", {"a", "b", None}),
    ],
)
def test_operators(condition: str, fitting: set[str | None]) -> None:
    for value in ("a", "b", None):
        labels = {"key": value} if value is not None else {}
        assert Node(node_id="n", total={}, free={}, labels=labels).matches({"key": condition}) == (value in fitting)


@given(condition=st.text(alphabet="ab-_.(),! in", max_size=12) | st.from_regex(r"!?(in)?\((a|b1|-)(, ?(a|c-d))*\)?"))
@example("in(T4,A100)")
@example("x" * 63)
@example("x" * 64)
@example("")
def test_what_ray_refuses_is_refused_and_nothing_else(condition: str) -> None:
    rays = validate_label_selector_value(condition) is None
    without_operator = condition.lstrip("!").startswith("(")  # Ray lets "(a)" pass and then finds no node with it
    try:
        check_selector({"key": condition}, "label_selector")
    except ValueError:
        assert not rays or without_operator
    else:
        assert rays
        assert matches(satisfying({"key": condition}), {"key": condition})


def test_bad_selector_is_refused_when_the_job_is_described() -> None:
    with pytest.raises(ValueError, match=r"label_selector of job 'a' must hold .*, but got 'in\(T4' for 'gpu'"):
        view("a", label_selector={"gpu": "in(T4"})
    with pytest.raises(TypeError, match="must map text to text"):
        view("a", label_selector={"gpu": 4})
