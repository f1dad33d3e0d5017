"""What jobs have measured."""

from __future__ import annotations

from placement.cluster.jobs import JobView
from placement.goodput.fitting import Observation
from tests.placement.views import model, view

MODEL = model()


def measured(job: str, sizes: tuple[int, ...], gpu: str = "T4", fingerprint: str | None = "resnet") -> JobView:
    seen = tuple(Observation(1, k, 64, 0, float(MODEL.step_time(1, k, 64, 0))) for k in sizes)
    return view(
        job,
        fingerprint=fingerprint,
        goodput=MODEL,
        models={gpu: MODEL},
        observations={gpu: seen},
        most_workers=max(sizes),
        growth_limit=2 * max(sizes),
    )


def fresh(fingerprint: str | None = "resnet") -> JobView:
    return view("new", goodput=None, fingerprint=fingerprint, growth_limit=1)
