"""``budget``: one value of an hour for all jobs, which follows the money."""

from __future__ import annotations

import math
import sys

import hypothesis.strategies as st
import pytest
from hypothesis import example, given

from placement import AllocatorConfig, Autoscaling
from placement.autoscaling.objectives import make_objective
from placement.autoscaling.objectives.cost_per_progress import Budget
from placement.cluster.jobs import Account
from placement.cluster.node_types import NodeType

TYPE = NodeType(name="t4", resources={"GPU": 4.0}, usd_per_h=3.0, max_nodes=4)

spans = st.lists(st.tuples(st.floats(0.0, 5.0), st.floats(0.0, 100.0), st.integers(0, 20)), max_size=8)


@given(spans, st.floats(1.0, 100.0))
@example([(4e-10, 1.0, 1)], 1.0)
@example([(1.0, 5e-324, 0), (1.0, 5e-324, 0)], 2.0)  # numbers this small have no digits to be exact in
def test_an_account_never_counts_more_than_its_memory(several: list[tuple[float, float, int]], memory_h: float) -> None:
    account = Account()
    for hours, usd_per_h, jobs in several:
        account = account.after(hours, usd_per_h, jobs, memory_h)
    assert account.hours <= min(sum(each[0] for each in several), memory_h) * (1 + 1e-9)
    most_usd = account.hours * max((each[1] for each in several), default=0.0)
    assert account.spent_usd <= most_usd * (1 + 1e-9) + sys.float_info.min
    assert account.job_hours <= account.hours * max((each[2] for each in several), default=0) * (1 + 1e-9)


def test_account_is_the_same_however_often_it_is_kept() -> None:
    once, often = Account().after(3.0, 12.0, 5, 24.0), Account()
    for _ in range(300):
        often = often.after(0.01, 12.0, 5, 24.0)
    for field in ("hours", "spent_usd", "job_hours"):
        assert getattr(often, field) == pytest.approx(getattr(once, field))


def test_an_hour_is_worth_more_while_money_is_left() -> None:
    budget = Budget(usd_per_h=10.0)
    even = budget.value_usd_per_h(Account(hours=4.0, spent_usd=40.0, job_hours=20.0), 5)
    assert even == pytest.approx(2.0)
    saved = budget.value_usd_per_h(Account(hours=4.0, spent_usd=20.0, job_hours=20.0), 5)
    assert saved == pytest.approx(2.0 * math.e)
    spent = budget.value_usd_per_h(Account(hours=4.0, spent_usd=60.0, job_hours=20.0), 5)
    assert spent == pytest.approx(2.0 / math.e)


def test_the_number_of_jobs_hardly_changes_an_hours_worth() -> None:
    """Or else a burst of jobs would run on the nodes of one, and a lone job on those of all."""
    budget, account = Budget(usd_per_h=10.0), Account(hours=15.0, spent_usd=150.0, job_hours=75.0)
    few, many = (budget.value_usd_per_h(account, jobs) for jobs in (1, 20))
    assert 1.0 < few / many < 1.3


def test_spending_settles_at_the_budget() -> None:
    """Jobs with speed-up k^p spend value x p / (1 - p) each; their number changes, their p is not 1/2."""
    budget, account, p = Budget(usd_per_h=10.0), Account(), 0.7
    spent, hours = 0.0, 0.0
    for step in range(4000):
        jobs = 3 + (step // 50) % 5
        usd_per_h = jobs * budget.value_usd_per_h(account, jobs) * p / (1 - p)
        account = account.after(0.05, usd_per_h, jobs, 24.0)
        if step > 800:
            spent, hours = spent + 0.05 * usd_per_h, hours + 0.05
    assert spent / hours == pytest.approx(10.0, rel=0.12)


def test_a_budget_goes_with_its_objective() -> None:
    assert make_objective("budget", 5.0) == Budget(usd_per_h=5.0)
    config = Autoscaling(node_types=(TYPE,), objective="budget", budget_usd_per_h=5.0)
    assert config.chosen == Budget(usd_per_h=5.0)
    assert AllocatorConfig(autoscaling=config).autoscaling == config
    for objective, usd in (("budget", None), ("cost_per_progress", 5.0)):
        with pytest.raises(ValueError, match=r"budget_usd_per_h.*go together"):
            Autoscaling(node_types=(TYPE,), objective=objective, budget_usd_per_h=usd)
    for wrong in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="usd_per_h must be above 0"):
            Budget(usd_per_h=wrong)
