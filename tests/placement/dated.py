"""Jobs with deadlines, whose times are exact."""

from __future__ import annotations

from typing import Any

from placement.cluster.jobs import JobView, Progress
from placement.goodput.model import GoodputModel, NoiseScale
from placement.goodput.step_time import ThroughputModel
from tests.placement.views import view

# A step of the whole fixed batch of 64 samples takes 64 / k x 1/64 s on k workers: 1 s alone, 0.25 s on four.
EXACT = GoodputModel(
    ThroughputModel(alpha_c=0.0, beta_c=1 / 64, alpha_n=0.0, beta_n=0.0, alpha_r=0.0, beta_r=0.0, gamma=1.0),
    NoiseScale(sqr=1.0, var=1.0),
    64,
)
HALFWAY = Progress(done=100.0, epoch_ends=(50.0, 100.0), epochs=4.0)  # 100 of 200 iterations are left: 100 s alone


def dated(job: str, deadline_s: float | None, **kwargs: Any) -> JobView:
    fields = {"goodput": EXACT, "max_batch_size": None, "atomic_bsz_range": None, "accumulation": False}
    fields |= {"progress": HALFWAY, "resize_cost_s": 0.0, "most_workers": 8}
    return view(job, deadline_s=deadline_s, **{**fields, **kwargs})
